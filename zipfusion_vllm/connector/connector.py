"""``ZipFusionConnector``: vLLM's KV connector interface, used as a two-way channel and for its hooks in the step.

It transfers no KV: commands go down with each step, measured sizes come up, and what to do with them is in the two halves
(``scheduler.py``, ``worker.py``). vLLM makes one object in the scheduler's process and one in each worker.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from zipfusion_vllm.attention.registry import register_store
from zipfusion_vllm.attention.spec import ZipFullAttentionSpec
from zipfusion_vllm.config import ZipFusionConfig
from zipfusion_vllm.connector.messages import StepAnswers, StepCommands
from zipfusion_vllm.connector.scheduler import SchedulerHalf
from zipfusion_vllm.memory.manager import ZipFullAttentionManager
from zipfusion_vllm.metrics import ZipFusionKVStats, ZipFusionPromMetrics
from zipfusion_vllm.support import check_kv_cache_config

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from zipfusion_vllm.connector.worker import WorkerHalf

logger = init_logger(f"vllm.{__name__}")  # below vLLM's logger, so that its settings apply


class ZipFusionConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_kv_cache_config(kv_cache_config)
        self._config = ZipFusionConfig.from_vllm_config(vllm_config)
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        assert isinstance(spec, ZipFullAttentionSpec)
        self._spec = spec
        self._layout = spec.arena_layout(kv_cache_config.num_blocks)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """No KV leaves this engine, so a preempted request owes nothing to anyone."""
        return False

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        assert len(managers) == 1 and isinstance(managers[0], ZipFullAttentionManager)
        self._scheduler_half = SchedulerHalf(self._config, managers[0], self._spec.num_ranks)
        logger.info(self._start_line())

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self._scheduler_half is not None
        self._scheduler_half.admit(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler_half is not None
        return self._scheduler_half.build_commands(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler_half is not None
        answers = connector_output.kv_connector_worker_meta
        if answers is not None:
            assert isinstance(answers, StepAnswers)
            self._scheduler_half.apply_answers(answers)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler_half is not None
        self._scheduler_half.finish(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until the workers' answers are in; bounded, see ``LOST_AFTER_STEPS``."""
        return self._scheduler_half is not None and self._scheduler_half.has_outstanding

    def reset_cache(self) -> bool | None:
        """Nothing is cached here; the block pool resets what it caches."""
        return True

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Not at the top: the scheduler's and the front-end's processes need no kernels.
        from zipfusion_vllm.attention.page_store import PageStore, arena_of
        from zipfusion_vllm.connector.worker import WorkerHalf

        if len(kv_caches) != self._spec.num_layers:
            raise RuntimeError(
                f"ZIPFUSION planned {self._spec.num_layers} attention layers in one arena and vLLM made {len(kv_caches)}: "
                "this model's layers do not all keep K and V of their own; serve it without ZIPFUSION."
            )
        any_layer = next(iter(kv_caches.values()))
        store = PageStore(arena_of(any_layer), self._layout)
        register_store(any_layer, store, list(kv_caches), owner=self)
        self._worker_half = WorkerHalf(store, get_tensor_model_parallel_rank())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepCommands) and self._worker_half is not None
        self._worker_half.bind(connector_metadata)

    def wait_for_save(self) -> None:
        assert self._worker_half is not None
        self._worker_half.finish_step()

    def build_connector_worker_meta(self) -> StepAnswers | None:
        assert self._worker_half is not None
        return self._worker_half.take_answers()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        return

    # Statistics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler_half.recorder.take() if self._scheduler_half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return ZipFusionKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ZipFusionPromMetrics:
        return ZipFusionPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _start_line(self) -> str:
        layout, shape = self._layout, self._spec.shape
        expected = layout.expected_tokens(self._config.expected_eligible)
        compaction = "on" if self._config.compaction else "OFF (every page stays raw)"
        return (
            f"ZIPFUSION is active: {self._vllm_config.model_config.model}, page {shape.raw_page_bytes:,} bytes raw, "
            f"{shape.nominal_page_bytes:,} nominal, {layout.num_pages:,} logical pages, arena {layout.arena_bytes:,} bytes per rank "
            f"in {layout.num_usable_chunks:,} chunks of {layout.chunk_bytes:,}, reserve {self._spec.reserve} page per running request, "
            f"room for {layout.raw_tokens:,} tokens raw and {expected:,} at the expected {self._config.expected_eligible:.0%} eligible, "
            f"compaction {compaction}, checks {'on' if self._config.check else 'off'}, kernels: numba (CPU) around vLLM's CPU attention"
        )
