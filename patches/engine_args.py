"""Patch of vLLM: turn a request for ZIPFUSION into vLLM's configuration.

Target: ``vllm.engine.arg_utils.EngineArgs.create_engine_config`` (0.32, 0.33).
Reason: vLLM no longer reads VLLM_ATTENTION_BACKEND, ``--attention-backend`` takes only names of its own, and a plugin has no hook that sees
the engine's arguments; backend, block size and connector must be set together.
Guard: signature and fields are checked when the patch is applied; without a request the original is called as it is.
"""

import functools
import inspect
import os
import sys
from dataclasses import fields
from typing import Any

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from zipfusion_vllm import compat, plugin
from zipfusion_vllm.config import CONFIG_KEY, ConfigError, ZipFusionConfig
from zipfusion_vllm.format import PAGE_TOKENS
from zipfusion_vllm.patches.errors import PatchError
from zipfusion_vllm.support import UnsupportedError, check_vllm_config

_MARKER = "_zipfusion_original"
_PARAMETERS = ("self", "usage_context", "headless")
_FIELDS = ("attention_backend", "attention_config", "block_size", "kv_transfer_config", "additional_config")

_variable_set_by_us = False


def apply() -> None:
    """Wrap ``EngineArgs.create_engine_config`` once. Raises PatchError when vLLM's engine arguments no longer look as this patch expects."""
    original = EngineArgs.create_engine_config
    if hasattr(original, _MARKER):
        return
    check_target(EngineArgs)

    @functools.wraps(original)
    def create_engine_config(self: Any, usage_context: UsageContext | None = None, headless: bool = False) -> Any:
        if not _take_request(self):
            return original(self, usage_context, headless)
        try:
            _write_request(self)
            vllm_config = original(self, usage_context, headless)
            check_vllm_config(vllm_config)
        except (UnsupportedError, ConfigError, compat.VllmVersionError) as error:
            if usage_context is UsageContext.OPENAI_API_SERVER:
                # `vllm serve`: the sentence, without a trace through vLLM.
                sys.exit(f"vllm serve: error: {error}")
            raise
        return vllm_config

    setattr(create_engine_config, _MARKER, original)
    EngineArgs.create_engine_config = create_engine_config


def check_target(engine_args_cls: type) -> None:
    """Raise PatchError unless ``engine_args_cls`` has the method and fields that this patch was written for."""
    method = getattr(engine_args_cls, "create_engine_config", None)
    parameters = tuple(inspect.signature(method).parameters) if method is not None else ()
    names = {field.name for field in fields(engine_args_cls)}
    if parameters != _PARAMETERS or not names.issuperset(_FIELDS):
        raise PatchError(
            "ZIPFUSION cannot patch EngineArgs.create_engine_config of this vLLM: it changed; install a vLLM in the tested range "
            f"({compat.TESTED_RANGE}), or a newer zipfusion-vllm."
        )


def _take_request(args: Any) -> bool:
    """Whether ``args`` or the environment ask for ZIPFUSION; leaves this process and its children in the state that fits."""
    global _variable_set_by_us
    if _variable_set_by_us:
        os.environ.pop(plugin.ENV_VARIABLE, None)
        _variable_set_by_us = False
    by_argument = str(args.attention_backend).upper() == plugin.BACKEND_NAME
    by_env = plugin.is_requested_by_env()
    if not (by_argument or by_env):
        if _activated:
            plugin.deactivate()
        return False
    if by_argument and not by_env:
        os.environ[plugin.ENV_VARIABLE] = plugin.BACKEND_NAME
        _variable_set_by_us = True
    return True


_activated = False


def _write_request(args: Any) -> None:
    """Put ZIPFUSION into engine arguments that ask for it. Raises UnsupportedError, ConfigError or VllmVersionError."""
    global _activated
    compat.check_vllm_version()
    backend = args.attention_backend
    configured = getattr(args.attention_config, "backend", None)
    for name in (backend, configured):
        if name is not None and str(getattr(name, "name", name)).upper() not in (plugin.BACKEND_NAME, "AUTO"):
            raise UnsupportedError(
                f"{plugin.ENV_VARIABLE} asks for ZIPFUSION and the arguments for attention backend {getattr(name, 'name', name)}: drop one of them."
            )
    if args.block_size not in (None, PAGE_TOKENS):
        raise UnsupportedError(
            f"ZIPFUSION's pages have {PAGE_TOKENS} tokens, and --block-size {args.block_size} was given: leave it unset or at {PAGE_TOKENS}."
        )
    if args.kv_transfer_config is not None and args.kv_transfer_config.kv_connector != "ZipFusionConnector":
        raise UnsupportedError(
            f"ZIPFUSION does not support other KV connectors, and {args.kv_transfer_config.kv_connector} was given: they read raw pages by block "
            "id; drop --kv-transfer-config."
        )
    options = ZipFusionConfig.from_env(os.environ)
    args.attention_backend = None
    args.block_size = PAGE_TOKENS
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="ZipFusionConnector",
        kv_connector_module_path="zipfusion_vllm.connector",
        # As a producer: consumers make vLLM hold freed blocks back until their step is processed, for loads that we never make.
        kv_role="kv_producer",
    )
    args.additional_config = {**(args.additional_config or {}), CONFIG_KEY: options.to_dict()}
    plugin.activate()
    _activated = True
