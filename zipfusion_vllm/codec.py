"""Encode and decode of regions in plain PyTorch: the reference that every kernel is held against, bit for bit.

Stands directly on ``format.py``. ``encode``/``decode`` treat one region; ``encode_regions``/``decode_regions`` the same for
many at once. Exact for every one of the 65,536 bit patterns: values are never touched as numbers, only as bytes.
"""

from functools import cache
from typing import NamedTuple

import torch

from zipfusion_vllm import format as fmt
from zipfusion_vllm.format import BLOCK_DIMS, BLOCK_VALUES, HEAD_DIMS, LOW_BYTES, MAX_D, PAGE_TOKENS, RAW_BASE, Kind

CODE_MASK = 0x87
"""Sign and d of one code byte, and of one restored high byte less its base."""


class EncodedRegion(NamedTuple):
    payload: torch.Tensor
    """uint8 [bytes]: the blocks one after the other, 768 bytes each if compressed, 1024 if raw."""
    bases: torch.Tensor
    """uint8 [blocks]: b/2 of a compressed block, 0xFF of a raw one."""


class EncodedRegions(NamedTuple):
    payloads: torch.Tensor
    """uint8 [regions, raw region bytes]: each row begins with the region's payload; what follows it is zero."""
    bases: torch.Tensor
    """uint8 [regions, blocks]."""
    units: torch.Tensor
    """int32 [regions]: units of 256 bytes that the payload takes."""


@cache
def block_order(kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [512] each: which value (token * 32 + dim) stands at low byte i, and at high byte i, of a raw block."""
    low = torch.empty(BLOCK_VALUES, dtype=torch.int64)
    high = torch.empty(BLOCK_VALUES, dtype=torch.int64)
    for token in range(PAGE_TOKENS):
        for dim in range(BLOCK_DIMS):
            low[fmt.low_offset(kind, token, dim)] = token * BLOCK_DIMS + dim
            high[fmt.high_offset(kind, token, dim) - LOW_BYTES] = token * BLOCK_DIMS + dim
    return low, high


def encode(values: torch.Tensor, kind: Kind) -> EncodedRegion:
    """Encode one region: bfloat16 [16, head_dim], kind 'k' or 'v'. Raises ValueError for any other shape, dtype or kind."""
    if values.dim() != 2:
        raise ValueError(f"a region has shape [16, head_dim], got {list(values.shape)}")
    regions = encode_regions(values[None], kind)
    size = int(regions.units[0]) * fmt.UNIT_BYTES
    return EncodedRegion(regions.payloads[0, :size].clone(), regions.bases[0])


def decode(payload: torch.Tensor, bases: torch.Tensor, kind: Kind, head_dim: int) -> torch.Tensor:
    """Restore one region to bfloat16 [16, head_dim].

    ``payload``: uint8 [bytes]; ``bases``: uint8 [head_dim // 32]. Raises ValueError when shapes, dtypes or the payload's
    length do not fit the bases, or a base is neither 0..127 nor 0xFF.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ValueError(f"a payload is uint8 [bytes], got {payload.dtype} {list(payload.shape)}")
    if bases.dim() != 1:
        raise ValueError(f"bases are uint8 [blocks], got {list(bases.shape)}")
    _check_bases(bases[None], kind, head_dim)
    size = int(region_units(bases[None])[0]) * fmt.UNIT_BYTES
    if payload.numel() != size:
        raise ValueError(f"a region with these bases takes {size} bytes, the payload has {payload.numel()}")
    padded = payload.new_zeros(1, head_dim // BLOCK_DIMS * fmt.RAW_BLOCK_BYTES)
    padded[0, :size] = payload
    return decode_regions(padded, bases[None], kind, head_dim)[0]


def measure(values: torch.Tensor) -> torch.Tensor:
    """Bases, uint8 [..., blocks], of regions of bfloat16 [..., 16, head_dim]. Needs the high bytes alone."""
    top7 = _bytes_of(values)[..., 1] & 0x7F
    blocks = top7.unflatten(-1, (-1, BLOCK_DIMS))  # [..., 16, blocks, 32]
    smallest = blocks.amin(dim=(-3, -1))
    span = blocks.amax(dim=(-3, -1)) - smallest
    return torch.where(span <= MAX_D, smallest, torch.full_like(smallest, RAW_BASE))


def region_units(bases: torch.Tensor) -> torch.Tensor:
    """int32 [...]: units of regions with ``bases`` uint8 [..., blocks]."""
    compact = bases.shape[-1] * fmt.COMPACT_BLOCK_UNITS
    return (bases == RAW_BASE).sum(-1, dtype=torch.int32) + compact


def raw_regions(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """uint8 [n, raw region bytes]: regions of bfloat16 [n, 16, head_dim] in block order, every block raw."""
    _check_values(values, kind)
    return torch.cat(_planes(values, kind), dim=-1).flatten(1)


def encode_regions(values: torch.Tensor, kind: Kind) -> EncodedRegions:
    """Encode n regions at once: bfloat16 [n, 16, head_dim]. Raises ValueError as ``encode`` does."""
    _check_values(values, kind)
    bases = measure(values)
    low, high = _planes(values, kind)
    n, num_blocks = bases.shape
    compact = bases != RAW_BASE
    # Sign and d of every value, in the order of the raw high plane: [n, blocks, r, lane and s, i].
    d = (high & 0x7F) - bases[..., None]
    codes = ((high & 0x80) | (d & MAX_D)).unflatten(-1, (2, BLOCK_VALUES // 8, 4))
    first, second = codes.unbind(2)
    sign, d_next = second & 0x80, (second & MAX_D).roll(-1, dims=-1)
    packed = (first | sign >> 4 | d_next << 4).flatten(2)

    payloads = values.new_zeros((n, num_blocks * fmt.RAW_BLOCK_BYTES), dtype=torch.uint8)
    offset = torch.zeros(n, dtype=torch.int64, device=values.device)
    for block in range(num_blocks):
        for is_compact, content in ((True, packed[:, block]), (False, high[:, block])):
            rows = (compact[:, block] == is_compact).nonzero()[:, 0]
            body = torch.cat((low[rows, block], content[rows]), dim=-1)
            columns = offset[rows, None] + torch.arange(body.shape[1], device=values.device)
            payloads[rows[:, None], columns] = body
        offset += torch.where(compact[:, block], fmt.COMPACT_BLOCK_BYTES, fmt.RAW_BLOCK_BYTES)
    return EncodedRegions(payloads, bases, region_units(bases))


def decode_regions(payloads: torch.Tensor, bases: torch.Tensor, kind: Kind, head_dim: int) -> torch.Tensor:
    """Restore n regions to bfloat16 [n, 16, head_dim].

    ``payloads``: uint8 [n, at least the largest region's bytes], each row beginning with its region's payload (what follows it is
    not looked at); ``bases``: uint8 [n, blocks]. Raises ValueError for other shapes, dtypes or bases.
    """
    _check_bases(bases, kind, head_dim)
    n, num_blocks = bases.shape
    if payloads.dtype != torch.uint8 or payloads.dim() != 2 or payloads.shape[0] != n:
        raise ValueError(f"payloads are uint8 [{n}, bytes], got {payloads.dtype} {list(payloads.shape)}")
    needed = int(region_units(bases).max()) * fmt.UNIT_BYTES if n else 0
    if payloads.shape[1] < needed:
        raise ValueError(f"regions with these bases take up to {needed} bytes, the payloads have {payloads.shape[1]}")
    device = payloads.device
    out = torch.empty((n, num_blocks, BLOCK_VALUES, 2), dtype=torch.uint8, device=device)
    low_order, high_order = (order.to(device) for order in block_order(kind))
    offset = torch.zeros(n, dtype=torch.int64, device=device)
    for block in range(num_blocks):
        base = bases[:, block]
        compact = base != RAW_BASE
        low = payloads[
            torch.arange(n, device=device)[:, None], offset[:, None] + torch.arange(LOW_BYTES, device=device)
        ]
        high = torch.empty((n, BLOCK_VALUES), dtype=torch.uint8, device=device)
        for is_compact in (True, False):
            rows = (compact == is_compact).nonzero()[:, 0]
            size = BLOCK_VALUES // 2 if is_compact else BLOCK_VALUES
            columns = offset[rows, None] + LOW_BYTES + torch.arange(size, device=device)
            content = payloads[rows[:, None], columns]
            if is_compact:
                code = content.unflatten(-1, (-1, 4))
                second = (code & 0x08) << 4 | (code >> 4 & MAX_D).roll(1, dims=-1)
                content = torch.cat((code & CODE_MASK, second), dim=-2).flatten(1) + base[rows, None]
            high[rows] = content
        out[:, block, low_order, 0] = low
        out[:, block, high_order, 1] = high
        offset += torch.where(compact, fmt.COMPACT_BLOCK_BYTES, fmt.RAW_BLOCK_BYTES)
    tokens = out.unflatten(2, (PAGE_TOKENS, BLOCK_DIMS)).transpose(1, 2).reshape(n, PAGE_TOKENS, head_dim * 2)
    return tokens.contiguous().view(torch.bfloat16)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2] view of bfloat16 [...]: low byte, high byte."""
    return values.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))


def _planes(values: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high bytes, uint8 [n, blocks, 512] each, of regions [n, 16, head_dim] in block order."""
    blocks = values.unflatten(-1, (-1, BLOCK_DIMS)).transpose(1, 2).flatten(2)  # [n, blocks, 512]
    low_order, high_order = (order.to(values.device) for order in block_order(kind))
    data = _bytes_of(blocks)
    return data[..., low_order, 0], data[..., high_order, 1]


def _check_kind(kind: Kind, head_dim: int) -> None:
    if kind not in fmt.KINDS:
        raise ValueError(f"kind {kind!r} is unknown: a region holds 'k' or 'v'")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} is not supported: the page format takes {HEAD_DIMS}")


def _check_values(values: torch.Tensor, kind: Kind) -> None:
    if values.dtype != torch.bfloat16 or values.dim() != 3 or values.shape[1] != PAGE_TOKENS:
        raise ValueError(f"regions are bfloat16 [n, {PAGE_TOKENS}, head_dim], got {values.dtype} {list(values.shape)}")
    _check_kind(kind, values.shape[2])


def _check_bases(bases: torch.Tensor, kind: Kind, head_dim: int) -> None:
    _check_kind(kind, head_dim)
    if bases.dtype != torch.uint8 or bases.dim() != 2 or bases.shape[1] != head_dim // BLOCK_DIMS:
        raise ValueError(f"bases are uint8 [n, {head_dim // BLOCK_DIMS}], got {bases.dtype} {list(bases.shape)}")
    if bool(((bases > 127) & (bases != RAW_BASE)).any()):
        raise ValueError("a base is 0..127, or 255 for a raw block: the metadata is damaged")
