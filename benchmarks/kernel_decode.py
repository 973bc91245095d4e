#!/usr/bin/env python3
"""Decode attention over 12-bit pages against its peers on one GPU: cold L2, launches and graph replays, peers and ours alternating.

    python3 -m benchmarks.kernel_decode [--quick] [--json benchmarks/results/kernel_decode.h200.json]

Peers (vLLM's FlashAttention-3 and Triton attention, FlashInfer) are used if they can be imported. Every kernel of ours is checked against
float64 before it is timed.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernel_inputs import make_pages
from zipfusion_vllm.kernels.decode import DecodeAttention
from zipfusion_vllm.kernels.reference import attention, pages_to_values

DEVICE = "cuda"
SHAPES = [(1, 8192), (8, 8192), (32, 8192), (46, 8192), (57, 8192), (64, 2048), (4, 65536), (1, 131072), (256, 1024)]
VARIANTS = [  # q_heads, kv_heads, head_dim, query tokens at (32, 8192)
    (8, 8, 128, 1), (64, 8, 128, 1), (128, 8, 128, 1), (4, 1, 128, 1), (32, 8, 64, 1), (32, 8, 256, 1),
    (32, 8, 128, 2), (32, 8, 128, 4), (32, 8, 128, 8),
]  # fmt: skip


def mixed_lengths() -> list[int]:
    """128 lengths, log-uniform from 256 to 32768, seed 7."""
    generator = torch.Generator().manual_seed(7)
    return [int(256 * 128 ** float(u)) for u in torch.rand(128, generator=generator)]


@triton.jit
def read_kernel(x, out, n, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.program_id(0), n // (BLOCK * UNROLL), tl.num_programs(0)):
        for j in tl.static_range(UNROLL):
            total += tl.load(x + (i * UNROLL + j) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


class Timer:
    """Times calls with a cold L2: a 256 MiB buffer is written before each."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def time(self, functions: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        """Median and spread (us) of each function, as launches and as graph replays, taken in turn."""
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        for name, function in functions.items():
            for _ in range(3):
                function()
            torch.cuda.synchronize()
            calls[name, "us"] = function
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    function()
                calls[name, "us_graph"] = graph.replay
            except Exception as error:  # a peer that cannot be captured keeps its launch time
                print(f"{name}: no graph ({error})", file=sys.stderr)
        events: dict[tuple[str, str], list[Any]] = {key: [] for key in calls}
        for _ in range(self.repeat):
            for key, call in calls.items():
                self.flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                events[key].append((begin, end))
        torch.cuda.synchronize()
        result: dict[str, dict[str, float]] = {name: {} for name in functions}
        for (name, field), pairs in events.items():
            times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
            result[name][field] = round(times[len(times) // 2], 2)
            result[name][field + "_p10"], result[name][field + "_p90"] = (
                round(times[int(len(times) * s)], 2) for s in (0.1, 0.9)
            )
        return result


def peers(lengths: list[int], q_heads: int, kv_heads: int, dim: int, query: int) -> dict[str, Callable[[], object]]:
    """The peers' runs over plain BF16 pages of the same lengths; what cannot be had is left out with a line on stderr."""
    counts = [-(-n // 16) for n in lengths]
    total, batch, longest = sum(counts), len(lengths), max(lengths)
    k = torch.randn(total, 16, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    v = torch.randn_like(k)
    ids = torch.randperm(total, device=DEVICE, dtype=torch.int32)
    table = torch.zeros(batch, max(counts), dtype=torch.int32, device=DEVICE)
    for i, part in enumerate(ids.split(counts)):
        table[i, : len(part)] = part
    q = torch.randn(batch * query, q_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    starts = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * query
    seq_lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    out = torch.empty_like(q)
    found: dict[str, Callable[[], object]] = {}

    def flash_attention_3() -> Callable[[], object]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

        plan = get_scheduler_metadata(
            batch_size=batch, max_seqlen_q=query, max_seqlen_k=longest, num_heads_q=q_heads, num_heads_kv=kv_heads,
            headdim=dim, cache_seqlens=seq_lens, qkv_dtype=torch.bfloat16, cu_seqlens_q=starts, page_size=16, causal=True,
            window_size=(-1, -1), num_splits=0,
        )  # fmt: skip
        return lambda: flash_attn_varlen_func(
            q, k, v, max_seqlen_q=query, cu_seqlens_q=starts, max_seqlen_k=longest, seqused_k=seq_lens, block_table=table,
            softmax_scale=dim**-0.5, causal=True, fa_version=3, scheduler_metadata=plan, out=out, num_splits=0,
        )  # fmt: skip

    def vllm_triton() -> Callable[[], object]:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        one = torch.ones(batch, kv_heads, device=DEVICE)
        return lambda: unified_attention(
            q=q, k=k, v=v, out=out, cu_seqlens_q=starts, max_seqlen_q=query, seqused_k=seq_lens, max_seqlen_k=longest,
            softmax_scale=dim**-0.5, causal=True, window_size=(-1, -1), block_table=table, softcap=0, q_descale=None,
            k_descale=one, v_descale=one,
        )  # fmt: skip

    def flashinfer(tensor_cores: bool) -> Callable[[], object]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE), "NHD", use_tensor_cores=tensor_cores
        )
        indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        last = torch.tensor([(n - 1) % 16 + 1 for n in lengths], dtype=torch.int32)
        wrapper.plan(
            indptr, ids.cpu(), last, q_heads, kv_heads, dim, 16, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
        )
        return lambda: wrapper.run(q, (k, v))

    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "flash_attention_3": flash_attention_3,
        "vllm_triton": vllm_triton,
    }
    if query == 1:
        makers["flashinfer_tensor_cores"] = lambda: flashinfer(True)
        makers["flashinfer_cuda_cores"] = lambda: flashinfer(False)
    for name, make in makers.items():
        try:
            run = make()
            run()
            torch.cuda.synchronize()
            found[name] = run
        except Exception as error:
            print(
                f"{name} left out at {q_heads}/{kv_heads}/{dim}: {type(error).__name__} {str(error)[:200]}",
                file=sys.stderr,
            )
    return found


def ours(
    lengths: list[int], q_heads: int, kv_heads: int, dim: int, query: int, eligible: float
) -> tuple[Callable[[], object], int, float]:
    """(run, compressed bytes read, relative error against float64 on the shortest sequence)."""
    counts = [-(-n // 16) for n in lengths]
    total = sum(counts)
    pages = make_pages(total, kv_heads, dim, eligible, pool=512)
    ids = torch.randperm(total, device=DEVICE, dtype=torch.int32)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=DEVICE)
    for i, part in enumerate(ids.split(counts)):
        table[i, : len(part)] = part
    seq_lens = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, device=DEVICE, dtype=torch.int32) * query
    q = torch.randn(len(lengths) * query, q_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    decode = DecodeAttention(q_heads, kv_heads, dim, DEVICE, query)
    decode.plan(seq_lens)
    decode.run(q, pages.arena, pages.table, table, seq_lens, starts, out)
    i = min(range(len(lengths)), key=lengths.__getitem__)
    rows = pages.table[table[i, : counts[i]].long()].flatten(0, 1)
    k, v = (
        pages_to_values(pages.arena, rows, dim, kind)
        .view(counts[i], kv_heads, 16, dim)
        .transpose(1, 2)
        .flatten(0, 1)[: lengths[i]]
        for kind in ("k", "v")
    )
    mine = slice(i * query, (i + 1) * query)
    want, _ = attention(q[mine].double(), k.double(), v.double(), dim**-0.5)
    error = float((out[mine].double() - want).norm() / want.norm())
    assert error < 5e-3, error
    run = lambda: decode.run(q, pages.arena, pages.table, table, seq_lens, starts, out)  # noqa: E731
    return run, pages.arena.numel() - 64 * 256, error


def machine() -> dict[str, str]:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {"gpu": torch.cuda.get_device_name(0), "driver": driver.stdout.strip(), "torch": torch.__version__,
            "triton": triton.__version__, "python": platform.python_version(), "command": " ".join(sys.argv)}  # fmt: skip


def read_ceiling(timer: Timer) -> float:
    """Bytes per second of a kernel that only reads 2 GiB: the best of a few launch shapes."""
    x = torch.randint(0, 2**30, (2**29,), dtype=torch.int32, device=DEVICE)
    best = 0.0
    for block, unroll, warps, waves in [(2048, 4, 8, 2), (2048, 8, 8, 4), (4096, 4, 8, 2), (1024, 8, 4, 8)]:
        programs = torch.cuda.get_device_properties(0).multi_processor_count * waves
        out = torch.empty(programs * block, dtype=torch.int32, device=DEVICE)
        call = lambda: read_kernel[(programs,)](x, out, x.numel(), block, unroll, num_warps=warps)  # noqa: B023, E731
        best = max(best, x.numel() * 4 / timer.time({"read": call})["read"]["us"] * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--quick", action="store_true", help="three shapes, no variants")
    parser.add_argument("--repeat", type=int, default=21)
    args = parser.parse_args()
    timer = Timer(args.repeat)
    ceiling = read_ceiling(timer)
    print(f"read ceiling {ceiling / 1e12:.2f} TB/s")
    cells = [([length] * batch, batch, length, 32, 8, 128, 1) for batch, length in SHAPES]
    mixed = mixed_lengths()
    cells.append((mixed, len(mixed), 0, 32, 8, 128, 1))
    cells += [([8192] * 32, 32, 8192, *variant) for variant in VARIANTS]
    if args.quick:
        cells = [cells[0], cells[3], cells[8]]
    rows = []
    for lengths, batch, length, q_heads, kv_heads, dim, query in cells:
        functions: dict[str, Callable[[], object]] = {}
        info: dict[str, tuple[str, float | None, int, float | None]] = {}
        for eligible in (1.0, 0.92, 0.0):
            name = f"zipfusion_{eligible:g}"
            functions[name], num_bytes, error = ours(lengths, q_heads, kv_heads, dim, query, eligible)
            info[name] = ("zipfusion", eligible, num_bytes, error)
        for name, run in peers(lengths, q_heads, kv_heads, dim, query).items():
            functions[name] = run
            info[name] = (name, None, sum(lengths) * kv_heads * dim * 4, None)
        times = timer.time(functions)
        best = min((times[n]["us"] for n in times if info[n][1] is None), default=float("nan"))
        best_graph = min(
            (times[n].get("us_graph", float("inf")) for n in times if info[n][1] is None), default=float("nan")
        )
        line = []
        for name, result in times.items():
            kernel, share, num_bytes, worst = info[name]
            rows.append({"kernel": kernel, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "query_tokens": query,
                         "batch": batch, "length": length or "mixed", "eligible": share, **result,
                         "read_tbps": round(num_bytes / result["us"] / 1e6, 3), "error": worst,
                         "ratio": round(best / result["us"], 3), "ratio_graph": round(best_graph / result.get("us_graph", float("nan")), 3)})  # fmt: skip
            line.append(f"{name[:12]} {result['us']:.1f}/{result.get('us_graph', 0):.1f}")
        print((q_heads, kv_heads, dim, query), batch, length or "mixed", "|", "  ".join(line), flush=True)
        del functions
        torch.cuda.empty_cache()
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"machine": machine(), "commit": args.commit, "read_ceiling_tbps": round(ceiling / 1e12, 3),
                           "mixed_lengths": mixed_lengths.__doc__, "rows": rows}, file, indent=1)  # fmt: skip


if __name__ == "__main__":
    main()
