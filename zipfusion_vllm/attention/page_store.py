"""The pages of one worker: its arena, its lookup table, and what is done to them.

Stands between the connector's worker half (which places and compacts pages) and the attention backend (which writes and
restores them). Runs on the CPU, through ``kernels/cpu_pages.py``; ``codec.py`` and ``memory/packing.py`` say what its bytes must
be. Knows no scheduler: it is told which chunks a page owns.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
import torch

from zipfusion_vllm.format import RAW_BASE, START_BYTES
from zipfusion_vllm.kernels import cpu_pages
from zipfusion_vllm.memory.layout import SCRATCH_CHUNK, ArenaLayout
from zipfusion_vllm.memory.packing import pack_pages

COMPACTION_WAVE = 64
"""Pages compacted at once: bounds the arrays of a wave; the staging of raw bytes is one page per thread."""


class PageStore:
    """One arena on the CPU and the lookup table at its end.

    ``arena``: uint8 [layout.arena_bytes], shared by all layers. Every table entry points at the scratch chunk until its page is placed, so
    that reads and writes through ids that were never placed (warm-up, the null block) stay inside the arena and hit no page.
    """

    def __init__(self, arena: torch.Tensor, layout: ArenaLayout) -> None:
        if arena.dtype != torch.uint8 or arena.dim() != 1 or arena.numel() < layout.arena_bytes:
            raise ValueError(
                f"the arena must be uint8 [{layout.arena_bytes}] or more, got {arena.dtype} {list(arena.shape)}"
            )
        self.layout = layout
        shape = layout.shape
        memory = arena.numpy()[: layout.arena_bytes]
        self._chunks = memory[: layout.table_offset]
        table = memory[layout.table_offset : layout.table_offset + layout.table_bytes]
        entries = table.reshape(shape.num_layers, layout.num_pages, shape.num_kv_heads, 2, shape.entry_bytes)
        # Views of the table, [layers, pages, heads, kind]: starts in units, and the base bytes of every block.
        self.starts: np.ndarray = entries[..., :START_BYTES].view(np.uint32)[..., 0]
        self.bases: np.ndarray = entries[..., START_BYTES : START_BYTES + shape.blocks_per_region]
        self._region_layer, head_kind = np.divmod(np.arange(shape.regions_per_page), 2 * shape.num_kv_heads)
        self._region_head, self._region_kind = np.divmod(head_kind, 2)
        self.own = np.full((layout.num_pages, layout.chunks_per_raw_page), SCRATCH_CHUNK, dtype=np.int32)
        self.generation = np.zeros(layout.num_pages, dtype=np.uint32)
        self.starts[...] = SCRATCH_CHUNK * layout.chunk_units
        self.bases[...] = RAW_BASE
        with worker_threads():
            self._load_kernels()

    def place(self, pages: np.ndarray, generations: np.ndarray, chunks: np.ndarray) -> None:
        """Make ``pages`` (int32 [n]) raw pages in ``chunks`` (int32 [n, chunks per raw page]) and remember their generations."""
        if not len(pages):
            return
        layout = self.layout
        chunk, slot = np.divmod(np.arange(layout.shape.regions_per_page), layout.regions_per_chunk)
        starts = chunks[:, chunk].astype(np.int64) * layout.chunk_units + slot * layout.shape.raw_region_units
        self.own[pages] = chunks
        self.generation[pages] = generations
        self._set_starts(pages, starts)
        self.bases[:, pages] = RAW_BASE

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write new tokens: bfloat16 [tokens, heads, head_dim] to int64 slots [tokens] (page * 16 + position, -1 for none)."""
        k, v = _bits(key), _bits(value)
        cpu_pages.write_tokens(self._chunks, self.starts[layer], slots.numpy(), k, v)

    def restore(
        self,
        layer: int,
        pages: np.ndarray,
        first_token: np.ndarray,
        num_tokens: np.ndarray,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Restore ``pages`` of one layer, raw or compact, into bfloat16 [tokens, heads, head_dim].

        Page i fills the rows ``first_token[i] : first_token[i] + num_tokens[i]`` (int64 arrays).
        """
        cpu_pages.restore_pages(
            self._chunks,
            self.starts[layer],
            self.bases[layer],
            pages,
            first_token,
            num_tokens,
            _bits(key),
            _bits(value),
        )

    def compact(self, pages: np.ndarray) -> tuple[np.ndarray, int]:
        """Compact raw, full ``pages`` in place, each into the first of its own chunks.

        Returns int32 [n], the chunks that each keeps, and how many of the pages' blocks were eligible.
        """
        counts = [np.zeros(0, dtype=np.int32)]
        eligible = 0
        for begin in range(0, len(pages), COMPACTION_WAVE):
            wave_counts, wave_eligible = self._compact_wave(pages[begin : begin + COMPACTION_WAVE].astype(np.int64))
            counts.append(wave_counts)
            eligible += wave_eligible
        return np.concatenate(counts), eligible

    def check(self, pages: np.ndarray, num_chunks: np.ndarray) -> np.ndarray:
        """Which of ``pages`` break an invariant: a region outside the page's first ``num_chunks`` chunks, across a chunk's end, or
        over another region of the page. Returns those page ids."""
        layout = self.layout
        raw_blocks = (self.bases[:, pages] == RAW_BASE).sum(-1)
        units = raw_blocks + layout.shape.compact_region_units
        starts = self.starts[:, pages].astype(np.int64)
        flat = (len(pages), layout.shape.regions_per_page)
        starts, units = (np.moveaxis(x, 1, 0).reshape(flat) for x in (starts, units))
        chunk, offset = np.divmod(starts, layout.chunk_units)
        straddles = (offset + units > layout.chunk_units).any(1)
        kept = np.arange(layout.chunks_per_raw_page) < num_chunks[:, None]
        own = np.where(kept, self.own[pages], -1)
        outside = ~(chunk[:, :, None] == own[:, None, :]).any(2).all(1)
        order = np.argsort(starts, axis=1)
        starts, units = (np.take_along_axis(x, order, axis=1) for x in (starts, units))
        overlaps = (starts[:, :-1] + units[:, :-1] > starts[:, 1:]).any(1)
        return pages[straddles | outside | overlaps]

    def _compact_wave(self, pages: np.ndarray) -> tuple[np.ndarray, int]:
        shape, layout = self.layout.shape, self.layout
        bases = np.empty((len(pages), shape.regions_per_page, shape.blocks_per_region), dtype=np.uint8)
        cpu_pages.measure_pages(self._chunks, self.starts, pages, bases)
        raw_blocks = (bases == RAW_BASE).sum(2)
        chunk, offset, counts = pack_pages(raw_blocks + shape.compact_region_units, layout.chunk_units)
        starts = np.take_along_axis(self.own[pages].astype(np.int64), chunk, axis=1) * layout.chunk_units + offset
        cpu_pages.encode_pages(self._chunks, self.starts, self.bases, pages, bases, starts.astype(np.uint32))
        return counts.astype(np.int32), bases.size - int(raw_blocks.sum())

    def _load_kernels(self) -> None:
        """Compile the kernels, or load them from numba's cache, now and not in the first request: 15 s on a new machine."""
        shape = self.layout.shape
        nothing = torch.empty(0, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
        no_pages = np.empty(0, dtype=np.int64)
        self.write(0, torch.empty(0, dtype=torch.int64), nothing, nothing)
        self.restore(0, no_pages, no_pages, no_pages, nothing, nothing)
        bases = np.empty((0, shape.regions_per_page, shape.blocks_per_region), dtype=np.uint8)
        cpu_pages.measure_pages(self._chunks, self.starts, no_pages, bases)
        new_starts = np.empty((0, shape.regions_per_page), dtype=np.uint32)
        cpu_pages.encode_pages(self._chunks, self.starts, self.bases, no_pages, bases, new_starts)

    def _set_starts(self, pages: np.ndarray, starts: np.ndarray) -> None:
        """Table starts of ``pages`` from [n, regions]."""
        self.starts[self._region_layer[None], pages[:, None], self._region_head[None], self._region_kind[None]] = starts


@contextmanager
def worker_threads() -> Iterator[None]:
    """Let numba start its threads on all cores that vLLM gave this worker, and as many as it gave.

    vLLM pins each of its threads to a core, the calling one too, and threads started later would inherit that one core. What this gives in decode
    has not been measured yet.
    """
    mine = os.sched_getaffinity(0)
    cores = set().union(*(os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")))
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def arena_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes]: the storage behind one layer's view of the KV cache, which is that of all layers (vLLM 0.32+)."""
    storage = kv_cache.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=kv_cache.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


def _bits(values: torch.Tensor) -> np.ndarray:
    """uint16 view of contiguous bfloat16 values."""
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)
