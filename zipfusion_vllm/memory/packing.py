"""The packing rule: which of a page's own chunks each of its regions goes to when the page is compacted.

Used by the worker when it compacts (``attention/page_store.py``) and by ``layout.py`` to choose the chunk size. The scheduler never packs: only
the number of chunks comes back to it. Plain Python and numpy, no vLLM.

The rule looks at nothing but how many regions of each size a page has. Fill a chunk by taking, again and again, the largest size that fits and
leaves a remainder that is either nothing or can be filled (``q * smallest <= remainder <= q * largest`` for some q, over the sizes
that are left); else the largest size that fits; when none fits, close the chunk. Regions of one size are used in index order.

A chunk is closed only when the next region does not fit, so it holds at least as many regions as would fit raw: a page never needs more
chunks than its raw form.
"""

from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import numpy as np


class PackedPages(NamedTuple):
    chunk: np.ndarray
    """int64 [n, regions]: region r goes to its page's ``chunk[r]``-th own chunk,"""
    offset: np.ndarray
    """int64 [n, regions]: at this offset in it, in units."""
    num_chunks: np.ndarray
    """int32 [n]: chunks that each page needs; it uses the first ones it owns."""


class _Run(NamedTuple):
    """Chunks one after the other that are filled alike."""

    sizes: tuple[int, ...]
    """Region sizes in the order in which they stand in each chunk."""
    num_chunks: int


def pack_pages(units: np.ndarray, chunk_units: int) -> PackedPages:
    """Pack pages whose regions take ``units`` (int [n, regions], in units of 256 bytes) into chunks of ``chunk_units``.

    Raises ValueError when a region is larger than a chunk.
    """
    units = _check(units, chunk_units)
    chunk = np.empty(units.shape, dtype=np.int64)
    offset = np.empty(units.shape, dtype=np.int64)
    num_chunks = np.empty(len(units), dtype=np.int32)
    for page, sizes in enumerate(units):
        places = _places(*_size_counts(sizes), chunk_units)
        order = np.argsort(sizes, kind="stable")
        chunk[page, order], offset[page, order] = places
        num_chunks[page] = places[0].max() + 1
    return PackedPages(chunk, offset, num_chunks)


def pack_page(units: np.ndarray, chunk_units: int) -> tuple[np.ndarray, np.ndarray, int]:
    """``pack_pages`` for one page: int [regions] -> (chunk [regions], offset in units [regions], number of chunks)."""
    packed = pack_pages(units[None], chunk_units)
    return packed.chunk[0], packed.offset[0], int(packed.num_chunks[0])


def count_chunks(units: np.ndarray, chunk_units: int) -> np.ndarray:
    """Chunks that pages need: int [n, regions] -> int32 [n], without placing the regions."""
    units = _check(units, chunk_units)
    counts = [count_chunks_by_size(*_size_counts(sizes), chunk_units) for sizes in units]
    return np.array(counts, dtype=np.int32)


def count_chunks_by_size(sizes: tuple[int, ...], counts: tuple[int, ...], chunk_units: int) -> int:
    """Chunks that a page needs which has ``counts[i]`` regions of ``sizes[i]`` units; sizes ascend, counts may be 0."""
    return sum(run.num_chunks for run in _runs(sizes, counts, chunk_units))


def _check(units: np.ndarray, chunk_units: int) -> np.ndarray:
    units = np.asarray(units)
    if units.ndim != 2 or units.shape[1] == 0:
        raise ValueError(f"units are int [pages, regions] with at least one region, got {list(units.shape)}")
    if units.size and not 0 < units.min() <= units.max() <= chunk_units:
        raise ValueError(f"regions take 1 to {chunk_units} units (a chunk), got {units.min()} to {units.max()}")
    return units


def _size_counts(units: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    smallest = int(units.min())
    counts = np.bincount(units - smallest).tolist()
    return tuple(range(smallest, smallest + len(counts))), tuple(counts)


@lru_cache(maxsize=1024)
def _places(sizes: tuple[int, ...], counts: tuple[int, ...], chunk_units: int) -> tuple[np.ndarray, np.ndarray]:
    """(chunk, offset) of the regions of a page, ordered by size and within a size by index. Not to be written to."""
    first_of_size = np.concatenate(([0], np.cumsum(counts)[:-1])).tolist()
    next_of_size = dict(zip(sizes, first_of_size, strict=True))
    chunk = np.empty(sum(counts), dtype=np.int64)
    offset = np.empty_like(chunk)
    num_chunks = 0
    for run in _runs(sizes, counts, chunk_units):
        for _ in repeat(None, run.num_chunks):
            at = 0
            for size in run.sizes:
                region = next_of_size[size]
                next_of_size[size] += 1
                chunk[region], offset[region] = num_chunks, at
                at += size
            num_chunks += 1
    return chunk, offset


@lru_cache(maxsize=4096)
def _runs(sizes: tuple[int, ...], counts: tuple[int, ...], chunk_units: int) -> tuple[_Run, ...]:
    """The chunks of a page, in order."""
    left = list(counts)
    runs: list[_Run] = []
    while any(left):
        taken = _fill_chunk(sizes, left, chunk_units)
        used = [taken.count(index) for index in range(len(sizes))]
        # The next chunk is filled alike as long as none of the sizes used runs out in it: every choice would fall the same way.
        num_alike = min(have // need for have, need in zip(left, used, strict=True) if need)
        left = [have - num_alike * need for have, need in zip(left, used, strict=True)]
        runs.append(_Run(tuple(sizes[index] for index in taken), num_alike))
    return tuple(runs)


def _fill_chunk(sizes: tuple[int, ...], counts: list[int], chunk_units: int) -> list[int]:
    """Indices of the sizes that one chunk takes, in order; ``counts`` regions are there of each."""
    left, space, taken = list(counts), chunk_units, []
    while (index := _next_size(sizes, left, space)) is not None:
        taken.append(index)
        left[index] -= 1
        space -= sizes[index]
    return taken


def _next_size(sizes: tuple[int, ...], left: list[int], space: int) -> int | None:
    """Index of the size to take next, or None when nothing that is left fits into ``space`` units."""
    available = [index for index, count in enumerate(left) if count]
    fitting = [index for index in reversed(available) if sizes[index] <= space]
    if not fitting:
        return None
    smallest, largest = sizes[available[0]], sizes[available[-1]]
    for index in fitting:
        remainder = space - sizes[index]
        if remainder // smallest * largest >= remainder:
            return index
    return fitting[0]
