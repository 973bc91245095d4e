"""The CPU page store against the reference codec: what is written comes back bit for bit, raw, compact and mixed."""

import numpy as np
import pytest
import torch

from zipfusion_vllm import codec
from zipfusion_vllm.attention.page_store import COMPACTION_WAVE, PageStore
from zipfusion_vllm.format import KINDS, PAGE_TOKENS, RAW_BASE, PageShape
from zipfusion_vllm.memory.layout import SCRATCH_CHUNK, ArenaLayout

SHAPES = [PageShape(3, 3, 64), PageShape(2, 2, 128), PageShape(1, 5, 256), PageShape(1, 1, 64)]


def make_store(shape: PageShape, num_pages: int, regions_per_chunk: int = 5) -> PageStore:
    """A store with room for all pages raw; its memory holds NaN patterns."""
    raw_page = -(-shape.regions_per_page // regions_per_chunk) * regions_per_chunk * shape.raw_region_bytes
    arena_bytes = (num_pages + 1) * raw_page + num_pages * shape.table_page_bytes + 4096
    arena = torch.full((arena_bytes,), 0xFF, dtype=torch.uint8)
    return PageStore(arena, ArenaLayout(shape, num_pages, arena_bytes, regions_per_chunk))


def place_all(store: PageStore, rng: np.random.Generator) -> np.ndarray:
    """Place pages 1.. in shuffled chunks; returns their ids."""
    layout = store.layout
    pages = np.arange(1, layout.num_pages, dtype=np.int32)
    chunks = 1 + rng.permutation(layout.num_chunks - 1)[: len(pages) * layout.chunks_per_raw_page]
    store.place(pages, np.full(len(pages), 7, dtype=np.uint32), chunks.reshape(len(pages), -1).astype(np.int32))
    return pages


def hostile(shape: PageShape, tokens: int, seed: int) -> torch.Tensor:
    """bfloat16 [layers, 2, tokens, heads, head_dim]: normal values with outliers, zeros, NaN payloads and infinities in some blocks."""
    rng = np.random.default_rng(seed)
    size = (shape.num_layers, 2, tokens, shape.num_kv_heads, shape.head_dim)
    values = torch.from_numpy(rng.standard_normal(size, dtype=np.float32)).bfloat16().view(torch.int16)
    strange = torch.from_numpy(rng.integers(-32768, 32768, size).astype(np.int16))
    return torch.where(torch.from_numpy(rng.random(size) < 2e-4), strange, values).view(torch.bfloat16)


def write_all(store: PageStore, pages: np.ndarray, values: torch.Tensor) -> None:
    slots = torch.from_numpy((pages[:, None].astype(np.int64) * PAGE_TOKENS + np.arange(PAGE_TOKENS)).ravel())
    for layer in range(store.layout.shape.num_layers):
        store.write(layer, slots, values[layer, 0], values[layer, 1])


def read(store: PageStore, layer: int, pages: np.ndarray) -> torch.Tensor:
    """int16 [2, tokens, heads, head_dim] of whole pages."""
    shape = store.layout.shape
    out = torch.zeros(2, len(pages) * PAGE_TOKENS, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
    first = np.arange(len(pages), dtype=np.int64) * PAGE_TOKENS
    store.restore(layer, pages.astype(np.int64), first, np.full(len(pages), PAGE_TOKENS), out[0], out[1])
    return out.view(torch.int16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_raw_then_mixed_then_compact(shape: PageShape) -> None:
    rng = np.random.default_rng(1)
    store = make_store(shape, num_pages=9)
    pages = place_all(store, rng)
    values = hostile(shape, len(pages) * PAGE_TOKENS, seed=2)
    write_all(store, pages, values)
    for compacted in (pages[:0], pages[1::2], pages[::2]):
        num_chunks, num_eligible = store.compact(compacted)
        assert len(store.check(compacted, num_chunks)) == 0
        assert num_eligible == sum(int((store.bases[:, page] != RAW_BASE).sum()) for page in compacted)
        for layer in range(shape.num_layers):
            assert torch.equal(read(store, layer, pages), values[layer].view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_the_codec_s(shape: PageShape) -> None:
    store = make_store(shape, num_pages=4)
    pages = place_all(store, np.random.default_rng(3))
    values = hostile(shape, len(pages) * PAGE_TOKENS, seed=4)
    write_all(store, pages, values)
    for compact in (False, True):
        if compact:
            store.compact(pages)
        for layer in range(shape.num_layers):
            for kind_index, kind in enumerate(KINDS):
                for i, page in enumerate(pages):
                    for head in range(shape.num_kv_heads):
                        region = values[layer, kind_index, i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS, head]
                        if compact:
                            expected = codec.encode(region, kind)
                            payload, bases = expected.payload.numpy(), expected.bases.numpy()
                        else:
                            payload = codec.raw_regions(region[None], kind)[0].numpy()
                            bases = np.full(shape.blocks_per_region, RAW_BASE)
                        at = int(store.starts[layer, page, head, kind_index]) * 256
                        assert np.array_equal(store._chunks[at : at + len(payload)], payload)
                        assert np.array_equal(store.bases[layer, page, head, kind_index], bases)


def test_compaction_touches_nothing_but_the_page_s_own_chunks() -> None:
    shape = SHAPES[0]
    store = make_store(shape, num_pages=6)
    pages = place_all(store, np.random.default_rng(5))
    values = hostile(shape, len(pages) * PAGE_TOKENS, seed=6)
    write_all(store, pages, values)
    before = store._chunks.copy()
    num_chunks, _ = store.compact(pages[:1])
    changed = np.unique(np.flatnonzero(before != store._chunks) // store.layout.chunk_bytes)
    assert set(changed) <= set(store.own[pages[0], : num_chunks[0]])
    assert 0 < num_chunks[0] < store.layout.chunks_per_raw_page


def test_more_pages_than_a_wave() -> None:
    shape = PageShape(1, 1, 64)
    store = make_store(shape, num_pages=COMPACTION_WAVE * 2 + 3, regions_per_chunk=1)
    pages = place_all(store, np.random.default_rng(7))
    values = hostile(shape, len(pages) * PAGE_TOKENS, seed=8)
    write_all(store, pages, values)
    num_chunks, _ = store.compact(pages)
    assert len(num_chunks) == len(pages)
    assert torch.equal(read(store, 0, pages), values[0].view(torch.int16))


def test_unfinished_page_reads_only_its_tokens() -> None:
    shape = SHAPES[0]
    store = make_store(shape, num_pages=3)
    pages = place_all(store, np.random.default_rng(9))
    values = hostile(shape, PAGE_TOKENS, seed=10)
    slots = torch.arange(5) + int(pages[1]) * PAGE_TOKENS
    store.write(0, slots, values[0, 0, :5], values[0, 1, :5])
    out = torch.full((2, 7, shape.num_kv_heads, shape.head_dim), 3.0, dtype=torch.bfloat16)
    store.restore(0, np.array([pages[1]], dtype=np.int64), np.array([1]), np.array([5]), out[0], out[1])
    assert torch.equal(out[:, 1:6].view(torch.int16), values[0, :, :5].view(torch.int16))
    assert (out[:, 0] == 3.0).all() and (out[:, 6] == 3.0).all()


def test_slot_minus_one_and_unplaced_pages_write_no_page() -> None:
    shape = SHAPES[0]
    store = make_store(shape, num_pages=4)
    pages = place_all(store, np.random.default_rng(11))
    before = store._chunks.copy()
    values = hostile(shape, 2, seed=12)
    store.write(1, torch.tensor([-1, 3]), values[0, 0], values[0, 1])  # slot 3 is in page 0, which is never placed
    changed = np.unique(np.flatnonzero(before != store._chunks) // store.layout.chunk_bytes)
    assert list(changed) == [SCRATCH_CHUNK]
    assert len(pages) == 3


def test_reused_page_is_raw_again() -> None:
    shape = SHAPES[0]
    store = make_store(shape, num_pages=3)
    pages = place_all(store, np.random.default_rng(13))
    values = hostile(shape, 2 * PAGE_TOKENS, seed=14)
    write_all(store, pages, values)
    store.compact(pages)
    store.place(pages[:1], np.array([8], dtype=np.uint32), store.own[pages[:1]].copy())
    write_all(store, pages[:1], values[:, :, PAGE_TOKENS:])
    assert torch.equal(read(store, 2, pages[:1]), values[2, :, PAGE_TOKENS:].view(torch.int16))


@pytest.mark.parametrize("damage", ["outside", "straddle", "overlap"])
def test_check_names_the_damaged_page(damage: str) -> None:
    store = make_store(SHAPES[1], num_pages=5)
    pages = place_all(store, np.random.default_rng(15))
    num_chunks = np.full(len(pages), store.layout.chunks_per_raw_page)
    assert len(store.check(pages, num_chunks)) == 0
    entry = store.starts[:, pages[2]]
    if damage == "outside":
        entry[0, 0, 0] = store.own[pages[1], 0] * store.layout.chunk_units
    elif damage == "straddle":
        entry[0, 0, 0] = (store.own[pages[2], 0] + 1) * store.layout.chunk_units - 1
    else:
        entry[0, 0, 0] = entry[0, 0, 1]
    assert list(store.check(pages, num_chunks)) == [pages[2]]


def test_wrong_arena_is_refused() -> None:
    layout = make_store(SHAPES[0], num_pages=3).layout
    with pytest.raises(ValueError, match="arena must be uint8"):
        PageStore(torch.zeros(10, dtype=torch.uint8), layout)
