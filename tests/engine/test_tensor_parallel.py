"""Two workers: tensor parallel 2 through vLLM's multiprocessing executor, on two CPU cores.

In a process of its own (``python -m tests.engine.test_tensor_parallel ...``), because the workers are spawned and re-enter the main module.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Shape, make_model

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def uneven_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two KV heads, one for each rank; those of rank 1 hold values whose exponents often span too much, so it needs more chunks."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("models") / "uneven"
    shape = Shape(layers=6)
    make_model(folder, shape)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for layer in range(shape.layers):
        value = weights[f"model.layers.{layer}.self_attn.v_proj.weight"]
        value[shape.head_dim :] *= torch.where(torch.arange(shape.head_dim) % 2 == 1, 2.0**-24, 1.0)[:, None].to(
            value.dtype
        )
    save_file(weights, path)
    return str(folder)


def run_engine(model: str, compaction: bool) -> dict[str, Any]:
    """Serve 12 prompts twice with two workers; what came out, and how many chunks compact pages keep."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ATTENTION_BACKEND": "ZIPFUSION",
        "ZIPFUSION_COMPACTION": str(int(compaction)),
        "ZIPFUSION_CHECK": "1",
    }
    result = subprocess.run(
        [sys.executable, "-m", __name__, model],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.strip().split("\n")[-1])


def test_two_ranks_give_the_same_tokens_and_keep_the_largest_count(uneven_llama: str) -> None:
    on, off = (run_engine(uneven_llama, compaction) for compaction in (True, False))
    assert on["outcome"] == off["outcome"]
    assert on["shrunk"] > 50 and off["shrunk"] == 0
    counts = on["counts_by_rank"]
    assert sorted(counts) == ["0", "1"]
    assert sum(counts["0"]) < sum(counts["1"]), "rank 1 was made to need more"
    assert on["kept"] == [max(pair) for pair in zip(counts["0"], counts["1"], strict=True)]
    assert on["breaches"] == off["breaches"] == 0


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    from tests.engine.harness import assert_all_memory_is_back, half_of, outcome, pool_of
    from zipfusion_vllm.memory.space import BlockSpaceManager

    counts: dict[int, list[int]] = {0: [], 1: []}
    kept: list[int] = []
    answer = BlockSpaceManager.answer

    def record(self: Any, rank: int, pages: Any, generations: Any, num_chunks: Any) -> int:
        done = answer(self, rank, pages, generations, num_chunks)
        counts[rank] += num_chunks.tolist()
        if done:
            kept.extend(self.num_chunks_of(pages).tolist())
        return done

    BlockSpaceManager.answer = record  # type: ignore[method-assign]
    llm = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        num_gpu_blocks_override=600,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        skip_tokenizer_init=True,
        seed=0,
    )
    prompts: list[Any] = [
        {"prompt_token_ids": [3 + (i * 31 + j * 7) % 500 for j in range(20 + 17 * i)]} for i in range(12)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True, detokenize=False)
    results = [outcome(llm.generate(prompts, params, use_tqdm=False)) for _ in range(2)]
    shrunk = pool_of(llm).space.num_shrunk
    assert_all_memory_is_back(llm)
    breaches = half_of(llm).recorder.totals["check_breaches"]
    llm.llm_engine.engine_core.shutdown()
    print(
        json.dumps({"outcome": results, "shrunk": shrunk, "counts_by_rank": counts, "kept": kept, "breaches": breaches})
    )


if __name__ == "__main__":
    main(sys.argv[1])
