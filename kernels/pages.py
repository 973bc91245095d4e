"""Page kernels in plain Triton: write, restore, compact (measure, pack, encode). No inline PTX, so the interpreter runs them on a CPU.

Called by the GPU page store. ``codec.py`` and ``memory/packing.py`` define the results, bit for bit; byte positions are those drawn in
``format.py``. All entries queue work in the current stream, allocate nothing but what they return, and never synchronise.

    arena   uint8 [bytes]                                       all regions
    table   uint8 [layers, pages, heads, row_bytes]             the whole lookup table, contiguous
"""

import torch

from zipfusion_vllm.format import BLOCK_DIMS, HEAD_DIMS, PAGE_TOKENS, PageShape
from zipfusion_vllm.kernels.compat import tl, triton

_WARPS = 4


@triton.jit
def _position(token, dim, IS_V: tl.constexpr):
    """Byte offsets in a block of the low and of the raw high byte of (token, dim 0..31)."""
    s = dim // 16
    if IS_V:
        r = (dim // 8) % 2
        g = dim % 8
        h = token // 8
        q = (token // 2) % 4
        e = token % 2
    else:
        r = token // 8
        g = token % 8
        h = (dim // 8) % 2
        q = (dim // 2) % 4
        e = dim % 2
    lane = 4 * g + q
    return 16 * lane + 4 * (2 * s + r) + 2 * h + e, 512 + 256 * r + 8 * lane + 4 * s + 2 * h + e


@triton.jit
def _value_at(byte, IS_V: tl.constexpr):
    """(token, dim) of low byte 0..511 of a block: the inverse of ``_position``."""
    e = byte % 2
    h = (byte // 2) % 2
    r = (byte // 4) % 2
    s = (byte // 8) % 2
    q = (byte // 16) % 4
    g = byte // 64
    if IS_V:
        return 8 * h + 2 * q + e, 16 * s + 8 * r + g
    else:
        return 8 * r + g, 16 * s + 8 * h + 2 * q + e


@triton.jit
def _high_value_at(byte, IS_V: tl.constexpr):
    """(token, dim) of high byte 0..511 of a raw block."""
    e = byte % 2
    h = (byte // 2) % 2
    s = (byte // 4) % 2
    q = (byte // 8) % 4
    g = (byte // 32) % 8
    r = byte // 256
    if IS_V:
        return 8 * h + 2 * q + e, 16 * s + 8 * r + g
    else:
        return 8 * r + g, 16 * s + 8 * h + 2 * q + e


@triton.jit
def write_kernel(
    k, v, slots, arena, table, num_tokens, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    HEADS: tl.constexpr, NB: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (window, head, kind and block): 16 tokens of the batch; a page that they begin and fill is written as a whole."""
    window = tl.program_id(0)
    head = tl.program_id(1)
    kind = tl.program_id(2) // NB
    block = tl.program_id(2) % NB
    if kind == 0:
        _write_block(
            k,
            slots,
            arena,
            table,
            num_tokens,
            k_stride_token,
            k_stride_head,
            window,
            head,
            block,
            HEADS,
            ROW_BYTES,
            False,
        )
    else:
        _write_block(
            v,
            slots,
            arena,
            table,
            num_tokens,
            v_stride_token,
            v_stride_head,
            window,
            head,
            block,
            HEADS,
            ROW_BYTES,
            True,
        )


@triton.jit
def _write_block(
    values, slots, arena, table, num_tokens, stride_token, stride_head, window, head, block,
    HEADS: tl.constexpr, ROW_BYTES: tl.constexpr, IS_V: tl.constexpr,
):  # fmt: skip
    token = window * 16 + tl.arange(0, 16)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    # A token is part of a whole page if the 16 tokens from the page's first one on have its 16 slots.
    first = token - (slot % 16).to(tl.int32)
    other = first[:, None] + tl.arange(0, 16)[None, :]
    other_slot = tl.load(slots + other, mask=(slot >= 0)[:, None] & (other >= 0) & (other < num_tokens), other=-1)
    whole = tl.min((other_slot == (slot - slot % 16)[:, None] + tl.arange(0, 16)[None, :]).to(tl.int32), axis=1) > 0
    begins = whole & (slot >= 0) & (slot % 16 == 0)
    loose = (slot >= 0) & (whole == 0)
    entry: tl.constexpr = ROW_BYTES // 2 if IS_V else 0
    source = values + head * stride_head + block * 32
    begin = tl.max(tl.where(begins, token, -1), axis=0)
    if begin >= 0:
        page = tl.max(tl.where(begins, slot // 16, -1), axis=0)
        row = (table + (page * HEADS + head) * ROW_BYTES + entry).to(tl.pointer_type(tl.uint32))
        target = arena + tl.load(row).to(tl.int64) * 256 + block * 1024
        byte = tl.arange(0, 512)
        t, d = _value_at(byte, IS_V)
        low = tl.load(source + (begin + t).to(tl.int64) * stride_token + d)
        tl.store(target + byte, (low & 0xFF).to(tl.uint8))
        t, d = _high_value_at(byte, IS_V)
        high = tl.load(source + (begin + t).to(tl.int64) * stride_token + d)
        tl.store(target + 512 + byte, ((high >> 8) & 0xFF).to(tl.uint8))
    if tl.max(loose.to(tl.int32), axis=0) > 0:
        page = tl.maximum(slot, 0) // 16
        row = (table + (page * HEADS + head) * ROW_BYTES + entry).to(tl.pointer_type(tl.uint32))
        start = tl.load(row, mask=loose, other=0).to(tl.int64) * 256 + block * 1024
        dim = tl.arange(0, 32)
        value = tl.load(
            source + token.to(tl.int64)[:, None] * stride_token + dim[None, :], mask=loose[:, None], other=0
        )
        low_at, high_at = _position((tl.maximum(slot, 0) % 16).to(tl.int32)[:, None], dim[None, :], IS_V)
        tl.store(arena + start[:, None] + low_at, (value & 0xFF).to(tl.uint8), mask=loose[:, None])
        tl.store(arena + start[:, None] + high_at, ((value >> 8) & 0xFF).to(tl.uint8), mask=loose[:, None])


@triton.jit
def restore_kernel(
    arena, table, pages, first_token, num_tokens, k, v, stride_token, stride_head,
    HEADS: tl.constexpr, NB: tl.constexpr, ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Program (page index, head, kind and block): one block to BF16 rows."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    kind = tl.program_id(2) // NB
    block = tl.program_id(2) % NB
    page = tl.load(pages + index).to(tl.int64)
    first = tl.load(first_token + index).to(tl.int64)
    tokens = tl.load(num_tokens + index)
    entry = table + (page * HEADS + head) * ROW_BYTES + kind * (ROW_BYTES // 2)
    if kind == 0:
        _restore_block(
            arena,
            entry,
            k + first * stride_token + head * stride_head + block * 32,
            tokens,
            block,
            stride_token,
            NB,
            False,
        )
    else:
        _restore_block(
            arena,
            entry,
            v + first * stride_token + head * stride_head + block * 32,
            tokens,
            block,
            stride_token,
            NB,
            True,
        )


@triton.jit
def _restore_block(arena, entry, out, tokens, block, stride_token, NB: tl.constexpr, IS_V: tl.constexpr):
    start = tl.load(entry.to(tl.pointer_type(tl.uint32))).to(tl.int64)
    units = block * 3
    for other in tl.static_range(NB):
        if other < NB - 1:
            raw_before = tl.load(entry + 4 + other) == 0xFF
            units += tl.where((other < block) & raw_before, 1, 0)
    base = tl.load(entry + 4 + block).to(tl.int32)
    words = (arena + (start + units) * 256).to(tl.pointer_type(tl.int32))
    low, first, second = _block_words(words, base == 0xFF)
    _store_block(low, first, second, base, out, tokens, stride_token, IS_V)


@triton.jit
def _block_words(words, raw):
    """Words of the block at ``words``: low [32 lanes, 2 s, 2 r], codes or first high plane [32, 2 s], second high plane [32, 2 s]."""
    lane = tl.arange(0, 32)
    s = tl.arange(0, 2)
    r = tl.arange(0, 2)
    low = tl.load(words + lane[:, None, None] * 4 + s[None, :, None] * 2 + r[None, None, :])
    first = tl.load(words + 128 + lane[:, None] * 2 + s[None, :])
    second = tl.load(words + 192 + lane[:, None] * 2 + s[None, :], mask=(lane[:, None] >= 0) & raw, other=0)
    return low, first, second


@triton.jit
def _high_words(first, second, base):
    """High bytes [32, 2 s, 2 r] of a block, four in a word."""
    raw = base == 0xFF
    mask: tl.constexpr = 0x87878787 - (1 << 32)
    rotated = (first << 4) | ((first >> 28) & 0xF)
    add = base * 0x01010101
    high_0 = tl.where(raw, first, (first & mask) + add)
    high_1 = tl.where(raw, second, (rotated & mask) + add)
    return tl.join(high_0, high_1)


@triton.jit
def _block_values(low, first, second, base, IS_V: tl.constexpr):
    """int16 [16 tokens, 32 dims] of a block."""
    high = _high_words(first, second, base)
    # Values i = 2h + e of every word: [lane, s, r, e, h].
    v00 = (low & 0xFF) | ((high & 0xFF) << 8)
    v01 = ((low >> 8) & 0xFF) | (high & 0xFF00)
    v10 = ((low >> 16) & 0xFF) | ((high >> 8) & 0xFF00)
    v11 = ((low >> 24) & 0xFF) | ((high >> 16) & 0xFF00)
    values = tl.join(tl.join(v00.to(tl.int16), v01.to(tl.int16)), tl.join(v10.to(tl.int16), v11.to(tl.int16)))
    values = tl.reshape(values, [8, 4, 2, 2, 2, 2])  # g, q, s, r, e, h
    if IS_V:  # noqa: SIM108 (a constexpr branch)
        values = tl.permute(values, [5, 1, 4, 2, 3, 0])  # h, q, e | s, r, g
    else:
        values = tl.permute(values, [3, 0, 2, 5, 1, 4])  # r, g | s, h, q, e
    return tl.reshape(values, [16, 32])


@triton.jit
def _store_block(low, first, second, base, out, tokens, stride_token, IS_V: tl.constexpr):
    values = _block_values(low, first, second, base, IS_V)
    token = tl.arange(0, 16)
    pointer = out + token[:, None] * stride_token + tl.arange(0, 32)[None, :]
    tl.store(pointer, values, mask=(token < tokens)[:, None])


def write_tokens(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, arena: torch.Tensor, table: torch.Tensor
) -> None:
    """Write new tokens of one layer into raw pages, in block order.

    ``k``, ``v``: bfloat16 [tokens, heads, head_dim], last dim dense; ``slots``: int64 [tokens], page * 16 + position, -1 writes nothing;
    ``table``: the layer's uint8 [pages, heads, row_bytes]. A slot may occur once. Raises ValueError for what does not fit.
    """
    heads, head_dim = _check_values(k, v)
    if slots.dtype != torch.int64 or slots.dim() != 1 or len(slots) > len(k):
        raise ValueError(
            f"slots are int64 [tokens] with at most {len(k)} tokens, got {slots.dtype} {list(slots.shape)}"
        )
    row_bytes = _check_table(table, heads, head_dim)
    if not len(slots):
        return
    blocks = head_dim // BLOCK_DIMS
    write_kernel[(triton.cdiv(len(slots), PAGE_TOKENS), heads, 2 * blocks)](
        k.view(torch.int16), v.view(torch.int16), slots, arena, table, len(slots), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        heads, blocks, row_bytes, num_warps=_WARPS,
    )  # fmt: skip


def restore_pages(
    arena: torch.Tensor, table: torch.Tensor, pages: torch.Tensor, first_token: torch.Tensor, num_tokens: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor,
) -> None:  # fmt: skip
    """Restore pages of any state of one layer: page i to rows ``first_token[i]`` .. ``+ num_tokens[i]`` of k and v.

    ``table``: uint8 [pages, heads, row_bytes]; ``pages``, ``first_token``, ``num_tokens``: int32 or int64 [n]; k, v: bfloat16 [tokens, heads, head_dim]
    with equal strides. With ``first_token = 16 i`` this is a paged workspace. Raises ValueError for what does not fit.
    """
    heads, head_dim = _check_values(k, v)
    if k.stride() != v.stride():
        raise ValueError(f"k and v must have the same strides, got {k.stride()} and {v.stride()}")
    row_bytes = _check_table(table, heads, head_dim)
    if not len(pages):
        return
    blocks = head_dim // BLOCK_DIMS
    restore_kernel[(len(pages), heads, 2 * blocks)](
        arena, table, pages, first_token, num_tokens, k.view(torch.int16), v.view(torch.int16), k.stride(0), k.stride(1),
        heads, blocks, row_bytes, num_warps=1,
    )  # fmt: skip


def _check_values(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    if k.dtype != torch.bfloat16 or v.dtype != torch.bfloat16 or k.dim() != 3 or k.shape != v.shape:
        raise ValueError(
            f"k and v are bfloat16 [tokens, heads, head_dim] alike, got {k.dtype} {list(k.shape)} and {v.dtype} {list(v.shape)}"
        )
    if k.shape[2] not in HEAD_DIMS or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError(
            f"head_dim must be one of {HEAD_DIMS} and dense, got {list(k.shape)} with strides {k.stride()}"
        )
    return k.shape[1], k.shape[2]


def _check_table(table: torch.Tensor, heads: int, head_dim: int) -> int:
    row_bytes = PageShape(1, heads, head_dim).row_bytes
    if (
        table.dtype != torch.uint8
        or table.dim() != 3
        or table.shape[1:] != (heads, row_bytes)
        or not table.is_contiguous()
    ):
        raise ValueError(
            f"the table must be contiguous uint8 [pages, {heads}, {row_bytes}], got {table.dtype} {list(table.shape)}"
        )
    return row_bytes
