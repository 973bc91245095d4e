"""Decode attention in plain Triton, without inline PTX: correct everywhere Triton runs, the interpreter included, and slow.

Used by ``decode.py`` where Gluon is not to be had (``compat.GLUON_ERROR``). One program per sequence, KV head and query token block walks the
sequence's pages one by one; there is no plan and no workspace. Same arguments and results as ``decode.py`` states.
"""

import math

import torch

from zipfusion_vllm.kernels.compat import tl, triton


@triton.jit
def _region_values(arena, entry, NB: tl.constexpr, IS_V: tl.constexpr):
    """bfloat16 [16, NB * 32] of the region behind the table entry at ``entry`` (format.py draws its bytes)."""
    block = tl.arange(0, NB)
    lane = tl.arange(0, 32)
    s = tl.arange(0, 2)
    r = tl.arange(0, 2)
    base = tl.load(entry + 4 + block).to(tl.int32)
    raw = base == 0xFF
    before = tl.sum(tl.where(block[None, :] < block[:, None], raw[None, :].to(tl.int32), 0), axis=1)
    start = tl.load(entry.to(tl.pointer_type(tl.uint32))).to(tl.int64) * 64
    words = arena.to(tl.pointer_type(tl.int32)) + start + (block * 3 + before) * 64
    low = tl.load(
        words[:, None, None, None] + lane[None, :, None, None] * 4 + s[None, None, :, None] * 2 + r[None, None, None, :]
    )
    high_at = words[:, None, None] + 128 + lane[None, :, None] * 2 + s[None, None, :]
    first = tl.load(high_at)
    second = tl.load(
        high_at + 64, mask=(lane[None, :, None] >= 0) & (s[None, None, :] >= 0) & raw[:, None, None], other=0
    )
    mask: tl.constexpr = 0x87878787 - (1 << 32)
    rotated = (first << 4) | ((first >> 28) & 0xF)
    add = (base * 0x01010101)[:, None, None]
    is_raw = raw[:, None, None]
    high = tl.join(tl.where(is_raw, first, (first & mask) + add), tl.where(is_raw, second, (rotated & mask) + add))
    v00 = (low & 0xFF) | ((high & 0xFF) << 8)
    v01 = ((low >> 8) & 0xFF) | (high & 0xFF00)
    v10 = ((low >> 16) & 0xFF) | ((high >> 8) & 0xFF00)
    v11 = ((low >> 24) & 0xFF) | ((high >> 16) & 0xFF00)
    values = tl.join(tl.join(v00.to(tl.int16), v01.to(tl.int16)), tl.join(v10.to(tl.int16), v11.to(tl.int16)))
    values = tl.reshape(values, [NB, 8, 4, 2, 2, 2, 2])  # block, g, q, s, r, e, h
    if IS_V:  # noqa: SIM108 (a constexpr branch)
        values = tl.permute(values, [6, 2, 5, 0, 3, 4, 1])  # h, q, e | block, s, r, g
    else:
        values = tl.permute(values, [4, 1, 0, 3, 6, 2, 5])  # r, g | block, s, h, q, e
    return tl.reshape(values, [16, NB * 32]).to(tl.bfloat16, bitcast=True)


@triton.jit
def portable_kernel(
    q, arena, table, block_table, seq_lens, query_start, out, lse,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, block_table_stride, scale, cap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, NB: tl.constexpr, ROW_BYTES: tl.constexpr, COLS: tl.constexpr,
    MAX_QUERY: tl.constexpr, HAS_LSE: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head). Column c is query token c // GROUP of head c % GROUP; ``scale`` is that of the softmax."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(seq_lens + sequence)
    query_0 = tl.load(query_start + sequence)
    num_query = tl.load(query_start + sequence + 1) - query_0
    column = tl.arange(0, COLS)
    token = column // GROUP
    q_head = head * GROUP + column % GROUP
    real = (token < num_query) & (token < MAX_QUERY)
    row = (query_0 + token).to(tl.int64)
    dim = tl.arange(0, NB * 32)
    q_tile = tl.load(
        q + (row * q_stride_token + q_head * q_stride_head)[:, None] + dim[None, :], mask=real[:, None], other=0.0
    )
    limit = tl.minimum(length - num_query + token + 1, length)
    m = tl.full([COLS], -1e30, tl.float32)
    l = tl.zeros([COLS], tl.float32)
    acc = tl.zeros([COLS, NB * 32], tl.float32)
    index = 0
    while index * 16 < length:  # not range(): the interpreter takes no loaded bound there
        page = tl.load(block_table + sequence * block_table_stride + index).to(tl.int64)
        entry = table + (page * KV_HEADS + head) * ROW_BYTES
        position = index * 16 + tl.arange(0, 16)
        k = _region_values(arena, entry, NB, False)
        v = _region_values(arena, entry + ROW_BYTES // 2, NB, True)
        v = tl.where((position < length)[:, None], v.to(tl.float32), 0.0)
        # FP32 operands: the interpreter's dot takes BF16 bits for integers, and products of BF16 are exact in FP32.
        s = tl.dot(q_tile.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee") * scale
        if HAS_CAP:
            s = cap * (1.0 - 2.0 / (tl.exp(2.0 * s / cap) + 1.0))
        s = tl.where(position[None, :] < limit[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p, v, input_precision="ieee")
        m = m_new
        index += 1
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(
        out + (row * out_stride_token + q_head * out_stride_head)[:, None] + dim[None, :],
        acc.to(tl.bfloat16),
        mask=real[:, None],
    )
    if HAS_LSE:
        value = tl.where(l == 0.0, float("-inf"), m + tl.log(tl.where(l == 0.0, 1.0, l)))
        tl.store(lse + q_head * lse_stride_head + row, value, mask=real)


def run_portable(
    q: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, kv_heads: int, max_query_tokens: int, scale: float, soft_cap: float,
) -> None:  # fmt: skip
    """Arguments as ``DecodeAttention.run``, checked there."""
    group = q.shape[1] // kv_heads
    columns = max(16, 2 ** math.ceil(math.log2(group * max_query_tokens)))
    portable_kernel[(len(seq_lens), kv_heads)](
        q, arena, table, block_table, seq_lens, query_start, out, lse if lse is not None else seq_lens,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), lse.stride(0) if lse is not None else 0, block_table.stride(0), scale, soft_cap,
        kv_heads, group, q.shape[2] // 32, table.shape[2], columns, max_query_tokens, lse is not None, bool(soft_cap), num_warps=4,
    )  # fmt: skip
