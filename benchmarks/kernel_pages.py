#!/usr/bin/env python3
"""Page write, compaction, restore, and 'restore, then FlashAttention' on one GPU: cold L2, medians; bytes per second of raw data.

python3 -m benchmarks.kernel_pages [--json benchmarks/results/kernel_pages.h200.json]
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernel_decode import Timer, machine, ours
from benchmarks.kernel_inputs import make_pages, random_values
from zipfusion_vllm.format import RAW_BASE, START_BYTES, PageShape
from zipfusion_vllm.kernels.compaction import Compactor
from zipfusion_vllm.kernels.pages import restore_pages, write_tokens
from zipfusion_vllm.memory.layout import ArenaLayout

DEVICE = "cuda"
HEADS, DIM = 8, 128


def write_rows(timer: Timer) -> list[dict]:
    rows = []
    pages = make_pages(8192, HEADS, DIM, 1.0, raw=True)
    cache = torch.zeros(2, 8192, 16, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    for name, tokens in (("decode_64", 64), ("decode_256", 256), ("prefill_2048", 2048), ("prefill_16384", 16384)):
        k, v = (torch.randn(tokens, HEADS, DIM, device=DEVICE).bfloat16() for _ in range(2))
        if name.startswith("decode"):
            slots = torch.randperm(8192, device=DEVICE)[:tokens] * 16 + 5
        else:
            slots = (
                torch.randperm(8192, device=DEVICE)[: tokens // 16, None] * 16 + torch.arange(16, device=DEVICE)
            ).flatten()
        functions: dict[str, Callable[[], object]] = {
            "zipfusion": partial(write_tokens, k, v, slots, pages.arena, pages.table)
        }
        try:
            from vllm import _custom_ops as ops

            one = torch.ones((), device=DEVICE)
            functions["reshape_and_cache_flash"] = partial(
                ops.reshape_and_cache_flash, k, v, cache[0], cache[1], slots, "auto", one, one
            )
            functions["reshape_and_cache_flash"]()
        except Exception as error:
            functions.pop("reshape_and_cache_flash", None)
            print(f"vLLM's write left out: {error}", file=sys.stderr)
        for kernel, result in timer.time(functions).items():
            size = tokens * HEADS * DIM * 4
            rows.append(
                {
                    "operation": "write",
                    "case": name,
                    "kernel": kernel,
                    **result,
                    "raw_gbps": round(size / result["us"] / 1e3, 1),
                }
            )
    return rows


def restore_rows(timer: Timer) -> list[dict]:
    rows, n = [], 8192
    k = torch.empty(n * 16, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    v = torch.empty_like(k)
    for eligible in (1.0, 0.92, 0.0):
        pages = make_pages(n, HEADS, DIM, eligible)
        index = torch.randperm(n, device=DEVICE)
        first, counts = torch.arange(n, device=DEVICE) * 16, torch.full((n,), 16, device=DEVICE)
        result = timer.time({"r": lambda: restore_pages(pages.arena, pages.table, index, first, counts, k, v)})["r"]  # noqa: B023
        assert torch.equal(k.view(n, 16, HEADS, DIM), pages.k[pages.source[index]])
        rows.append({"operation": "restore", "case": "8192 pages", "kernel": "zipfusion", "eligible": eligible, **result,
                     "raw_gbps": round(n * 16 * HEADS * DIM * 4 / result["us"] / 1e3, 1)})  # fmt: skip
    return rows


def compaction_rows(timer: Timer) -> list[dict]:
    """32 layers; the pages are made raw again (table only, same bytes) before each timed call, outside the timed part."""
    rows = []
    shape = PageShape(32, HEADS, DIM)
    for num_pages in (4, 32, 128):
        layout_pages = num_pages + 1
        chunks = -(-shape.regions_per_page // 12)
        layout = ArenaLayout(
            shape,
            layout_pages,
            (num_pages * chunks + 2) * 12 * shape.raw_region_bytes + layout_pages * shape.table_page_bytes + 512,
            12,
        )
        arena = torch.empty(layout.table_offset, dtype=torch.uint8, device=DEVICE)
        one = random_values((4096, 16, DIM), 0.92, DEVICE, torch.Generator(DEVICE).manual_seed(0))
        from zipfusion_vllm import codec

        raw = codec.raw_regions(one, "k").flatten()
        arena[: arena.numel() // raw.numel() * raw.numel()].view(-1, raw.numel())[:] = raw
        fresh = arena.clone()
        own = torch.zeros(layout_pages, chunks, dtype=torch.int32, device=DEVICE)
        own[1:] = (torch.randperm(num_pages * chunks, device=DEVICE) + 1).view(num_pages, chunks).int()
        region = torch.arange(shape.regions_per_page, device=DEVICE)
        starts = own[:, region // 12].long() * layout.chunk_units + region % 12 * shape.raw_region_units
        table = torch.zeros(32, layout_pages, HEADS, 2, shape.entry_bytes, dtype=torch.uint8, device=DEVICE)
        order = starts.view(layout_pages, 32, HEADS, 2).transpose(0, 1)
        for byte in range(START_BYTES):
            table[..., byte] = (order >> 8 * byte & 0xFF).to(torch.uint8)
        table[..., 4:8] = RAW_BASE
        table = table.view(32, layout_pages, HEADS, shape.row_bytes)
        fresh_table = table.clone()
        compactor = Compactor(layout, num_pages, DEVICE)
        pages = torch.arange(1, num_pages + 1, dtype=torch.int32, device=DEVICE)
        answer = torch.zeros(num_pages, dtype=torch.int32, pin_memory=True)
        times = []
        for _ in range(9):
            arena.copy_(fresh)
            table.copy_(fresh_table)
            timer.flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            compactor.compact(pages, arena, table, own, answer)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        us = sorted(times)[len(times) // 2]
        rows.append({"operation": "compaction", "case": f"{num_pages} pages of 32 layers", "kernel": "zipfusion", "eligible": 0.92, "us": round(us, 1),
                     "raw_gbps": round(num_pages * shape.raw_page_bytes / us / 1e3, 1), "chunks_kept": int(answer.sum()), "chunks_raw": num_pages * chunks})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    timer = Timer(21)
    rows = write_rows(timer) + restore_rows(timer) + compaction_rows(timer)
    fused, _, _ = ours([8192] * 32, 32, 8, 128, 1, 0.92)
    rows.append(
        {
            "operation": "fused attention",
            "case": "32 x 8192",
            "kernel": "zipfusion",
            "eligible": 0.92,
            **timer.time({"f": fused})["f"],
        }
    )
    for row in rows:
        print(row)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": machine(), "commit": args.commit, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
