"""The Gluon decode kernel compiles to machine code for every architecture that it is meant for, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from zipfusion_vllm.kernels.decode_gluon import decode_kernel  # noqa: E402

TYPES = {
    "q": "*bf16",
    "out": "*bf16",
    "lse": "*fp32",
    "parts_o": "*fp32",
    "parts_ml": "*fp32",
    "scale": "fp32",
    "cap": "fp32",
}
POINTERS = {"arena", "table", "block_table", "seq_lens", "query_start", "plan", "counters"}


def compile_decode(capability, dim=128, columns=8, group=4, query=1, registers=168):
    constants = {
        "KV_HEADS": 8, "GROUP": group, "D": dim, "COLS": columns, "COL_BLOCKS": -(-group * query // columns), "MAX_QUERY": query, "W": 4,
        "HAS_LSE": True, "HAS_CAP": False, "PREFETCH_V": dim < 256,
    }  # fmt: skip
    names = decode_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "*i32" if name in POINTERS else "i32")
        for name in names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = GluonASTSource(decode_kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "maxnreg": registers}
    )


def compiled(*arguments):
    """Compile in a process of its own: the other tests of this folder switch Triton's interpreter on for theirs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_compiles(capability):
    assert compiled(capability) == "mma movmatrix\n"


@pytest.mark.parametrize(
    ("dim", "columns", "group", "query", "registers"),
    [(64, 8, 4, 1, 96), (256, 8, 4, 1, 255), (128, 16, 16, 1, 255), (128, 16, 4, 8, 255)],
)
def test_compiles_other_shapes(dim, columns, group, query, registers):
    assert compiled(90, dim, columns, group, query, registers) == "mma movmatrix\n"


if __name__ == "__main__":
    kernel = compile_decode(*map(int, sys.argv[1:]))
    assert kernel.asm["cubin"]
    print("mma" * ("mma.sync.aligned.m16n8k16" in kernel.asm["ptx"]), "movmatrix" * ("movmatrix" in kernel.asm["ptx"]))
