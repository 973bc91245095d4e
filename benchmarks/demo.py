"""README's first command: serve SmolLM2-135M with ZIPFUSION, ask it something, saturate its KV cache, and show what compaction gave.

    python -m benchmarks.demo [--commit-results]

Two servers run one after the other with the same arena: compaction on, then off (ZIPFUSION_COMPACTION=0, the same kernels over raw pages).
The arena is small on purpose, so that 32 prompts of 1,500 tokens do not fit at once.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.load import ask, make_prompts, send_all
from benchmarks.server import Server, ServerError, exit_on_sigterm
from scripts.prepare_model import DEFAULT_FOLDER

QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 32
NUM_PROMPTS = 32
PROMPT_TOKENS = 1500
OUTPUT_TOKENS = 32
NUM_BLOCKS = 2000
"""Logical pages of the arena. Each has 3/4 of a raw page's bytes, so about 1,480 raw pages, or 23,700 tokens, fit: 15 of the prompts."""
ARGUMENTS = (
    "--dtype=bfloat16",
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=64",
    f"--num-gpu-blocks-override={NUM_BLOCKS}",
)
POLL_S = 0.5
_QUIET_LOG_S = 10


@dataclass(frozen=True)
class Figures:
    """What one server showed."""

    answer: str
    ready_s: float
    load_s: float
    metrics: dict[str, float]
    start_line: str

    def of(self, name: str) -> float:
        """A ``vllm:`` metric after the load. Raises ServerError if the server does not have it."""
        try:
            return self.metrics[f"vllm:{name}"]
        except KeyError:
            raise ServerError(f"the server has no metric vllm:{name}: was it started without ZIPFUSION?") from None


class Progress:
    """One line that is rewritten on a terminal, and a line every ten seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._last = -_QUIET_LOG_S * 2.0

    def __enter__(self) -> "Progress":
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def show(self, text: str) -> None:
        self._status.update(text)
        if not self._console.is_terminal and time.monotonic() - self._last >= _QUIET_LOG_S:
            self._last = time.monotonic()
            self._console.print(text, soft_wrap=True)


async def _watch(server: Server, progress: Progress, done: asyncio.Event) -> None:
    """Show running and waiting requests until ``done``."""
    started = time.monotonic()
    while not done.is_set():
        server.check_alive()
        try:
            metrics = await asyncio.to_thread(server.metrics)
        except httpx.TransportError:
            metrics = {}
        running, waiting = (metrics.get(f"vllm:num_requests_{state}", 0) for state in ("running", "waiting"))
        resident = metrics.get("vllm:zipfusion_resident_tokens", 0)
        progress.show(
            f"  {NUM_PROMPTS} prompts of {PROMPT_TOKENS:,} tokens: {running:.0f} running, {waiting:.0f} waiting, "
            f"{resident:,.0f} tokens in the KV cache, {time.monotonic() - started:.0f} s"
        )
        try:
            await asyncio.wait_for(done.wait(), POLL_S)
        except TimeoutError:
            continue


async def _saturate(server: Server, prompts: list[list[int]], progress: Progress) -> float:
    """Send the load; returns the seconds it took. Raises ServerError when the server dies under it."""
    done = asyncio.Event()
    watcher = asyncio.create_task(_watch(server, progress, done))
    started = time.monotonic()
    try:
        await send_all(server.url, prompts, OUTPUT_TOKENS)
    finally:
        seconds = time.monotonic() - started
        done.set()
        await watcher
    return seconds


def measure(console: Console, model: Path, prompts: list[list[int]], *, compaction: bool) -> Figures:
    """Serve, ask, saturate, read the metrics, stop. Raises ServerError."""
    switch = "1" if compaction else "0"
    title = "ZIPFUSION" if compaction else "ZIPFUSION with compaction off"
    log = record.REPOSITORY / f".cache/logs/demo.compaction{switch}.log"
    server = Server(model, "ZIPFUSION", ARGUMENTS, log, {"ZIPFUSION_COMPACTION": switch})
    variables = f"VLLM_ATTENTION_BACKEND=ZIPFUSION ZIPFUSION_COMPACTION={switch}"
    console.print(
        f"[bold]{title}[/]\n  [dim]{variables} vllm serve MODEL {' '.join(ARGUMENTS)}[/]",
        soft_wrap=True,
        highlight=False,
    )
    try:
        with server, Progress(console) as progress:
            ready = server.wait_ready(lambda seconds: progress.show(f"  starting vLLM, {seconds:.0f} s"))
            console.print(f"  ready after {ready:.0f} s, log in {log.relative_to(record.REPOSITORY)}")
            progress.show("  one chat request")
            answer = ask(server.url, QUESTION, ANSWER_TOKENS)
            console.print(f"  [dim]{QUESTION}[/] {answer}")
            seconds = asyncio.run(_saturate(server, prompts, progress))
            console.print(f"  load done in {seconds:.0f} s")
            progress.show("  stopping")
            return Figures(answer, ready, seconds, server.metrics(), _start_line(server, model))
    except httpx.HTTPError as error:
        raise ServerError(f"a request failed ({error!r}); the server's last lines:\n{server.tail()}") from error


def _start_line(server: Server, model: Path) -> str:
    """ZIPFUSION's line at start, without the folder that the model lies in on this machine."""
    return (server.find_in_log("ZIPFUSION is active") or "").replace(str(model), model.name)


def summary(on: Figures, off: Figures) -> dict[str, Any]:
    """The result file's figures."""
    return {
        "model": "SmolLM2-135M-Instruct",
        "load": {"prompts": NUM_PROMPTS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS},
        "arguments": list(ARGUMENTS),
        "eligible_share": round(on.of("zipfusion_eligible_share"), 4),
        "bytes_per_token_raw": round(on.of("zipfusion_bytes_per_token_raw")),
        "bytes_per_token": round(on.of("zipfusion_bytes_per_token")),
        "peak_running": int(on.of("zipfusion_peak_running")),
        "peak_running_off": int(off.of("zipfusion_peak_running")),
        "peak_tokens": int(on.of("zipfusion_peak_resident_tokens")),
        "peak_tokens_off": int(off.of("zipfusion_peak_resident_tokens")),
        "peak_tokens_ratio": round(
            on.of("zipfusion_peak_resident_tokens") / off.of("zipfusion_peak_resident_tokens"), 3
        ),
        "preemptions": int(on.of("num_preemptions_total")),
        "preemptions_off": int(off.of("num_preemptions_total")),
        "load_s": round(on.load_s, 1),
        "load_s_off": round(off.load_s, 1),
        "ready_s": round(on.ready_s, 1),
        "answer": on.answer,
        "answer_off": off.answer,
        "start_line": on.start_line,
    }


def show(console: Console, figures: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title="the same arena, with and without compaction")
    table.add_column("")
    table.add_column("compaction on", justify="right")
    table.add_column("off", justify="right")
    saved = 1 - figures["bytes_per_token"] / figures["bytes_per_token_raw"]
    table.add_row("eligible blocks", f"{figures['eligible_share']:.1%}", "")
    table.add_row(
        "bytes per token", f"{figures['bytes_per_token']:,} (-{saved:.1%})", f"{figures['bytes_per_token_raw']:,}"
    )
    ratio = figures["peak_tokens_ratio"]
    table.add_row(
        "peak resident tokens", f"{figures['peak_tokens']:,} ({ratio:.2f}x)", f"{figures['peak_tokens_off']:,}"
    )
    table.add_row("peak running requests", str(figures["peak_running"]), str(figures["peak_running_off"]))
    table.add_row("preemptions", str(figures["preemptions"]), str(figures["preemptions_off"]))
    table.add_row("seconds for the load (one run)", f"{figures['load_s']:.0f}", f"{figures['load_s_off']:.0f}")
    console.print(table)
    same = "the same" if figures["answer"] == figures["answer_off"] else "NOT the same"
    console.print(f"The answer with compaction off is {same}: {figures['answer']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="folder that scripts/prepare_model.py made")
    parser.add_argument(
        "--commit-results", action="store_true", help="write benchmarks/results/demo.cpu.json, not .cache/results"
    )
    options = parser.parse_args()
    exit_on_sigterm()
    console = Console()
    prompts = make_prompts(options.model, NUM_PROMPTS, PROMPT_TOKENS)
    try:
        on = measure(console, options.model, prompts, compaction=True)
        off = measure(console, options.model, prompts, compaction=False)
        figures = summary(on, off)
    except ServerError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    show(console, figures)
    path = record.write("demo.cpu", figures, committed=options.commit_results)
    console.print(f"written to {path.relative_to(record.REPOSITORY)}")


if __name__ == "__main__":
    main()
