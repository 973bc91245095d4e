"""The packing rule: what must hold for every page, and that it is the rule that the docstring states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipfusion_vllm.memory.packing import count_chunks, count_chunks_by_size, pack_page, pack_pages


def plain_packing(units: list[int], chunk_units: int) -> tuple[list[int], list[int], int]:
    """The rule as the docstring states it, one region at a time."""
    todo = {size: [region for region, other in enumerate(units) if other == size] for size in set(units)}
    chunk, offset, num_chunks = [0] * len(units), [0] * len(units), 0
    while any(todo.values()):
        space = chunk_units
        while True:
            available = [size for size in sorted(todo, reverse=True) if todo[size]]
            fitting = [size for size in available if size <= space]
            if not fitting:
                break
            low, high = available[-1], available[0]
            good = [size for size in fitting if any(q * low <= space - size <= q * high for q in range(space + 1))]
            size = (good or fitting)[0]
            region = todo[size].pop(0)
            chunk[region], offset[region] = num_chunks, chunk_units - space
            space -= size
        num_chunks += 1
    return chunk, offset, num_chunks


@st.composite
def pages(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """(units [regions], regions per chunk, raw region units) of a head size of the format."""
    blocks = draw(st.sampled_from([2, 4, 8]))
    regions_per_chunk = draw(st.integers(1, 16))
    weights = draw(st.lists(st.integers(0, 5), min_size=blocks + 1, max_size=blocks + 1).filter(any))
    kinds = [size for size, weight in enumerate(weights) for _ in range(weight)]
    extra = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=150))
    return np.array(extra) + 3 * blocks, regions_per_chunk, 4 * blocks


@settings(deadline=None, max_examples=400)
@given(pages())
def test_every_page_is_packed_by_the_rule(page: tuple[np.ndarray, int, int]) -> None:
    units, regions_per_chunk, raw_units = page
    chunk_units = regions_per_chunk * raw_units
    chunk, offset, num_chunks = pack_page(units, chunk_units)
    assert (chunk.tolist(), offset.tolist(), num_chunks) == plain_packing(units.tolist(), chunk_units)
    # No region straddles a chunk, none lies over another, and the first num_chunks chunks are all used.
    assert (offset >= 0).all() and (offset + units <= chunk_units).all()
    used = np.zeros((num_chunks, chunk_units), dtype=int)
    for c, o, u in zip(chunk, offset, units, strict=True):
        used[c, o : o + u] += 1
    assert used.max() == 1 and used.any(axis=1).all()
    assert -(-units.sum() // chunk_units) <= num_chunks <= -(-len(units) // regions_per_chunk)
    assert count_chunks(units[None], chunk_units).tolist() == [num_chunks]


@given(st.permutations(list(range(40))))
def test_only_the_counts_of_the_sizes_matter(order: list[int]) -> None:
    units = np.array([6] * 25 + [7] * 10 + [8] * 5)
    _, _, num_chunks = pack_page(units, 48)
    chunk, offset, shuffled = pack_page(units[order], 48)
    assert shuffled == num_chunks == count_chunks_by_size((6, 7, 8), (25, 10, 5), 48)
    for size in (6, 7, 8):  # regions of a size are used in index order
        places = chunk[units[order] == size] * 48 + offset[units[order] == size]
        assert (np.diff(places) > 0).all()


def test_an_all_raw_page_takes_the_chunks_of_a_raw_page() -> None:
    chunk, offset, num_chunks = pack_page(np.full(25, 16), 12 * 16)
    assert num_chunks == 3
    assert (chunk * 12 + offset // 16).tolist() == list(range(25))


def test_many_pages_at_once_equal_each_alone() -> None:
    units = np.random.default_rng(3).integers(12, 17, size=(20, 64))
    packed = pack_pages(units, 96)
    for page in range(len(units)):
        chunk, offset, num_chunks = pack_page(units[page], 96)
        assert (packed.chunk[page] == chunk).all() and (packed.offset[page] == offset).all()
        assert packed.num_chunks[page] == num_chunks
    assert packed.num_chunks.dtype == np.int32 and (count_chunks(units, 96) == packed.num_chunks).all()


def test_no_pages() -> None:
    packed = pack_pages(np.zeros((0, 8), dtype=int), 96)
    assert packed.chunk.shape == (0, 8) and packed.num_chunks.shape == (0,)
    assert count_chunks(np.zeros((0, 8), dtype=int), 96).shape == (0,)


@pytest.mark.parametrize(
    ("units", "says"),
    [([[97]], "1 to 96 units"), ([[0]], "1 to 96 units"), ([[-3, 4]], "1 to 96 units"), ([12], "at least one region"), ([[]], "at least one region")],
)  # fmt: skip
def test_what_no_page_can_be_is_refused(units: list, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack_pages(np.array(units, dtype=int), 96)
