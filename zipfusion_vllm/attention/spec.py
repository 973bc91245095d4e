"""The KV cache spec of ZIPFUSION: what vLLM plans memory with.

Made in the worker (``customize_spec`` of the attention backend), pickled to the scheduler's process, where it picks the manager.
It declares a *nominal* page of 3/4 size, so that vLLM makes 4/3 as many logical ids as raw pages fit; the start-up check still asks for raw
memory, through ``max_memory_usage_bytes``. Importing this module registers the spec, in every process that unpickles one.
"""

from dataclasses import dataclass, fields
from typing import Self

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import Attention
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from zipfusion_vllm.config import ZipFusionConfig
from zipfusion_vllm.format import PAGE_TOKENS, PageShape
from zipfusion_vllm.memory.layout import ArenaLayout, choose_regions_per_chunk, min_blocks
from zipfusion_vllm.memory.manager import ZipFullAttentionManager
from zipfusion_vllm.support import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class ZipFullAttentionSpec(FullAttentionSpec):
    """Full attention over compressed pages. ``page_size_bytes`` is the nominal page of one layer."""

    num_layers: int
    """Layers that share the arena."""
    regions_per_chunk: int
    """Raw regions in a chunk, chosen once so that all processes cut the arena alike."""
    num_ranks: int
    """Tensor parallel ranks: each holds its own heads of every page in its own arena."""
    reserve: float
    """Raw pages kept free per running request when a new one is admitted."""

    @property
    def shape(self) -> PageShape:
        return PageShape(self.num_layers, self.num_kv_heads, self.head_size)

    def arena_layout(self, num_blocks: int) -> ArenaLayout:
        """How a worker's arena of ``num_blocks`` logical pages is cut."""
        arena_bytes = num_blocks * self.page_size_bytes * self.num_layers
        return ArenaLayout(self.shape, num_blocks, arena_bytes, self.regions_per_chunk)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one layer that a sequence of max_model_len needs raw, with all that the arena withholds.

        vLLM turns it into blocks and adds one for the null block, which ``min_blocks`` counts as well.
        """
        num_raw_pages = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        blocks = min_blocks(self.shape, self.regions_per_chunk, num_raw_pages)
        return (blocks - 1) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The one spec of a group: its layers must be the same."""
        if any(spec != specs[0] for spec in specs):
            raise UnsupportedError(
                "ZIPFUSION needs all attention layers to have the same KV heads and head size, and this model's differ: "
                "serve it without ZIPFUSION."
            )
        return specs[0]


_engine_config: VllmConfig | None = None


def remember_engine(vllm_config: VllmConfig) -> None:
    """Keep the config of the engine whose model is being loaded: vLLM asks for specs right after, without a config at hand."""
    global _engine_config
    _engine_config = vllm_config


def zip_spec(spec: AttentionSpec) -> ZipFullAttentionSpec:
    """``spec`` of one attention layer as vLLM made it, turned into ours. Raises UnsupportedError for all but plain full attention."""
    vllm_config = get_current_vllm_config_or_none() or _engine_config
    if vllm_config is None:
        raise RuntimeError("ZIPFUSION was asked for a KV cache spec before any of its attention layers was built")
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise UnsupportedError(
            f"ZIPFUSION compresses full attention layers only, and this model has a layer with {type(spec).__name__}: "
            "serve it without ZIPFUSION."
        )
    config = ZipFusionConfig.from_vllm_config(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context.values()
    num_layers = sum(isinstance(layer, Attention) for layer in layers)
    shape = PageShape(num_layers, spec.num_kv_heads, spec.head_size)
    inherited = {field.name: getattr(spec, field.name) for field in fields(spec)}
    inherited["state_content_bytes"] = shape.nominal_page_bytes // (num_layers * spec.num_kv_heads * PAGE_TOKENS)
    return ZipFullAttentionSpec(
        **inherited,
        num_layers=num_layers,
        regions_per_chunk=choose_regions_per_chunk(shape, config.expected_eligible),
        num_ranks=vllm_config.parallel_config.tensor_parallel_size,
        reserve=config.reserve,
    )


# The built-in specs first: registering ours alone would leave the registry non-empty, and vLLM would skip its own.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(ZipFullAttentionSpec, ZipFullAttentionManager, uniform_type_base_spec=FullAttentionSpec)
