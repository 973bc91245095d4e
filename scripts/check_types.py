"""Type-check the package as it is installed: ``kernels/`` and ``patches/`` under ``zipfusion_vllm``.

mypy cannot follow setup.cfg's ``package_dir``, so it gets a tree of links with the installed layout; messages name the real files.
"""

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
STAGE = REPOSITORY / ".cache/typecheck"
TOOLS = ("scripts", "examples", "benchmarks")


def mapped_folders() -> dict[str, str]:
    """Packages that setup.cfg takes from a folder of another name: {"zipfusion_vllm.kernels": "kernels", ...}."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    lines = setup["options"]["package_dir"].split("\n")
    return dict((part.strip() for part in line.split("=")) for line in lines if "=" in line)  # type: ignore[misc]


def stage() -> dict[str, str]:
    """Make the tree of links; returns {path in the tree: path in the repository}, both relative."""
    shutil.rmtree(STAGE, ignore_errors=True)
    package = STAGE / "zipfusion_vllm"
    package.mkdir(parents=True)
    names = {"zipfusion_vllm": "zipfusion_vllm"}
    for entry in (REPOSITORY / "zipfusion_vllm").iterdir():
        (package / entry.name).symlink_to(entry)
    for name, folder in mapped_folders().items():
        path = Path(*name.split("."))
        (STAGE / path).symlink_to(REPOSITORY / folder)
        names[str(path)] = folder
    return dict(sorted(names.items(), reverse=True))  # longest first


def main() -> int:
    names = stage()
    tools = [str(path) for folder in TOOLS for path in sorted((REPOSITORY / folder).glob("*.py"))]
    status = 0
    for what in (["-p", "zipfusion_vllm"], tools):
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--explicit-package-bases",
            "--config-file",
            str(REPOSITORY / "setup.cfg"),
            *what,
        ]
        environment = {**os.environ, "MYPYPATH": str(STAGE), "MYPY_CACHE_DIR": str(REPOSITORY / ".mypy_cache")}
        cwd = STAGE if what[0] == "-p" else REPOSITORY
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        status = status or result.returncode
        for line in (result.stdout + result.stderr).splitlines():
            for staged, real in names.items():
                if line.startswith(staged + "/"):
                    line = real + line[len(staged) :]
                    break
            print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
