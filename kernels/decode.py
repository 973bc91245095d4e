"""Decode attention over raw and compact pages: plan once a step, run once a layer. The contract of the kernels stands here.

Called by the attention backend. ``DecodeAttention`` is made once per worker; ``plan`` and ``run`` allocate nothing, never synchronise, and read
everything that changes from step to step from device memory, so that both may be captured in a CUDA graph and replayed with other
contents of the same tensors.

    q            bfloat16 [tokens, q_heads, head_dim], last dim dense     queries of all sequences, one after the other
    arena        uint8    [bytes], 256-byte aligned                       all regions of all layers
    table        uint8    [num_pages, kv_heads, row_bytes], contiguous    the layer's part of the lookup table (format.py)
    block_table  int32    [sequences, pages], last dim dense              page ids; entries past a sequence's last page are not read
    seq_lens     int32    [sequences]                                     tokens of each sequence, the new ones included; 0 is allowed
    query_start  int32    [sequences + 1]                                 first row of q of each sequence; at most max_query_tokens each
    out          bfloat16 [tokens, q_heads, head_dim], last dim dense     written for every query token of every sequence
    lse          float32  [q_heads, tokens], optional                     natural log-sum-exp; -inf for an empty sequence

Query token t of n sees the keys 0 .. length - n + t. Slots past a sequence's end may hold anything. Results do not depend on which
pages are compact, nor on the run: the same plan gives the same bits. They do depend on the plan, thus on the other lengths of the batch.
"""

import logging
import math

import torch

from zipfusion_vllm.format import HEAD_DIMS, PageShape
from zipfusion_vllm.kernels.compat import GLUON_ERROR, interpreted
from zipfusion_vllm.kernels.decode_portable import run_portable
from zipfusion_vllm.kernels.plan import RECORD_INTS, WARPS, plan_decode

logger = logging.getLogger(__name__)

MAX_GROUP = 16
MAX_QUERY_TOKENS = 8
_PROGRAMS_PER_SM = {64: 5, 128: 3, 256: 2}
_REGISTERS = {64: 96, 128: 168, 256: 255}
_WIDE_PROGRAMS_PER_SM = 2
"""With 16 columns the accumulators take twice the registers."""


class DecodeAttention:
    """Decode attention of one worker: fixed head counts, head_dim, scale; owns its plan and workspace.

    ``q_heads``/``kv_heads``: heads of this rank. Raises ValueError for what the kernels do not take.
    """

    def __init__(
        self,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        max_query_tokens: int = 1,
        scale: float | None = None,
        soft_cap: float = 0.0,
        portable: bool = False,
    ) -> None:
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {head_dim} is not supported: decode attention takes {HEAD_DIMS}")
        if kv_heads < 1 or q_heads % kv_heads or not 1 <= q_heads // kv_heads <= MAX_GROUP:
            raise ValueError(
                f"{q_heads} query heads over {kv_heads} KV heads: decode attention takes whole groups of 1 to {MAX_GROUP}"
            )
        if not 1 <= max_query_tokens <= MAX_QUERY_TOKENS:
            raise ValueError(
                f"{max_query_tokens} query tokens per sequence: decode attention takes 1 to {MAX_QUERY_TOKENS}"
            )
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.group = q_heads // kv_heads
        self.max_query_tokens = max_query_tokens
        self.scale = head_dim**-0.5 if scale is None else scale
        self.soft_cap = soft_cap
        self.row_bytes = PageShape(1, 1, head_dim).row_bytes
        self.device = torch.device(device)
        why = GLUON_ERROR or (
            None if self.device.type == "cuda" and not interpreted() else f"it runs on {self.device.type}"
        )
        self.portable = portable or why is not None
        """Whether the slow kernel in plain Triton runs instead of the Gluon one."""
        if self.portable:
            logger.warning("ZIPFUSION decodes with its portable Triton kernel, which is slow: %s", why or "asked for")
            return
        columns = self.group * max_query_tokens
        self.columns = 8 if columns <= 8 else 16
        self.column_blocks = -(-columns // self.columns)
        wide = self.columns > 8 or head_dim == 256
        per_sm = min(_PROGRAMS_PER_SM[head_dim], _WIDE_PROGRAMS_PER_SM) if wide else _PROGRAMS_PER_SM[head_dim]
        self.registers = 255 if wide else _REGISTERS[head_dim]
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.programs = num_sms * per_sm
        self.small = num_sms * 2
        self.records = torch.zeros(self.programs, RECORD_INTS, dtype=torch.int32, device=self.device)
        self.parts_o = torch.empty(2 * self.programs * self.columns * head_dim, dtype=torch.float32, device=self.device)
        self.parts_ml = torch.empty(2 * self.programs * 2 * self.columns, dtype=torch.float32, device=self.device)
        self.counters = torch.zeros(self.programs, dtype=torch.int32, device=self.device)

    def plan(self, seq_lens: torch.Tensor) -> None:
        """Cut the step's work for ``seq_lens`` (int32 [sequences], on the device). Queued in the current stream, like ``run``."""
        self._check("seq_lens", seq_lens, torch.int32, 1)
        if self.portable:
            return
        plan_decode(seq_lens, self.records, self.kv_heads * self.column_blocks, self.small)

    def run(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        table: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with the last plan; see the module's docstring. Returns ``out``. Raises ValueError for tensors that do not fit."""
        self._check("q", q, torch.bfloat16, 3)
        self._check("out", out, torch.bfloat16, 3)
        self._check("arena", arena, torch.uint8, 1)
        self._check("table", table, torch.uint8, 3)
        self._check("block_table", block_table, torch.int32, 2)
        self._check("seq_lens", seq_lens, torch.int32, 1)
        self._check("query_start", query_start, torch.int32, 1)
        if (
            q.shape[1:] != (self.q_heads, self.head_dim)
            or out.shape != q.shape
            or q.stride(2) != 1
            or out.stride(2) != 1
        ):
            raise ValueError(
                f"q and out must be [tokens, {self.q_heads}, {self.head_dim}] with a dense last dim, got {list(q.shape)} and {list(out.shape)}"
            )
        if table.shape[1:] != (self.kv_heads, self.row_bytes) or not table.is_contiguous():
            raise ValueError(
                f"the table must be contiguous [pages, {self.kv_heads}, {self.row_bytes}], got {list(table.shape)}"
            )
        if len(block_table) < len(seq_lens) or block_table.stride(1) != 1 or len(query_start) != len(seq_lens) + 1:
            raise ValueError(
                f"{len(seq_lens)} sequences, but {len(block_table)} block table rows and {len(query_start)} query starts (one more)"
            )
        if lse is not None:
            self._check("lse", lse, torch.float32, 2)
        if self.portable:
            run_portable(
                q,
                arena,
                table,
                block_table,
                seq_lens,
                query_start,
                out,
                lse,
                self.kv_heads,
                self.max_query_tokens,
                self.scale,
                self.soft_cap,
            )
            return out
        from zipfusion_vllm.kernels.decode_gluon import decode_kernel

        decode_kernel[(self.programs,)](
            q, arena.view(torch.int32), table.view(torch.int32), block_table, seq_lens, query_start, self.records, out,
            lse if lse is not None else self.parts_ml, self.parts_o, self.parts_ml, self.counters,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), lse.stride(0) if lse is not None else 0, block_table.stride(0),
            self.scale * math.log2(math.e), self.soft_cap,
            KV_HEADS=self.kv_heads, GROUP=self.group, D=self.head_dim, COLS=self.columns, COL_BLOCKS=self.column_blocks,
            MAX_QUERY=self.max_query_tokens, W=WARPS, HAS_LSE=lse is not None, HAS_CAP=bool(self.soft_cap), PREFETCH_V=self.prefetch_v,
            num_warps=WARPS, maxnreg=self.registers,
        )  # fmt: skip
        return out

    @property
    def prefetch_v(self) -> bool:
        """Whether V of the next page is loaded a page ahead; with head_dim 256 there are no registers for it."""
        return self.head_dim < 256

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, dims: int) -> None:
        if tensor.dtype != dtype or tensor.dim() != dims or tensor.device.type != self.device.type:
            raise ValueError(
                f"{name} must be {dtype} with {dims} dims on {self.device.type}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device.type}"
            )


__all__ = ["MAX_GROUP", "MAX_QUERY_TOKENS", "DecodeAttention"]
