"""Patch of vLLM: keep ZIPFUSION's connector out of the external prefix cache statistics.

Target: ``vllm.v1.core.sched.scheduler.Scheduler.make_stats`` (0.32, 0.33).
Reason: the scheduler counts every prompt token as a query to an "external prefix cache" as soon as any KV connector is configured. Ours
is a channel that holds no cache, and users would read a hit rate of 0 %. vLLM has no option to say so.
Guard: the signature and the attribute are checked when the patch is applied; the wrapper acts only on schedulers whose connector is ours.
"""

import functools
import inspect
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats

from zipfusion_vllm.patches.errors import PatchError

_MARKER = "_zipfusion_original"
_ATTRIBUTE = "connector_prefix_cache_stats"


def apply() -> None:
    """Wrap ``Scheduler.make_stats`` once. Raises PatchError when vLLM's scheduler no longer looks as this patch expects."""
    original = Scheduler.make_stats
    if hasattr(original, _MARKER):
        return
    check_target(Scheduler)

    @functools.wraps(original)
    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        stats = getattr(self, _ATTRIBUTE)
        if stats is not None and _is_ours(self.connector):
            empty = PrefixCacheStats()
            empty.reset = stats.reset
            setattr(self, _ATTRIBUTE, empty)
        return original(self, *args, **kwargs)

    setattr(make_stats, _MARKER, original)
    Scheduler.make_stats = make_stats  # type: ignore[method-assign]


def check_target(scheduler_cls: type) -> None:
    """Raise PatchError unless ``scheduler_cls.make_stats`` and the statistics it sends are those that this patch was written for."""
    parameters = list(inspect.signature(scheduler_cls.make_stats).parameters)  # type: ignore[attr-defined]
    source = inspect.getsource(scheduler_cls.__init__)  # type: ignore[misc]
    if parameters[:1] != ["self"] or "kv_connector_stats" not in parameters or f"self.{_ATTRIBUTE}" not in source:
        raise PatchError(
            "ZIPFUSION cannot patch Scheduler.make_stats of this vLLM: it changed; install a vLLM in the tested range, or a newer zipfusion-vllm."
        )


def _is_ours(connector: object) -> bool:
    return type(connector).__name__ == "ZipFusionConnector"
