"""Patch of vLLM: turn a request for ZIPFUSION into vLLM's configuration.

Target: ``vllm.engine.arg_utils.EngineArgs.create_engine_config`` (0.32, 0.33).
Reason: vLLM no longer reads VLLM_ATTENTION_BACKEND, ``--attention-backend`` takes only names of its own, and a plugin has no hook that sees
the engine's arguments; backend, block size and connector must be set together.
Guard: signature and fields are checked when the patch is applied, and a misfit refuses every request; without a request the original is called
as it is.
"""

import functools
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from zipfusion_vllm import compat, plugin
from zipfusion_vllm.config import CONFIG_KEY, ConfigError, ZipFusionConfig
from zipfusion_vllm.format import PAGE_TOKENS
from zipfusion_vllm.patches.errors import PatchError
from zipfusion_vllm.support import UnsupportedError, check_arena, check_engine_args, check_vllm_config

_MARKER = "_zipfusion_original"
_PARAMETERS = ("self", "usage_context", "headless")
_FIELDS = ("attention_backend", "attention_config", "block_size", "kv_transfer_config", "additional_config")


def apply() -> None:
    """Wrap ``EngineArgs.create_engine_config`` once. Where vLLM changed too much for it, the wrapper raises PatchError for every request."""
    original = EngineArgs.create_engine_config
    if hasattr(original, _MARKER):
        return
    misfit = find_misfit(EngineArgs)

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _take_request(self):
            return original(self, *args, **kwargs)
        try:
            compat.check_vllm_version()
            if misfit is not None:
                raise misfit
            with _request_written(self):
                vllm_config = original(self, *args, **kwargs)
            check_vllm_config(vllm_config)
            check_arena(vllm_config)
        except (UnsupportedError, ConfigError, PatchError, compat.VllmVersionError) as error:
            usage_context = args[0] if args else kwargs.get("usage_context")
            if getattr(usage_context, "name", None) == "OPENAI_API_SERVER":
                # `vllm serve`: the sentence, without a trace through vLLM.
                sys.exit(f"vllm serve: error: {error}")
            raise
        return vllm_config

    setattr(create_engine_config, _MARKER, original)
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def find_misfit(engine_args_cls: type) -> PatchError | None:
    """The error to raise if ``engine_args_cls`` lacks the method and fields that this patch was written for."""
    method = getattr(engine_args_cls, "create_engine_config", None)
    parameters = tuple(inspect.signature(method).parameters) if method is not None else ()
    missing = set(_FIELDS) - {field.name for field in fields(engine_args_cls)}
    if parameters == _PARAMETERS and not missing:
        return None
    found = f"it takes {parameters}" if parameters != _PARAMETERS else f"{', '.join(sorted(missing))} is gone"
    return PatchError(
        f"ZIPFUSION cannot patch EngineArgs.create_engine_config of this vLLM, {found}: install a vLLM in the tested range "
        f"({compat.TESTED_RANGE}), or a newer zipfusion-vllm."
    )


def _take_request(args: Any) -> bool:
    """Whether ``args`` or the environment ask for ZIPFUSION; if not, leaves this process and its children to stock vLLM."""
    if _name_of(getattr(args, "attention_backend", None)) == plugin.BACKEND_NAME or plugin.is_requested_by_env():
        return True
    plugin.deactivate()
    return False


@contextmanager
def _request_written(args: Any) -> Iterator[None]:
    """Put ZIPFUSION into engine arguments that ask for it, for as long as the config is made: arguments may be used again.

    Raises UnsupportedError or ConfigError for what shows in the arguments already.
    """
    from vllm.config import KVTransferConfig

    _check_no_other_backend(args)
    check_engine_args(args)
    options = ZipFusionConfig.from_env(os.environ)
    plugin.activate()
    before = {name: getattr(args, name) for name in _FIELDS}
    # No name: the CPU platform takes its own backend whatever it is, and says in the log that it cannot use ours.
    args.attention_backend = None
    args.block_size = PAGE_TOKENS
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="ZipFusionConnector",
        kv_connector_module_path="zipfusion_vllm.connector",
        # As a producer: consumers make vLLM hold freed blocks back until their step is processed, for loads that we never make.
        kv_role="kv_producer",
    )
    args.additional_config = {**(args.additional_config or {}), CONFIG_KEY: options.to_dict()}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def _check_no_other_backend(args: Any) -> None:
    for backend in (args.attention_backend, getattr(args.attention_config, "backend", None)):
        name = _name_of(backend)
        if name not in (None, "AUTO", plugin.BACKEND_NAME):
            raise UnsupportedError(
                f"{plugin.ENV_VARIABLE} asks for {plugin.BACKEND_NAME} and the arguments for attention backend {name}: drop one of them."
            )


def _name_of(backend: Any) -> str | None:
    """Upper-case name of an attention backend given as a string or as a member of vLLM's enumeration."""
    return None if backend is None else str(getattr(backend, "name", backend)).upper()
