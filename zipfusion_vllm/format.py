"""The page format: sizes, byte order and metadata, drawn once, here.

Everything that touches page bytes (codec, kernels, memory manager, attention) takes its numbers from this
module; this module knows nobody. Words as in the README's glossary: a *page* is 16 tokens of one sequence in
all layers, a *region* the K or the V of one KV head of one page in one layer, a *block* 512 values of a region
(16 tokens x 32 dims), a *unit* 256 bytes.

A BF16 value is two bytes. The low byte (7 fraction bits and the lowest exponent bit) is stored as it is. The high
byte is ``sign*128 + top7`` where ``top7`` are the upper 7 exponent bits. A block is *eligible* when all its
exponents lie in ``[b, b+15]``, b the smallest exponent rounded down to even; since b is even this is the same as
``max(top7) - min(top7) <= 7``. Then ``top7 = b/2 + d`` with d in 0..7, and (sign, d) is a 4-bit code::

    raw block, 4 units                            compressed block, 3 units
    0..511    low bytes                           0..511    low bytes (the same bytes)
    512..767  high bytes of the values with r=0   512..767  code bytes
    768..1023 high bytes of the values with r=1

The order inside a block is that of the operand fragments of ``mma.m16n8k16`` (lane = 4g + q), so that a warp loads
its fragments of a block with one 16-byte and one 8-byte load per lane. A value has coordinates s, r, h, e (one bit each),
g (0..7) and q (0..3)::

    K: token = 8r + g              dim = 16s + 8h + 2q + e
    V: token = 8h + 2q + e         dim = 16s + 8r + g

    low byte         at        16*lane + 4*(2s + r) + 2h + e
    raw high byte    at  512 + 256r + 8*lane + 4s + 2h + e
    code byte        at  512 +        8*lane + 4s + i        i = 2h + e; it holds two codes:

      bit   7          6   5   4               3          2   1   0
            sign(r=0,i) d(r=1, (i+1) mod 4)     sign(r=1,i) d(r=0,i)

Seen as one little-endian 32-bit word per (lane, s), ``word & 0x87878787`` are the four codes with r=0 and
``rotate_left(word, 4) & 0x87878787`` those with r=1; adding b/2 to every byte restores four high bytes at once, and
``b/2 + d <= 127`` so nothing carries.

Metadata: one *entry* per region, ``u32 start`` (in units from the start of the arena) and one *base* byte per block
(0xFF for raw, else b/2), padded to a multiple of 8 bytes. The entries of K and V of a head stand side by side: a *row*::

    head_dim 64    K start, 2 bases, 2 pad | V start, 2 bases, 2 pad         16 bytes
    head_dim 128   K start, 4 bases        | V start, 4 bases                16 bytes
    head_dim 256   K start, 8 bases, 4 pad | V start, 8 bases, 4 pad         32 bytes
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["k", "v"]
KINDS: tuple[Kind, Kind] = ("k", "v")

PAGE_TOKENS = 16
"""Tokens in a page: vLLM's block size."""
BLOCK_DIMS = 32
BLOCK_VALUES = PAGE_TOKENS * BLOCK_DIMS
UNIT_BYTES = 256
RAW_BLOCK_UNITS = 4
COMPACT_BLOCK_UNITS = 3
RAW_BLOCK_BYTES = RAW_BLOCK_UNITS * UNIT_BYTES
COMPACT_BLOCK_BYTES = COMPACT_BLOCK_UNITS * UNIT_BYTES
LOW_BYTES = BLOCK_VALUES
"""Bytes 0..511 of a block: the low bytes. What follows are high bytes (raw) or codes (compressed)."""
RAW_BASE = 0xFF
"""The base byte of a raw block. A real base is at most 127."""
MAX_D = 7
"""A block is eligible when the largest and smallest of its top-7 exponent bits differ by at most this."""
START_BYTES = 4
ENTRY_ALIGNMENT = 8
HEAD_DIMS = (64, 128, 256)
"""Head sizes that the format supports."""


@dataclass(frozen=True)
class PageShape:
    """What one worker stores of a page: ``num_layers`` layers of ``num_kv_heads`` KV heads (of this rank) of ``head_dim``.

    Raises ValueError for a head_dim outside ``HEAD_DIMS`` or a count below 1.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {self.head_dim} is not supported: the page format takes {HEAD_DIMS}")
        if self.num_layers < 1 or self.num_kv_heads < 1:
            raise ValueError(f"a page needs at least one layer and one KV head, got {self}")

    @property
    def blocks_per_region(self) -> int:
        return self.head_dim // BLOCK_DIMS

    @property
    def regions_per_page(self) -> int:
        """K and V of every KV head in every layer."""
        return self.num_layers * self.num_kv_heads * 2

    @property
    def raw_region_units(self) -> int:
        return self.blocks_per_region * RAW_BLOCK_UNITS

    @property
    def compact_region_units(self) -> int:
        """Units of a region all of whose blocks are eligible: the smallest size a region can have."""
        return self.blocks_per_region * COMPACT_BLOCK_UNITS

    @property
    def raw_region_bytes(self) -> int:
        return self.raw_region_units * UNIT_BYTES

    @property
    def raw_page_bytes(self) -> int:
        """Bytes of a raw page in all layers: ``16 * 2 * heads * head_dim * 2 * layers``."""
        return self.regions_per_page * self.raw_region_bytes

    @property
    def nominal_page_bytes(self) -> int:
        """Bytes of a page all of whose blocks are eligible: 3/4 of raw. vLLM sizes its logical ids by it."""
        return self.regions_per_page * self.compact_region_units * UNIT_BYTES

    @property
    def entry_bytes(self) -> int:
        """Metadata bytes of one region: start, bases, padding."""
        used = START_BYTES + self.blocks_per_region
        return -(-used // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT

    @property
    def row_bytes(self) -> int:
        """Metadata bytes of one head of a page in one layer: the entries of K and V."""
        return 2 * self.entry_bytes

    @property
    def table_page_bytes(self) -> int:
        """Metadata bytes of one page: a row for each layer and head."""
        return self.num_layers * self.num_kv_heads * self.row_bytes


def region_units(num_raw_blocks: int, blocks_per_region: int) -> int:
    """Units of a region with ``num_raw_blocks`` blocks that are not eligible."""
    return blocks_per_region * COMPACT_BLOCK_UNITS + num_raw_blocks


def coordinates(kind: Kind, token: int, dim: int) -> tuple[int, int, int, int, int, int]:
    """(s, r, h, e, g, q) of the value at ``token`` (0..15) and ``dim`` (0..31) of a block, see the drawing above."""
    s = dim // 16
    if kind == "k":
        r, g = divmod(token, 8)
        h, q, e = (dim // 8) % 2, (dim // 2) % 4, dim % 2
    else:
        r, g = (dim // 8) % 2, dim % 8
        h, q, e = token // 8, (token // 2) % 4, token % 2
    return s, r, h, e, g, q


def low_offset(kind: Kind, token: int, dim: int) -> int:
    """Byte offset in a block of the low byte of the value at ``token``, ``dim``."""
    s, r, h, e, g, q = coordinates(kind, token, dim)
    return 16 * (4 * g + q) + 4 * (2 * s + r) + 2 * h + e


def high_offset(kind: Kind, token: int, dim: int) -> int:
    """Byte offset in a *raw* block of the high byte of the value at ``token``, ``dim``."""
    s, r, h, e, g, q = coordinates(kind, token, dim)
    return LOW_BYTES + 256 * r + 8 * (4 * g + q) + 4 * s + 2 * h + e
