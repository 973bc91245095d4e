"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every process that it starts.

Without a request for ZIPFUSION it changes nothing but to look, when engine arguments become a config, whether one is there
(``patches/engine_args.py``). The request is the environment variable VLLM_ATTENTION_BACKEND=ZIPFUSION or the argument of the same meaning. The
processes of an engine build their attention layers soon after ``register`` and cannot ask it: they know by a variable that they inherit.
"""

import logging
import os

from zipfusion_vllm import compat
from zipfusion_vllm.patches.errors import PatchError

ENV_VARIABLE = "VLLM_ATTENTION_BACKEND"
"""vLLM no longer reads it: this package makes it work, for ZIPFUSION alone."""
BACKEND_NAME = "ZIPFUSION"
ENGINE_VARIABLE = "_ZIPFUSION_ENGINE"
"""Set in the process whose last engine config asks for ZIPFUSION, so that the processes it starts are activated too."""
CPU_BACKEND = "zipfusion_vllm.attention.cpu.ZipCPUAttentionBackend"

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, so that its settings apply


def register() -> None:
    """Called by vLLM, more than once in some processes. Raises PatchError if this vLLM cannot be patched and ZIPFUSION was asked for.

    A vLLM out of the tested range is refused later, when an engine asks for ZIPFUSION: as arguments may, which are not known yet.
    """
    requested = is_requested_by_env() or ENGINE_VARIABLE in os.environ
    try:
        # Imports vLLM, and so may fail on versions that nobody has seen yet: of no concern to those who did not ask.
        from zipfusion_vllm.patches import engine_args

        engine_args.apply()
        if requested and compat.is_tested():
            activate()
    except Exception as error:
        if not requested:
            logger.debug("ZIPFUSION stays out of this vLLM: %s", error)
            return
        if isinstance(error, PatchError):
            raise
        raise PatchError(
            f"ZIPFUSION cannot be loaded into this vLLM ({type(error).__name__}: {error}): install a vLLM in the tested range "
            f"({compat.TESTED_RANGE}), or a newer zipfusion-vllm."
        ) from error


def is_requested_by_env() -> bool:
    return os.environ.get(ENV_VARIABLE, "").upper() == BACKEND_NAME


def activate() -> None:
    """Put ZIPFUSION's backend, spec and patches in place in this process. May be called again."""
    import vllm.envs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from zipfusion_vllm.patches import scheduler_stats

    os.environ[ENGINE_VARIABLE] = "1"
    # Known to vLLM, the variable gives no warning, nor an error under --fail-on-environ-validation.
    vllm.envs.environment_variables.setdefault(ENV_VARIABLE, lambda: os.environ.get(ENV_VARIABLE))
    scheduler_stats.apply()
    if current_platform.is_cpu():
        # The CPU platform takes its own backend whatever is asked for, so ours stands in for it.
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
        _forget_chosen_backends()


def deactivate() -> None:
    """Give this process, and those that it starts from now on, stock vLLM back: for an engine without ZIPFUSION. Does nothing without ``activate``."""
    if os.environ.pop(ENGINE_VARIABLE, None) is None:
        return
    import vllm.envs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    vllm.envs.environment_variables.pop(ENV_VARIABLE, None)
    AttentionBackendEnum.CPU_ATTN.clear_override()
    _forget_chosen_backends()


def _forget_chosen_backends() -> None:
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
