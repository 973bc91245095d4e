"""vLLM's own KVCacheManager over the upgraded block pool, without a model: ids and space stay in step, and admission is exact."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from zipfusion_vllm.attention.spec import ZipFullAttentionSpec
from zipfusion_vllm.format import PAGE_TOKENS, PageShape
from zipfusion_vllm.memory import block_pool
from zipfusion_vllm.memory.block_pool import ZipBlockPool
from zipfusion_vllm.memory.layout import ArenaLayout, min_blocks
from zipfusion_vllm.memory.manager import ZipFullAttentionManager
from zipfusion_vllm.memory.space import SpaceError

SHAPE = PageShape(num_layers=4, num_kv_heads=3, head_dim=64)
REGIONS_PER_CHUNK = 3  # 24 regions a page: 8 chunks raw
RAW = 8
MAX_MODEL_LEN = 4096


def make_spec(reserve: float = 0.0, num_ranks: int = 1) -> ZipFullAttentionSpec:
    return ZipFullAttentionSpec(
        block_size=PAGE_TOKENS,
        num_kv_heads=SHAPE.num_kv_heads,
        head_size=SHAPE.head_dim,
        dtype=torch.bfloat16,
        state_content_bytes=SHAPE.nominal_page_bytes // (SHAPE.num_layers * SHAPE.num_kv_heads * PAGE_TOKENS),
        num_layers=SHAPE.num_layers,
        regions_per_chunk=REGIONS_PER_CHUNK,
        num_ranks=num_ranks,
        reserve=reserve,
    )


def make_manager(
    raw_pages: int,
    *,
    caching: bool = True,
    reserve: float = 0.0,
    hash_block_size: int = PAGE_TOKENS,
    events: bool = False,
) -> KVCacheManager:
    """A KV cache manager whose arena holds exactly ``raw_pages`` raw pages, and some chunks less than one more."""
    init_none_hash(sha256)
    num_blocks = min_blocks(SHAPE, REGIONS_PER_CHUNK, raw_pages)
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{i}" for i in range(SHAPE.num_layers)], make_spec(reserve))],
        hash_block_size=hash_block_size,
        cache_hit_alignment_tokens=PAGE_TOKENS,
    )
    return KVCacheManager(
        config,
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=PAGE_TOKENS,
        hash_block_size=hash_block_size,
        enable_caching=caching,
        enable_kv_cache_events=events,
    )


def pool_of(manager: KVCacheManager) -> ZipBlockPool:
    assert isinstance(manager.block_pool, ZipBlockPool)
    return manager.block_pool


def zip_manager(manager: KVCacheManager) -> ZipFullAttentionManager:
    (single,) = manager.coordinator.single_type_managers
    assert isinstance(single, ZipFullAttentionManager)
    return single


def make_request(name: str, tokens: list[int]) -> Request:
    hasher = get_request_block_hasher(PAGE_TOKENS, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=500), None, block_hasher=hasher)


def tokens(num_pages: int, seed: int, extra: int = 1) -> list[int]:
    """A prompt of whole pages and ``extra`` tokens: its own for each seed."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_pages * PAGE_TOKENS + extra)]


def admit(manager: KVCacheManager, request: Request) -> bool:
    """Schedule the whole prompt of a new request, as vLLM's scheduler does."""
    hits, num_hit_tokens, *_ = manager.get_computed_blocks(request)
    blocks = manager.allocate_slots(
        request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits, full_sequence_must_fit=True
    )
    if blocks is None:
        return False
    request.num_computed_tokens = request.num_tokens
    return True


def grow(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    for _ in range(num_tokens):
        request.append_output_token_ids(7)
    if manager.allocate_slots(request, num_tokens) is None:
        return False
    request.num_computed_tokens += num_tokens
    return True


def compact(manager: KVCacheManager, request: Request, num_chunks: int) -> None:
    """Answer for all full pages of ``request`` that are raw."""
    blocks = zip_manager(manager).req_to_blocks[request.request_id][: request.num_computed_tokens // PAGE_TOKENS]
    space = pool_of(manager).space
    pages, generations = space.begin_compaction(np.array([block.block_id for block in blocks], dtype=np.int32))
    for rank in range(space.num_ranks):
        space.answer(rank, pages, generations, np.full(len(pages), num_chunks))
    space.check()


def ids_of(manager: KVCacheManager, request: Request) -> list[int]:
    return [block.block_id for block in zip_manager(manager).req_to_blocks[request.request_id]]


def test_vllm_builds_its_manager_on_the_upgraded_pool() -> None:
    manager = make_manager(20)
    pool = pool_of(manager)
    assert pool is manager.coordinator.block_pool is zip_manager(manager).block_pool is zip_manager(manager).zip_pool
    assert all(block.pool is pool for block in pool.blocks)
    assert pool.get_num_free_blocks() == 20 == pool.layout.raw_pages
    assert pool.num_gpu_blocks > 25  # 4/3 as many ids
    assert pool.get_usage() == 0.0


def test_compaction_makes_room_for_more_pages_than_raw_ones() -> None:
    manager = make_manager(20, caching=False)
    requests = [make_request(str(i), tokens(5, i, extra=0)) for i in range(5)]
    assert [admit(manager, request) for request in requests[:4]] == [True] * 4
    assert not admit(manager, requests[4])
    compact(manager, requests[0], 6)
    compact(manager, requests[1], 6)
    assert pool_of(manager).get_num_free_blocks() == 2
    compact(manager, requests[2], 5)
    assert pool_of(manager).get_num_free_blocks() == 4
    compact(manager, requests[3], 6)
    assert admit(manager, requests[4])


def test_pages_that_nobody_can_hit_are_released_at_once() -> None:
    manager = make_manager(20)
    request = make_request("a", tokens(3, 1))
    assert admit(manager, request)
    compact(manager, request, 6)
    manager.free(request)  # vLLM passes an iterator to free_blocks
    space = pool_of(manager).space
    assert space.num_cached_pages == 3 and space.num_evictable_chunks == 18  # the page in filling is gone
    assert pool_of(manager).get_num_free_blocks() == 20
    assert pool_of(manager).get_usage() == 0.0
    plain, request = make_manager(20, caching=False), make_request("a", tokens(3, 1))
    assert admit(plain, request)
    plain.free(request)
    assert pool_of(plain).space.num_used_chunks == 0


def test_shared_pages_are_released_with_the_last_reference() -> None:
    manager = make_manager(20)
    first, second = make_request("a", tokens(4, 1)), make_request("b", tokens(4, 1))
    assert admit(manager, first) and admit(manager, second)
    assert ids_of(manager, first)[:4] == ids_of(manager, second)[:4]
    space = pool_of(manager).space
    assert space.num_used_chunks == 6 * RAW
    manager.free(first)
    assert space.num_used_chunks == 5 * RAW and space.num_cached_pages == 0
    manager.free(second)
    assert space.num_used_chunks == 4 * RAW and space.num_cached_pages == 4
    space.check()


def test_eviction_counts_chunks_and_takes_the_least_recently_used_first() -> None:
    manager = make_manager(20, events=True)
    pool = pool_of(manager)
    requests = [make_request(str(i), tokens(4, i)) for i in range(6)]
    for request in requests:  # 24 compact pages of 6 chunks stay cached, one after the other
        assert admit(manager, request)
        compact(manager, request, 6)
        manager.free(request)
    assert pool.space.num_cached_pages == 24 and pool.get_num_free_blocks() == 20
    manager.take_events()
    assert admit(manager, make_request("new", tokens(7, 99)))
    pool.space.check()
    # 8 raw pages take 64 chunks: what the stack holds first, the rest from the oldest pages, 6 chunks each.
    stack_before = pool.space.num_usable_chunks - 24 * 6
    evicted = 24 - pool.space.num_cached_pages
    assert evicted == math.ceil((8 * RAW - stack_before) / 6)
    removed = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    assert sum(len(event.block_hashes) for event in removed) == evicted
    # The newest stays, and is still hit.
    _, num_hit_tokens, *_ = manager.get_computed_blocks(make_request("again", tokens(4, 5)))
    assert num_hit_tokens == 4 * PAGE_TOKENS
    _, num_hit_tokens, *_ = manager.get_computed_blocks(make_request("old", tokens(4, 0)))
    assert num_hit_tokens == 0


def test_all_cached_pages_can_be_evicted_for_one_request() -> None:
    manager = make_manager(20)
    for seed in range(5):
        request = make_request(str(seed), tokens(4, seed))
        assert admit(manager, request)
        compact(manager, request, 6)
        manager.free(request)
    assert admit(manager, make_request("all", tokens(20, 77, extra=0)))
    assert pool_of(manager).space.num_cached_pages == 0
    assert pool_of(manager).get_num_free_blocks() == 0
    pool_of(manager).space.check()


def test_a_hit_pins_its_chunks_and_no_more() -> None:
    """20 raw pages fit. 8 cached compact pages take 48 chunks; with all of them hit, 160 - 48 = 112 chunks make 14 pages."""
    for extra_pages, fits in ((14, True), (15, False)):
        manager = make_manager(20)
        pool = pool_of(manager)
        spare = pool.space.num_usable_chunks - 20 * RAW
        request = make_request("a", tokens(8, 1))
        assert admit(manager, request)
        compact(manager, request, 6)
        manager.free(request)
        longer = make_request("b", tokens(8, 1, extra=0) + tokens(extra_pages, 2, extra=0))
        assert (20 * RAW + spare - 48) // RAW == 14
        assert admit(manager, longer) == fits
        pool.space.check()


def test_the_reserve_is_kept_by_new_requests_and_never_by_one_alone() -> None:
    manager = make_manager(20, caching=False, reserve=0.25)
    assert admit(manager, make_request("alone", tokens(20, 0, extra=0)))
    manager = make_manager(20, caching=False, reserve=0.25)
    running = [make_request(str(i), tokens(3, i, extra=0)) for i in range(5)]
    assert all(admit(manager, request) for request in running)  # 15 pages, reserve ceil(0.25 * 5) = 2
    assert not admit(manager, make_request("four", tokens(4, 9, extra=0)))
    assert admit(manager, make_request("three", tokens(3, 9, extra=0)))
    assert all(grow(manager, request, 1) for request in running[:2])  # growth may use what was reserved
    assert pool_of(manager).get_num_free_blocks() == 0
    assert not grow(manager, running[2], 1)


def test_new_pages_are_drained_in_order_of_their_allocation() -> None:
    manager = make_manager(20, caching=False)
    pool = pool_of(manager)
    first, second = make_request("a", tokens(3, 1, extra=0)), make_request("b", tokens(2, 2, extra=0))
    assert admit(manager, first) and admit(manager, second)
    assert pool.take_new_pages().tolist() == ids_of(manager, first) + ids_of(manager, second)
    assert len(pool.take_new_pages()) == 0
    third = make_request("c", tokens(3, 3, extra=0))
    assert admit(manager, third)
    first_use = ids_of(manager, third)
    manager.free(third)  # and again within the step
    fourth = make_request("d", tokens(2, 4, extra=0))
    assert admit(manager, fourth)
    new = pool.take_new_pages()
    assert new.tolist() == ids_of(manager, fourth)  # what was freed is not told
    assert set(new.tolist()) <= set(first_use) and (pool.space.generation[new] == 2).all()


def test_evicting_by_id_releases_only_what_nobody_holds() -> None:
    manager = make_manager(20)
    pool = pool_of(manager)
    held, cached = make_request("a", tokens(2, 1)), make_request("b", tokens(2, 2))
    assert admit(manager, held) and admit(manager, cached)
    held_ids, cached_ids = ids_of(manager, held), ids_of(manager, cached)
    manager.free(cached)
    pool.evict_blocks({held_ids[0], cached_ids[0]})
    assert pool.space.num_cached_pages == 1 and pool.space.num_used_chunks == 4 * RAW
    manager.free(held)
    assert pool.space.num_cached_pages == 2  # the evicted one was released with its last reference
    pool.space.check()


def test_reset_gives_all_memory_back_and_waits_for_requests() -> None:
    manager = make_manager(20)
    pool = pool_of(manager)
    request = make_request("a", tokens(4, 1))
    assert admit(manager, request)
    compact(manager, request, 5)
    assert not manager.reset_prefix_cache()
    assert pool.space.num_used_chunks == 4 * 5 + RAW
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert pool.space.num_used_chunks == 0 and pool.get_num_free_blocks() == 20
    _, num_hit_tokens, *_ = manager.get_computed_blocks(make_request("b", tokens(4, 1)))
    assert num_hit_tokens == 0
    assert admit(manager, make_request("c", tokens(20, 5, extra=0)))
    pool.space.check()


def test_usage_is_the_share_of_the_arena_that_requests_hold() -> None:
    manager = make_manager(20)
    pool = pool_of(manager)
    request = make_request("a", tokens(10, 1, extra=0))
    assert admit(manager, request)
    assert pool.get_usage() == pytest.approx(10 * RAW / pool.space.num_usable_chunks)
    compact(manager, request, 6)
    by_chunks, by_ids = 60 / pool.space.num_usable_chunks, 10 / (pool.num_gpu_blocks - 1)
    assert pool.get_usage() == pytest.approx(max(by_chunks, by_ids))
    manager.free(request)
    assert pool.get_usage() == 0.0


def test_the_null_block_is_never_touched() -> None:
    pool = pool_of(make_manager(4))
    pool.free_blocks(iter([pool.null_block]))
    pool.free_blocks([])
    assert pool.get_new_blocks(0) == [] and pool.get_num_free_blocks() == 4
    pool.space.check()


def test_more_than_is_free_is_refused_as_by_vllm() -> None:
    pool = pool_of(make_manager(4))
    with pytest.raises(ValueError, match="Cannot get 5 free blocks"):
        pool.get_new_blocks(5)
    assert len(pool.get_new_blocks(4)) == 4


def fresh_pool(num_blocks: int = 100) -> BlockPool:
    return BlockPool(num_blocks, True, PAGE_TOKENS)


def layout_of(num_blocks: int) -> ArenaLayout:
    return make_spec().arena_layout(num_blocks)


class OtherPool(BlockPool):
    pass


def test_only_a_fresh_pool_of_vllm_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="found OtherPool"):
        ZipBlockPool.upgrade(OtherPool(100, True, PAGE_TOKENS), layout_of(100), 1)
    used = fresh_pool()
    used.get_new_blocks(1)
    with pytest.raises(RuntimeError, match="before blocks are allocated"):
        ZipBlockPool.upgrade(used, layout_of(100), 1)
    with pytest.raises(RuntimeError, match="has 100 blocks and the arena 90"):
        ZipBlockPool.upgrade(fresh_pool(), layout_of(90), 1)
    upgraded = ZipBlockPool.upgrade(fresh_pool(), layout_of(100), 1)
    with pytest.raises(RuntimeError, match="found ZipBlockPool"):
        ZipBlockPool.upgrade(upgraded, layout_of(100), 1)
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks, why: None)
    with pytest.raises(RuntimeError, match=r"BlockPool\.touch takes \('blocks', 'why'\)"):
        ZipBlockPool.upgrade(fresh_pool(), layout_of(100), 1)
    monkeypatch.delattr(BlockPool, "touch")
    with pytest.raises(RuntimeError, match=r"BlockPool\.touch takes None"):
        ZipBlockPool.upgrade(fresh_pool(), layout_of(100), 1)
    assert set(block_pool.LEANED_ON) <= set(vars(ZipBlockPool))


def test_hashes_of_less_than_a_page_are_refused() -> None:
    """vLLM would then copy a page that is hit in part, by its block id. Its own coordinator refuses too, with an assertion."""
    pool = BlockPool(100, True, PAGE_TOKENS // 2)
    with pytest.raises(RuntimeError, match="prefix hashes of whole pages"):
        ZipFullAttentionManager(
            make_spec(), pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=PAGE_TOKENS
        )
    with pytest.raises((RuntimeError, AssertionError)):
        make_manager(10, hash_block_size=PAGE_TOKENS // 2)


def test_blocks_that_are_still_read_are_refused() -> None:
    pool = pool_of(make_manager(4))
    with pytest.raises(SpaceError, match="HiSparse"):
        pool.unpin_blocks([], lambda block: None)


@pytest.mark.parametrize("seed", range(60))
def test_admission_is_exact_under_random_load(seed: int) -> None:
    """vLLM admits a request if and only if it fits, by the formula of memory-notes section 6, and what it admits never fails."""
    rng = random.Random(seed)
    reserve = rng.choice([0.0, 0.25, 1.5])
    manager = make_manager(rng.randint(4, 40), caching=rng.random() < 0.8, reserve=reserve)
    pool, single = pool_of(manager), zip_manager(manager)
    running: dict[str, Request] = {}
    outcomes: dict[str, int] = {"admitted": 0, "refused": 0, "grown": 0, "stuck": 0}

    def fits(request: Request | None, num_pages: int, hits: list[Any]) -> bool:
        """Whether ``num_pages`` new pages fit beside ``hits``, counted afresh from the pool's blocks."""
        free = {block.block_id for block in pool.blocks if block.ref_cnt == 0 and not block.is_null}
        cached = [page for page in free if pool.blocks[page].block_hash is not None]
        pinned = {block.block_id for block in hits if block.ref_cnt == 0}
        own = {page: int(pool.space.num_chunks_of(np.array([page]))[0]) for page in cached}
        chunks = pool.space.num_free_chunks + sum(own[page] for page in cached if page not in pinned)
        others = sum(1 for name in running if request is not None and name != request.request_id)
        withheld = math.ceil(reserve * others) if request is not None else 0
        return num_pages + withheld <= min(chunks // RAW, len(free) - len(pinned))

    for step in range(120):
        choice = rng.random()
        if choice < 0.4:
            prompt = tokens(rng.randint(0, 12), rng.randrange(4), extra=0) + tokens(0, step, extra=rng.randint(1, 40))
            request = make_request(str(step), prompt)
            blocks, num_hit_tokens, *_ = manager.get_computed_blocks(request)
            num_new = -(-len(prompt) // PAGE_TOKENS) - num_hit_tokens // PAGE_TOKENS
            expected = fits(request, num_new, list(blocks.blocks[0]))
            assert admit(manager, request) == expected
            outcomes["admitted" if expected else "refused"] += 1
            if expected:
                running[request.request_id] = request
            elif not running:
                assert num_new + len(blocks.blocks[0]) > pool.layout.raw_pages, (
                    "alone, whatever start-up accepts is admitted"
                )
        elif choice < 0.7 and running:
            request = running[rng.choice(sorted(running))]
            num_tokens = rng.randint(1, 40)
            num_new = -(-(request.num_tokens + num_tokens) // PAGE_TOKENS) - len(ids_of(manager, request))
            expected = fits(None, num_new, [])
            assert grow(manager, request, num_tokens) == expected
            outcomes["grown" if expected else "stuck"] += 1
            if not expected:  # preempted
                manager.free(running.pop(request.request_id))
        elif choice < 0.85 and running:
            compact(manager, running[rng.choice(sorted(running))], rng.randint(6, RAW))
        elif running:
            manager.free(running.pop(rng.choice(sorted(running))))
        pool.space.check()
        held = {page for name in running for page in ids_of(manager, running[name])} | set(pool._evictable)
        assert pool.space.held_pages().tolist() == sorted(held)
        assert list(pool._evictable) == [
            b.block_id for b in pool.free_block_queue.get_all_free_blocks() if b.block_hash is not None
        ]
    for request in running.values():
        manager.free(request)
    assert manager.reset_prefix_cache()
    assert pool.space.num_used_chunks == 0 and pool.get_num_free_blocks() == pool.layout.raw_pages
    assert outcomes["admitted"] and outcomes["grown"]
    assert single.req_to_blocks == {}
