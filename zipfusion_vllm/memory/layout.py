"""How a worker's arena is cut into chunks, and how large a chunk is.

Both sides compute it from the same numbers (the KV cache spec carries them), so that they agree without a message: the scheduler hands out chunk
ids, the worker turns them into addresses. Knows ``format.py`` and the packing rule, no vLLM::

    chunk 0      chunks 1 .. num_chunks - 1    slack            lookup table                                  rest
    scratch      handed out to pages           < one chunk      uint8 [layers, pages, heads, row_bytes]       < 256 bytes

The scratch chunk is where every table entry points until its page is placed: it may be written and read, and holds nothing.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from zipfusion_vllm.format import PAGE_TOKENS, UNIT_BYTES, PageShape
from zipfusion_vllm.memory.packing import count_chunks_by_size

SCRATCH_CHUNK = 0
"""The chunk that no page owns."""
TABLE_ALIGNMENT = 256
MAX_UNITS = 1 << 32
"""A region's start is a u32 in units, so an arena may have 1 TiB."""
CHUNK_CANDIDATES = range(3, 17)
"""Raw regions per chunk that are tried."""

_SAMPLED_PAGES = 64
_SEED = 16
_PAGE_SPREAD = 0.015
"""Standard deviation of the eligible share from page to page beyond chance, measured on the SmolLM2 samples (tests/data)."""
_REGION_SPREAD = 3.7
"""a + b of the Beta distribution of a region's eligible share: blocks of a region are alike (region sizes of memory-notes, part II)."""
_RAW_SHARE = 0.05
"""Share of the resident pages taken to be raw: those still being filled, and those whose answer is on its way."""
_RAW_ROUNDING_LIMITS = (0.02, 0.125, float("inf"))
"""How much more than its bytes a raw page may take, so that a model that compresses badly loses nothing: the first limit under which
compaction saves anything worth having. Only pages of a handful of regions, those of test models, need more than the first."""
_WORTH_HAVING = 0.1
_INDIFFERENCE = 0.003
"""Chunk sizes that differ by less in pages are as good as each other; then the larger one, because it makes shorter chunk lists."""


@dataclass(frozen=True)
class ArenaLayout:
    """The arena of one worker. ``num_pages`` counts vLLM's block ids with the null block 0; ``arena_bytes`` is the memory behind all layers.

    Raises ValueError when not even the scratch chunk and the lookup table fit, or addresses would not.
    """

    shape: PageShape
    num_pages: int
    arena_bytes: int
    regions_per_chunk: int

    def __post_init__(self) -> None:
        if self.num_pages < 1 or self.regions_per_chunk < 1:
            raise ValueError(f"an arena needs at least one page and one region per chunk, got {self}")
        if self.num_chunks < 1:
            raise ValueError(
                f"an arena of {self.arena_bytes:,} bytes is too small for a lookup table of {self.table_bytes:,} bytes and one chunk of "
                f"{self.chunk_bytes:,}: give vLLM more KV cache memory"
            )
        if self.arena_bytes > MAX_UNITS * UNIT_BYTES:
            raise ValueError(
                f"an arena of {self.arena_bytes:,} bytes is beyond the {MAX_UNITS * UNIT_BYTES:,} that the page format can address: "
                "give vLLM less KV cache memory"
            )

    @property
    def chunk_units(self) -> int:
        return self.regions_per_chunk * self.shape.raw_region_units

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_units * UNIT_BYTES

    @property
    def chunks_per_raw_page(self) -> int:
        return chunks_per_raw_page(self.shape, self.regions_per_chunk)

    @property
    def table_bytes(self) -> int:
        return self.num_pages * self.shape.table_page_bytes

    @property
    def table_offset(self) -> int:
        """Byte at which the lookup table begins; negative when it does not fit."""
        return (self.arena_bytes - self.table_bytes) // TABLE_ALIGNMENT * TABLE_ALIGNMENT

    @property
    def num_chunks(self) -> int:
        """All chunks, the scratch chunk included."""
        return self.table_offset // self.chunk_bytes

    @property
    def num_usable_chunks(self) -> int:
        """Chunks that pages can own: ids 1 to ``num_chunks - 1``."""
        return self.num_chunks - 1

    @property
    def raw_pages(self) -> int:
        """Pages that fit when none is compact."""
        return min(self.num_usable_chunks // self.chunks_per_raw_page, self.num_pages - 1)

    @property
    def raw_tokens(self) -> int:
        return self.raw_pages * PAGE_TOKENS

    def expected_pages(self, eligible_share: float) -> int:
        """Compact pages that fit when ``eligible_share`` of all blocks is compressed."""
        mean = float(_expected_chunks(self.shape, self.regions_per_chunk, eligible_share).mean())
        return min(int(self.num_usable_chunks / mean), self.num_pages - 1)

    def expected_tokens(self, eligible_share: float) -> int:
        """Tokens of the pages that ``expected_pages`` counts."""
        return self.expected_pages(eligible_share) * PAGE_TOKENS


def chunks_per_raw_page(shape: PageShape, regions_per_chunk: int) -> int:
    """Chunks that hold all regions of a page raw; the last one may not be full."""
    return -(-shape.regions_per_page // regions_per_chunk)


@cache
def choose_regions_per_chunk(shape: PageShape, eligible_share: float) -> int:
    """Raw regions per chunk (one of ``CHUNK_CANDIDATES``) with which most pages fit, when ``eligible_share`` of the blocks is compressed.

    What a chunk costs is the rounding of a page's size to whole chunks, so the best size depends on where the mean page falls between two
    chunks: on layers, heads, head_dim and share. A few raw pages are always resident, so the rounding of the raw size counts too.
    Deterministic. Raises ValueError for a share outside 0..1.
    """
    raw_units = shape.regions_per_page * shape.raw_region_units
    for limit in _RAW_ROUNDING_LIMITS:
        cost = {
            candidate: _mean_page_units(shape, candidate, eligible_share)
            for candidate in CHUNK_CANDIDATES
            if chunks_per_raw_page(shape, candidate) * candidate <= shape.regions_per_page * (1 + limit)
        }
        if cost and min(cost.values()) <= raw_units * (1 - _WORTH_HAVING):
            break
    cheapest = min(cost.values())
    return max(candidate for candidate in cost if cost[candidate] <= cheapest * (1 + _INDIFFERENCE))


def min_blocks(shape: PageShape, regions_per_chunk: int, num_raw_pages: int) -> int:
    """Smallest number of block ids, the null block included, whose arena holds ``num_raw_pages`` pages raw.

    The arena has that many *nominal* pages' bytes (3/4 of raw); scratch chunk and lookup table come out of it.
    """

    def fits(num_blocks: int) -> bool:
        arena_bytes = num_blocks * shape.nominal_page_bytes
        try:
            return ArenaLayout(shape, num_blocks, arena_bytes, regions_per_chunk).raw_pages >= num_raw_pages
        except ValueError:
            return False

    too_few, enough = 0, 1
    while not fits(enough):
        if enough * shape.nominal_page_bytes > MAX_UNITS * UNIT_BYTES:
            raise ValueError(
                f"{num_raw_pages:,} raw pages of {shape.raw_page_bytes:,} bytes need a larger arena than can be addressed"
            )
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough


def _mean_page_units(shape: PageShape, regions_per_chunk: int, eligible_share: float) -> float:
    """Units of arena that a resident page takes on average."""
    chunk_units = regions_per_chunk * shape.raw_region_units
    compact = float(_expected_chunks(shape, regions_per_chunk, eligible_share).mean())
    raw = chunks_per_raw_page(shape, regions_per_chunk)
    return chunk_units * ((1 - _RAW_SHARE) * compact + _RAW_SHARE * raw)


@cache
def _expected_chunks(shape: PageShape, regions_per_chunk: int, eligible_share: float) -> np.ndarray:
    """int32 [sampled pages]: chunks of compact pages drawn at ``eligible_share``."""
    chunk_units = regions_per_chunk * shape.raw_region_units
    sizes = tuple(range(shape.compact_region_units, shape.raw_region_units + 1))
    pages = _sampled_size_counts(shape, eligible_share)
    return np.array([count_chunks_by_size(sizes, counts, chunk_units) for counts in pages], dtype=np.int32)


@cache
def _sampled_size_counts(shape: PageShape, eligible_share: float) -> list[tuple[int, ...]]:
    """How many regions of each size, smallest first, the sampled pages have."""
    if not 0.0 <= eligible_share <= 1.0:
        raise ValueError(f"the expected eligible share is between 0 and 1, got {eligible_share}")
    rng = np.random.default_rng(_SEED)
    if eligible_share in (0.0, 1.0):
        page_shares = np.full(_SAMPLED_PAGES, eligible_share)
    else:
        page_shares = (eligible_share + _PAGE_SPREAD * rng.standard_normal(_SAMPLED_PAGES)).clip(0.0, 1.0)
    region_size = (_SAMPLED_PAGES, shape.regions_per_page)
    concentration = (
        np.maximum(_REGION_SPREAD * page_shares, 1e-9)[:, None],
        np.maximum(_REGION_SPREAD * (1 - page_shares), 1e-9)[:, None],
    )
    raw_blocks = rng.binomial(shape.blocks_per_region, 1 - rng.beta(*concentration, size=region_size))
    minlength = shape.blocks_per_region + 1
    return [tuple(np.bincount(page, minlength=minlength).tolist()) for page in raw_blocks]
