"""What the kernels must compute, in PyTorch: slow, plain, on any device. Called by tests and benchmarks only.

``pages_to_values`` reads an arena through the lookup table with ``codec.py``; ``attention`` is textbook attention in the dtype it is given
(float64 in tests).
"""

import torch

from zipfusion_vllm import codec
from zipfusion_vllm.format import RAW_BLOCK_BYTES, START_BYTES, UNIT_BYTES, Kind


def table_entries(rows: torch.Tensor, head_dim: int, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts int64 [...], bases uint8 [..., blocks]) of table rows uint8 [..., row_bytes]."""
    half = rows.shape[-1] // 2
    entry = rows[..., :half] if kind == "k" else rows[..., half:]
    powers = torch.tensor([1, 1 << 8, 1 << 16, 1 << 24], device=rows.device)
    starts = (entry[..., :START_BYTES].long() * powers).sum(-1)
    return starts, entry[..., START_BYTES : START_BYTES + head_dim // 32]


def pages_to_values(arena: torch.Tensor, rows: torch.Tensor, head_dim: int, kind: Kind) -> torch.Tensor:
    """bfloat16 [n, 16, head_dim] of n regions: arena uint8 [bytes], rows uint8 [n, row_bytes]."""
    starts, bases = table_entries(rows, head_dim, kind)
    size = head_dim // 32 * RAW_BLOCK_BYTES
    at = starts[:, None] * UNIT_BYTES + torch.arange(size, device=arena.device)
    payloads = arena[
        at.clamp(max=arena.numel() - 1)
    ]  # a compact region at the arena's end is shorter than the row read
    return codec.decode_regions(payloads, bases.contiguous(), kind, head_dim)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, soft_cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last ``q`` tokens of one sequence.

    q [tokens, heads, D], k and v [length, kv_heads, D], all of one dtype. Returns (out [tokens, heads, D], log-sum-exp [heads, tokens]). With
    length 0: zeros and -inf.
    """
    tokens, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    k = k.repeat_interleave(heads // kv_heads, dim=1)
    v = v.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - tokens, length, device=q.device)
    hidden = torch.arange(length, device=q.device)[None] > position[:, None]
    scores = scores.masked_fill(hidden[None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0) if length == 0 else torch.exp(scores - lse[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse
