"""Which vLLM is taken, and what is said of one that is not."""

import sys

import pytest

from zipfusion_vllm.compat import VllmVersionError, check_vllm_version


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.9", "0.33.0", "0.33.0rc1", "0.33.1.dev5+g1234"])
def test_tested_versions(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "0.34.0.dev1+g1234", "1.0", "dev", ""])
def test_other_versions(version: str) -> None:
    with pytest.raises(VllmVersionError) as caught:
        check_vllm_version(version)
    assert f">=0.32.0,<0.34, and {version} is installed: install a vLLM in that range" in str(caught.value)


def test_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        VllmVersionError, match=r"needs vLLM >=0.32.0,<0.34, and none is installed: install zipfusion-vllm\[gpu\]"
    ):
        check_vllm_version()
