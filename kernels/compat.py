"""The Triton and Gluon names that differ between versions, in one place. Imported by every kernel module and by nobody else.

Plain Triton kernels need triton 3.4 or newer; Gluon's ``mma_v2`` with a batch dimension came with 3.5. What is missing is said in one
sentence when it is asked for, never in the middle of a launch.
"""

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError as error:  # pragma: no cover - a machine without triton
    raise ImportError("the GPU kernels of zipfusion-vllm need triton 3.4 or newer: install triton==3.6.0") from error

MIN_VERSION = (3, 4)
MIN_GLUON_VERSION = (3, 5)
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

if VERSION < MIN_VERSION:
    raise ImportError(
        f"triton {triton.__version__} is too old for the GPU kernels of zipfusion-vllm: install 3.4 or newer"
    )

gluon: Any = None
gl: Any = None
mma_v2: Any = None
GLUON_ERROR: str | None = None
"""Why Gluon kernels cannot be used here; None when they can be compiled."""

if VERSION < MIN_GLUON_VERSION:
    GLUON_ERROR = f"triton {triton.__version__} has no Gluon with batched mma_v2: install 3.5 or newer"
else:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.ampere import mma_v2
    except ImportError as error:  # pragma: no cover - names moved in a later version
        GLUON_ERROR = f"Gluon of triton {triton.__version__} lacks a name that the decode kernel needs ({error}): install triton 3.6"


def thread_barrier_name() -> str:
    """Gluon's barrier of all threads of a program: ``thread_barrier`` up to 3.6, ``barrier`` later."""
    return "thread_barrier" if hasattr(gl, "thread_barrier") else "barrier"


def interpreted() -> bool:
    """Whether plain Triton kernels run in the interpreter (``TRITON_INTERPRET=1``), on the CPU."""
    return bool(triton.knobs.runtime.interpret)


__all__ = ["GLUON_ERROR", "gl", "gluon", "interpreted", "mma_v2", "thread_barrier_name", "tl", "triton"]
