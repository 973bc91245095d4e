"""Patch of llvmlite: let its library wrapper have no ``__dict__`` again, so that vLLM can start an engine after numba was imported.

Target: ``llvmlite.binding.ffi._lib_wrapper.__getattr__`` (llvmlite 0.47, which numba 0.65 brings with vLLM).
Reason: the wrapper answers every attribute name, ``__dict__`` too, with a function object. vLLM's CPU platform looks through the ``__dict__`` of all
objects of all modules when a worker starts (``triton_utils/dispatcher.py``, 0.32 and 0.33), takes that for a dict, and dies with an AttributeError.
That hits any second engine in a process that has used numba; our CPU kernels use it.
Guard: only names with two leading underscores change, which no LLVM function has; nothing is done when the wrapper is not there or behaves already.
"""

import functools
from typing import Any

_MARKER = "_zipfusion_original"


def apply() -> None:
    """Make the wrapper raise AttributeError for dunder names. Does nothing when that is the case already."""
    from llvmlite.binding import ffi

    if isinstance(getattr(ffi.lib, "__dict__", {}), dict):
        return
    wrapper = type(ffi.lib)
    original = wrapper.__getattr__

    @functools.wraps(original)
    def getattr_of_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    setattr(getattr_of_functions, _MARKER, original)
    wrapper.__getattr__ = getattr_of_functions
