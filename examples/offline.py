"""Offline inference with ZIPFUSION: vLLM's ``LLM`` with one argument more.

.venv/bin/python examples/offline.py [MODEL]        # default: the model that `make model` prepared
"""

import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

PREPARED = Path(__file__).resolve().parents[1] / ".cache/models/SmolLM2-135M-Instruct"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(PREPARED)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    llm = LLM(model=model, attention_backend="ZIPFUSION", dtype="bfloat16", max_model_len=2048, enforce_eager=True)
    questions = ["What is the capital of France?", "Name three prime numbers."]
    conversations: list[Any] = [[{"role": "user", "content": question}] for question in questions]
    for question, output in zip(
        questions, llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48)), strict=True
    ):
        print(f"{question}\n  {output.outputs[0].text}")


if __name__ == "__main__":  # vLLM's processes import this file again
    main()
