"""How an arena is cut, and the choice of the chunk size."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipfusion_vllm.format import HEAD_DIMS, PAGE_TOKENS, PageShape
from zipfusion_vllm.memory.layout import (
    CHUNK_CANDIDATES,
    ArenaLayout,
    choose_regions_per_chunk,
    chunks_per_raw_page,
    min_blocks,
)

LLAMA_8B = PageShape(32, 8, 128)
SMOLLM2 = PageShape(30, 3, 64)
REAL_SHAPES = [
    LLAMA_8B, SMOLLM2, PageShape(36, 8, 128), PageShape(48, 4, 128), PageShape(80, 8, 128), PageShape(80, 1, 128), PageShape(28, 2, 128),
    PageShape(18, 1, 256), PageShape(26, 4, 256), PageShape(24, 8, 64),
]  # fmt: skip
shapes = st.builds(PageShape, st.integers(1, 80), st.integers(1, 16), st.sampled_from(HEAD_DIMS))


def layout_of(shape: PageShape, num_blocks: int, regions_per_chunk: int) -> ArenaLayout:
    return ArenaLayout(shape, num_blocks, num_blocks * shape.nominal_page_bytes, regions_per_chunk)


def test_an_8b_arena() -> None:
    layout = layout_of(LLAMA_8B, 4096, 12)
    assert layout.chunk_units == 192 and layout.chunk_bytes == 48 * 1024
    assert layout.chunks_per_raw_page == 43
    assert layout.table_bytes == 4096 * 32 * 8 * 16
    assert layout.num_usable_chunks == layout.num_chunks - 1
    assert layout.raw_pages == layout.num_usable_chunks // 43
    assert layout.raw_tokens == layout.raw_pages * PAGE_TOKENS
    assert 1.27 < layout.expected_tokens(0.92) / layout.raw_tokens < 1.30
    assert layout.expected_pages(0.0) == layout.raw_pages
    assert layout.expected_pages(1.0) <= layout.num_pages - 1


@given(shapes, st.integers(1, 16), st.integers(1, 3000))
def test_the_parts_of_an_arena_do_not_overlap(shape: PageShape, regions_per_chunk: int, num_blocks: int) -> None:
    try:
        layout = layout_of(shape, num_blocks, regions_per_chunk)
    except ValueError:
        return
    assert layout.num_chunks * layout.chunk_bytes <= layout.table_offset
    assert layout.table_offset % 256 == 0
    assert layout.table_offset + layout.table_bytes <= layout.arena_bytes
    assert layout.chunks_per_raw_page * layout.chunk_units >= shape.regions_per_page * shape.raw_region_units
    assert layout.raw_pages <= layout.expected_pages(0.92) <= num_blocks - 1


@settings(deadline=None)
@given(shapes, st.sampled_from(CHUNK_CANDIDATES), st.integers(1, 4096))
def test_min_blocks_is_the_smallest_that_fits(shape: PageShape, regions_per_chunk: int, num_raw_pages: int) -> None:
    num_blocks = min_blocks(shape, regions_per_chunk, num_raw_pages)
    assert layout_of(shape, num_blocks, regions_per_chunk).raw_pages >= num_raw_pages
    try:
        assert layout_of(shape, num_blocks - 1, regions_per_chunk).raw_pages < num_raw_pages
    except ValueError:
        pass  # not even a layout


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_the_chunk_size_of_a_real_shape(shape: PageShape) -> None:
    chosen = choose_regions_per_chunk(shape, 0.92)
    assert chosen in CHUNK_CANDIDATES
    raw_regions = chunks_per_raw_page(shape, chosen) * chosen
    assert raw_regions <= 1.02 * shape.regions_per_page, "a model that does not compress would lose more than 2 %"
    layout = layout_of(shape, 2000, chosen)
    assert layout.expected_pages(0.92) >= 1.19 * layout.raw_pages


@settings(deadline=None, max_examples=30)
@given(shapes, st.sampled_from([0.0, 0.3, 0.85, 1.0]))
def test_every_shape_and_share_has_a_chunk_size(shape: PageShape, eligible_share: float) -> None:
    assert choose_regions_per_chunk(shape, eligible_share) in CHUNK_CANDIDATES


def test_all_processes_choose_alike_and_fast() -> None:
    code = (
        "import time\n"
        "from zipfusion_vllm.format import PageShape\n"
        "from zipfusion_vllm.memory.layout import choose_regions_per_chunk as choose\n"
        "begin = time.process_time()\n"
        "print(choose(PageShape(80, 8, 128), 0.92), time.process_time() - begin)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(output[0]) == choose_regions_per_chunk(PageShape(80, 8, 128), 0.92)
    assert float(output[1]) < 0.3


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.2"):
        choose_regions_per_chunk(LLAMA_8B, 1.2)
    with pytest.raises(ValueError, match="too small for a lookup table"):
        ArenaLayout(LLAMA_8B, 100, 1000, 12)
    with pytest.raises(ValueError, match="beyond the"):
        ArenaLayout(LLAMA_8B, 10, 2**41, 12)
    with pytest.raises(ValueError, match="at least one page"):
        ArenaLayout(LLAMA_8B, 0, 2**30, 12)
    with pytest.raises(ValueError, match="larger arena than can be addressed"):
        min_blocks(LLAMA_8B, 12, 2**40)
