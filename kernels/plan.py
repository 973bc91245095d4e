"""The work split of a decode step: made once per step on the device, read by every layer's attention launch.

``plan_decode`` is called by the attention metadata builder (or inside the captured graph); ``decode.py`` hands the result to the kernel. All lists
(one for each sequence, KV head and block of query columns) are laid end to end, counted in tiles of ``TILE_TOKENS`` tokens, and cut into
equal ranges, one for each program. A record is 8 int32:

    sequence, list in the sequence, tile in the list, number of tiles, first tile counted over all lists, total tiles, programs that work, 0

An empty sequence counts one tile, so that its rows are written (zeros, log-sum-exp -inf).
"""

import torch

from zipfusion_vllm.format import PAGE_TOKENS
from zipfusion_vllm.kernels.compat import tl, triton

WARPS = 4
TILE_TOKENS = WARPS * PAGE_TOKENS
"""Tokens of a tile: one page for each warp of a program."""
RECORD_INTS = 8
MIN_TILES_PER_PROGRAM = 4
"""With fewer tiles per program than this, two programs per SM are started instead of all: less to merge."""


@triton.jit
def plan_kernel(
    seq_lens, records, num_sequences, lists, small, TILE: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per record. ``lists``: lists of a sequence; ``small``: programs that work when there is little."""
    program = tl.program_id(0)
    grid = tl.num_programs(0)
    index = tl.arange(0, BLOCK)
    lengths = tl.load(seq_lens + index, mask=index < num_sequences, other=0)
    tiles = tl.where(index < num_sequences, tl.maximum((lengths + TILE - 1) // TILE, 1), 0)
    ends = tl.cumsum(tiles * lists, axis=0)
    total = tl.sum(tiles * lists, axis=0)
    programs = tl.where(total >= grid * MIN_TILES, grid, tl.minimum(total, small))
    begin = (program.to(tl.int64) * total // tl.maximum(programs, 1)).to(tl.int32)
    end = ((program + 1).to(tl.int64) * total // tl.maximum(programs, 1)).to(tl.int32)
    sequence = tl.sum(((ends <= begin) & (index < num_sequences)).to(tl.int32), axis=0)
    before = tl.sum(tl.where(index < sequence, tiles * lists, 0), axis=0)
    own = tl.maximum(tl.sum(tl.where(index == sequence, tiles, 0), axis=0), 1)
    works = program < programs
    base = records + program * 8
    tl.store(base + 0, sequence)
    tl.store(base + 1, (begin - before) // own)
    tl.store(base + 2, (begin - before) % own)
    tl.store(base + 3, tl.where(works, end - begin, 0))
    tl.store(base + 4, begin)
    tl.store(base + 5, total)
    tl.store(base + 6, programs)
    tl.store(base + 7, 0)


def plan_decode(seq_lens: torch.Tensor, records: torch.Tensor, lists: int, small: int) -> None:
    """Fill ``records`` (int32 [programs, 8]) for ``seq_lens`` (int32 [sequences], tokens, new ones included), in the current stream.

    ``lists``: KV heads times column blocks; ``small``: programs used when there are fewer than four tiles each. No allocation, no
    synchronisation, shapes fixed by the arguments: may be captured. The attention launch must see the same ``seq_lens``.
    """
    num_sequences = seq_lens.shape[0]
    block = max(triton.next_power_of_2(num_sequences), 16)
    plan_kernel[(records.shape[0],)](
        seq_lens, records, num_sequences, lists, min(small, records.shape[0]), TILE_TOKENS, MIN_TILES_PER_PROGRAM, block
    )
