"""Page kernels of the CPU backend, in numba: write tokens, restore pages, compact pages.

Called by ``attention/page_store.py``, which owns the arena and the lookup table; nothing here allocates or knows vLLM.
Byte positions follow the drawing in ``format.py``; ``codec.py`` and ``memory/packing.py`` define the results, bit for
bit. All arrays are C-contiguous numpy views of torch memory:

    arena      uint8  [bytes]                   the whole arena, less the table
    starts     uint32 [pages, heads, 2]         start of the K and V region of a layer, in units (strided view of the table)
    bases      uint8  [pages, heads, 2, blocks] base bytes of the same
    k, v       uint16 [tokens, heads, head_dim] BF16 bit patterns
"""

import numba
import numpy as np

from zipfusion_vllm.format import (
    BLOCK_DIMS,
    COMPACT_BLOCK_BYTES,
    LOW_BYTES,
    MAX_D,
    PAGE_TOKENS,
    RAW_BASE,
    RAW_BLOCK_BYTES,
    UNIT_BYTES,
)
from zipfusion_vllm.patches import llvmlite_attributes

llvmlite_attributes.apply()

_jit = numba.njit(cache=True, nogil=True, error_model="numpy", boundscheck=False)
_parallel = numba.njit(cache=True, nogil=True, error_model="numpy", boundscheck=False, parallel=True)
_inline = numba.njit(cache=True, nogil=True, error_model="numpy", boundscheck=False, inline="always")

_U8 = np.uint8
_U16 = np.uint16
_U32 = np.uint32
_CODE_MASK = np.uint32(0x87878787)
_BYTE_ONES = np.uint32(0x01010101)
_SPREAD_16 = np.uint64(0x0000FFFF0000FFFF)
_SPREAD_8 = np.uint64(0x00FF00FF00FF00FF)


@_inline
def _spread(word):
    """Four bytes of a uint32 into the low bytes of four 16-bit lanes of a uint64."""
    x = np.uint64(word)
    x = (x | (x << np.uint64(16))) & _SPREAD_16
    return (x | (x << np.uint64(8))) & _SPREAD_8


@_inline
def _word(memory, at):
    """The little-endian uint32 at byte ``at``."""
    return (
        _U32(memory[at])
        | (_U32(memory[at + 1]) << _U32(8))
        | (_U32(memory[at + 2]) << _U32(16))
        | (_U32(memory[at + 3]) << _U32(24))
    )


@_jit
def _restore_region(arena, at, bases, is_v, out, token0, head, num_tokens):
    """Restore the region at byte ``at`` into ``out[token0 : token0 + num_tokens, head]``."""
    for block in range(bases.shape[0]):
        base = bases[block]
        raw = base == RAW_BASE
        dim0 = block * BLOCK_DIMS
        add = _U32(base) * _BYTE_ONES
        for lane in range(32):
            g, q = lane >> 2, lane & 3
            for s in range(2):
                high0 = _word(arena, at + LOW_BYTES + 8 * lane + 4 * s)
                if raw:
                    high1 = _word(arena, at + LOW_BYTES + 256 + 8 * lane + 4 * s)
                else:
                    code = high0
                    rotated = (code << _U32(4)) | (code >> _U32(28))
                    high0 = (code & _CODE_MASK) + add
                    high1 = (rotated & _CODE_MASK) + add
                for r in range(2):
                    low = _word(arena, at + 16 * lane + 4 * (2 * s + r))
                    high = high1 if r else high0
                    values = _spread(low) | (_spread(high) << np.uint64(8))
                    if is_v:
                        dim = dim0 + 16 * s + 8 * r + g
                        for i in range(4):
                            token = 8 * (i >> 1) + 2 * q + (i & 1)
                            if token < num_tokens:
                                out[token0 + token, head, dim] = _U16(values >> np.uint64(16 * i))
                    else:
                        token = 8 * r + g
                        if token < num_tokens:
                            dim = dim0 + 16 * s + 2 * q
                            out[token0 + token, head, dim] = _U16(values)
                            out[token0 + token, head, dim + 1] = _U16(values >> np.uint64(16))
                            out[token0 + token, head, dim + 8] = _U16(values >> np.uint64(32))
                            out[token0 + token, head, dim + 9] = _U16(values >> np.uint64(48))
        at += RAW_BLOCK_BYTES if raw else COMPACT_BLOCK_BYTES


@_parallel
def restore_pages(arena, starts, bases, pages, first_token, num_tokens, k, v):
    """Restore ``pages`` of one layer: page i to rows ``first_token[i] : first_token[i] + num_tokens[i]`` of k and v."""
    heads = starts.shape[1]
    for item in numba.prange(pages.shape[0] * heads):
        i, head = item // heads, item % heads
        page = pages[i]
        k_at = np.int64(starts[page, head, 0]) * UNIT_BYTES
        v_at = np.int64(starts[page, head, 1]) * UNIT_BYTES
        _restore_region(arena, k_at, bases[page, head, 0], False, k, first_token[i], head, num_tokens[i])
        _restore_region(arena, v_at, bases[page, head, 1], True, v, first_token[i], head, num_tokens[i])


@_parallel
def write_tokens(arena, starts, slots, k, v):
    """Write token i to ``slots[i]`` (page * 16 + position; -1 writes nothing) of raw pages of one layer, in block order."""
    heads, head_dim = k.shape[1], k.shape[2]
    for i in numba.prange(slots.shape[0]):
        slot = slots[i]
        if slot >= 0:
            page, token = slot // PAGE_TOKENS, slot % PAGE_TOKENS
            for head in range(heads):
                at = np.int64(starts[page, head, 0]) * UNIT_BYTES
                r, g = token >> 3, token & 7
                for dim in range(head_dim):
                    block = dim // BLOCK_DIMS * RAW_BLOCK_BYTES
                    s, h, q, e = (dim >> 4) & 1, (dim >> 3) & 1, (dim >> 1) & 3, dim & 1
                    lane, inner = 4 * g + q, 2 * h + e
                    value = k[i, head, dim]
                    arena[at + block + 16 * lane + 4 * (2 * s + r) + inner] = _U8(value)
                    high = at + block + LOW_BYTES + 256 * r + 8 * lane + 4 * s + inner
                    arena[high] = _U8(value >> _U16(8))
                at = np.int64(starts[page, head, 1]) * UNIT_BYTES
                h, q, e = token >> 3, (token >> 1) & 3, token & 1
                for dim in range(head_dim):
                    block = dim // BLOCK_DIMS * RAW_BLOCK_BYTES
                    s, r, g = (dim >> 4) & 1, (dim >> 3) & 1, dim & 7
                    lane, inner = 4 * g + q, 2 * h + e
                    value = v[i, head, dim]
                    arena[at + block + 16 * lane + 4 * (2 * s + r) + inner] = _U8(value)
                    high = at + block + LOW_BYTES + 256 * r + 8 * lane + 4 * s + inner
                    arena[high] = _U8(value >> _U16(8))


@_jit
def _measure_block(memory, at):
    """Base byte of the raw block at byte ``at``: its smallest top-7 exponent bits if eligible, else RAW_BASE."""
    smallest, largest = _U8(127), _U8(0)
    for i in range(LOW_BYTES, RAW_BLOCK_BYTES):
        top7 = memory[at + i] & _U8(0x7F)
        smallest = min(smallest, top7)
        largest = max(largest, top7)
    if largest - smallest > MAX_D:
        return _U8(RAW_BASE)
    return smallest


@_jit
def _encode_block(source, at, base, target, to):
    """Compress the raw block at ``source[at:]`` with ``base`` to ``target[to:]`` (768 bytes)."""
    for i in range(LOW_BYTES):
        target[to + i] = source[at + i]
    for word in range(64):
        first = at + LOW_BYTES + 4 * word
        second = first + 256
        for i in range(4):
            high0 = source[first + i]
            high1 = source[second + i]
            high1_next = source[second + ((i + 1) & 3)]
            code = (high0 & _U8(0x80)) | ((high0 & _U8(0x7F)) - base)
            code |= (high1 & _U8(0x80)) >> _U8(4)
            code |= ((high1_next & _U8(0x7F)) - base) << _U8(4)
            target[to + LOW_BYTES + 4 * word + i] = code


@_parallel
def measure_pages(arena, starts, pages, bases):
    """Measure raw pages: ``bases[i, region]`` (uint8 [n, regions, blocks]) of ``pages[i]``.

    ``starts``: uint32 [layers, pages, heads, 2]; region = (layer * heads + head) * 2 + kind.
    """
    layers, heads = starts.shape[0], starts.shape[2]
    for i in numba.prange(pages.shape[0]):
        page = pages[i]
        for region in range(layers * heads * 2):
            start = starts[region // (2 * heads), page, region // 2 % heads, region % 2]
            at = np.int64(start) * UNIT_BYTES
            for block in range(bases.shape[2]):
                bases[i, region, block] = _measure_block(arena, at + block * RAW_BLOCK_BYTES)


@_parallel
def encode_pages(arena, starts, table_bases, pages, bases, new_starts):
    """Compact raw pages in place: region of ``pages[i]`` goes to ``new_starts[i, region]`` with ``bases[i, region]``.

    A page's regions are staged outside the arena before the first one is written, because destinations overlap sources.
    ``starts`` (uint32 [layers, pages, heads, 2]) and ``table_bases`` (uint8 [..., blocks]) are updated: the lookup table.
    """
    heads = starts.shape[2]
    num_regions, num_blocks = bases.shape[1], bases.shape[2]
    region_bytes = num_blocks * RAW_BLOCK_BYTES
    for i in numba.prange(pages.shape[0]):
        page = pages[i]
        staged = np.empty(num_regions * region_bytes, dtype=np.uint8)
        for region in range(num_regions):
            start = starts[region // (2 * heads), page, region // 2 % heads, region % 2]
            at = np.int64(start) * UNIT_BYTES
            staged[region * region_bytes : (region + 1) * region_bytes] = arena[at : at + region_bytes]
        for region in range(num_regions):
            layer, head, kind = region // (2 * heads), region // 2 % heads, region % 2
            to = np.int64(new_starts[i, region]) * UNIT_BYTES
            for block in range(num_blocks):
                base = bases[i, region, block]
                at = region * region_bytes + block * RAW_BLOCK_BYTES
                if base == RAW_BASE:
                    arena[to : to + RAW_BLOCK_BYTES] = staged[at : at + RAW_BLOCK_BYTES]
                    to += RAW_BLOCK_BYTES
                else:
                    _encode_block(staged, at, base, arena, to)
                    to += COMPACT_BLOCK_BYTES
                table_bases[layer, page, head, kind, block] = base
            starts[layer, page, head, kind] = new_starts[i, region]
