"""What ZIPFUSION tells of itself: Prometheus metrics ``vllm:zipfusion_*`` and vLLM's own log line, through its connector statistics.

Written by the scheduler's half of the channel each step, read in vLLM's front-end process. Levels are values of the moment, the
rest are added up.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from zipfusion_vllm.format import PAGE_TOKENS
from zipfusion_vllm.memory.layout import ArenaLayout


class Metric(NamedTuple):
    is_level: bool
    help: str


METRICS: dict[str, Metric] = {
    "resident_tokens": Metric(True, "Tokens whose K and V running requests hold in the KV cache."),
    "peak_resident_tokens": Metric(True, "Largest zipfusion_resident_tokens since start."),
    "running": Metric(True, "Requests that hold pages."),
    "peak_running": Metric(True, "Largest zipfusion_running since start."),
    "compact_pages": Metric(True, "Pages stored compact, those of the prefix cache included."),
    "used_chunks": Metric(True, "Chunks of the arena in use, those of the prefix cache included."),
    "num_chunks": Metric(True, "Chunks of the arena."),
    "outstanding_batches": Metric(True, "Compaction batches whose answers are on their way."),
    "bytes_per_token_raw": Metric(True, "KV cache bytes of a token in a raw page, all layers of one rank, with its share of the lookup table."),
    "bytes_per_token": Metric(True, "The same of a token in a compact page, mean of the pages stored compact now; 0 while there is none."),
    "eligible_share": Metric(True, "Share of all blocks measured so far that were compressed; 0 before the first."),
    "dropped_answers": Metric(False, "Answers of workers that came twice or too late and were ignored."),
    "lost_batches": Metric(False, "Compaction batches given up because a rank did not answer."),
    "check_breaches": Metric(False, "Broken invariants that ZIPFUSION_CHECK=1 found."),
}  # fmt: skip
LEVELS = tuple(name for name, metric in METRICS.items() if metric.is_level)
COUNTS = tuple(name for name, metric in METRICS.items() if not metric.is_level)


@dataclass
class ZipFusionKVStats(KVConnectorStats):
    """One step's metrics in ``data``: levels as they are, counts since the last."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Self:
        counts = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in COUNTS}
        self.data = {**self.data, **other.data, **counts}
        return self

    def reduce(self) -> dict[str, int | float]:
        if self.is_empty():
            return {}
        return {
            "ZIPFUSION compact pages": self.data["compact_pages"],
            "bytes per token (raw)": f"{self.data['bytes_per_token']:.0f} ({self.data['bytes_per_token_raw']:.0f})",
            "eligible blocks": f"{self.data['eligible_share']:.1%}",
        }  # type: ignore[dict-item]  # vLLM only formats the values

    def is_empty(self) -> bool:
        return not self.data


class StepRecorder:
    """Collects the metrics of the scheduler's process, step by step."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self.num_blocks = 0
        self.num_eligible = 0
        self.totals = dict.fromkeys(COUNTS, 0)
        self._told = dict.fromkeys(COUNTS, 0)
        self.levels: dict[str, float] = {}
        self.mean_compact_chunks = 0.0
        """Chunks of a compact page, mean of those stored now; the last known while there is none."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of the counts in METRICS."""
        self.totals[name] += amount

    def add_measured(self, num_blocks: int, num_eligible: int) -> None:
        """Blocks that a rank measured, and how many of them it compressed."""
        self.num_blocks += num_blocks
        self.num_eligible += num_eligible

    def observe(
        self,
        *,
        resident_tokens: int,
        running: int,
        compact_pages: int,
        compact_chunks: int,
        used_chunks: int,
        outstanding_batches: int,
    ) -> None:
        """Levels of this step; ``compact_chunks`` are the chunks of the compact pages."""
        layout = self._layout
        table_share = layout.shape.table_page_bytes / PAGE_TOKENS
        chunk_share = layout.chunk_bytes / PAGE_TOKENS
        if compact_pages:
            self.mean_compact_chunks = compact_chunks / compact_pages
        self.levels = {
            "resident_tokens": resident_tokens,
            "peak_resident_tokens": max(resident_tokens, self.levels.get("peak_resident_tokens", 0)),
            "running": running,
            "peak_running": max(running, self.levels.get("peak_running", 0)),
            "compact_pages": compact_pages,
            "used_chunks": used_chunks,
            "num_chunks": layout.num_usable_chunks,
            "outstanding_batches": outstanding_batches,
            "bytes_per_token_raw": layout.chunks_per_raw_page * chunk_share + table_share,
            "bytes_per_token": self.mean_compact_chunks * chunk_share + table_share if compact_pages else 0.0,
            "eligible_share": self.num_eligible / self.num_blocks if self.num_blocks else 0.0,
        }

    def take(self) -> ZipFusionKVStats | None:
        """The metrics to send to the front-end now, or None before the first step."""
        if not self.levels:
            return None
        counts = {name: self.totals[name] - self._told[name] for name in COUNTS}
        self._told = dict(self.totals)
        return ZipFusionKVStats({**self.levels, **counts})


class ZipFusionPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus gauges and counters, one per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, metric in METRICS.items():
            full_name = f"vllm:zipfusion_{name}"
            if metric.is_level:
                parent = self._gauge_cls(  # type: ignore[call-arg]
                    name=full_name, documentation=metric.help, labelnames=labelnames, multiprocess_mode="mostrecent"
                )
            else:
                parent = self._counter_cls(name=full_name, documentation=metric.help, labelnames=labelnames)
            self._metrics[name] = create_metric_per_engine(parent, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            metric.set(value) if METRICS[name].is_level else metric.inc(value)
