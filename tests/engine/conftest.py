"""Fixtures of the engine tests: models, and an environment in which vLLM's CPU engine runs in the test's own process."""

import os
from pathlib import Path

import pytest

from tests.engine.harness import Shape, make_model

# Read when vLLM is imported, so set before any test module does.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

REPOSITORY = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, so that ``-m "not engine"`` leaves it out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of SmolLM2-135M-Instruct; ``make test`` prepares it (scripts/prepare_model.py)."""
    folder = Path(os.environ.get("SMOLLM2_FOLDER", REPOSITORY / ".cache/models/SmolLM2-135M-Instruct"))
    if not (folder / "model.safetensors").exists():
        pytest.fail(f"{folder} is missing: run `make model`, or `make test`, which does")
    return str(folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama of 2 layers, 2 KV heads, head_dim 64."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", Shape())


@pytest.fixture(scope="session")
def incompressible_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama none of whose K and V blocks is eligible."""
    return make_model(tmp_path_factory.mktemp("models") / "incompressible", Shape(incompressible=True))
