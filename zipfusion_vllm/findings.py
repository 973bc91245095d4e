"""What in vLLM's arguments or config asks for a feature: one question each, for the rows of ``support.MATRIX``.

Each returns what it found, in the user's words, or None. Questions about ``EngineArgs`` are asked before vLLM looks at the model, those
about ``VllmConfig`` after. Knows vLLM's attributes by name only.
"""

from collections.abc import Callable
from typing import Any

from zipfusion_vllm.format import HEAD_DIMS, PAGE_TOKENS

KV_CACHE_DTYPES = ("auto", "bfloat16")


def above_one(*options: str) -> Callable[[Any], str | None]:
    """Options of the engine that ask for something when they are above 1."""

    def find(args: Any) -> str | None:
        for option in options:
            if (value := getattr(args, option, 1)) > 1:
                return f"{_flag(option)} {value}"
        return None

    return find


def is_set(option: str) -> Callable[[Any], str | None]:
    """A switch of the engine that asks for something when it is on."""
    return lambda args: _flag(option) if getattr(args, option, None) else None


def if_model(attribute: str) -> Callable[[Any], str | None]:
    """A property of vLLM's ModelConfig."""
    return lambda config: _architecture(config) if getattr(config.model_config, attribute) else None


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _architecture(config: Any) -> str:
    return str(config.model_config.architecture)


def platform(config: Any) -> str | None:
    device = config.device_config.device_type
    return None if device == "cpu" else f"this vLLM runs on {device}"


def speculator(config: Any) -> str | None:
    speculative = config.speculative_config
    return None if speculative is None or speculative.method == "ngram" else f"method {speculative.method}"


def pooling(config: Any) -> str | None:
    runner = config.model_config.runner_type
    return None if runner == "generate" else f"{_architecture(config)} with runner {runner}"


def state(config: Any) -> str | None:
    model = config.model_config
    return _architecture(config) if model.is_hybrid or model.is_attention_free else None


def window(config: Any) -> str | None:
    model = config.model_config
    if (window := model.get_sliding_window()) is not None:
        return f"a window of {window} tokens"
    for kind in getattr(model.hf_text_config, "layer_types", None) or ():
        if "sliding" in kind or "chunked" in kind:
            return f"layers of type {kind}"
    chunk = getattr(model, "attention_chunk_size", None)
    return None if chunk is None else f"attention chunks of {chunk} tokens"


def prefix_attention(config: Any) -> str | None:
    return _architecture(config) if config.model_config.is_mm_prefix_lm or config.model_config.rswa_window else None


def dtype(config: Any) -> str | None:
    name = str(config.model_config.dtype).removeprefix("torch.")
    return None if name == "bfloat16" else name


def cache_dtype_argument(args: Any) -> str | None:
    return None if args.kv_cache_dtype in KV_CACHE_DTYPES else f"--kv-cache-dtype {args.kv_cache_dtype}"


def cache_dtype(config: Any) -> str | None:
    dtype = config.cache_config.cache_dtype
    return None if dtype in KV_CACHE_DTYPES else f"{dtype}, which the model asks for"


def block_size_argument(args: Any) -> str | None:
    return None if args.block_size in (None, PAGE_TOKENS) else f"--block-size {args.block_size}"


def block_size(config: Any) -> str | None:
    size = config.cache_config.block_size
    return None if size == PAGE_TOKENS else f"vLLM chose {size} for this model"


def prefix_unit(args: Any) -> str | None:
    unit = getattr(args, "prefix_match_unit", None)
    return None if unit in (None, PAGE_TOKENS) else f"--prefix-match-unit {unit}"


def head_size(config: Any) -> str | None:
    size = config.model_config.get_head_size()
    return None if size in HEAD_DIMS else f"this model has {size}"


def connector(args: Any) -> str | None:
    if args.kv_transfer_config is not None:
        return str(args.kv_transfer_config.kv_connector)
    return None if getattr(args, "kv_offloading_size", None) is None else "--kv-offloading-size"


def hisparse(args: Any) -> str | None:
    return "hisparse_config" if getattr(args.attention_config, "hisparse_config", None) is not None else None


def backend_per_kind(args: Any) -> str | None:
    return "backend_per_kind" if getattr(args.attention_config, "backend_per_kind", None) else None


def shared_layers(config: Any) -> str | None:
    shared = getattr(config.model_config.hf_text_config, "num_kv_shared_layers", 0) or 0
    return f"{shared} of this model's layers" if shared else None
