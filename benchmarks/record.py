"""What every result carries beside its figures: machine, versions, commit, command. One JSON file per measurement."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks/results"
SCRATCH = REPOSITORY / ".cache/results"
"""Where a run goes that is not meant to be committed."""
DISTRIBUTIONS = ("zipfusion-vllm", "vllm", "torch", "numba", "transformers")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the distributions that matter, as installed."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checked-out commit; "+" after it if files that git tracks differ from it, "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return "unknown"


def command() -> str:
    """The command line of this process, relative to the repository."""
    main = sys.modules["__main__"].__spec__
    program = f"python -m {main.name}" if main else f"python {sys.argv[0]}"
    return shlex.join([*program.split(), *sys.argv[1:]])


def write(name: str, figures: dict[str, Any], *, committed: bool) -> Path:
    """Write ``figures`` with their circumstances to ``<name>.json`` in benchmarks/results (or .cache/results); returns the path."""
    path = (RESULTS if committed else SCRATCH) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "versions": versions(), "commit": commit(), "command": command()}
    path.write_text(json.dumps({**figures, **about}, indent=2) + "\n")
    return path


def read(name: str) -> dict[str, Any] | None:
    """The committed result of that name, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
