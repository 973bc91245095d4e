"""Decode throughput on a CPU, 8 streams of SmolLM2-135M: ZIPFUSION, the same with compaction off, and stock vLLM, alternating in one run.

    python -m benchmarks.serve_cpu [--commit-results] [--rounds N]

Three servers stay up together; only one has work at a time, and the order turns with every round. A round's rate counts the tokens that came while
all its streams were decoding, so no prefill is in it. Ratios are taken within a round, where the machine's mood is the same for all.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks import record
from benchmarks.load import decode_rate, make_prompts, send_all
from benchmarks.server import Server, ServerError, exit_on_sigterm
from scripts.prepare_model import DEFAULT_FOLDER

STREAMS = 8
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
WARM_UP_ROUNDS = 1
ARGUMENTS = ("--dtype=bfloat16", "--enforce-eager", "--max-model-len=2048")


class Contestant(NamedTuple):
    backend: str | None
    environment: dict[str, str]


CONTESTANTS = {
    "zipfusion": Contestant("ZIPFUSION", {"ZIPFUSION_COMPACTION": "1"}),
    "zipfusion_off": Contestant("ZIPFUSION", {"ZIPFUSION_COMPACTION": "0"}),
    "stock": Contestant(None, {}),
}


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def run_round(servers: dict[str, Server], prompts: list[list[int]], turn: int) -> dict[str, float]:
    """Tokens per second of each contestant, one after the other, beginning with another one each ``turn``."""
    names = list(servers)
    rates = {}
    for place in range(len(names)):
        name = names[(turn + place) % len(names)]
        servers[name].check_alive()
        rates[name] = decode_rate(asyncio.run(send_all(servers[name].url, prompts, OUTPUT_TOKENS)))
    return rates


def measure(model: Path, num_rounds: int) -> dict[str, Any]:
    """All rounds; returns the result file's figures. Raises ServerError or httpx.HTTPError."""
    prompts = make_prompts(model, STREAMS * (num_rounds + WARM_UP_ROUNDS), PROMPT_TOKENS)
    rounds = []
    with ExitStack() as stack:
        servers = {}
        for name, contestant in CONTESTANTS.items():
            log = record.REPOSITORY / f".cache/logs/serve_cpu.{name}.log"
            server = Server(model, contestant.backend, ARGUMENTS, log, contestant.environment)
            servers[name] = stack.enter_context(server)
            print(f"{name}: ready after {server.wait_ready():.0f} s", flush=True)
        for number in range(num_rounds + WARM_UP_ROUNDS):
            rates = run_round(servers, prompts[STREAMS * number : STREAMS * (number + 1)], number)
            shown = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            warm_up = number < WARM_UP_ROUNDS
            print(f"{'warm-up' if warm_up else f'round {number}'}: {shown} tokens/s", flush=True)
            if not warm_up:
                rounds.append(rates)
        metrics = servers["zipfusion"].metrics()
    return {
        "model": "SmolLM2-135M-Instruct",
        "load": {
            "streams": STREAMS,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "rounds": num_rounds,
        },
        "arguments": list(ARGUMENTS),
        "decode_tokens_per_s": {name: spread([one[name] for one in rounds], 1) for name in CONTESTANTS},
        "ratio_to_stock": spread([one["zipfusion"] / one["stock"] for one in rounds], 3),
        "ratio_off_to_stock": spread([one["zipfusion_off"] / one["stock"] for one in rounds], 3),
        "ratio_to_off": spread([one["zipfusion"] / one["zipfusion_off"] for one in rounds], 3),
        "eligible_share": round(metrics.get("vllm:zipfusion_eligible_share", 0.0), 4),
        "rounds": [{name: round(rate, 1) for name, rate in one.items()} for one in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="folder that scripts/prepare_model.py made")
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds (default 6)")
    parser.add_argument(
        "--commit-results", action="store_true", help="write benchmarks/results/serve.cpu.json, not .cache/results"
    )
    options = parser.parse_args()
    exit_on_sigterm()
    try:
        figures = measure(options.model, options.rounds)
    except (ServerError, httpx.HTTPError) as error:
        sys.exit(str(error) or repr(error))
    path = record.write("serve.cpu", figures, committed=options.commit_results)
    ratio = figures["ratio_to_stock"]
    print(
        f"ZIPFUSION decodes at {ratio['median']:.2f} of stock vLLM ({ratio['min']:.2f} to {ratio['max']:.2f}); written to {path}"
    )


if __name__ == "__main__":
    main()
