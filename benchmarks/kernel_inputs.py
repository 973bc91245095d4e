"""Random arenas for kernel tests and benchmarks: values shaped like real KV, encoded by ``codec.py``, placed in random order.

``make_pages`` encodes a pool of distinct pages once and repeats it at distinct addresses, so that large arenas take no time to make.
"""

from typing import NamedTuple

import torch

from zipfusion_vllm import codec
from zipfusion_vllm.format import PAGE_TOKENS, START_BYTES, UNIT_BYTES, Kind, PageShape


class Pages(NamedTuple):
    arena: torch.Tensor
    """uint8 [bytes]"""
    table: torch.Tensor
    """uint8 [pages, heads, row_bytes]: one layer"""
    source: torch.Tensor
    """int64 [pages]: which page of the pool each page repeats"""
    k: torch.Tensor
    """bfloat16 [pool, 16, heads, D]"""
    v: torch.Tensor


def random_values(shape: tuple[int, ...], eligible: float, device: str, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 [n, 16, D]: about N(0, 1) with exponents in a range of 14; a share ``1 - eligible`` of the blocks holds one value too small."""
    n, tokens, dim = shape
    values = torch.randn(shape, device=device, generator=generator)
    values = torch.where(values.abs() < 2**-10, 2**-10, values).to(torch.bfloat16)
    blocks = values.view(n, tokens, dim // 32, 32)
    spoiled = torch.rand(n, dim // 32, device=device, generator=generator) >= eligible
    blocks[:, 3, :, 7] = torch.where(
        spoiled, torch.tensor(1e-9, dtype=torch.bfloat16, device=device), blocks[:, 3, :, 7]
    )
    return values


def make_pages(
    num_pages: int, heads: int, head_dim: int, eligible: float, device: str = "cuda", seed: int = 0, pool: int = 1024,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, raw: bool = False, first_unit: int = 0,
) -> Pages:  # fmt: skip
    """``num_pages`` pages of one layer. ``k``/``v``: given values [pool, 16, heads, D] instead of random ones; ``raw``: leave every block raw."""
    generator = torch.Generator(device).manual_seed(seed)
    pool = min(pool, num_pages) if k is None else len(k)
    if k is None or v is None:
        k, v = (
            random_values((pool * heads, PAGE_TOKENS, head_dim), eligible, device, generator)
            .view(pool, heads, PAGE_TOKENS, head_dim).transpose(1, 2).contiguous()
            for _ in range(2)
        )  # fmt: skip
    shape = PageShape(1, heads, head_dim)
    payloads, bases = [], []
    kinds: tuple[tuple[Kind, torch.Tensor], ...] = (("k", k), ("v", v))
    for kind, values in kinds:
        flat = values.transpose(1, 2).reshape(pool * heads, PAGE_TOKENS, head_dim)
        if raw:
            payloads.append(codec.raw_regions(flat, kind))
            bases.append(torch.full((len(flat), shape.blocks_per_region), 0xFF, dtype=torch.uint8, device=device))
        else:
            encoded = codec.encode_regions(flat, kind)
            payloads.append(encoded.payloads)
            bases.append(encoded.bases)
    payload = torch.stack(payloads, 1).view(-1, UNIT_BYTES)  # [pool, heads, kind, units] flat
    base = torch.stack(bases, 1).view(pool, heads, 2, -1)
    units = codec.region_units(base)
    source = torch.arange(num_pages, device=device) % pool
    all_units = units[source].flatten().long()
    order = torch.randperm(num_pages, device=device, generator=generator)
    order = (order[:, None] * heads * 2 + torch.arange(heads * 2, device=device)).flatten()
    ends = all_units[order].cumsum(0)
    starts = torch.empty_like(ends)
    starts[order] = ends - all_units[order]
    total = int(ends[-1])
    arena = torch.empty((first_unit + total + 64) * UNIT_BYTES, dtype=torch.uint8, device=device)
    within = torch.arange(total, device=device) - (ends - all_units[order]).repeat_interleave(all_units[order])
    region = (source[:, None] * heads * 2 + torch.arange(heads * 2, device=device)).flatten()[order]
    arena[first_unit * UNIT_BYTES :].view(-1, UNIT_BYTES)[:total] = payload[
        region.repeat_interleave(all_units[order]) * shape.raw_region_units + within
    ]
    table = torch.zeros(num_pages, heads, 2, shape.entry_bytes, dtype=torch.uint8, device=device)
    starts = (starts + first_unit).view(num_pages, heads, 2)
    for byte in range(START_BYTES):
        table[..., byte] = (starts >> 8 * byte & 0xFF).to(torch.uint8)
    table[..., START_BYTES : START_BYTES + shape.blocks_per_region] = base[source]
    return Pages(arena, table.view(num_pages, heads, shape.row_bytes), source, k, v)
