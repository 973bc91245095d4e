"""Real vLLM engines in the test's process: small models, and what a run of prompts gave."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ARENA_BLOCKS = 1024
"""Logical pages of an engine that is not told otherwise."""


@dataclass(frozen=True)
class Shape:
    """A Llama of N(0, 0.02) weights. vLLM's own dummy weights are no test: with them any attention gives the same tokens."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512
    incompressible: bool = False
    """K and V whose exponents span more than a block can hold: no block is eligible."""


def make_model(folder: Path, shape: Shape, seed: int = 0) -> str:
    """Write a Hugging Face folder (config and weights, no tokenizer); returns its path."""
    from safetensors.torch import save_file

    hidden = shape.heads * shape.head_dim
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.02

    kv = shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": normal(shape.vocab, hidden) * 50,
        "lm_head.weight": normal(shape.vocab, hidden) * 5,
        "model.norm.weight": torch.ones(hidden),
    }
    # Every other dim far smaller: 2**-24 is beyond the 15 exponents of a block. RoPE pairs dims of the same parity.
    spread = (
        torch.where(torch.arange(kv) % 2 == 1, 2.0**-24, 1.0)[:, None] if shape.incompressible else torch.ones(kv, 1)
    )
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": normal(hidden, hidden) * 4,
            prefix + "self_attn.k_proj.weight": normal(kv, hidden) * 4 * spread,
            prefix + "self_attn.v_proj.weight": normal(kv, hidden) * spread,
            prefix + "self_attn.o_proj.weight": normal(hidden, hidden) * 4,
            prefix + "mlp.gate_proj.weight": normal(2 * hidden, hidden),
            prefix + "mlp.up_proj.weight": normal(2 * hidden, hidden),
            prefix + "mlp.down_proj.weight": normal(hidden, 2 * hidden),
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, folder / "model.safetensors")
    return str(folder)


@contextmanager
def engine(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    *,
    backend: str | None = "ZIPFUSION",
    compaction: bool = True,
    check: bool = True,
    **arguments: Any,
) -> Iterator[Any]:
    """A vLLM ``LLM`` in this process; ``backend=None`` is stock vLLM."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    monkeypatch.setenv("ZIPFUSION_COMPACTION", str(int(compaction)))
    monkeypatch.setenv("ZIPFUSION_CHECK", str(int(check)))
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    if backend is not None:
        arguments["attention_backend"] = backend
    defaults = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 2048,
        "num_gpu_blocks_override": ARENA_BLOCKS,
        "disable_log_stats": True,
        "skip_tokenizer_init": not (Path(model) / "tokenizer.json").exists(),
        "seed": 0,
    }
    llm = LLM(model=model, **{**defaults, **arguments})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def scheduler_of(llm: Any) -> Any:
    """vLLM's scheduler object of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def pool_of(llm: Any) -> Any:
    return scheduler_of(llm).kv_cache_manager.block_pool


def half_of(llm: Any) -> Any:
    """ZIPFUSION's scheduler half."""
    return scheduler_of(llm).connector._scheduler_half


def outcome(outputs: Sequence[Any]) -> list[Any]:
    """Everything that must be bitwise equal between two runs: token ids and log-probabilities, in the order of the prompts."""
    result = []
    for request in outputs:
        for completion in request.outputs:
            logprobs = [
                sorted((token, entry.logprob) for token, entry in position.items())
                for position in completion.logprobs or []
            ]
            result.append((list(completion.token_ids), completion.finish_reason, logprobs))
    return result


def drain(llm: Any, limit: int = 1000) -> int:
    """Step an idle engine until it has nothing to do; returns the steps. Fails if it never rests."""
    core = llm.llm_engine.engine_core.engine_core
    for steps in range(limit):
        if not core.scheduler.has_requests():
            return steps
        core.step()
    raise AssertionError(f"the idle engine still steps after {limit} steps")


def assert_all_memory_is_back(llm: Any) -> None:
    """Nothing outstanding, no page held but cached ones, and after a reset of the prefix cache every chunk is free."""
    drain(llm)
    half, pool = half_of(llm), pool_of(llm)
    assert not half.has_outstanding
    assert half.recorder.totals["check_breaches"] == 0
    assert half.recorder.totals["lost_batches"] == 0
    assert pool.reset_prefix_cache()
    pool.space.check()
    assert pool.space.num_used_chunks == 0
    assert pool.get_num_free_blocks() == pool.layout.raw_pages


def freeze_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compact pages but hand nothing back, so that a run has the very schedule of one with compaction off."""
    from zipfusion_vllm.memory.space import BlockSpaceManager

    answer: Callable[..., int] = BlockSpaceManager.answer

    def keep_all(self: Any, rank: int, pages: Any, generations: Any, num_chunks: Any) -> int:
        return answer(self, rank, pages, generations, num_chunks * 0 + self.chunks_per_raw_page)

    monkeypatch.setattr(BlockSpaceManager, "answer", keep_all)


def count_preemptions(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of requests as they are preempted."""
    scheduler = scheduler_of(llm)
    preempted: list[str] = []
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    return preempted
