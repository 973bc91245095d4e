"""BlockSpaceManager by example, and as a state machine against a plain model (architecture.md, "What must always hold": 2, 4, 5, 6)."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zipfusion_vllm.memory.space import BlockSpaceManager, PageState, SpaceError


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


@pytest.fixture
def space() -> BlockSpaceManager:
    """8 pages, 20 chunks to hand out, 4 a raw page: 5 raw pages fit."""
    return BlockSpaceManager(num_pages=8, num_chunks=21, chunks_per_raw_page=4)


def compact(space: BlockSpaceManager, pages: np.ndarray, num_chunks: int) -> None:
    pages, generations = space.begin_compaction(pages)
    for rank in range(space.num_ranks):
        space.answer(rank, pages, generations, np.full(len(pages), num_chunks, dtype=np.int32))


def test_a_page_lives_through_all_states(space: BlockSpaceManager) -> None:
    space.allocate(ids(1, 2))
    lists = space.chunk_lists(ids(1, 2))
    assert sorted(lists.ravel()) == [1, 2, 3, 4, 5, 6, 7, 8]  # chunk 0 is scratch
    assert space.num_free_pages(7) == 3
    pages, generations = space.begin_compaction(ids(1, 2, 3))
    assert pages.tolist() == [1, 2] and generations.tolist() == [1, 1]  # 3 is free
    assert space.answer(0, pages, generations, ids(3, 2)) == 2
    assert space.num_chunks_of(ids(1, 2)).tolist() == [3, 2]
    assert (space.chunk_lists(ids(1))[0, :3] == lists[0, :3]).all()  # a prefix of the raw list
    assert space.num_free_chunks == 15 and space.num_compact_chunks == 5 and space.num_compact_pages == 2
    space.release(ids(1, 2))
    assert space.num_free_chunks == 20 and space.num_compact_pages == 0
    assert space.states_of(ids(1, 2)).tolist() == [PageState.FREE] * 2
    space.check()


def test_cached_pages_count_as_free_by_their_chunks(space: BlockSpaceManager) -> None:
    space.allocate(ids(1, 2, 3, 4, 5))
    compact(space, ids(1, 2), 3)
    space.cache(ids(1, 2))
    assert space.num_free_pages(7) == 2  # 2 chunks on the stack, 6 cached
    assert space.num_free_pages_after_pinning(7, ids(1)) == 1
    assert space.num_free_pages_after_pinning(7, ids(1, 2, 3)) == 0  # 3 is no hit on a cached page
    assert space.num_free_pages(1) == 1  # ids run out first
    space.uncache(ids(1))
    assert space.num_free_pages(7) == 1
    space.release(ids(2))
    assert space.num_free_chunks == 5
    space.check()


def test_shrinking_a_cached_page_leaves_the_count(space: BlockSpaceManager) -> None:
    space.allocate(ids(1, 2, 3, 4, 5))
    pages, generations = space.begin_compaction(ids(1))
    space.cache(ids(1))
    before = space.num_free_pages(7)
    space.answer(0, pages, generations, ids(1))
    assert space.num_free_pages(7) == before and space.num_evictable_chunks == 1
    space.check()


def test_a_page_without_gain_becomes_compact_with_all_its_chunks(space: BlockSpaceManager) -> None:
    space.allocate(ids(1))
    compact(space, ids(1), 4)
    assert space.states_of(ids(1)).tolist() == [PageState.COMPACT]
    assert space.num_free_chunks == 16 and space.take_faults() == []
    assert len(space.begin_compaction(ids(1))[0]) == 0
    space.check()


def test_the_page_keeps_the_largest_count_of_the_ranks() -> None:
    space = BlockSpaceManager(num_pages=4, num_chunks=13, chunks_per_raw_page=4, num_ranks=3)
    space.allocate(ids(1))
    pages, generations = space.begin_compaction(ids(1))
    assert space.answer(2, pages, generations, ids(2)) == 0
    assert space.answer(2, pages, generations, ids(4)) == 0  # doubled: the first counts
    assert space.answer(0, pages, generations, ids(3)) == 0
    assert space.num_chunks_of(ids(1)).tolist() == [4]
    assert space.answer(1, pages, generations, ids(1)) == 1
    assert space.num_chunks_of(ids(1)).tolist() == [3]
    assert space.num_doubled == 1
    assert space.answer(1, pages, generations, ids(1)) == 0  # late: compact already
    assert space.num_stale == 1 and space.num_shrunk == 1


def test_an_answer_for_an_earlier_life_is_dropped(space: BlockSpaceManager) -> None:
    space.allocate(ids(1))
    pages, generations = space.begin_compaction(ids(1))
    space.release(ids(1))
    assert space.answer(0, pages, generations, ids(1)) == 0
    space.allocate(ids(1))
    assert space.answer(0, pages, generations, ids(1)) == 0
    space.begin_compaction(ids(1))
    assert space.answer(0, pages, generations, ids(1)) == 0
    assert space.num_chunks_of(ids(1)).tolist() == [4] and space.num_stale == 3
    space.check()


def test_a_page_twice_in_one_answer_counts_once(space: BlockSpaceManager) -> None:
    space.allocate(ids(1, 2))
    pages, generations = space.begin_compaction(ids(1, 2))
    assert space.answer(0, pages[[0, 0, 1]], generations[[0, 0, 1]], ids(2, 1, 3)) == 2
    assert space.num_chunks_of(ids(1, 2)).tolist() == [2, 3] and space.num_doubled == 1
    space.check()


@pytest.mark.parametrize(
    ("rank", "page", "count", "says"),
    [(0, 1, 0, "0 chunks for page 1"), (0, 1, 5, "5 chunks for page 1"), (0, -1, 2, "page -1"), (0, 8, 2, "page 8"), (1, 1, 2, "rank 1"),
     (-1, 1, 2, "rank -1")],
)  # fmt: skip
def test_impossible_answers_change_nothing_and_are_told(
    space: BlockSpaceManager, rank: int, page: int, count: int, says: str
) -> None:
    space.allocate(ids(1))
    space.begin_compaction(ids(1))
    assert space.answer(rank, ids(page), np.ones(1, dtype=np.uint32), ids(count)) == 0
    assert space.num_chunks_of(ids(1)).tolist() == [4] and space.num_impossible == 1
    (fault,) = space.take_faults()
    assert says in fault and space.take_faults() == []
    space.check()


def test_an_impossible_count_does_not_spoil_the_others(space: BlockSpaceManager) -> None:
    space.allocate(ids(1, 2))
    pages, generations = space.begin_compaction(ids(1, 2))
    assert space.answer(0, pages, generations, ids(9, 2)) == 1
    assert space.num_chunks_of(ids(1, 2)).tolist() == [4, 2]
    assert space.answer(0, pages, generations, ids(2, 2)) == 1  # the rank may still say it right
    assert space.answer(0, pages, generations[:1], ids(2, 2)) == 0  # lengths differ
    assert len(space.take_faults()) == 2


def test_programming_errors_raise_and_change_nothing(space: BlockSpaceManager) -> None:
    space.allocate(ids(1, 2, 3, 4))
    with pytest.raises(SpaceError, match="need 8 chunks and 4 are free"):
        space.allocate(ids(5, 6))
    with pytest.raises(SpaceError, match="page 1 is allocated although"):
        space.allocate(ids(1))
    with pytest.raises(SpaceError, match="page 5 is released although"):
        space.release(ids(5))
    with pytest.raises(SpaceError, match="page 1 is taken from the cache"):
        space.uncache(ids(1))
    with pytest.raises(SpaceError, match="named twice"):
        space.release(ids(1, 1))
    space.cache(ids(1))
    with pytest.raises(SpaceError, match="page 1 is cached although"):
        space.cache(ids(1))
    space.check()


def test_nothing_to_do_is_done(space: BlockSpaceManager) -> None:
    for operation in (space.allocate, space.begin_compaction, space.cache, space.uncache, space.release):
        operation(ids())
    assert space.answer(0, ids(), ids().astype(np.uint32), ids()) == 0
    space.check()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda s: s._own.__setitem__((2, 0), s._own[1, 0]), "held by page 1 and page 2"),
        (lambda s: s._stack.__setitem__(0, s._own[1, 0]), "the free stack and page 1"),
        (lambda s: s._own.__setitem__((1, 0), 0), "page 1 holds chunk 0"),
        (lambda s: setattr(s, "_top", s._top - 1), "held by nobody"),
        (lambda s: s._state.__setitem__(1, PageState.FREE), "page 1: a free page owns chunks"),
        (lambda s: s._cached.__setitem__(1, True), "evictable chunks are counted"),
        (lambda s: setattr(s, "num_compact_pages", 3), "compact pages are counted"),
    ],
)
def test_check_names_what_broke(
    space: BlockSpaceManager, damage: Callable[[BlockSpaceManager], None], says: str
) -> None:
    space.allocate(ids(1, 2))
    space.check()
    damage(space)
    with pytest.raises(SpaceError, match=says):
        space.check()


@dataclass
class ModelPage:
    generation: int
    chunks: list[int]
    references: int = 1
    cached: bool = False
    commanded: bool = False
    answers: dict[int, int] = field(default_factory=dict)
    is_compact: bool = False


@dataclass(frozen=True)
class Sent:
    """A compaction command that one rank got."""

    rank: int
    page: int
    generation: int


class SpaceMachine(RuleBasedStateMachine):
    """Allocates, fills, answers (late, reordered, doubled, for reused pages), shares, caches, evicts, frees, resets."""

    @initialize(
        num_ranks=st.integers(1, 4),
        chunks_per_raw_page=st.integers(1, 6),
        num_pages=st.integers(2, 12),
        spare=st.integers(0, 40),
    )
    def start(self, num_ranks: int, chunks_per_raw_page: int, num_pages: int, spare: int) -> None:
        self.num_usable = chunks_per_raw_page + spare
        self.space = BlockSpaceManager(num_pages, self.num_usable + 1, chunks_per_raw_page, num_ranks)
        self.num_raw = chunks_per_raw_page
        self.lives = [0] * num_pages
        self.held: dict[int, ModelPage] = {}
        self.sent: list[Sent] = []

    def free_ids(self) -> list[int]:
        """Page 0 is the null block."""
        return [page for page in range(1, len(self.lives)) if page not in self.held]

    def evictable(self) -> list[int]:
        return [page for page, held in self.held.items() if held.cached]

    def count(self) -> int:
        return self.space.num_free_pages(len(self.free_ids()) + len(self.evictable()))

    @precondition(lambda self: self.count() > 0)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        wanted = data.draw(st.integers(1, self.count()))
        evictable = data.draw(st.permutations(self.evictable()))
        while len(self.free_ids()) < wanted or self.space.num_free_chunks < wanted * self.num_raw:
            self.give_back(evictable.pop())
        pages = data.draw(st.permutations(self.free_ids()))[:wanted]
        self.space.allocate(ids(*pages))
        for page, chunks in zip(pages, self.space.chunk_lists(ids(*pages)), strict=True):
            self.lives[page] += 1
            self.held[page] = ModelPage(self.lives[page], chunks.tolist())

    @rule()
    def allocate_too_many(self) -> None:
        pages = self.free_ids()
        if len(pages) * self.num_raw > self.space.num_free_chunks:
            with pytest.raises(SpaceError):
                self.space.allocate(ids(*pages))

    @precondition(lambda self: any(not page.commanded for page in self.held.values()))
    @rule(data=st.data(), others=st.booleans())
    def fill(self, data: st.DataObject, others: bool) -> None:
        raw = [page for page, held in self.held.items() if not held.commanded]
        pages = data.draw(st.lists(st.sampled_from(raw), min_size=1, unique=True))
        if others:  # pages that are free or commanded already: they are skipped
            pages += [page for page in range(1, len(self.lives)) if page not in raw]
        taken, generations = self.space.begin_compaction(ids(*pages))
        expected = [page for page in pages if page in raw]
        assert taken.tolist() == expected
        for page, generation in zip(expected, generations.tolist(), strict=True):
            assert generation == self.held[page].generation
            self.held[page].commanded = True
            self.sent += [Sent(rank, page, generation) for rank in range(self.space.num_ranks)]

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), again=st.booleans())
    def answer(self, data: st.DataObject, again: bool) -> None:
        """One rank answers some of its commands, in any order, a page even twice; ``again``: and will answer them once more."""
        rank = data.draw(st.sampled_from(sorted({sent.rank for sent in self.sent})))
        mine = [sent for sent in self.sent if sent.rank == rank]
        self.deliver(rank, data.draw(st.lists(st.sampled_from(mine), min_size=1, max_size=6)), again, data)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), again=st.booleans())
    def answer_all(self, data: st.DataObject, again: bool) -> None:
        """Every rank, in any order, answers all that it was told."""
        for rank in data.draw(st.permutations(range(self.space.num_ranks))):
            mine = [sent for sent in self.sent if sent.rank == rank]
            if mine:
                self.deliver(rank, data.draw(st.permutations(mine)), again, data)

    def deliver(self, rank: int, batch: list[Sent], again: bool, data: st.DataObject) -> None:
        counts = [data.draw(st.integers(1, self.num_raw)) for _ in batch]
        if not again:
            self.sent = [sent for sent in self.sent if sent not in batch]
        before, applied, shrunk = self.count(), 0, 0
        for sent, count in zip(batch, counts, strict=True):
            page = self.held.get(sent.page)
            if page is None or page.generation != sent.generation or page.is_compact or rank in page.answers:
                continue
            applied += 1
            page.answers[rank] = count
            if len(page.answers) == self.space.num_ranks:
                page.is_compact = True
                page.chunks = page.chunks[: max(page.answers.values())]
                shrunk += 1
        dropped = self.space.num_stale + self.space.num_doubled
        generations = np.array([sent.generation for sent in batch], dtype=np.uint32)
        assert self.space.answer(rank, ids(*(sent.page for sent in batch)), generations, ids(*counts)) == shrunk
        assert self.space.num_stale + self.space.num_doubled - dropped == len(batch) - applied
        assert self.count() >= before

    @rule(
        rank=st.integers(-1, 5),
        page=st.integers(-2, 14),
        count=st.sampled_from([-1, 0, 7, 1000]),
        generation=st.integers(0, 3),
    )
    def answer_nonsense(self, rank: int, page: int, count: int, generation: int) -> None:
        assert self.space.answer(rank, ids(page), np.array([generation], dtype=np.uint32), ids(count)) == 0
        assert len(self.space.take_faults()) == 1

    @precondition(lambda self: any(not page.cached for page in self.held.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([number for number, held in self.held.items() if not held.cached]))
        self.held[page].references += 1

    @precondition(lambda self: any(not page.cached for page in self.held.values()))
    @rule(data=st.data(), stays=st.booleans())
    def drop_reference(self, data: st.DataObject, stays: bool) -> None:
        page = data.draw(st.sampled_from([number for number, held in self.held.items() if not held.cached]))
        held = self.held[page]
        held.references -= 1
        if held.references:
            return
        before = self.count()
        if stays:
            self.space.cache(ids(page))
            held.cached = True
        else:
            self.give_back(page)
        assert self.count() >= before

    @precondition(lambda self: self.evictable())
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.evictable()), min_size=1, unique=True))
        promised = self.space.num_free_pages_after_pinning(len(self.free_ids()) + len(self.evictable()), ids(*pages))
        self.space.uncache(ids(*pages))
        for page in pages:
            self.held[page].cached, self.held[page].references = False, 1
        assert self.count() == promised

    @precondition(lambda self: self.evictable())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        before = self.count()
        self.give_back(data.draw(st.sampled_from(self.evictable())))
        assert self.count() == before  # it counted as free already

    @precondition(lambda self: self.evictable())
    @rule()
    def reset(self) -> None:
        for page in self.evictable():
            self.give_back(page)

    def give_back(self, page: int) -> None:
        del self.held[page]
        self.space.release(ids(page))

    @invariant()
    def books_and_model_agree(self) -> None:
        if not hasattr(self, "space"):
            return
        self.space.check()
        assert self.space.held_pages().tolist() == sorted(self.held)
        for number, held in self.held.items():
            row = ids(number)
            num_chunks = int(self.space.num_chunks_of(row)[0])
            assert self.space.chunk_lists(row)[0, :num_chunks].tolist() == held.chunks
            assert self.space.generation[number] == held.generation
        owned = [chunk for held in self.held.values() for chunk in held.chunks]
        assert self.space.num_free_chunks == self.num_usable - len(owned)
        assert self.space.num_evictable_chunks == sum(len(held.chunks) for held in self.held.values() if held.cached)
        assert self.space.num_compact_pages == sum(held.is_compact for held in self.held.values())

    @invariant()
    def what_is_promised_fits_and_no_more(self) -> None:
        if not hasattr(self, "space"):
            return
        promised, twin = self.count(), copy.deepcopy(self.space)
        twin.release(ids(*self.evictable()))
        free = self.free_ids() + self.evictable()
        assert promised <= len(free)
        twin.allocate(ids(*free[:promised]))
        if promised < len(free):
            with pytest.raises(SpaceError):
                twin.allocate(ids(free[promised]))

    def teardown(self) -> None:
        if hasattr(self, "space"):
            self.space.release(ids(*self.held))
            self.space.check()
            assert self.space.num_free_chunks == self.num_usable
            assert self.space.num_free_pages(len(self.lives) - 1) == min(
                self.num_usable // self.num_raw, len(self.lives) - 1
            )


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
