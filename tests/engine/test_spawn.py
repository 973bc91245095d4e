"""An engine whose core and worker are processes of their own, spawned by vLLM: the plugin is on in each, or says where it is not.

In a process of its own (``python -m tests.engine.test_spawn ...``), because spawned processes re-enter the main module.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TOKENS = 20


def run_engine(model: str, *child_plugins: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Generate with vLLM's multiprocess engine; ``child_plugins`` is VLLM_PLUGINS of the processes that the first one starts."""
    clean = {name: value for name, value in os.environ.items() if not name.lstrip("_").startswith("ZIPFUSION_")}
    environment = clean | {
        "VLLM_ATTENTION_BACKEND": "zipfusion",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        **environ,
    }
    return subprocess.run(
        [sys.executable, "-m", __name__, model, *child_plugins],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_asked_by_variable_in_spawned_processes(tiny_llama: str) -> None:
    """Also with a filter that lists the plugin. The statistics know no external prefix cache, which a connector would make vLLM count."""
    result = run_engine(tiny_llama, VLLM_PLUGINS="zipfusion")
    log = result.stdout + result.stderr
    assert result.returncode == 0, log[-4000:]
    lines = [line for line in log.splitlines() if "ZIPFUSION is active" in line]
    assert len(lines) == 1
    assert "EngineCore" in lines[0]
    for part in (
        tiny_llama,
        "16,384 bytes raw",
        "12,288 nominal",
        "256 logical pages",
        "reserve 0.25",
        "kernels: numba",
    ):
        assert part in lines[0]
    # Others may be unknown: vLLM leaves variables of its own in the process that ran an engine before.
    assert "environment variable detected: VLLM_ATTENTION_BACKEND" not in log
    told = next(json.loads(line) for line in log.splitlines() if line.startswith('{"tokens"'))
    assert told["tokens"] == NUM_TOKENS
    assert told["vllm:zipfusion_compact_pages"] > 0
    assert told["vllm:prefix_cache_queries"] > 0
    assert told["vllm:external_prefix_cache_queries"] == 0


def test_plugin_left_out_in_the_children(tiny_llama: str) -> None:
    result = run_engine(tiny_llama, "other")
    log = result.stdout + result.stderr
    assert result.returncode != 0
    assert "ZIPFUSION was asked for, and the workers planned a KV cache of FullAttentionSpec" in log
    assert "do not leave zipfusion out of VLLM_PLUGINS" in log


def main(model: str, *child_plugins: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if child_plugins:
        os.environ["VLLM_PLUGINS"] = child_plugins[0]
    llm = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        num_gpu_blocks_override=256,
        skip_tokenizer_init=True,
        disable_log_stats=False,
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(range(3, 60))}], sampling)
    told = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print("\n" + json.dumps({"tokens": len(outputs[0].outputs[0].token_ids), **told}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
