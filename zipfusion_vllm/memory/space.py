"""BlockSpaceManager: which chunks of the arena belong to which page.

Lives in the scheduler's process and is the only authority over space; the vLLM block pool (``block_pool.py``) tells it what happens to pages, the
connector's scheduler half asks for chunk lists and brings the workers' answers. Numpy only: no vLLM, no addresses.

The life of a page::

    FREE --allocate--> RAW --begin_compaction--> COMPACTING --answer of every rank--> COMPACT
      ^                 |                            |                                   |
      +-----------------+----------release-----------+-----------------------------------+

A page owns ``chunks_per_raw_page`` chunks until it is COMPACT, then the first few of them. A page without references that stays for prefix hits is
*cached*, in any state but FREE: its chunks count as free, because it can be evicted. Every life of a page has its own generation number, so that an
answer for an earlier life is told from one for this.

All operations are vectorised over pages and cost microseconds (memory-notes, part I, section 7).
"""

from enum import IntEnum

import numpy as np

from zipfusion_vllm.memory.layout import SCRATCH_CHUNK

FIRST_CHUNK = SCRATCH_CHUNK + 1


class PageState(IntEnum):
    FREE = 0
    RAW = 1
    COMPACTING = 2
    COMPACT = 3


class SpaceError(AssertionError):
    """The books do not add up, or were asked for what cannot be: a fault of the program, never of a message from outside."""


class BlockSpaceManager:
    """Hands out chunks ``1 .. num_chunks - 1`` to pages ``0 .. num_pages - 1`` and takes them back.

    ``num_ranks`` workers hold the same chunks of the same pages, each in its own arena: a page keeps the largest count that a rank needs.
    """

    def __init__(self, num_pages: int, num_chunks: int, chunks_per_raw_page: int, num_ranks: int = 1) -> None:
        if num_pages < 1 or num_chunks < 1 or chunks_per_raw_page < 1 or num_ranks < 1:
            raise ValueError(
                f"pages, chunks, chunks per raw page and ranks are at least 1, got {num_pages}, {num_chunks}, {chunks_per_raw_page}, {num_ranks}"
            )
        self.num_pages = num_pages
        self.num_usable_chunks = num_chunks - FIRST_CHUNK
        self.chunks_per_raw_page = chunks_per_raw_page
        self.num_ranks = num_ranks
        self.generation = np.zeros(num_pages, dtype=np.uint32)
        """uint32 [pages]: lives of each page so far. Read only."""
        self.num_shrunk = 0
        """Pages made compact so far, those without gain included."""
        self.num_stale = 0
        """Answers dropped so far because their page was freed, reused or compact already."""
        self.num_doubled = 0
        """Answers dropped so far because the rank had answered for the page."""
        self.num_impossible = 0
        """Answers dropped so far because no worker can mean them; ``take_faults`` names them."""
        self.num_compact_pages = 0
        self.num_compact_chunks = 0
        self.num_evictable_chunks = 0
        """Chunks of cached pages."""
        self.num_cached_pages = 0
        self._stack = np.arange(num_chunks - 1, SCRATCH_CHUNK, -1, dtype=np.int32)  # the lowest ids go first
        self._top = self.num_usable_chunks
        self._own = np.full((num_pages, chunks_per_raw_page), SCRATCH_CHUNK, dtype=np.int32)
        self._num_chunks = np.zeros(num_pages, dtype=np.int32)
        self._state = np.full(num_pages, PageState.FREE, dtype=np.uint8)
        self._cached = np.zeros(num_pages, dtype=np.bool_)
        self._answered = np.zeros((num_ranks, num_pages), dtype=np.bool_)
        self._needed = np.zeros(num_pages, dtype=np.int32)
        self._columns = np.arange(chunks_per_raw_page, dtype=np.int32)
        self._faults: list[str] = []

    # Questions

    @property
    def num_free_chunks(self) -> int:
        """Chunks that no page owns."""
        return self._top

    @property
    def num_used_chunks(self) -> int:
        """Chunks that pages own, cached pages included."""
        return self.num_usable_chunks - self._top

    def num_free_pages(self, num_free_ids: int) -> int:
        """Pages that can be allocated at once, raw, when cached pages are evicted; ``num_free_ids`` ids are free or of cached pages."""
        return min((self._top + self.num_evictable_chunks) // self.chunks_per_raw_page, num_free_ids)

    def num_free_pages_after_pinning(self, num_free_ids: int, pages: np.ndarray) -> int:
        """What ``num_free_pages`` would say if the cached ones of ``pages`` (int [n], distinct) were hit, so not to be evicted."""
        pinned = pages[self._cached[pages]]
        evictable = self.num_evictable_chunks - int(self._num_chunks[pinned].sum())
        return min((self._top + evictable) // self.chunks_per_raw_page, num_free_ids - len(pinned))

    def chunk_lists(self, pages: np.ndarray) -> np.ndarray:
        """int32 [n, chunks per raw page]: the chunks of ``pages``; the first ``num_chunks_of(pages)`` of each row are the page's."""
        return self._own[pages]

    def num_chunks_of(self, pages: np.ndarray) -> np.ndarray:
        """int32 [n]: chunks that ``pages`` own."""
        return self._num_chunks[pages]

    def states_of(self, pages: np.ndarray) -> np.ndarray:
        """uint8 [n]: ``PageState`` of ``pages``."""
        return self._state[pages]

    def held_pages(self) -> np.ndarray:
        """int32 [n]: ids of all pages that own chunks, ascending."""
        return np.flatnonzero(self._state != PageState.FREE).astype(np.int32)

    # The life of a page

    def allocate(self, pages: np.ndarray) -> None:
        """Give FREE ``pages`` (int [n], distinct) the chunks of a raw page each. Raises SpaceError, and changes nothing, if they do not fit."""
        num_chunks = len(pages) * self.chunks_per_raw_page
        if num_chunks > self._top:
            raise SpaceError(
                f"{len(pages)} raw pages need {num_chunks} chunks and {self._top} are free: cached pages must be evicted first"
            )
        self._require(pages, self._state[pages] == PageState.FREE, "allocated although it owns chunks")
        self._top -= num_chunks
        self._own[pages] = self._stack[self._top : self._top + num_chunks].reshape(len(pages), self.chunks_per_raw_page)
        self._num_chunks[pages] = self.chunks_per_raw_page
        self._state[pages] = PageState.RAW
        self.generation[pages] += 1

    def begin_compaction(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of ``pages`` (int [n], distinct), take those that are RAW; the workers are now told to compact them.

        Returns (pages int32 [m], generations uint32 [m]); those in any other state are skipped.
        """
        raw = pages[self._state[pages] == PageState.RAW].astype(np.int32)
        self._state[raw] = PageState.COMPACTING
        self._needed[raw] = 0
        self._answered[:, raw] = False
        return raw, self.generation[raw]

    def answer(self, rank: int, pages: np.ndarray, generations: np.ndarray, num_chunks: np.ndarray) -> int:
        """``rank`` has compacted ``pages`` of ``generations`` into ``num_chunks`` chunks each (all int [n]).

        A page shrinks once all ranks have answered, to the largest of their counts. Whatever comes late, doubled or in another order changes
        nothing else; an impossible answer is dropped and told by ``take_faults``. Returns the number of pages made compact.
        """
        if not 0 <= rank < self.num_ranks:
            self._reject(len(pages), f"rank {rank} answered for pages, and there are {self.num_ranks} ranks")
            return 0
        if not len(pages) == len(generations) == len(num_chunks):
            self._reject(len(pages), f"rank {rank} answered {len(pages)} pages with {len(num_chunks)} counts")
            return 0
        possible = self._are_possible(rank, pages, num_chunks)
        pages, generations, num_chunks = pages[possible], generations[possible], num_chunks[possible]
        fresh = (self._state[pages] == PageState.COMPACTING) & (self.generation[pages] == generations)
        self.num_stale += len(pages) - int(fresh.sum())
        pages, num_chunks = pages[fresh], num_chunks[fresh]
        first = ~self._answered[rank, pages]
        if len(set(pages.tolist())) < len(pages):
            first &= np.isin(np.arange(len(pages)), np.unique(pages, return_index=True)[1])
        self.num_doubled += len(pages) - int(first.sum())
        pages, num_chunks = pages[first], num_chunks[first]
        self._answered[rank, pages] = True
        self._needed[pages] = np.maximum(self._needed[pages], num_chunks)
        complete = pages[self._answered[:, pages].all(axis=0)]
        self._shrink(complete)
        return len(complete)

    def cache(self, pages: np.ndarray) -> None:
        """The last reference to ``pages`` (int [n], distinct) is gone, and they stay for prefix hits: evictable from now on."""
        self._require(
            pages, (self._state[pages] != PageState.FREE) & ~self._cached[pages], "cached although it is free or cached"
        )
        self._cached[pages] = True
        self.num_cached_pages += len(pages)
        self.num_evictable_chunks += int(self._num_chunks[pages].sum())

    def uncache(self, pages: np.ndarray) -> None:
        """Cached ``pages`` (int [n], distinct) are hit: somebody refers to them again."""
        self._require(pages, self._cached[pages], "taken from the cache although it is not cached")
        self._cached[pages] = False
        self.num_cached_pages -= len(pages)
        self.num_evictable_chunks -= int(self._num_chunks[pages].sum())

    def release(self, pages: np.ndarray) -> None:
        """Take back all chunks of ``pages`` (int [n], distinct), cached or not, whatever their state; answers for them come too late now."""
        self._require(pages, self._state[pages] != PageState.FREE, "released although it owns nothing")
        cached = pages[self._cached[pages]]
        if len(cached):
            self.uncache(cached)
        compact = pages[self._state[pages] == PageState.COMPACT]
        self.num_compact_pages -= len(compact)
        self.num_compact_chunks -= int(self._num_chunks[compact].sum())
        self._push(pages, np.zeros(len(pages), dtype=np.int32))
        self._state[pages] = PageState.FREE

    # Faults and checks

    def take_faults(self) -> list[str]:
        """Sentences about impossible answers since the last call."""
        faults, self._faults = self._faults, []
        return faults

    def check(self) -> None:
        """Hold the books against each other. Raises SpaceError naming the page or chunk and what broke."""
        held = self._columns < self._num_chunks[:, None]
        chunks = np.concatenate((self._stack[: self._top], self._own[held]))
        wrong = (chunks < FIRST_CHUNK) | (chunks >= FIRST_CHUNK + self.num_usable_chunks)
        if wrong.any():
            place = int(wrong.argmax())
            raise SpaceError(f"{self._holder(place)} holds chunk {chunks[place]}, which is not one to hand out")
        times = np.bincount(chunks, minlength=FIRST_CHUNK + self.num_usable_chunks)[FIRST_CHUNK:]
        if (times != 1).any():
            chunk = int(times.argmax() if times.max() > 1 else times.argmin()) + FIRST_CHUNK
            holders = " and ".join(map(self._holder, np.flatnonzero(chunks == chunk))) or "nobody"
            raise SpaceError(f"chunk {chunk} is held by {holders}: every chunk has one holder")
        self._check_states()

    def _holder(self, place: int) -> str:
        """Who holds the chunk at ``place`` of the stack followed by the chunk lists of all pages."""
        if place < self._top:
            return "the free stack"
        page = np.searchsorted(self._num_chunks.cumsum(), place - self._top, side="right")
        return f"page {page}"

    def _check_states(self) -> None:
        raw = np.isin(self._state, (PageState.RAW, PageState.COMPACTING))
        compact = self._state == PageState.COMPACT
        self._require_all(
            np.where(raw, self._num_chunks == self.chunks_per_raw_page, True),
            "a raw page does not own a raw page's chunks",
        )
        self._require_all(np.where(compact, self._num_chunks >= 1, True), "a compact page owns no chunk")
        self._require_all(np.where(raw | compact, True, self._num_chunks == 0), "a free page owns chunks")
        self._require_all(~self._cached | raw | compact, "a free page counts as cached")
        for what, counted, true in (
            ("evictable chunks", self.num_evictable_chunks, self._num_chunks[self._cached].sum()),
            ("cached pages", self.num_cached_pages, self._cached.sum()),
            ("compact pages", self.num_compact_pages, compact.sum()),
            ("chunks of compact pages", self.num_compact_chunks, self._num_chunks[compact].sum()),
        ):
            if counted != true:
                raise SpaceError(f"{counted} {what} are counted and there are {true}")

    def _are_possible(self, rank: int, pages: np.ndarray, num_chunks: np.ndarray) -> np.ndarray:
        """bool [n]: answers that a worker can mean, for a page that exists and with a count between one chunk and a raw page's."""
        possible = (
            (pages >= 0) & (pages < self.num_pages) & (num_chunks >= 1) & (num_chunks <= self.chunks_per_raw_page)
        )
        if not possible.all():
            first = int(np.flatnonzero(~possible)[0])
            self._reject(
                len(pages) - int(possible.sum()),
                f"rank {rank} answered {num_chunks[first]} chunks for page {pages[first]}: there are {self.num_pages} pages, "
                f"and one takes 1 to {self.chunks_per_raw_page}",
            )
        return possible

    def _shrink(self, pages: np.ndarray) -> None:
        needed = self._needed[pages]
        cached = self._cached[pages]
        self.num_evictable_chunks -= int((self.chunks_per_raw_page - needed[cached]).sum())
        self._push(pages, needed)
        self._state[pages] = PageState.COMPACT
        self.num_shrunk += len(pages)
        self.num_compact_pages += len(pages)
        self.num_compact_chunks += int(needed.sum())

    def _push(self, pages: np.ndarray, keep: np.ndarray) -> None:
        """Put all but the first ``keep`` chunks of ``pages`` back on the stack."""
        gone = (self._columns >= keep[:, None]) & (self._columns < self._num_chunks[pages][:, None])
        chunks = self._own[pages][gone]
        self._stack[self._top : self._top + len(chunks)] = chunks
        self._top += len(chunks)
        self._num_chunks[pages] = keep

    def _reject(self, num_answers: int, fault: str) -> None:
        self.num_impossible += num_answers
        self._faults.append(fault)

    def _require(self, pages: np.ndarray, good: np.ndarray, otherwise: str) -> None:
        if not good.all():
            raise SpaceError(f"page {pages[~good][0]} is {otherwise}")
        if len(set(pages.tolist())) < len(pages):
            raise SpaceError(f"pages are named twice in one operation: {sorted(pages.tolist())}")

    def _require_all(self, good: np.ndarray, otherwise: str) -> None:
        if not good.all():
            raise SpaceError(f"page {np.flatnonzero(~good)[0]}: {otherwise}")
