"""What ZIPFUSION does not support is refused when the engine's config is made, by one sentence: what was found, why not, what to do.

No weights and no engine: models are a config.json each.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zipfusion_vllm.config import ConfigError
from zipfusion_vllm.support import (
    MATRIX,
    UnsupportedError,
    check_attention_layer,
    check_kv_cache_config,
    check_vllm_config,
    render_support_table,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024}
GEMMA3 = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
}
MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 256,
    "intermediate_size": 512,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "num_hidden_layers": 2,
    "time_step_rank": 16,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "is_encoder_decoder": True,
    "max_target_positions": 448,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("COMPACTION", "CHECK", "EXPECTED_ELIGIBLE", "RESERVE"):
        monkeypatch.delenv(f"ZIPFUSION_{variable}", raising=False)
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)


def make_config(
    folder: Path, model: dict[str, Any] = LLAMA, backend: str | None = "ZIPFUSION", **arguments: Any
) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(model))
    defaults = {
        "skip_tokenizer_init": True,
        "max_model_len": min(512, model.get("max_target_positions", 512)),
        "enforce_eager": True,
    }
    arguments = {**defaults, **arguments}
    return EngineArgs(model=str(folder), attention_backend=backend, **arguments).create_engine_config()


def is_one_sentence(text: str) -> bool:
    return text.endswith(".") and not re.search(r"[.!?] [A-Z]", text) and "\n" not in text


def other_connector() -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")


BY_ARGUMENT: dict[str, tuple[dict[str, Any], str]] = {
    "block size": (dict(block_size=32), "block sizes other than 16 (--block-size 32)"),
    "fp8 cache": (dict(kv_cache_dtype="fp8"), "quantised KV cache dtypes (--kv-cache-dtype fp8)"),
    "pipeline": (dict(pipeline_parallel_size=2), "pipeline parallelism (--pipeline-parallel-size 2)"),
    "dcp": (dict(decode_context_parallel_size=2), "context parallelism (--decode-context-parallel-size 2)"),
    "pcp": (dict(prefill_context_parallel_size=2), "context parallelism (--prefill-context-parallel-size 2)"),
    "dbo": (dict(enable_dbo=True), "dual batch overlap (--enable-dbo)"),
    "sleep": (dict(enable_sleep_mode=True), "sleep mode (--enable-sleep-mode)"),
    "offloading": (dict(kv_offloading_size=1.0), "other KV connectors and KV offloading (--kv-offloading-size)"),
    "match unit": (dict(prefix_match_unit=8), "prefix hits inside a page (--prefix-match-unit 8)"),
    "dtype": (dict(dtype="float16"), "model dtypes other than bfloat16 (float16)"),
    "pooling": (dict(runner="pooling", convert="embed"), "pooling models"),
}
BY_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "head size": ({**LLAMA, "head_dim": 80}, "head sizes other than 64, 128, 256 (this model has 80)"),
    "sliding window": (MISTRAL, "sliding-window and chunked-attention layers (a window of 1024 tokens)"),
    "interleaved windows": (GEMMA3, "sliding-window and chunked-attention layers"),
    "mla": (DEEPSEEK, "MLA (DeepseekV2ForCausalLM)"),
    "encoder-decoder": (WHISPER, "encoder-decoder and cross-attention models (WhisperForConditionalGeneration)"),
    "mamba": (MAMBA, "hybrid and attention-free models (Mamba, linear attention) (MambaForCausalLM)"),
    "shared layers": ({**LLAMA, "num_kv_shared_layers": 1}, "KV-sharing layers (1 of this model's layers)"),
}


@pytest.mark.parametrize("case", BY_ARGUMENT)
def test_refused_by_argument(case: str, tmp_path: Path) -> None:
    arguments, found = BY_ARGUMENT[case]
    with pytest.raises(UnsupportedError) as caught:
        make_config(tmp_path, **arguments)
    assert str(caught.value).startswith("ZIPFUSION does not support ")
    assert found in str(caught.value)
    assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize("case", BY_MODEL)
def test_refused_by_model(case: str, tmp_path: Path) -> None:
    model, found = BY_MODEL[case]
    with pytest.raises(UnsupportedError) as caught:
        make_config(tmp_path, model)
    assert found in str(caught.value)
    assert is_one_sentence(str(caught.value))


def test_other_connector(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"other KV connectors and KV offloading \(OffloadingConnector\)"):
        make_config(tmp_path, kv_transfer_config=other_connector())


def test_other_attention_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "ZIPFUSION")
    with pytest.raises(UnsupportedError, match="asks for ZIPFUSION and the arguments for attention backend FLASH_ATTN"):
        make_config(tmp_path, backend="FLASH_ATTN")


def test_backend_per_kind_and_hisparse(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="attention backends by layer kind"):
        make_config(tmp_path, attention_config={"backend_per_kind": {"full_attention": "CPU_ATTN"}})
    with pytest.raises(UnsupportedError, match="HiSparse"):
        make_config(tmp_path, attention_config={"hisparse_config": {}})


def test_speculation_by_a_draft_model(tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = make_config(tmp_path, speculative_config=ngram)
    config.speculative_config.method = "eagle"
    with pytest.raises(UnsupportedError, match=r"draft models \(EAGLE, MTP, ...\) \(method eagle\)"):
        check_vllm_config(config)


def test_other_platforms(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.device_config.device_type = "cuda"
    with pytest.raises(UnsupportedError, match=r"NVIDIA GPU \(this vLLM runs on cuda\)"):
        check_vllm_config(config)


def test_prefix_attention(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.model_config = SimpleNamespace(**{**vars_of_model(config.model_config), "is_mm_prefix_lm": True})
    with pytest.raises(UnsupportedError, match="bidirectional attention over a multimodal prefix"):
        check_vllm_config(config)


def vars_of_model(model: Any) -> dict[str, Any]:
    names = (
        "architecture use_mla is_encoder_decoder runner_type is_hybrid is_attention_free get_sliding_window hf_text_config "
        "attention_chunk_size is_mm_prefix_lm rswa_window dtype get_head_size"
    )
    return {name: getattr(model, name) for name in names.split()}


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (dict(head_size=80), "a layer has 80"),
        (dict(sliding_window=128), "a layer has a window of 128 tokens"),
        (dict(kv_cache_dtype="fp8"), "a layer has fp8"),
        (dict(attn_type="encoder_decoder"), "a layer has attention type encoder_decoder"),
        (dict(kv_sharing_target_layer_name="model.layers.0"), "a layer reads model.layers.0"),
        (dict(alibi_slopes=[0.5]), "a layer has ALiBi"),
        (dict(sinks=[0.5]), "a layer has sinks"),
    ],
)
def test_refused_by_layer(layer: dict[str, Any], found: str) -> None:
    plain = dict(
        head_size=64,
        sliding_window=None,
        kv_cache_dtype="auto",
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        alibi_slopes=None,
        sinks=None,
    )
    check_attention_layer(**plain)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError) as caught:
        check_attention_layer(**{**plain, **layer})  # type: ignore[arg-type]
    assert found in str(caught.value)
    assert is_one_sentence(str(caught.value))


def test_worker_without_the_plugin() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=__import__("torch").bfloat16)
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with pytest.raises(
        RuntimeError, match="planned a KV cache of FullAttentionSpec: its plugin did not load there"
    ) as caught:
        check_kv_cache_config(config)
    assert "VLLM_PLUGINS" in str(caught.value)


def test_arena_too_small(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"ZIPFUSION needs \d+ blocks .* for one sequence of 512 tokens"
    ) as caught:
        make_config(tmp_path, num_gpu_blocks_override=8)
    needed = int(re.findall(r"needs (\d+) blocks", str(caught.value))[0])
    assert is_one_sentence(str(caught.value))
    make_config(tmp_path, num_gpu_blocks_override=needed)
    with pytest.raises(UnsupportedError, match="raise --num-gpu-blocks-override, or lower --max-model-len"):
        make_config(tmp_path, num_gpu_blocks_override=needed - 1)


def test_arena_of_a_small_kv_cache_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    large = {**LLAMA, "num_hidden_layers": 64, "num_key_value_heads": 16, "num_attention_heads": 16, "head_dim": 256}
    with pytest.raises(UnsupportedError, match=r"VLLM_CPU_KVCACHE_SPACE \(GiB\)"):
        make_config(tmp_path, large, max_model_len=4096)


def test_bad_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIPFUSION_COMPACTION", "maybe")
    with pytest.raises(ConfigError, match="ZIPFUSION_COMPACTION=maybe is not accepted: it takes 0 or 1"):
        make_config(tmp_path)
    monkeypatch.delenv("ZIPFUSION_COMPACTION")
    monkeypatch.setenv("ZIPFUSION_COMPACTON", "1")
    with pytest.raises(ConfigError, match="ZIPFUSION_COMPACTON is no option"):
        make_config(tmp_path)
    make_config(tmp_path, backend=None)  # of no concern to stock vLLM


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0rc1", "1.0", "dev"])
def test_vllm_out_of_range(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"tested with vLLM >=0.32.0,<0.34, and {version} is installed"):
        make_config(tmp_path)
    make_config(tmp_path, backend=None)


def test_every_refusal_of_the_matrix_names_reason_and_remedy() -> None:
    for feature in MATRIX:
        assert feature.supported or feature.why.count("; ") == 1, feature.name
        assert not (feature.supported and (feature.find_in_args or feature.find_in_config))
    table = render_support_table().splitlines()
    assert len(table) == len(MATRIX) + 2
    assert all(line.count("|") == 4 for line in table)


def test_supported_models_pass(tmp_path: Path) -> None:
    for head_dim in (64, 128, 256):
        config = make_config(tmp_path, {**LLAMA, "head_dim": head_dim})
        assert config.cache_config.block_size == 16
