"""vLLM still is what ZIPFUSION leans on: names, signatures, fields and steps, in the installed version and in an extract of 0.33.

The extract is made by ``scripts/extract_vllm_contract.py`` from the unpacked wheel (336 MB, so not in CI).
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from scripts.extract_vllm_contract import extract, import_key, our_imports
from tests.engine.contracts.items import CONTRACTS, Contract

EXTRACTS = sorted((Path(__file__).parent / "contracts").glob("vllm-*.json"))


def broken(contract: Contract, found: dict[str, Any] | None) -> str | None:
    """What about ``contract`` does not hold, None if it does."""
    if found is None:
        return "it is gone"
    if contract.parameters is not None and tuple(found["parameters"]) != contract.parameters:
        return f"it takes {found['parameters']}, not {list(contract.parameters)}"
    if missing := [name for name in contract.accepts if name not in found["parameters"]]:
        return f"it no longer takes {missing}"
    if missing := [name for name in contract.fields if name not in found["fields"]]:
        return f"its fields {missing} are gone"
    if contract.kind and found["kind"] != contract.kind:
        return f"it is no {contract.kind}"
    if missing := [text for text in contract.contains if not found["contains"].get(text)]:
        return f"it no longer does {missing}"
    return None


def breaches(found: dict[str, dict[str, Any] | None]) -> list[str]:
    result = []
    for contract in CONTRACTS:
        what = broken(contract, found.get(f"{contract.file}::{contract.name}"))
        if what is not None:
            result.append(f"{contract.file}: {contract.name}, which {contract.user} leans on: {what}")
    for key in (import_key(*item) for item in our_imports()):
        if key not in found:
            result.append(f"{key}: not in the extract; run scripts/extract_vllm_contract.py again")
        elif found[key] is None:
            result.append(f"{key}: there is no such name")
    return result


@pytest.fixture(scope="module")
def installed() -> dict[str, dict[str, Any] | None]:
    import vllm

    return extract(Path(vllm.__file__).parent)


def test_installed_vllm(installed: dict[str, dict[str, Any] | None]) -> None:
    assert breaches(installed) == []


@pytest.mark.parametrize("file", EXTRACTS, ids=lambda file: file.stem)
def test_extract_of_another_version(file: Path) -> None:
    assert breaches(json.loads(file.read_text(encoding="utf-8"))) == []


def test_every_tested_minor_version_has_its_source_checked() -> None:
    import vllm
    from packaging.version import Version

    from zipfusion_vllm import compat

    minors = {Version(file.stem.removeprefix("vllm-")).minor for file in EXTRACTS} | {Version(vllm.__version__).minor}
    assert minors >= set(range(compat.TESTED_FROM.minor, compat.TESTED_BELOW.minor))


def test_a_changed_vllm_is_noticed(installed: dict[str, dict[str, Any] | None]) -> None:
    """The comparison is no formality: each kind of change is told, with the module that it hurts."""
    changed = {key: None if value is None else dict(value) for key, value in installed.items()}
    pool = "v1/core/block_pool.py::BlockPool."
    changed[pool + "touch"] = None
    changed[pool + "free_blocks"]["parameters"] = ["self", "blocks"]  # type: ignore[index]
    changed["v1/core/sched/output.py::SchedulerOutput"]["fields"] = []  # type: ignore[index]
    changed[pool + "evict_blocks"]["contains"] = {}  # type: ignore[index]
    changed["import vllm.forward_context ForwardContext"] = None
    del changed["import vllm.v1.request Request"]
    told = breaches(changed)
    assert len(told) == 6
    assert any("ForwardContext: there is no such name" in line for line in told)
    assert any("Request: not in the extract; run scripts/extract_vllm_contract.py" in line for line in told)
    hurt = [line for line in told if not line.startswith("import ")]
    assert all("which memory/block_pool.py" in line or "which connector/scheduler.py" in line for line in hurt)


def test_live_signatures_are_those_of_the_source(installed: dict[str, dict[str, Any] | None]) -> None:
    """Reading the source sees what Python sees: nothing is wrapped or generated at import."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.block_pool import BlockPool

    for cls, file in (
        (BlockPool, "v1/core/block_pool.py"),
        (KVConnectorBase_V1, "distributed/kv_transfer/kv_connector/v1/base.py"),
    ):
        for contract in CONTRACTS:
            if contract.file == file and contract.parameters is not None and contract.name.startswith(cls.__name__):
                method = inspect.getattr_static(cls, contract.name.split(".")[1])
                live = inspect.signature(getattr(method, "__func__", method))
                stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
                names = [stars.get(parameter.kind, "") + parameter.name for parameter in live.parameters.values()]
                entry = installed[f"{contract.file}::{contract.name}"]
                assert entry is not None and names == entry["parameters"], contract.name


def test_spec_page_size_follows_state_content_bytes() -> None:
    """vLLM sizes pages, and with them the number of logical ids, by this field."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert plain.page_size_bytes == 16 * 2 * 2 * 64 * 2
    nominal = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, state_content_bytes=192
    )
    assert nominal.page_size_bytes == 16 * 2 * 192


def test_producer_is_not_made_to_hold_blocks_back() -> None:
    from vllm.config import KVTransferConfig

    ours = KVTransferConfig(kv_connector="ZipFusionConnector", kv_role="kv_producer")
    assert ours.is_kv_transfer_instance
    assert not ours.is_kv_consumer
