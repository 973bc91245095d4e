"""The attention backend on a CPU: vLLM's own attention kernel over pages that are restored layer by layer.

Every layer writes its new tokens into raw pages, restores all pages of the batch into a dense workspace of one layer, and hands
that to the kernel of vLLM's CPU backend. So the arithmetic is stock vLLM's, on the same bits: compaction on, off and stock give the
same output for the same batch. Pages come from ``page_store.py``; the connector's worker half places and compacts them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionLayer, AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, _get_attn_isa
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from zipfusion_vllm.attention.page_store import PageStore
from zipfusion_vllm.attention.registry import store_of
from zipfusion_vllm.attention.spec import ZipFullAttentionSpec, remember_engine, zip_spec
from zipfusion_vllm.format import PAGE_TOKENS
from zipfusion_vllm.support import check_attention_layer

WORKSPACE_BLOCK = 128
"""Tokens in a block of the restored workspace: the block size that vLLM's CPU backend uses when it is not told another."""


class ZipCPUAttentionBackend(CPUAttentionBackend):
    """ZIPFUSION in the place of vLLM's CPU backend (its platform takes no other name)."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[Any]:
        return [PAGE_TOKENS]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> ZipFullAttentionSpec:
        return zip_spec(spec)

    @staticmethod
    def get_impl_cls() -> type["ZipCPUAttentionImpl"]:
        return ZipCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["ZipCPUMetadataBuilder"]:  # type: ignore[override]
        return ZipCPUMetadataBuilder


class Workspace:
    """The restored K and V of one layer at a time: grown when a batch needs more, and used again by every layer and step.

    Memory that is asked for anew in every layer costs more time than what is done in it: the system clears each page.
    """

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self._row = (num_kv_heads, head_dim)
        self._block = (num_kv_heads, 2 * WORKSPACE_BLOCK, head_dim)
        self._dense = torch.empty(2, 0, *self._row, dtype=torch.bfloat16)
        self._cache = torch.empty(0, *self._block, dtype=torch.bfloat16)

    def take(self, num_tokens: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """bfloat16 [2, num_tokens, heads, head_dim] and [num_blocks, heads, 2 * WORKSPACE_BLOCK, head_dim], with whatever was in them."""
        if self._dense.shape[1] < num_tokens:
            self._dense = torch.empty(2, num_tokens * 5 // 4, *self._row, dtype=torch.bfloat16)
        if len(self._cache) < num_blocks:
            self._cache = torch.empty(num_blocks * 5 // 4 + 1, *self._block, dtype=torch.bfloat16)
        return self._dense[:, :num_tokens], self._cache[:num_blocks]


@dataclass
class ZipCPUAttentionMetadata:
    """The plan of one step, the same for all layers."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    """int32 [requests + 1]"""
    seq_lens: torch.Tensor
    """int32 [requests]: tokens of each sequence, the new ones included."""
    causal: bool
    pages: np.ndarray
    """int64 [n]: the pages of all sequences, laid end to end."""
    first_token: np.ndarray
    """int64 [n]: row of the dense K and V where page i begins."""
    num_tokens: np.ndarray
    """int64 [n]: 16, or less for the last page of a sequence."""
    workspace_slots: torch.Tensor
    """int64 [tokens of all sequences]: slot of each dense row in the workspace."""
    workspace_table: torch.Tensor
    """int32 [requests, blocks]: block table of the workspace."""
    num_workspace_blocks: int
    last_blocks: torch.Tensor
    """int64 [requests]: workspace block of each sequence's last tokens."""
    workspace: Workspace
    scheduler_metadata: torch.Tensor
    """vLLM's work split of its CPU attention kernel."""
    isa: str


class ZipCPUMetadataBuilder(AttentionMetadataBuilder[ZipCPUAttentionMetadata]):
    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.num_kv_heads = kv_cache_spec.num_kv_heads
        self.head_dim = kv_cache_spec.head_size
        self.dtype = kv_cache_spec.dtype
        self.isa = _get_attn_isa(self.dtype, WORKSPACE_BLOCK, self.head_dim)
        self.workspace = Workspace(self.num_kv_heads, self.head_dim)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ZipCPUAttentionMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool) or not common.causal:
            raise NotImplementedError("ZIPFUSION serves causal decoders only: serve this model without ZIPFUSION.")
        lengths = common.seq_lens.numpy().astype(np.int64)
        blocks = -(-lengths // WORKSPACE_BLOCK)
        first_block = np.concatenate(([0], np.cumsum(blocks)))
        pages = -(-lengths // PAGE_TOKENS)
        sequence, page_index = _ragged(pages)
        first_row = np.concatenate(([0], np.cumsum(lengths)))
        token_sequence, token_index = _ragged(lengths)
        table = np.arange(max(int(blocks.max(initial=0)), 1)) + first_block[:-1, None]
        return ZipCPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            causal=True,
            pages=common.block_table_tensor.numpy()[sequence, page_index].astype(np.int64),
            first_token=first_row[sequence] + page_index * PAGE_TOKENS,
            num_tokens=np.minimum(lengths[sequence] - page_index * PAGE_TOKENS, PAGE_TOKENS),
            workspace_slots=torch.from_numpy(first_block[token_sequence] * WORKSPACE_BLOCK + token_index),
            workspace_table=torch.from_numpy(np.minimum(table, max(int(first_block[-1]) - 1, 0)).astype(np.int32)),
            num_workspace_blocks=int(first_block[-1]),
            last_blocks=torch.from_numpy(first_block[1:][lengths > 0] - 1),
            workspace=self.workspace,
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=common.num_reqs,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                seq_lens=common.seq_lens,
                dtype=self.dtype,
                query_start_loc=common.query_start_loc,
                causal=True,
                sliding_window_size=-1,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            ),
            isa=self.isa,
        )


class ZipCPUAttentionImpl(CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_attention_layer(
            head_size=self.head_size,
            sliding_window=None if self.sliding_window == -1 else self.sliding_window,
            kv_cache_dtype=self.kv_cache_dtype,
            attn_type=self.attn_type,
            kv_sharing_target_layer_name=self.kv_sharing_target_layer_name,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )
        assert self.attn_type == AttentionType.DECODER
        remember_engine(get_current_vllm_config())

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new tokens [tokens, heads, head_dim] into the raw pages that ``slot_mapping`` (int64 [tokens]) names."""
        store, index = store_of(kv_cache, layer)
        num_tokens = min(len(slot_mapping), len(key))
        store.write(index, slot_mapping[:num_tokens], key[:num_tokens], value[:num_tokens])

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ZipCPUAttentionMetadata | None,  # type: ignore[override]
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [tokens, heads, head_dim] over all tokens of its sequences, raw and compact pages alike."""
        if attn_metadata is None:  # memory profiling
            return output
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("ZIPFUSION writes BF16 attention output: switch fused output quantisation off.")
        store, index = store_of(kv_cache, layer)
        key_cache, value_cache = self._restore(store, index, attn_metadata)
        ops.cpu_attention_with_kv_cache(
            query=query[: attn_metadata.num_actual_tokens],
            key_cache=key_cache,
            value_cache=value_cache,
            output=output[: attn_metadata.num_actual_tokens],
            query_start_loc=attn_metadata.query_start_loc,
            seq_lens=attn_metadata.seq_lens,
            scale=self.scale,
            causal=attn_metadata.causal,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=attn_metadata.workspace_table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=attn_metadata.scheduler_metadata,
            s_aux=None,
        )
        return output

    def _restore(
        self, store: PageStore, layer: int, plan: ZipCPUAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer of the whole batch, in the block layout that vLLM's CPU kernel reads."""
        dense, cache = plan.workspace.take(len(plan.workspace_slots), max(plan.num_workspace_blocks, 1))
        store.restore(layer, plan.pages, plan.first_token, plan.num_tokens, dense[0], dense[1])
        # The kernel reads the unused slots of a sequence's last block too, and 0 x NaN is NaN.
        cache[plan.last_blocks] = 0
        key_cache, value_cache = cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            dense[0], dense[1], key_cache, value_cache, plan.workspace_slots, plan.isa, k_scale=1.0, v_scale=1.0
        )
        return key_cache, value_cache


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every item of rows that hold ``counts`` items: ([0, 0, 1], [0, 1, 0]) for [2, 1]."""
    row = np.repeat(np.arange(len(counts)), counts)
    first = np.concatenate(([0], np.cumsum(counts)))
    return row, np.arange(first[-1]) - first[row]
