"""Each patch of another's code checks its target first, so that a changed one is an error and no wrong behaviour."""

import subprocess
import sys
from typing import Any

import pytest

from zipfusion_vllm.patches import llvmlite_attributes, scheduler_stats
from zipfusion_vllm.patches.errors import PatchError


def test_scheduler_stats_fit_the_installed_vllm() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler_stats.check_target(Scheduler)


class WithoutStatistics:
    def make_stats(self, spec_decoding_stats: Any = None, kv_connector_stats: Any = None) -> None: ...

    def __init__(self) -> None:
        self.renamed_stats = None


class OtherSignature:
    def make_stats(self, spec_decoding_stats: Any = None) -> None: ...

    def __init__(self) -> None:
        self.connector_prefix_cache_stats = None


@pytest.mark.parametrize("changed", [WithoutStatistics, OtherSignature])
def test_a_changed_scheduler_is_refused(changed: type, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PatchError, match=r"cannot patch Scheduler\.make_stats of this vLLM"):
        scheduler_stats.check_target(changed)
    original = changed.make_stats  # type: ignore[attr-defined]
    monkeypatch.setattr(scheduler_stats, "Scheduler", changed)
    with pytest.raises(PatchError):
        scheduler_stats.apply()
    assert changed.make_stats is original  # type: ignore[attr-defined]


def test_scheduler_stats_of_other_connectors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are dropped for our connector only, and a reset of the cache is still told."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    class ZipFusionConnector: ...

    class Scheduler:
        def __init__(self, connector: object) -> None:
            self.connector = connector
            self.connector_prefix_cache_stats = PrefixCacheStats(reset=True, queries=5)

        def make_stats(self, kv_connector_stats: Any = None) -> PrefixCacheStats:
            return self.connector_prefix_cache_stats

    monkeypatch.setattr(scheduler_stats, "Scheduler", Scheduler)
    scheduler_stats.apply()
    method = Scheduler.make_stats
    scheduler_stats.apply()
    assert Scheduler.make_stats is method
    assert Scheduler(object()).make_stats().queries == 5
    ours = Scheduler(ZipFusionConnector()).make_stats()
    assert (ours.queries, ours.reset) == (0, True)


def test_llvmlite_wrapper_after_the_patch() -> None:
    """In a fresh process: with the patch the wrapper has no ``__dict__`` that is no dict, and LLVM's functions are still found."""
    code = (
        "from zipfusion_vllm.patches import llvmlite_attributes as patch\n"
        "from llvmlite.binding import ffi\n"
        "patch.apply(); patch.apply()\n"
        "assert isinstance(getattr(ffi.lib, '__dict__', {}), dict)\n"
        "assert callable(ffi.lib.LLVMPY_GetVersionInfo)\n"
        "import numba; assert numba.njit(lambda a: a + 1)(1) == 2\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]


def test_an_llvmlite_that_behaves_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from llvmlite.binding import ffi

    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    original = Wrapper.__getattr__
    monkeypatch.setattr(ffi, "lib", Wrapper())
    llvmlite_attributes.apply()
    assert Wrapper.__getattr__ is original
