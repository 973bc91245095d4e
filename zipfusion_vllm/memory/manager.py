"""The KV cache manager of ZIPFUSION's attention group: vLLM's manager for full attention, over a pool that counts space truly.

vLLM makes it from the KV cache spec (``attention/spec.py`` registers it), right after it has built the block pool and before anyone allocates: the moment
to upgrade that pool. Besides, it makes admission exact: what vLLM compares with the free count takes hits by their chunks and keeps a reserve.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from zipfusion_vllm.memory.block_pool import ZipBlockPool
from zipfusion_vllm.memory.layout import ArenaLayout


class ArenaSpec(Protocol):
    """What the manager needs of its KV cache spec besides vLLM's own fields."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def reserve(self) -> float: ...

    def arena_layout(self, num_blocks: int) -> ArenaLayout: ...


class ZipFullAttentionManager(FullAttentionManager):
    zip_pool: ZipBlockPool
    """The pool of the whole engine: ZIPFUSION has one attention group."""

    def __init__(self, kv_cache_spec: Any, block_pool: BlockPool, *args: Any, **kwargs: Any) -> None:
        spec: ArenaSpec = kv_cache_spec
        self._reserve = spec.reserve
        self.zip_pool = ZipBlockPool.upgrade(
            block_pool, spec.arena_layout(block_pool.num_gpu_blocks), num_ranks=spec.num_ranks
        )
        super().__init__(kv_cache_spec, block_pool, *args, **kwargs)
        if self.enable_caching and block_pool.hash_block_size != self.block_size:
            # Else prefix hits may end inside a page, and vLLM would copy it by block id, through a shape that is not real.
            raise RuntimeError(
                f"ZIPFUSION needs prefix hashes of whole pages of {self.block_size} tokens, and vLLM hashes {block_pool.hash_block_size}: "
                "leave prefix_match_unit and hash block size at their defaults"
            )

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> int:
        """Raw pages to compare with ``get_num_free_blocks()``: the request fits if and only if they do not exceed it.

        vLLM counts an evictable hit as one page. It takes fewer chunks than that when it is compact, so what it takes off the free count is used
        instead. A request that holds nothing yet must leave the reserve free, unless it is alone: then nothing is withheld from it.
        """
        required = super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *args, **kwargs)
        if self.req_to_blocks.get(request_id):
            return required
        if new_computed_blocks:
            pool = self.zip_pool
            required -= self._get_num_evictable_blocks(new_computed_blocks)
            required += pool.get_num_free_blocks() - pool.get_num_free_blocks_after_hits(new_computed_blocks)
        return required + self.num_reserved_pages(request_id)

    def num_reserved_pages(self, request_id: str) -> int:
        """Pages that a new request must leave free for the growth of the others while answers are on their way."""
        others = sum(1 for other, blocks in self.req_to_blocks.items() if blocks and other != request_id)
        return math.ceil(self._reserve * others)
