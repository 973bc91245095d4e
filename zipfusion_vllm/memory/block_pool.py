"""vLLM's block pool with the true count of free pages, on top of ``BlockSpaceManager``.

vLLM builds its ``BlockPool`` itself, without a hook, and hands it on at once; so the one instance is turned into a ``ZipBlockPool`` in place
(``ZipBlockPool.upgrade``, called by ``manager.py`` before anything is allocated). vLLM keeps deciding which block ids are used, cached and
evicted; this class keeps the space behind the ids in step with it, and answers how many raw pages really fit. The connector drains
``take_new_pages`` once per step.
"""

import inspect
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from zipfusion_vllm.memory.layout import ArenaLayout
from zipfusion_vllm.memory.space import BlockSpaceManager, SpaceError

LEANED_ON: dict[str, tuple[str, ...]] = {
    "get_num_free_blocks": (),
    "get_new_blocks": ("num_blocks",),
    "free_blocks": ("ordered_blocks",),
    "touch": ("blocks",),
    "_maybe_evict_cached_block": ("block",),
    "evict_blocks": ("block_ids",),
    "reset_prefix_cache": (),
    "get_usage": (),
}
"""Methods of vLLM's BlockPool that are overridden, with their parameters."""


class ZipBlockPool(BlockPool):
    layout: ArenaLayout
    space: BlockSpaceManager
    _evictable: dict[int, None]
    """Ids of blocks without references that stay for prefix hits, least recently used first: the hashed ones of the free queue, in its order."""
    _evicted: list[int]
    """Ids of blocks that lost their place in the prefix cache within the running call, still to be released."""
    _new_pages: dict[int, None]
    _counts_ids: bool

    @classmethod
    def upgrade(cls, pool: BlockPool, layout: ArenaLayout, num_ranks: int) -> "ZipBlockPool":
        """Turn ``pool``, fresh from vLLM, into a ZipBlockPool, and return it: every reference that vLLM holds stays good.

        ``layout`` is the arena of each of ``num_ranks`` workers. Raises RuntimeError when the pool is not what this class was written for.
        """
        _check_upgradable(pool, layout)
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.layout = layout
        pool.space = BlockSpaceManager(layout.num_pages, layout.num_chunks, layout.chunks_per_raw_page, num_ranks)
        pool._evictable = {}
        pool._evicted = []
        pool._new_pages = {}
        pool._counts_ids = False
        return pool

    # Questions

    def get_num_free_blocks(self) -> int:
        """Raw pages that can be allocated right now, evictable ones evicted. vLLM's admission reads this."""
        num_free_ids = self.free_block_queue.num_free_blocks
        return num_free_ids if self._counts_ids else self.space.num_free_pages(num_free_ids)

    def get_num_free_blocks_after_hits(self, blocks: Sequence[KVCacheBlock]) -> int:
        """What ``get_num_free_blocks`` would say after ``touch(blocks)``."""
        pages = {block.block_id: None for block in blocks if block.ref_cnt == 0 and not block.is_null}
        return self.space.num_free_pages_after_pinning(self.free_block_queue.num_free_blocks, _ids(pages))

    def get_usage(self) -> float:
        """Share of the arena, or of the block ids if that is larger, that is held by requests; what can be evicted counts as free."""
        held = self.space.num_used_chunks - self.space.num_evictable_chunks
        held_ids = self.num_gpu_blocks - 1 - self.free_block_queue.num_free_blocks
        return max(held / max(self.space.num_usable_chunks, 1), held_ids / max(self.num_gpu_blocks - 1, 1))

    def take_new_pages(self) -> np.ndarray:
        """int32 [n]: pages allocated since the last call that still own chunks, in order of their allocation; each is named once."""
        pages, self._new_pages = _ids(self._new_pages), {}
        return pages

    # What vLLM does to blocks

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Raises ValueError, as the base does, when ``num_blocks`` exceeds ``get_num_free_blocks()``."""
        blocks = super().get_new_blocks(num_blocks)
        if not blocks:
            return blocks
        self._release_evicted()
        self._evict_until_free(num_blocks * self.layout.chunks_per_raw_page)
        new = {block.block_id: None for block in blocks}
        self.space.allocate(_ids(new))
        self._new_pages.update(new)
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)  # vLLM passes iterators, and they are needed twice
        super().free_blocks(blocks)
        unreferenced = {
            block.block_id: block for block in blocks if block.ref_cnt == 0 and not block.is_null and block.pool is self
        }
        cached = {
            page: None for page, block in unreferenced.items() if self.enable_caching and block.block_hash is not None
        }
        self.space.cache(_ids(cached))
        self._evictable.update(cached)
        self._release([page for page in unreferenced if page not in cached])

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        hit = {block.block_id: None for block in blocks if block.block_id in self._evictable}
        super().touch(blocks)
        self.space.uncache(_ids(hit))
        for page in hit:
            del self._evictable[page]

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        evicted = super()._maybe_evict_cached_block(block)
        if block.block_id in self._evictable:
            del self._evictable[block.block_id]
            self._evicted.append(block.block_id)
        return evicted

    def evict_blocks(self, block_ids: set[int]) -> None:
        # Blocks with references lose their hash alone here, and are released when the last reference goes.
        super().evict_blocks(block_ids)
        self._release_evicted()

    def reset_prefix_cache(self) -> bool:
        # The base wants to know whether all block ids are free, and asks by the count of free blocks.
        self._counts_ids = True
        try:
            done = super().reset_prefix_cache()
        finally:
            self._counts_ids = False
        if done:
            pages, self._evictable = list(self._evictable), {}
            self._release(pages)
        return done

    def unpin_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Blocks that are free and still read have no place in these books; only vLLM's HiSparse, which is refused at start, asks for them."""
        raise SpaceError(
            "ZIPFUSION cannot hand out blocks that are still being read: serve without HiSparse offloading"
        )

    def _evict_until_free(self, num_chunks: int) -> None:
        """Evict cached pages, least recently used first, until ``num_chunks`` chunks are free: a compact page frees less than a raw one takes."""
        while (missing := num_chunks - self.space.num_free_chunks) > 0:
            if not self._evictable:
                raise SpaceError(
                    f"{num_chunks} chunks were promised, {missing} of them are missing, and nothing is left to evict"
                )
            num_candidates = 2 * (missing // self.layout.chunks_per_raw_page + 1)
            candidates = list(islice(self._evictable, num_candidates))
            freed = self.space.num_chunks_of(np.array(candidates, dtype=np.int32)).cumsum()
            for page in candidates[: int(np.searchsorted(freed, missing)) + 1]:
                self._maybe_evict_cached_block(self.blocks[page])
            self._release_evicted()

    def _release_evicted(self) -> None:
        pages, self._evicted = self._evicted, []
        self._release(pages)

    def _release(self, pages: list[int]) -> None:
        if not pages:
            return
        self.space.release(np.array(pages, dtype=np.int32))
        for page in pages:
            self._new_pages.pop(page, None)


def _ids(pages: dict[int, None]) -> np.ndarray:
    return np.fromiter(pages, dtype=np.int32, count=len(pages))


def _check_upgradable(pool: BlockPool, layout: ArenaLayout) -> None:
    if type(pool) is not BlockPool:
        raise RuntimeError(
            f"ZIPFUSION manages vLLM's BlockPool and found {type(pool).__qualname__}: something else has replaced it"
        )
    for name, parameters in LEANED_ON.items():
        method = getattr(BlockPool, name, None)
        found = tuple(inspect.signature(method).parameters)[1:] if method is not None else None
        if found != parameters:
            raise RuntimeError(
                f"this vLLM's BlockPool.{name} takes {found} and ZIPFUSION knows it with {parameters}: use a vLLM version that is supported"
            )
    if pool.free_block_queue.num_free_blocks != pool.num_gpu_blocks - 1 or not pool.null_block.is_null:
        raise RuntimeError("ZIPFUSION must take over the BlockPool before blocks are allocated, and some are")
    if pool.num_gpu_blocks != layout.num_pages:
        raise RuntimeError(
            f"the BlockPool has {pool.num_gpu_blocks} blocks and the arena {layout.num_pages}: they must agree"
        )
