"""Decode attention over 12-bit pages, in Gluon: one launch per layer, the merge of splits included.

Launched by ``decode.py`` (which checks shapes and states the contract) with the work split of ``plan.py``; ``reference.py`` defines the result.

Every warp takes a page: global memory -> registers -> decode -> ``mma.m16n8k16``, no shared memory and no barrier in the loop. The bytes of a
block stand in the order of the fragments (``format.py``), so S^T = K Q^T and O^T = V^T P^T take decoded K and V as operand A, and the heads of a
group (times query tokens) are the columns of operand B. P^T goes from the accumulator's layout to operand B by ``movmatrix``. Raw blocks run
through the same instructions: the masks are all ones, the base is 0, and the second high plane comes from a predicated load.
"""

from zipfusion_vllm.kernels.compat import gl, gluon, mma_v2, thread_barrier_name

constexpr = gl.constexpr
_barrier = getattr(gl, thread_barrier_name())

_DECODE_ASM = constexpr("""
{ .reg .b32 ha, hb, t;
and.b32 ha, $8, $12;
add.u32 ha, ha, $14;
shf.l.wrap.b32 hb, $8, $8, 4;
lop3.b32 hb, hb, $13, $9, 0xEA;
add.u32 hb, hb, $14;
prmt.b32 t, $10, ha, 0x5140;
mov.b32 {$0, $1}, t;
prmt.b32 t, $10, ha, 0x7362;
mov.b32 {$2, $3}, t;
prmt.b32 t, $11, hb, 0x5140;
mov.b32 {$4, $5}, t;
prmt.b32 t, $11, hb, 0x7362;
mov.b32 {$6, $7}, t; }
""")
_DECODE_CONSTRAINTS = constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r")


@gluon.jit
def _block_offsets(bases, HI: gl.constexpr, W: gl.constexpr, NB: gl.constexpr):
    """Units before each block [W, 1, NB, 1], mask of raw blocks (-1 or 0), base bytes; ``bases`` is a tuple of int32 [W, 1, 1, 1] words of 4 blocks."""
    block = gl.arange(0, NB, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, HI))))[None, None, :, None]
    flags = (bases[0] >> 7) & 0x01010101
    word = bases[0]
    before = flags * 0x01010100
    if NB == 8:
        flags_1 = (bases[1] >> 7) & 0x01010101
        before_1 = flags_1 * 0x01010100 + ((flags * 0x01010101) >> 24) * 0x01010101
        word = gl.where(block < 4, word, bases[1])
        before = gl.where(block < 4, before, before_1)
    shift = (block & 3) * 8
    byte = (word >> shift) & 0xFF
    raw = (byte << 24) >> 31
    units = block * 3 + ((before >> shift) & 0xFF)
    return units, raw, byte


@gluon.jit
def _load_region(arena, start, bases, valid, W: gl.constexpr, NB: gl.constexpr, LO: gl.constexpr, HI: gl.constexpr):
    """The words of one region per warp: low [W, 32, NB, 4], codes or first high plane and second high plane [W, 32, NB, 2].

    ``start``: uint32 units [W, 1, 1, 1] in HI's layout; ``valid`` int1 [W, 1, 1, 1]: nothing is read elsewhere, and what is returned there is
    undefined (scores are masked, and ``keep`` makes V finite).
    """
    units, raw, _ = _block_offsets(bases, HI, W, NB)
    lane_hi = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, HI))))[None, :, None, None]
    two = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, HI))))[None, None, None, :]
    lane_lo = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LO))))[None, :, None, None]
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LO))))[None, None, None, :]
    at = start.to(gl.uint32).to(gl.int64) * 64 + (units * 64).to(gl.int64)
    at_lo = gl.convert_layout(at, LO)
    valid_lo = gl.convert_layout(valid, LO)
    lo = gl.load(arena + at_lo + (lane_lo * 4 + four), mask=valid_lo, eviction_policy="evict_first")
    hi_pointer = arena + at + (lane_hi * 2 + two) + 128
    hi = gl.load(hi_pointer, mask=valid, eviction_policy="evict_first")
    second = gl.load(hi_pointer + 64, mask=valid & (raw != 0), other=0, eviction_policy="evict_first")
    return lo, hi, second


@gluon.jit
def _decode_region(
    lo,
    hi,
    second,
    bases,
    keep,
    IS_V: gl.constexpr,
    W: gl.constexpr,
    NB: gl.constexpr,
    HI: gl.constexpr,
    A: gl.constexpr,
):
    """BF16 operand A: K [W, 16, D] or V^T [W, D, 16].

    ``keep`` (V only): byte mask [W, 32, 1, 1] of a lane's 4 tokens; a value past the sequence's end gets the high byte 0, so it is finite.
    """
    _, raw, byte = _block_offsets(bases, HI, W, NB)
    mask_1 = raw | (0x87878787 - (1 << 32))
    mask_2 = ~raw & (0x87878787 - (1 << 32))
    base = (byte * 0x01010101) & ~raw
    if IS_V:
        mask_1 = mask_1 & keep
        mask_2 = mask_2 & keep
        base = base & keep
        second = second & keep
    low_0, low_1 = gl.split(lo.reshape([W, 32, NB, 2, 2]))
    low_0 = gl.convert_layout(low_0, HI, assert_trivial=True)
    low_1 = gl.convert_layout(low_1, HI, assert_trivial=True)
    # 8 BF16 values, named by r, h, e.
    v000, v001, v010, v011, v100, v101, v110, v111 = gl.inline_asm_elementwise(
        _DECODE_ASM,
        _DECODE_CONSTRAINTS,
        [hi, second, low_0, low_1, mask_1, mask_2, base],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    h0 = gl.join(gl.join(v000, v001), gl.join(v100, v101))  # [W, 32, NB, s, e, r]
    h1 = gl.join(gl.join(v010, v011), gl.join(v110, v111))
    # [W, g, q, block, s, e, r, h]
    values = gl.join(h0, h1).reshape([W, 8, 4, NB, 2, 2, 2, 2])
    if IS_V:
        values = values.permute([0, 3, 4, 6, 1, 7, 2, 5]).reshape([W, NB * 32, 16])
    else:
        values = values.permute([0, 6, 1, 3, 4, 7, 2, 5]).reshape([W, 16, NB * 32])
    return gl.convert_layout(values, A, assert_trivial=True)


@gluon.jit
def _load_row(table, page, head, KV_HEADS: gl.constexpr, ROW_WORDS: gl.constexpr, W: gl.constexpr):
    """The lookup-table row of each warp's page: (K start, K bases, V start, V bases), int32 [W, 1, 1, 1]; bases as tuples of words."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 1, 1, 1, 4], [1, 32, 1, 1, 1], [W, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, ROW)))))[
        None, None, None, None, :
    ]
    row = (page.to(gl.int64) * KV_HEADS + head) * ROW_WORDS
    at = gl.convert_layout(row, gl.SliceLayout(4, ROW), assert_trivial=True).expand_dims(4) + word
    # Words 0 and 2, then 1 and 3.
    even, odd = gl.split(gl.load(table + at).reshape([W, 1, 1, 1, 2, 2]))
    word_0, word_2 = gl.split(even)
    word_1, word_3 = gl.split(odd)
    HEAD: gl.constexpr = page.type.layout
    k_start = gl.convert_layout(word_0, HEAD, assert_trivial=True)
    k_base = gl.convert_layout(word_1, HEAD, assert_trivial=True)
    if ROW_WORDS == 8:
        k_base_1 = gl.convert_layout(word_2, HEAD, assert_trivial=True)
        even, odd = gl.split(gl.load(table + at + 4).reshape([W, 1, 1, 1, 2, 2]))
        word_0, word_2 = gl.split(even)
        word_1, word_3 = gl.split(odd)
        v_start = gl.convert_layout(word_0, HEAD, assert_trivial=True)
        v_base = gl.convert_layout(word_1, HEAD, assert_trivial=True)
        v_base_1 = gl.convert_layout(word_2, HEAD, assert_trivial=True)
    else:
        v_start = gl.convert_layout(word_2, HEAD, assert_trivial=True)
        v_base = gl.convert_layout(word_3, HEAD, assert_trivial=True)
        k_base_1 = k_base
        v_base_1 = v_base
    return k_start, k_base, k_base_1, v_start, v_base, v_base_1


@gluon.jit
def decode_kernel(
    q, arena, table, block_table, seq_lens, query_start, plan, out, lse, parts_o, parts_ml, counters,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, block_table_stride,
    scale, cap,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, COLS: gl.constexpr, COL_BLOCKS: gl.constexpr,
    MAX_QUERY: gl.constexpr, W: gl.constexpr, HAS_LSE: gl.constexpr, HAS_CAP: gl.constexpr, PREFETCH_V: gl.constexpr,
):  # fmt: skip
    """See ``decode.py`` for the arguments. ``scale`` is the softmax scale times log2(e)."""
    NB: gl.constexpr = D // 32
    ROW_WORDS: gl.constexpr = 8 if D == 256 else 4
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LO: gl.constexpr = gl.BlockedLayout([1, 1, NB, 4], [1, 32, 1, 1], [W, 1, 1, 1], [3, 2, 1, 0])
    HI: gl.constexpr = gl.BlockedLayout([1, 1, NB, 2], [1, 32, 1, 1], [W, 1, 1, 1], [3, 2, 1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([W, 1, COLS], [1, 32, 1], [1, 2, W // 2] if D == 64 else [1, W, 1], [1, 2, 0])
    COL: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, OUT))
    COL_M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, OUT))
    NEG: gl.constexpr = -1e30

    pid = gl.program_id(0)
    record = plan + pid * 8
    sequence = gl.load(record)
    list_index = gl.load(record + 1)
    tile = gl.load(record + 2)
    remaining = gl.load(record + 3)
    position = gl.load(record + 4)
    total = gl.load(record + 5)
    programs = gl.load(record + 6)

    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, HI))))[:, None, None, None]
    warp_mma = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    token_s = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    lane_token = (
        gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, HI))))[None, :, None, None] & 3
    ) * 2
    column_s = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    dim_q = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    column_q = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    warp_q = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    column_o = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(0, OUT)))
    dim_o = gl.arange(0, D, gl.SliceLayout(1, gl.SliceLayout(0, OUT)))

    while remaining > 0:
        length = gl.load(seq_lens + sequence)
        query_0 = gl.load(query_start + sequence)
        num_query = gl.load(query_start + sequence + 1) - query_0
        head = list_index // COL_BLOCKS
        first_column = (list_index % COL_BLOCKS) * COLS
        list_tiles = gl.maximum((length + 16 * W - 1) // (16 * W), 1)
        tile_end = gl.minimum(tile + remaining, list_tiles)
        num_pages = (length + 15) // 16
        page_end = gl.minimum(num_pages, tile_end * W)
        pages = block_table + sequence.to(gl.int64) * block_table_stride

        # Operand B: column c is query token c // GROUP of head c % GROUP.
        column = first_column + column_q
        q_token = column // GROUP
        q_offset = (query_0 + q_token).to(gl.int64) * q_stride_token + (head * GROUP + column % GROUP) * q_stride_head
        q_fragment = gl.load(
            q + q_offset + dim_q + warp_q * 0,
            mask=(q_token < num_query) & (q_token < MAX_QUERY) & (warp_q >= 0) & (dim_q >= 0),
            other=0.0,
        )

        # Registers run ahead: words of page i, row of page i+1, id of page i+2; in the loop one further.
        index = tile * W + warp
        page = gl.load(pages + index, mask=index < page_end, other=0)
        page_next = gl.load(pages + index + W, mask=index + W < page_end, other=0)
        k_start, kb, kb1, v_start, vb, vb1 = _load_row(table, page, head, KV_HEADS, ROW_WORDS, W)
        k_lo, k_hi, k_second = _load_region(arena, k_start, (kb, kb1), index < page_end, W, NB, LO, HI)
        if PREFETCH_V:
            v_lo, v_hi, v_second = _load_region(arena, v_start, (vb, vb1), index < page_end, W, NB, LO, HI)
        n_k_start, n_kb, n_kb1, n_v_start, n_vb, n_vb1 = _load_row(table, page_next, head, KV_HEADS, ROW_WORDS, W)

        page_next = gl.load(pages + index + 2 * W, mask=index + 2 * W < page_end, other=0)

        m = gl.full([W, COLS], NEG, gl.float32, gl.SliceLayout(1, MMA))
        l = gl.zeros([W, 16, COLS], gl.float32, MMA)
        acc = gl.zeros([W, D, COLS], gl.float32, MMA)
        limit_s = gl.full([1, 1, COLS], 0, gl.int32, MMA) + length
        if MAX_QUERY > 1:
            limit_s = gl.minimum(length - num_query + (first_column + column_s) // GROUP + 1, length)

        for t in range(tile, tile_end):
            index = t * W + warp
            if not PREFETCH_V:
                v_lo, v_hi, v_second = _load_region(arena, v_start, (vb, vb1), index < page_end, W, NB, LO, HI)
            n2_k_start, n2_kb, n2_kb1, n2_v_start, n2_vb, n2_vb1 = _load_row(
                table, page_next, head, KV_HEADS, ROW_WORDS, W
            )
            page_next = gl.load(pages + index + 3 * W, mask=index + 3 * W < page_end, other=0)
            k = _decode_region(k_lo, k_hi, k_second, (kb, kb1), 0, False, W, NB, HI, A)
            k_lo, k_hi, k_second = _load_region(arena, n_k_start, (n_kb, n_kb1), index + W < page_end, W, NB, LO, HI)
            s = mma_v2(k, q_fragment, gl.zeros([W, 16, COLS], gl.float32, MMA))
            if HAS_CAP:
                s = s * (scale / cap)
                s = cap * 1.4426950408889634 * (1.0 - 2.0 / (gl.exp2(2.0 * s) + 1.0))  # cap * tanh, times log2(e)
            else:
                s = s * scale
            s = gl.where((t * W + warp_mma) * 16 + token_s < limit_s, s, float("-inf"))
            m_new = gl.maximum(m, gl.max(s, axis=1))
            alpha = gl.exp2(m - m_new)
            p = gl.exp2(s - m_new.expand_dims(1))
            l = l * alpha.expand_dims(1) + p
            m = m_new
            p16 = gl.inline_asm_elementwise(
                "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
                "=r,r",
                [p.to(gl.bfloat16)],
                dtype=gl.bfloat16,
                is_pure=True,
                pack=2,
            )
            # [W, r, g, column block, 2q+e] holds P[8r + 2q+e, column block * 8 + g]
            p_t = p16.reshape([W, 2, 8, COLS // 8, 8]).permute([0, 1, 4, 3, 2]).reshape([W, 16, COLS])
            p_t = gl.convert_layout(p_t, B, assert_trivial=True)
            left = length - index * 16 - lane_token
            keep = (
                gl.where(left > 0, 0xFF, 0)
                | gl.where(left > 1, 0xFF00, 0)
                | gl.where(left > 8, 0xFF0000, 0)
                | gl.where(left > 9, 0xFF000000 - (1 << 32), 0)
            )
            v = _decode_region(v_lo, v_hi, v_second, (vb, vb1), keep, True, W, NB, HI, A)
            kb = n_kb
            kb1 = n_kb1
            vb = n_vb
            vb1 = n_vb1
            v_start = n_v_start
            if PREFETCH_V:
                v_lo, v_hi, v_second = _load_region(arena, v_start, (vb, vb1), index + W < page_end, W, NB, LO, HI)
            n_k_start, n_kb, n_kb1, n_v_start, n_vb, n_vb1 = n2_k_start, n2_kb, n2_kb1, n2_v_start, n2_vb, n2_vb1
            acc = acc * alpha.expand_dims(1)
            acc = mma_v2(v, p_t, acc)

        # Merge the warps, each of which holds every W-th page of the segment.
        m_out = gl.convert_layout(m, gl.SliceLayout(1, OUT))
        l_out = gl.convert_layout(gl.sum(l, axis=1), gl.SliceLayout(1, OUT))
        m_all = gl.max(m_out, axis=0)
        weight = gl.exp2(m_out - m_all.expand_dims(0))
        l_all = gl.sum(l_out * weight, axis=0)
        o = gl.sum(gl.convert_layout(acc, OUT) * weight.expand_dims(1), axis=0)

        list_start = position - tile
        list_end = list_start + list_tiles
        complete = (tile == 0) & (tile_end == list_tiles)
        if not complete:
            # A list begun in an earlier program goes to this program's slot 0, one begun here to slot 1.
            slot = pid * 2 + (1 if tile == 0 else 0)
            ml = parts_ml + slot * 2 * COLS
            gl.store(ml + column_o, gl.convert_layout(m_all, COL))
            gl.store(ml + COLS + column_o, gl.convert_layout(l_all, COL))
            at = slot.to(gl.int64) * (COLS * D) + column_o.expand_dims(0) * D + dim_o.expand_dims(1)
            gl.store(parts_o + at, o)
            first = (((list_start.to(gl.int64) + 1) * programs - 1) // total).to(gl.int32)
            last = ((list_end.to(gl.int64) * programs - 1) // total).to(gl.int32)
            _barrier()
            arrived = gl.atomic_add(counters + first, 1, sem="acq_rel")
            _barrier()
            if arrived == last - first:
                complete = arrived >= 0
                gl.store(counters + first, 0)
                num_parts = last - first + 1
                m_all = gl.full([COLS], NEG, gl.float32, COL_M)
                l_all = gl.zeros([COLS], gl.float32, COL_M)
                o = gl.zeros([D, COLS], gl.float32, gl.SliceLayout(0, OUT))
                part = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(1, OUT)))[:, None]
                column_p = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, :]
                part_3 = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))[:, None, None]
                dim_3 = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None]
                column_3 = gl.arange(0, COLS, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))[None, None, :]
                for begin in range(0, num_parts, W):
                    which = begin + part
                    slots = gl.where(which == 0, 2 * first + 1, 2 * (first + which))
                    pointer = parts_ml + slots * (2 * COLS) + column_p
                    m_part = gl.load(pointer, mask=which < num_parts, other=NEG, cache_modifier=".cg")
                    l_part = gl.load(pointer + COLS, mask=which < num_parts, other=0.0, cache_modifier=".cg")
                    which_3 = begin + part_3
                    slots_3 = gl.where(which_3 == 0, 2 * first + 1, 2 * (first + which_3)).to(gl.int64)
                    o_part = gl.load(
                        parts_o + slots_3 * (COLS * D) + column_3 * D + dim_3,
                        mask=which_3 < num_parts,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    m_merged = gl.maximum(m_all, gl.max(m_part, axis=0))
                    w_part = gl.exp2(m_part - m_merged.expand_dims(0))
                    w_old = gl.exp2(m_all - m_merged)
                    l_all = l_all * w_old + gl.sum(l_part * w_part, axis=0)
                    o = o * gl.convert_layout(w_old, COL).expand_dims(0) + gl.sum(
                        o_part * w_part.expand_dims(1), axis=0
                    )
                    m_all = m_merged
        if complete:
            l_o = gl.convert_layout(l_all, COL)
            m_o = gl.convert_layout(m_all, COL)
            o = o / gl.where(l_o == 0.0, 1.0, l_o).expand_dims(0)
            column_out = first_column + column_o
            token = column_out // GROUP
            real = (token < num_query) & (token < MAX_QUERY)
            row = (query_0 + token).to(gl.int64)
            q_head = head * GROUP + column_out % GROUP
            o_at = (row * out_stride_token + q_head * out_stride_head).expand_dims(0) + dim_o.expand_dims(1)
            gl.store(out + o_at, o.to(gl.bfloat16), mask=real.expand_dims(0) & (dim_o.expand_dims(1) >= 0))
            if HAS_LSE:
                value = gl.where(l_o == 0.0, float("-inf"), (m_o + gl.log2(l_o)) * 0.6931471805599453)
                gl.store(lse + q_head * lse_stride_head + row, value, mask=real)

        used = tile_end - tile
        remaining -= used
        position += used
        tile = 0
        list_index += 1
        if list_index == KV_HEADS * COL_BLOCKS:
            list_index = 0
            sequence += 1
