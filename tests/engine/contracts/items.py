"""What ZIPFUSION leans on in vLLM: names, signatures, fields and steps, as data.

``scripts/extract_vllm_contract.py`` looks each of them up in a vLLM source tree; ``test_contracts.py`` compares. A vLLM release that breaks
one of them breaks a test here before it breaks a user.
"""

from typing import NamedTuple


class Contract(NamedTuple):
    """One definition in vLLM's source. Empty tuples ask for nothing beyond its existence."""

    file: str
    """Path below the package ``vllm``."""
    name: str
    """``Class``, ``Class.method`` or ``function``."""
    user: str
    """The module of ours that leans on it."""
    parameters: tuple[str, ...] | None = None
    """Exactly these, in this order (``*args`` and ``**kwargs`` with their stars): of what we override or wrap."""
    accepts: tuple[str, ...] = ()
    """These at least: of what we call by keyword."""
    fields: tuple[str, ...] = ()
    """Annotated names in the body of a class: of what we read."""
    kind: str = ""
    """``property``, ``classmethod`` or ``staticmethod``."""
    contains: tuple[str, ...] = ()
    """Expressions or statements in its body, as ``ast.unparse`` writes them: behaviour that we rely on."""


_ARGS = "engine/arg_utils.py"
_BACKEND = "v1/attention/backend.py"
_REGISTRY = "v1/attention/backends/registry.py"
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
_CONNECTOR_METRICS = "distributed/kv_transfer/kv_connector/v1/metrics.py"
_POOL = "v1/core/block_pool.py"
_MANAGER = "v1/core/single_type_kv_cache_manager.py"
_SPEC = "v1/kv_cache_interface.py"
_SPEC_REGISTRY = "v1/kv_cache_spec_registry.py"
_SCHEDULER = "v1/core/sched/scheduler.py"
_CPU_ATTENTION = "v1/attention/backends/cpu_attn.py"

CONTRACTS: tuple[Contract, ...] = (
    # Plugin and engine arguments
    Contract("plugins/__init__.py", "load_general_plugins", "plugin.py", parameters=()),
    Contract("v1/engine/core.py", "EngineCore.__init__", "plugin.py", contains=("load_general_plugins()",)),
    Contract("v1/worker/worker_base.py", "WorkerWrapperBase.init_worker", "plugin.py", contains=("load_general_plugins()",)),
    Contract(
        _ARGS,
        "EngineArgs",
        "patches/engine_args.py",
        fields=(
            "attention_backend",
            "attention_config",
            "block_size",
            "kv_transfer_config",
            "additional_config",
            "kv_cache_dtype",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "enable_dbo",
            "ubatch_size",
            "enable_sleep_mode",
            "kv_offloading_size",
            "prefix_match_unit",
        ),
    ),
    Contract(
        _ARGS,
        "EngineArgs.create_engine_config",
        "patches/engine_args.py",
        parameters=("self", "usage_context", "headless"),
        contains=("additional_config=self.additional_config", "kv_transfer_config=self.kv_transfer_config"),
    ),
    Contract(_ARGS, "EngineArgs.__post_init__", "plugin.py", contains=("load_general_plugins()",)),
    Contract("config/vllm.py", "VllmConfig", "config.py", fields=("additional_config", "kv_transfer_config")),
    Contract("config/kv_transfer.py", "KVTransferConfig", "patches/engine_args.py", fields=("kv_connector", "kv_connector_module_path", "kv_role")),
    Contract("platforms/interface.py", "Platform.validate_environ", "plugin.py", contains=("env not in envs.environment_variables",)),
    Contract(
        "config/cache.py",
        "CacheConfig",
        "support.py",
        fields=("block_size", "cache_dtype", "num_gpu_blocks_override", "kv_cache_memory_bytes", "prefix_match_unit"),
    ),
    Contract("config/model.py", "ModelConfig.get_sliding_window", "support.py", parameters=("self",)),
    Contract("config/model.py", "ModelConfig.get_head_size", "support.py", parameters=("self",)),
    Contract("config/model.py", "ModelConfig.get_num_layers", "support.py", parameters=("self", "parallel_config")),
    Contract("config/model.py", "ModelConfig.get_num_kv_heads", "support.py", accepts=("self", "parallel_config")),
    Contract("config/model.py", "ModelConfig.use_mla", "support.py", kind="property"),
    Contract("config/model.py", "ModelConfig.is_encoder_decoder", "support.py", kind="property"),
    Contract("config/model.py", "ModelConfig.is_hybrid", "support.py", kind="property"),
    Contract("config/model.py", "ModelConfig.is_attention_free", "support.py", kind="property"),
    Contract("config/model.py", "ModelConfig.is_mm_prefix_lm", "support.py", kind="property"),
    Contract("config/model.py", "ModelConfig.rswa_window", "support.py", kind="property"),
    # Attention backend
    Contract(_REGISTRY, "register_backend", "plugin.py", parameters=("backend", "class_path", "is_mamba")),
    Contract(_REGISTRY, "AttentionBackendEnum", "plugin.py"),
    Contract(_REGISTRY, "AttentionBackendEnum.clear_override", "plugin.py", parameters=("self",)),
    Contract("v1/attention/selector.py", "_cached_get_attn_backend", "plugin.py", kind="cache"),
    Contract(
        "platforms/cpu.py",
        "CpuPlatform.get_attn_backend_cls",
        "plugin.py",
        contains=("return AttentionBackendEnum.CPU_ATTN.get_path()",),
    ),
    Contract(_BACKEND, "AttentionBackend.customize_spec", "attention/cpu.py", parameters=("cls", "spec"), kind="classmethod"),
    Contract(
        _BACKEND,
        "AttentionBackend.get_supported_kernel_block_sizes",
        "attention/cpu.py",
        parameters=("kv_cache_spec",),
        kind="staticmethod",
    ),
    Contract(_BACKEND, "AttentionBackend", "attention/cpu.py", fields=("forward_includes_kv_cache_update",)),
    Contract(
        _BACKEND,
        "AttentionMetadataBuilder.__init__",
        "attention/cpu.py",
        parameters=("self", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    ),
    Contract(
        _BACKEND,
        "AttentionMetadataBuilder.build",
        "attention/cpu.py",
        parameters=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Contract(
        _BACKEND,
        "CommonAttentionMetadata",
        "attention/cpu.py",
        fields=("query_start_loc", "seq_lens", "num_reqs", "num_actual_tokens", "block_table_tensor", "slot_mapping", "causal"),
    ),
    Contract("v1/worker/utils.py", "customize_attention_spec", "attention/spec.py", parameters=("backend", "spec"), contains=("backend.customize_spec(spec)",)),
    Contract(
        "model_executor/layers/attention/attention.py",
        "unified_kv_cache_update",
        "attention/cpu.py",
        contains=("attn_layer.impl.do_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping)",),
    ),
    Contract(_CPU_ATTENTION, "CPUAttentionBackend.get_name", "attention/cpu.py", contains=("return 'CPU_ATTN'",)),
    Contract(
        _CPU_ATTENTION,
        "CPUAttentionBackendImpl.__init__",
        "attention/cpu.py",
        parameters=(
            "self",
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "alibi_slopes",
            "sliding_window",
            "kv_cache_dtype",
            "logits_soft_cap",
            "attn_type",
            "kv_sharing_target_layer_name",
            "sinks",
        ),
    ),
    Contract(_CPU_ATTENTION, "_get_attn_isa", "attention/cpu.py", accepts=("dtype", "block_size", "head_size")),
    Contract("_custom_ops.py", "cpu_attn_reshape_and_cache", "attention/cpu.py", accepts=("key", "value", "key_cache", "value_cache", "slot_mapping", "isa", "k_scale", "v_scale")),
    Contract(
        "_custom_ops.py",
        "cpu_attention_with_kv_cache",
        "attention/cpu.py",
        accepts=("query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale", "causal", "block_table", "softcap", "scheduler_metadata", "s_aux"),
    ),
    Contract(
        "_custom_ops.py",
        "cpu_attn_get_scheduler_metadata",
        "attention/cpu.py",
        accepts=("num_reqs", "num_heads", "num_kv_heads", "head_dim", "seq_lens", "dtype", "query_start_loc", "causal", "sliding_window_size", "isa", "enable_kv_split"),
    ),
    # KV cache spec, sizes and memory
    Contract(
        _SPEC,
        "AttentionSpec",
        "attention/spec.py",
        fields=("num_kv_heads", "head_size", "dtype", "head_size_v", "page_size_padded", "state_content_bytes", "tokens_per_state"),
    ),
    Contract(_SPEC, "AttentionSpec.page_size_bytes", "attention/spec.py", kind="property"),
    Contract(
        _SPEC,
        "AttentionSpec.state_content_size_bytes",
        "attention/spec.py",
        kind="property",
        contains=("self.state_content_bytes",),
    ),
    Contract(_SPEC, "FullAttentionSpec", "attention/spec.py", fields=("sliding_window", "attention_chunk_size")),
    Contract(_SPEC, "FullAttentionSpec.max_memory_usage_bytes", "attention/spec.py", parameters=("self", "vllm_config")),
    Contract(_SPEC, "FullAttentionSpec.merge", "attention/spec.py", parameters=("cls", "specs"), kind="classmethod"),
    Contract(_SPEC, "KVCacheConfig", "connector/connector.py", fields=("num_blocks", "kv_cache_groups", "kv_cache_tensors")),
    Contract(_SPEC, "KVCacheConfig.needs_kv_cache_zeroing", "support.py", kind="property"),
    Contract(_SPEC_REGISTRY, "KVCacheSpecRegistry._ensure_registered", "attention/spec.py", accepts=("cls",), kind="classmethod"),
    Contract(
        _SPEC_REGISTRY,
        "KVCacheSpecRegistry.register",
        "attention/spec.py",
        parameters=("cls", "kvcache_spec_cls", "manager_class", "uniform_type_base_spec"),
        kind="classmethod",
    ),
    Contract(
        "v1/worker/utils.py",
        "allocate_kv_cache",
        "attention/page_store.py",
        contains=("assert len(sizes) == 1", "torch.zeros(buf_size, dtype=torch.int8, device=device)"),
    ),
    # Block pool and manager
    Contract(_POOL, "BlockPool.get_num_free_blocks", "memory/block_pool.py", parameters=("self",)),
    Contract(_POOL, "BlockPool.get_new_blocks", "memory/block_pool.py", parameters=("self", "num_blocks"), contains=("num_blocks > self.get_num_free_blocks()", "self._maybe_evict_cached_block(block)")),
    Contract(_POOL, "BlockPool.free_blocks", "memory/block_pool.py", parameters=("self", "ordered_blocks")),
    Contract(_POOL, "BlockPool.touch", "memory/block_pool.py", parameters=("self", "blocks")),
    Contract(_POOL, "BlockPool._maybe_evict_cached_block", "memory/block_pool.py", parameters=("self", "block")),
    Contract(_POOL, "BlockPool.evict_blocks", "memory/block_pool.py", parameters=("self", "block_ids"), contains=("self._maybe_evict_cached_block(block)",)),
    Contract(_POOL, "BlockPool.reset_prefix_cache", "memory/block_pool.py", parameters=("self",), contains=("self.num_gpu_blocks - self.get_num_free_blocks()",)),
    Contract(_POOL, "BlockPool.get_usage", "memory/block_pool.py", parameters=("self",)),
    Contract(_POOL, "BlockPool.unpin_blocks", "memory/block_pool.py", parameters=("self", "blocks", "on_reuse")),
    Contract(_POOL, "BlockPool.__init__", "memory/block_pool.py", contains=("self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)", "self.null_block = self.free_block_queue.popleft()", "self.hash_block_size = hash_block_size")),
    Contract("v1/core/kv_cache_utils.py", "KVCacheBlock", "memory/block_pool.py", fields=("block_id", "ref_cnt", "is_null")),
    Contract("v1/core/kv_cache_utils.py", "FreeKVCacheBlockQueue.__init__", "memory/block_pool.py", contains=("self.num_free_blocks = len(blocks)",)),
    Contract("v1/core/kv_cache_utils.py", "KVCacheBlock.block_hash", "memory/block_pool.py", kind="property"),
    Contract(
        "v1/core/kv_cache_coordinator.py",
        "KVCacheCoordinator.__init__",
        "memory/manager.py",
        contains=("self.block_pool = BlockPool(", "block_pool=self.block_pool", "self.single_type_managers = tuple("),
    ),
    Contract(_MANAGER, "SingleTypeKVCacheManager.__init__", "memory/manager.py", accepts=("self", "kv_cache_spec", "block_pool", "enable_caching"), contains=("self.req_to_blocks: ",)),
    Contract(_MANAGER, "FullAttentionManager", "memory/manager.py"),
    Contract(
        _MANAGER,
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "memory/manager.py",
        accepts=("self", "request_id", "num_tokens", "new_computed_blocks"),
    ),
    Contract(_MANAGER, "SingleTypeKVCacheManager._get_num_evictable_blocks", "memory/manager.py", parameters=("cls", "blocks"), kind="classmethod"),
    Contract(
        "v1/core/kv_cache_manager.py",
        "KVCacheManager.allocate_slots",
        "memory/manager.py",
        contains=("required_blocks > self.block_pool.get_num_free_blocks()", "self.block_pool.get_num_free_blocks() - reserved_blocks"),
    ),
    # The channel
    Contract(_CONNECTOR, "SupportsHMA.request_finished_all_groups", "connector/connector.py", parameters=("self", "request", "block_ids")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.__init__", "connector/connector.py", parameters=("self", "vllm_config", "role", "kv_cache_config")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.requires_kv_delivery", "connector/connector.py", kind="property"),
    Contract(_CONNECTOR, "KVConnectorBase_V1.bind_kv_cache_manager", "connector/connector.py", parameters=("self", "kv_cache_manager")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.get_num_new_matched_tokens", "connector/connector.py", parameters=("self", "request", "num_computed_tokens")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.update_state_after_alloc", "connector/connector.py", parameters=("self", "request", "blocks", "num_external_tokens")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.build_connector_meta", "connector/connector.py", parameters=("self", "scheduler_output")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.update_connector_output", "connector/connector.py", parameters=("self", "connector_output")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.request_finished", "connector/connector.py", parameters=("self", "request", "block_ids")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.has_pending_push_work", "connector/connector.py", parameters=("self",)),
    Contract(_CONNECTOR, "KVConnectorBase_V1.reset_cache", "connector/connector.py", parameters=("self",)),
    Contract(_CONNECTOR, "KVConnectorBase_V1.register_kv_caches", "connector/connector.py", parameters=("self", "kv_caches")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.handle_preemptions", "connector/connector.py", parameters=("self", "kv_connector_metadata")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.bind_connector_metadata", "connector/connector.py", parameters=("self", "connector_metadata")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.start_load_kv", "connector/connector.py", parameters=("self", "forward_context", "**kwargs")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.wait_for_layer_load", "connector/connector.py", parameters=("self", "layer_name")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.save_kv_layer", "connector/connector.py", parameters=("self", "layer_name", "kv_layer", "attn_metadata", "**kwargs")),
    Contract(_CONNECTOR, "KVConnectorBase_V1.wait_for_save", "connector/connector.py", parameters=("self",)),
    Contract(_CONNECTOR, "KVConnectorBase_V1.build_connector_worker_meta", "connector/connector.py", parameters=("self",)),
    Contract(_CONNECTOR, "KVConnectorBase_V1.get_kv_connector_stats", "connector/connector.py", parameters=("self",)),
    Contract(_CONNECTOR, "KVConnectorBase_V1.build_kv_connector_stats", "connector/connector.py", parameters=("cls", "data"), kind="classmethod"),
    Contract(
        _CONNECTOR,
        "KVConnectorBase_V1.build_prom_metrics",
        "connector/connector.py",
        parameters=("cls", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        kind="classmethod",
    ),
    Contract(_CONNECTOR, "KVConnectorWorkerMetadata.aggregate", "connector/messages.py", parameters=("self", "other")),
    Contract(_CONNECTOR, "KVConnectorMetadata", "connector/messages.py"),
    Contract(_CONNECTOR_METRICS, "KVConnectorStats", "metrics.py", fields=("data",)),
    Contract(_CONNECTOR_METRICS, "KVConnectorStats.aggregate", "metrics.py", parameters=("self", "other")),
    Contract(_CONNECTOR_METRICS, "KVConnectorPromMetrics.observe", "metrics.py", parameters=("self", "transfer_stats_data", "engine_idx")),
    Contract("v1/outputs.py", "KVConnectorOutput", "connector/connector.py", fields=("kv_connector_worker_meta", "kv_connector_stats")),
    Contract(
        "v1/core/sched/output.py",
        "SchedulerOutput",
        "connector/scheduler.py",
        fields=("num_scheduled_tokens", "finished_req_ids", "preempted_req_ids", "kv_connector_metadata"),
    ),
    Contract("v1/request.py", "Request.__init__", "connector/scheduler.py", contains=("self.num_computed_tokens = 0",)),
    Contract("v1/request.py", "Request.num_tokens", "connector/scheduler.py", kind="property"),
    Contract(
        "distributed/kv_transfer/kv_connector/utils.py",
        "KVOutputAggregator.aggregate",
        "connector/messages.py",
        contains=("aggregated_kv_connector_worker_meta.aggregate(",),
    ),
    Contract(
        "v1/worker/kv_connector_model_runner_mixin.py",
        "KVConnectorModelRunnerMixin._get_kv_connector_output",
        "connector/worker.py",
        contains=("kv_connector.bind_connector_metadata(scheduler_output.kv_connector_metadata)", "output.kv_connector_worker_meta = kv_connector.build_connector_worker_meta()"),
    ),
    # The scheduler
    Contract(
        _SCHEDULER,
        "Scheduler.__init__",
        "connector/connector.py",
        contains=("self.connector.bind_kv_cache_manager(self.kv_cache_manager)", "multiple_inflight_batches and kv_transfer_config.is_kv_consumer"),
    ),
    Contract(_SCHEDULER, "Scheduler._update_from_kv_xfer_finished", "connector/connector.py", contains=("self.connector.update_connector_output(kv_connector_output)",)),
    Contract(_SCHEDULER, "Scheduler._connector_finished", "connector/connector.py", contains=("self.connector.request_finished_all_groups(",)),
    Contract(_SCHEDULER, "Scheduler.make_stats", "patches/scheduler_stats.py", accepts=("self", "kv_connector_stats"), contains=("self.connector_prefix_cache_stats = PrefixCacheStats()",)),
    Contract("v1/metrics/stats.py", "BaseCacheStats", "patches/scheduler_stats.py", fields=("reset", "queries")),
    Contract("v1/metrics/utils.py", "create_metric_per_engine", "metrics.py", parameters=("metric", "per_engine_labelvalues")),
    Contract(_SCHEDULER, "Scheduler._preempt_request", "tests", accepts=("self", "request")),
)  # fmt: skip
