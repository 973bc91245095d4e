"""Render README's tables from the committed results, the support matrix and the options, so that none goes stale.

    python -m benchmarks.render [--check]        # --check only says whether README.md is up to date

A table stands between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->``; NAME is a key of TABLES.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import record
from zipfusion_vllm.config import option_rows
from zipfusion_vllm.support import render_support_table

README = record.REPOSITORY / "README.md"
_SLOT = re.compile(r"(<!-- table:(\S+) -->\n).*?(<!-- end:\2 -->)", re.DOTALL)


def result(name: str) -> dict[str, Any]:
    """A committed result; exits with what to run if it is missing."""
    found = record.read(name)
    if found is None:
        sys.exit(f"render: benchmarks/results/{name}.json is missing: run its script with --commit-results")
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown; all columns but the first are numbers, and stand to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def circumstances(figures: dict[str, Any], name: str) -> str:
    """Where and with what a result was measured, as a line under its table."""
    machine, versions = figures["machine"], figures["versions"]
    return (
        f"Measured on {machine['cores']} cores of {machine['cpu']}, vLLM {versions['vllm']}, torch {versions['torch']}, "
        f"by `{figures['command']}` at {figures['commit'][:9]} "
        f"([{name}.json](benchmarks/results/{name}.json))."
    )


def demo_table() -> str:
    """What ``make demo`` showed."""
    figures = result("demo.cpu")
    load = figures["load"]
    saved = 1 - figures["bytes_per_token"] / figures["bytes_per_token_raw"]
    rows = [
        ["KV cache bytes per token", f"{figures['bytes_per_token']:,} (−{saved:.1%})", f"{figures['bytes_per_token_raw']:,}"],
        ["peak resident tokens, same arena", f"{figures['peak_tokens']:,} ({figures['peak_tokens_ratio']:.2f}×)", f"{figures['peak_tokens_off']:,}"],
        ["peak running requests", f"{figures['peak_running']}", f"{figures['peak_running_off']}"],
        ["preemptions", f"{figures['preemptions']}", f"{figures['preemptions_off']}"],
    ]  # fmt: skip
    what = (
        f"{figures['model']}, {load['prompts']} concurrent prompts of {load['prompt_tokens']:,} tokens, {load['output_tokens']} tokens out; "
        f"{figures['eligible_share']:.1%} of all blocks compressed. "
    )
    return table(["", "ZIPFUSION", "compaction off"], rows) + "\n\n" + what + circumstances(figures, "demo.cpu")


def serve_cpu_table() -> str:
    """Decode throughput against stock vLLM."""
    figures = result("serve.cpu")
    load, rates = figures["load"], figures["decode_tokens_per_s"]
    titles = {"stock": "stock vLLM (CPU_ATTN)", "zipfusion_off": "ZIPFUSION, compaction off", "zipfusion": "ZIPFUSION"}
    ratios = {"zipfusion_off": figures["ratio_off_to_stock"], "zipfusion": figures["ratio_to_stock"]}

    def cell(values: dict[str, float], form: str) -> str:
        return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"

    rows = [
        [title, cell(rates[name], ".0f"), cell(ratios[name], ".2f") if name in ratios else "1"]
        for name, title in titles.items()
    ]
    what = (
        f"{figures['model']}, {load['streams']} streams of {load['prompt_tokens']} + {load['output_tokens']} tokens, median (range) of "
        f"{load['rounds']} rounds in which the three servers took turns. "
    )
    return (
        table(["decode on a CPU", "tokens/s", "ratio to stock"], rows)
        + "\n\n"
        + what
        + circumstances(figures, "serve.cpu")
    )


def option_table() -> str:
    """Every option, from ZipFusionConfig."""
    lines = ["| variable | default | accepted | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.variable}` | {row.default} | {row.accepted} | {row.meaning} |" for row in option_rows()]
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo_table,
    "serve-cpu": serve_cpu_table,
    "support": render_support_table,
    "options": option_table,
}


def render(text: str) -> str:
    """``text`` with every table filled. Raises KeyError for a name that TABLES does not have."""
    return _SLOT.sub(lambda slot: f"{slot[1]}{TABLES[slot[2]]()}\n{slot[3]}", text)


def main(path: Path = README) -> None:
    text = path.read_text(encoding="utf-8")
    rendered = render(text)
    if "--check" not in sys.argv[1:]:
        path.write_text(rendered, encoding="utf-8")
    elif rendered != text:
        sys.exit("README.md is out of date: run `make tables` and commit it")
    else:
        print("README.md: tables are up to date")


if __name__ == "__main__":
    main()
