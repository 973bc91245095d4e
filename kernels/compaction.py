"""Compaction on the GPU, in plain Triton: measure, pack, encode into staging, move into place. Four launches, whatever the number of layers.

Called by the GPU page store with the pages that the step filled. ``codec.py`` and ``memory/packing.py`` define the result bit for bit. Everything is
queued in the current stream: attention queued before reads the raw page, attention queued after the compact one, nothing in between.

    table     uint8 [layers, pages, heads, row_bytes], contiguous       rewritten for the pages
    own       int32 [pages, chunks_per_raw_page]                        chunk ids that each page owns
    regions   (layer * heads + head) * 2 + kind, kind 0 for K and 1 for V
"""

import torch

from zipfusion_vllm.format import COMPACT_BLOCK_UNITS, MAX_D, RAW_BASE, UNIT_BYTES
from zipfusion_vllm.kernels.compat import tl, triton
from zipfusion_vllm.memory.layout import ArenaLayout

_CLASSES = 16
"""Region sizes that the pack kernel keeps apart: blocks + 1 (at most 9), rounded up to a power of two."""


@triton.jit
def _entry(table, page, region, num_pages, HEADS: tl.constexpr, ROW_BYTES: tl.constexpr):
    layer = region // (2 * HEADS)
    head = (region // 2) % HEADS
    row = (layer.to(tl.int64) * num_pages + page) * HEADS + head
    return table + row * ROW_BYTES + (region % 2) * (ROW_BYTES // 2)


@triton.jit
def measure_kernel(
    arena, table, pages, num_pages, bases, units, regions,
    HEADS: tl.constexpr, ROW_BYTES: tl.constexpr, NB: tl.constexpr, RAW: tl.constexpr, LIMIT: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    """Program (page index, region): base byte of every block from the high bytes alone, and the region's units."""
    index = tl.program_id(0)
    region = tl.program_id(1)
    page = tl.load(pages + index).to(tl.int64)
    entry = _entry(table, page, region, num_pages, HEADS, ROW_BYTES)
    start = tl.load(entry.to(tl.pointer_type(tl.uint32))).to(tl.int64)
    block = tl.arange(0, NB)
    byte = tl.arange(0, 512)
    high = tl.load(arena + start * 256 + block[:, None] * 1024 + 512 + byte[None, :]).to(tl.int32) & 0x7F
    smallest = tl.min(high, axis=1)
    eligible = tl.max(high, axis=1) - smallest <= LIMIT
    at = index.to(tl.int64) * regions + region
    tl.store(bases + at * NB + block, tl.where(eligible, smallest, RAW).to(tl.uint8))
    tl.store(units + at, NB * COMPACT + tl.sum(tl.where(eligible, 0, 1), axis=0))


@triton.jit
def pack_kernel(
    units, own, pages, starts, counts, regions, chunks_per_page, chunk_units,
    SMALLEST: tl.constexpr, SIZES: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program page index: new start (uint32) of every region by the rule of ``memory/packing.py``, and the chunks kept."""
    index = tl.program_id(0)
    page = tl.load(pages + index).to(tl.int64)
    region = tl.arange(0, BLOCK)
    there = region < regions
    base = index.to(tl.int64) * regions
    size_class = tl.load(units + base + region, mask=there, other=0) - SMALLEST
    classes = tl.arange(0, CLASSES)
    sizes = classes + SMALLEST
    rank = tl.zeros([BLOCK], tl.int32)
    left = tl.zeros([CLASSES], tl.int32)
    for c in tl.static_range(SIZES):
        member = ((size_class == c) & there).to(tl.int32)
        rank = tl.where(member > 0, tl.cumsum(member, axis=0) - 1, rank)
        left += tl.where(classes == c, tl.sum(member, axis=0), 0)
    first_rank = tl.zeros([CLASSES], tl.int32)
    chunk = tl.zeros([BLOCK], tl.int32)
    offset = tl.zeros([BLOCK], tl.int32)
    num_chunks = 0
    remaining = tl.sum(left, axis=0)
    while remaining > 0:
        # How often each size stands in the next chunk.
        taken = tl.zeros([CLASSES], tl.int32)
        space = chunk_units
        pick = _pick(left, sizes, space)
        while pick > 0:
            taken += tl.where(sizes == pick, 1, 0)
            space -= pick
            pick = _pick(left - taken, sizes, space)
        # That many chunks in a row are filled alike.
        alike = tl.min(tl.where(taken > 0, left // tl.maximum(taken, 1), 1 << 30), axis=0)
        # Once more, now placing the regions of all of them.
        placed = tl.zeros([CLASSES], tl.int32)
        space = chunk_units
        pick = _pick(left, sizes, space)
        while pick > 0:
            mine = sizes == pick
            used = tl.sum(tl.where(mine, taken, 0), axis=0)
            occurrence = tl.sum(tl.where(mine, placed, 0), axis=0)
            past = rank - tl.sum(tl.where(mine, first_rank, 0), axis=0)
            here = (
                there
                & (size_class == pick - SMALLEST)
                & (past >= 0)
                & (past < alike * used)
                & (past % used == occurrence)
            )
            chunk = tl.where(here, num_chunks + past // used, chunk)
            offset = tl.where(here, chunk_units - space, offset)
            placed += tl.where(mine, 1, 0)
            space -= pick
            pick = _pick(left - placed, sizes, space)
        left -= alike * taken
        first_rank += alike * taken
        num_chunks += alike
        remaining = tl.sum(left, axis=0)
    chunk_id = tl.load(own + page * chunks_per_page + chunk, mask=there, other=0)
    start = chunk_id.to(tl.int64) * chunk_units + offset
    tl.store(starts + base + region, start.to(tl.uint32).to(tl.int32, bitcast=True), mask=there)
    tl.store(counts + index, num_chunks)


@triton.jit
def _pick(left, sizes, space):
    """Size to take next, 0 when nothing that is left fits into ``space``."""
    available = left > 0
    fits = available & (sizes <= space)
    smallest = tl.maximum(tl.min(tl.where(available, sizes, 1 << 20), axis=0), 1)
    largest = tl.max(tl.where(available, sizes, 0), axis=0)
    remainder = tl.maximum(space - sizes, 0)
    fillable = fits & (remainder // smallest * largest >= remainder)
    best = tl.max(tl.where(fillable, sizes, 0), axis=0)
    return tl.where(best > 0, best, tl.max(tl.where(fits, sizes, 0), axis=0))


@triton.jit
def encode_kernel(
    arena, table, pages, num_pages, bases, staging, regions,
    HEADS: tl.constexpr, ROW_BYTES: tl.constexpr, NB: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Program (page index, region): the region's payload into its place in the staging buffer (raw region stride)."""
    index = tl.program_id(0)
    region = tl.program_id(1)
    page = tl.load(pages + index).to(tl.int64)
    entry = _entry(table, page, region, num_pages, HEADS, ROW_BYTES)
    source = (arena + tl.load(entry.to(tl.pointer_type(tl.uint32))).to(tl.int64) * 256).to(tl.pointer_type(tl.int32))
    at = index.to(tl.int64) * regions + region
    target = (staging + at * (NB * 1024)).to(tl.pointer_type(tl.int32))
    low_word = tl.arange(0, 128)
    word = tl.arange(0, 64)
    for block in tl.static_range(NB):
        base = tl.load(bases + at * NB + block).to(tl.int32)
        tl.store(target + low_word, tl.load(source + low_word))
        first = tl.load(source + 128 + word)
        second = tl.load(source + 192 + word)
        every = base * 0x01010101
        d_0 = (first & 0x7F7F7F7F) - every
        d_1 = (second & 0x7F7F7F7F) - every
        d_next = ((d_1 >> 8) & 0xFFFFFF) | (d_1 << 24)
        code = (first & (0x80808080 - (1 << 32))) | d_0 | ((second >> 4) & 0x08080808) | (d_next << 4)
        raw = base == RAW
        tl.store(target + 128 + word, tl.where(raw, first, code))
        tl.store(target + 192 + word, second, mask=(word >= 0) & raw)
        source += 256
        target += tl.where(raw, 256, 192)


@triton.jit
def move_kernel(
    arena, table, pages, num_pages, bases, units, starts, staging, regions,
    HEADS: tl.constexpr, ROW_BYTES: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Program (page index, region): staged payload to its new start, and the table entry."""
    index = tl.program_id(0)
    region = tl.program_id(1)
    page = tl.load(pages + index).to(tl.int64)
    at = index.to(tl.int64) * regions + region
    start = tl.load(starts + at).to(tl.uint32, bitcast=True)
    words = tl.load(units + at) * 64
    source = (staging + at * (NB * 1024)).to(tl.pointer_type(tl.int32))
    target = (arena + start.to(tl.int64) * 256).to(tl.pointer_type(tl.int32))
    word = tl.arange(0, NB * 256)
    tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)
    entry = _entry(table, page, region, num_pages, HEADS, ROW_BYTES)
    tl.store(entry.to(tl.pointer_type(tl.uint32)), start)
    block = tl.arange(0, NB)
    tl.store(entry + 4 + block, tl.load(bases + at * NB + block))


class Compactor:
    """Compacts full raw pages of one worker in place; owns the buffers for ``max_pages`` pages at a time (``max_pages`` raw pages of staging)."""

    def __init__(self, layout: ArenaLayout, max_pages: int, device: torch.device | str) -> None:
        self.layout, self.max_pages = layout, max_pages
        shape = layout.shape
        regions, blocks = shape.regions_per_page, shape.blocks_per_region
        self.bases = torch.empty(max_pages, regions, blocks, dtype=torch.uint8, device=device)
        self.units = torch.empty(max_pages, regions, dtype=torch.int32, device=device)
        self.starts = torch.empty(max_pages, regions, dtype=torch.int32, device=device)
        self.counts = torch.empty(max_pages, dtype=torch.int32, device=device)
        self.staging = torch.empty(
            max_pages * regions * shape.raw_region_units * UNIT_BYTES, dtype=torch.uint8, device=device
        )

    def compact(
        self, pages: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, own: torch.Tensor, answer: torch.Tensor
    ) -> None:
        """Compact ``pages`` (int32 or int64 [n], raw, full, distinct, at most ``max_pages``).

        ``answer``: int32 [at least n]; the chunks that each page keeps are copied there (pinned host memory: without blocking; valid once an
        event recorded after this call has passed). ``arena``, ``table``, ``own``: see the module. Raises ValueError for what does not fit.
        """
        layout, shape = self.layout, self.layout.shape
        n = len(pages)
        if n > self.max_pages or len(answer) < n:
            raise ValueError(
                f"{n} pages to compact, the staging takes {self.max_pages} and the answer {len(answer)}: compact in smaller groups"
            )
        if (
            table.shape != (shape.num_layers, layout.num_pages, shape.num_kv_heads, shape.row_bytes)
            or not table.is_contiguous()
        ):
            raise ValueError(
                f"the table must be contiguous {shape.num_layers} layers of {layout.num_pages} pages, got {list(table.shape)}"
            )
        if (
            own.dtype != torch.int32
            or own.shape != (layout.num_pages, layout.chunks_per_raw_page)
            or not own.is_contiguous()
        ):
            raise ValueError(
                f"own must be int32 [{layout.num_pages}, {layout.chunks_per_raw_page}], got {own.dtype} {list(own.shape)}"
            )
        if n == 0:
            return
        regions, blocks, heads = shape.regions_per_page, shape.blocks_per_region, shape.num_kv_heads
        grid = (n, regions)
        measure_kernel[grid](
            arena, table, pages, layout.num_pages, self.bases, self.units, regions,
            heads, shape.row_bytes, blocks, RAW_BASE, MAX_D, COMPACT_BLOCK_UNITS, num_warps=1,
        )  # fmt: skip
        pack_kernel[(n,)](
            self.units, own, pages, self.starts, self.counts, regions, layout.chunks_per_raw_page, layout.chunk_units,
            shape.compact_region_units, blocks + 1, _CLASSES, triton.next_power_of_2(regions), num_warps=1,
        )  # fmt: skip
        encode_kernel[grid](
            arena,
            table,
            pages,
            layout.num_pages,
            self.bases,
            self.staging,
            regions,
            heads,
            shape.row_bytes,
            blocks,
            RAW_BASE,
            num_warps=1,
        )
        move_kernel[grid](
            arena, table, pages, layout.num_pages, self.bases, self.units, self.starts, self.staging, regions,
            heads, shape.row_bytes, blocks, num_warps=1,
        )  # fmt: skip
        answer[:n].copy_(self.counts[:n], non_blocking=True)
