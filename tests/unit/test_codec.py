"""The reference codec: every bit pattern comes back, at every position, and the bytes are those that format.py draws."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import samples
from zipfusion_vllm import codec
from zipfusion_vllm import format as fmt
from zipfusion_vllm.format import BLOCK_DIMS, BLOCK_VALUES, HEAD_DIMS, KINDS, LOW_BYTES, PAGE_TOKENS, RAW_BASE, Kind

kinds = pytest.mark.parametrize("kind", KINDS)
head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine made these tests ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def from_bits(bits: np.ndarray) -> torch.Tensor:
    """bfloat16 values of uint16 bit patterns."""
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def to_bits(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def exponents(bits: np.ndarray) -> np.ndarray:
    return (bits >> 7).astype(int) & 0xFF


def eligible_by_definition(block_bits: np.ndarray) -> bool:
    """All exponents in [b, b+15], b the smallest rounded down to even."""
    exponent = exponents(block_bits)
    b = exponent.min() // 2 * 2
    return bool(exponent.max() <= b + 15)


def blocks_of(region_bits: np.ndarray) -> list[np.ndarray]:
    return [region_bits[:, first : first + BLOCK_DIMS] for first in range(0, region_bits.shape[1], BLOCK_DIMS)]


def check_round_trip(region_bits: np.ndarray, kind: Kind) -> codec.EncodedRegion:
    """Encode and decode one region, uint16 [16, head_dim], and hold bases and size against the definition."""
    region = codec.encode(from_bits(region_bits), kind)
    blocks = blocks_of(region_bits)
    for block, base in zip(blocks, region.bases.tolist(), strict=True):
        assert base == (exponents(block).min() // 2 if eligible_by_definition(block) else RAW_BASE)
    num_raw = int((region.bases == RAW_BASE).sum())
    assert region.payload.numel() == fmt.region_units(num_raw, len(blocks)) * fmt.UNIT_BYTES
    restored = codec.decode(region.payload, region.bases, kind, region_bits.shape[1])
    assert (to_bits(restored) == region_bits).all()
    return region


@kinds
@head_dims
def test_every_bit_pattern_at_every_position_of_a_raw_block(kind: Kind, head_dim: int) -> None:
    """Shifted by one value at a time, all 65,536 patterns pass through all 512 positions of a block (here every 8th shift and its neighbour)."""
    patterns = np.arange(65536, dtype=np.uint16)
    for shift in [s for first in range(0, BLOCK_VALUES, 64) for s in (first, first + 1)]:
        bits = np.roll(patterns, shift).reshape(-1, PAGE_TOKENS, head_dim)
        regions = codec.encode_regions(from_bits(bits), kind)
        assert (to_bits(codec.decode_regions(regions.payloads, regions.bases, kind, head_dim)) == bits).all()


@kinds
@head_dims
def test_every_bit_pattern_in_every_position_class_of_a_compressed_block(kind: Kind, head_dim: int) -> None:
    """A position class is (s, r, h, e): where in its lane's words a value stands. 4,096 patterns lie in the window of a base."""
    for base in range(0, 256, 2):
        exponent = np.minimum(base + np.arange(16), 255)
        patterns = np.unique((exponent[:, None] << 7 | np.arange(128)).ravel())
        patterns = np.concatenate((patterns, patterns | 0x8000)).astype(np.uint16)
        for shift in (0, 1, 2, 3, 8, 16, 128, 256):  # one step of every class bit, for K and for V
            size = -(-len(patterns) // (PAGE_TOKENS * head_dim)) * PAGE_TOKENS * head_dim
            bits = np.roll(np.resize(patterns, size), shift).reshape(-1, PAGE_TOKENS, head_dim)
            regions = codec.encode_regions(from_bits(bits), kind)
            assert (to_bits(codec.decode_regions(regions.payloads, regions.bases, kind, head_dim)) == bits).all()
            assert (regions.bases != RAW_BASE).all()  # whatever lies in such a window can be compressed


@kinds
@pytest.mark.parametrize("distance", range(8))
def test_each_pattern_in_each_position_class_at_each_distance(kind: Kind, distance: int) -> None:
    """65,536 patterns x 16 classes x the 8 values of d: the 32 places of one class hold patterns, all others the smallest exponent."""
    classes: dict[tuple[int, ...], list[int]] = {}
    for place in range(BLOCK_VALUES):
        s, r, h, e, _, _ = fmt.coordinates(kind, *divmod(place, BLOCK_DIMS))
        classes.setdefault((s, r, h, e), []).append(place)
    assert len(classes) == 16 and all(len(places) == 32 for places in classes.values())
    patterns = np.arange(65536, dtype=np.uint16).reshape(-1, 32)  # 32 neighbours have one exponent
    smallest = np.maximum(exponents(patterns[:, 0]) // 2 - distance, 0) * 2
    for places in classes.values():
        blocks = np.repeat(smallest.astype(np.uint16)[:, None] << 7, BLOCK_VALUES, axis=1)
        blocks[:, places] = patterns
        bits = blocks.reshape(-1, 2, PAGE_TOKENS, BLOCK_DIMS).transpose(0, 2, 1, 3).reshape(-1, PAGE_TOKENS, 64)
        regions = codec.encode_regions(from_bits(bits), kind)
        assert (regions.bases.numpy().ravel() == smallest // 2).all()
        assert (to_bits(codec.decode_regions(regions.payloads, regions.bases, kind, 64)) == bits).all()


special = st.sampled_from(
    [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FC0, 0x0080, 0x7F7F, 0x3F80]
)  # zeros, subnormals, infinities, NaN payloads, smallest and largest normal, one


@st.composite
def boundary_blocks(draw: st.DrawFn) -> np.ndarray:
    """uint16 [16, 32]: exponents within a span of about 15 from a smallest one that is odd or even, with a few values out of place."""
    smallest = draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 2, 126, 127, 239, 240, 241, 254, 255])))
    span = draw(st.sampled_from([0, 1, 7, 13, 14, 15, 16, 17, 40]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = min(smallest + span, 255)
    exponent = rng.integers(smallest, largest + 1, size=(PAGE_TOKENS, BLOCK_DIMS))
    exponent.flat[rng.integers(BLOCK_VALUES)] = smallest
    exponent.flat[rng.integers(BLOCK_VALUES)] = largest
    sign, fraction = rng.integers(0, 2, size=exponent.shape), rng.integers(0, 128, size=exponent.shape)
    bits = (sign << 15 | exponent << 7 | fraction).astype(np.uint16)
    for value in draw(st.lists(st.one_of(special, st.integers(0, 65535)), max_size=2)):
        bits.flat[draw(st.integers(0, BLOCK_VALUES - 1))] = value
    return bits


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(KINDS), st.sampled_from(HEAD_DIMS), st.data())
def test_regions_of_boundary_blocks_come_back(kind: Kind, head_dim: int, data: st.DataObject) -> None:
    blocks = [data.draw(boundary_blocks()) for _ in range(head_dim // BLOCK_DIMS)]
    check_round_trip(np.concatenate(blocks, axis=1), kind)


@kinds
@pytest.mark.parametrize(("smallest", "span", "compact"), [
    (120, 15, True), (120, 16, False), (121, 14, True), (121, 15, False), (0, 15, True), (0, 16, False), (240, 15, True), (241, 14, True),
    (239, 15, False), (238, 15, True), (255, 0, True),
])  # fmt: skip
def test_the_boundary_of_the_rule(kind: Kind, smallest: int, span: int, compact: bool) -> None:
    """The window begins at an even exponent: an odd smallest one has room for a span of 14."""
    for token, dim in ((0, 0), (15, 31), (7, 18)):
        bits = np.full((PAGE_TOKENS, 64), smallest << 7, dtype=np.uint16)
        bits[token, dim] = (smallest + span) << 7 | 0x8055
        region = check_round_trip(bits, kind)
        assert (region.bases[0] != RAW_BASE) == compact and region.bases[1] != RAW_BASE


@kinds
@pytest.mark.parametrize("outlier", [0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FA5, 0xFFFF])
def test_one_outlier_makes_its_block_raw_and_no_other(kind: Kind, outlier: int) -> None:
    bits = np.full((PAGE_TOKENS, 128), 0x3F80, dtype=np.uint16)
    bits[5, 70] = outlier
    region = check_round_trip(bits, kind)
    assert (region.bases == RAW_BASE).tolist() == [False, False, True, False]


@kinds
@pytest.mark.parametrize("value", [0x0000, 0x8000, 0x7F80, 0xFFFF, 0x0001])
def test_blocks_of_one_special_value_are_compressed(kind: Kind, value: int) -> None:
    region = check_round_trip(np.full((PAGE_TOKENS, 64), value, dtype=np.uint16), kind)
    assert (region.bases == (value >> 8 & 0x7F)).all()


def test_eligible_counts_of_the_samples() -> None:
    """measure() needs the high bytes alone; sample_eligible.csv was counted independently."""
    counts = samples.eligible_counts()
    assert len(counts) == 16
    for count in counts:
        high = samples.high_bytes(count.text, count.kind)[count.layer_index]
        pages = from_bits(high.astype(np.uint16) << 8).unflatten(1, (-1, PAGE_TOKENS))
        bases = codec.measure(pages)
        assert bases.numel() == count.blocks
        assert int((bases != RAW_BASE).sum()) == count.eligible


def test_samples_of_a_real_model_come_back() -> None:
    for kind, bits in samples.full_layers():
        regions = bits.reshape(-1, PAGE_TOKENS, samples.HEAD_DIM)
        lower: Kind = "k" if kind == "K" else "v"
        encoded = codec.encode_regions(from_bits(regions), lower)
        assert (
            to_bits(codec.decode_regions(encoded.payloads, encoded.bases, lower, samples.HEAD_DIM)) == regions
        ).all()
        assert encoded.units.float().mean() < 0.8 * 8


@kinds
def test_a_raw_block_is_laid_out_as_drawn(kind: Kind) -> None:
    values = np.arange(PAGE_TOKENS * 64, dtype=np.uint16).reshape(PAGE_TOKENS, 64) * 61  # all different
    payload = codec.raw_regions(from_bits(values)[None], kind)[0].tolist()
    for token in range(PAGE_TOKENS):
        for dim in range(64):
            begin, inner = dim // BLOCK_DIMS * fmt.RAW_BLOCK_BYTES, dim % BLOCK_DIMS
            low = payload[begin + fmt.low_offset(kind, token, inner)]
            high = payload[begin + fmt.high_offset(kind, token, inner)]
            assert (high << 8 | low) == values[token, dim]


@kinds
def test_offsets_of_a_block_are_a_permutation(kind: Kind) -> None:
    places = [(token, dim) for token in range(PAGE_TOKENS) for dim in range(BLOCK_DIMS)]
    assert sorted(fmt.low_offset(kind, *place) for place in places) == list(range(LOW_BYTES))
    assert sorted(fmt.high_offset(kind, *place) for place in places) == list(range(LOW_BYTES, fmt.RAW_BLOCK_BYTES))


@kinds
def test_one_mask_one_rotation_and_one_addition_restore_a_compressed_block(kind: Kind) -> None:
    """As a warp reads it: word by word, four high bytes at once, with plain integers."""
    rng = np.random.default_rng(7)
    base = 0x70 // 2 * 2
    exponent = rng.integers(base, base + 16, size=(PAGE_TOKENS, BLOCK_DIMS))
    exponent[3, 4] = base
    bits = (rng.integers(0, 2, exponent.shape) << 15 | exponent << 7 | rng.integers(0, 128, exponent.shape)).astype(
        np.uint16
    )
    region = codec.encode(from_bits(np.concatenate((bits, bits), axis=1)), kind)
    block = bytes(region.payload[: fmt.COMPACT_BLOCK_BYTES].tolist())
    assert region.bases[0] == base // 2
    by_place = {}
    for token in range(PAGE_TOKENS):
        for dim in range(BLOCK_DIMS):
            s, r, h, e, g, q = fmt.coordinates(kind, token, dim)
            by_place[4 * g + q, s, r, 2 * h + e] = (token, dim)
    for lane in range(32):
        for s in range(2):
            at = LOW_BYTES + 8 * lane + 4 * s
            word = int.from_bytes(block[at : at + 4], "little")
            rotated = (word << 4 | word >> 28) & 0xFFFFFFFF
            for r, codes in enumerate((word & 0x87878787, rotated & 0x87878787)):
                high = (codes + int(region.bases[0]) * 0x01010101).to_bytes(4, "little")
                for i in range(4):
                    low = block[16 * lane + 4 * (2 * s + r) + i]
                    assert bits[by_place[lane, s, r, i]] == high[i] << 8 | low


def test_a_compressed_block_keeps_its_low_bytes_where_they_were() -> None:
    bits = np.full((PAGE_TOKENS, 64), 0x3F80, dtype=np.uint16) + np.arange(64, dtype=np.uint16)
    for kind in KINDS:
        raw = codec.raw_regions(from_bits(bits)[None], kind)[0]
        assert (codec.encode(from_bits(bits), kind).payload[:LOW_BYTES] == raw[:LOW_BYTES]).all()


def test_no_regions() -> None:
    regions = codec.encode_regions(torch.zeros(0, PAGE_TOKENS, 128, dtype=torch.bfloat16), "k")
    assert regions.units.shape == (0,)
    assert codec.decode_regions(regions.payloads, regions.bases, "k", 128).shape == (0, PAGE_TOKENS, 128)


def region(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        (region(16, 64, dtype=torch.float16), "k", "bfloat16"),
        (region(16, 64, dtype=torch.float32), "v", "bfloat16"),
        (region(15, 64), "k", r"\[n, 16, head_dim\]"),
        (region(16), "k", r"\[16, head_dim\]"),
        (region(1, 16, 64), "k", r"\[16, head_dim\]"),
        (region(16, 96), "k", "head_dim 96"),
        (region(16, 0), "k", "head_dim 0"),
        (region(16, 64), "q", "kind 'q'"),
    ],
)
def test_encode_refuses(values: torch.Tensor, kind: Kind, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        codec.encode(values, kind)


def test_decode_refuses() -> None:
    payload, bases = codec.encode(region(16, 64), "k")
    with pytest.raises(ValueError, match="takes 1536 bytes, the payload has 1535"):
        codec.decode(payload[:-1], bases, "k", 64)
    with pytest.raises(ValueError, match="a payload is uint8"):
        codec.decode(payload.short(), bases, "k", 64)
    with pytest.raises(ValueError, match="a payload is uint8"):
        codec.decode(payload[None], bases, "k", 64)
    with pytest.raises(ValueError, match="bases are uint8"):
        codec.decode(payload, bases, "k", 128)
    with pytest.raises(ValueError, match="bases are uint8"):
        codec.decode(payload, bases[None], "k", 64)
    with pytest.raises(ValueError, match="the metadata is damaged"):
        codec.decode(payload, torch.tensor([0, 128], dtype=torch.uint8), "k", 64)
    with pytest.raises(ValueError, match="kind 'x'"):
        codec.decode(payload, bases, "x", 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim 80"):
        codec.decode(payload, bases, "k", 80)
    with pytest.raises(ValueError, match="take up to 1536 bytes"):
        codec.decode_regions(payload[None, :1000], bases[None], "k", 64)


@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(0, 1, 64), (1, 0, 64), (1, 1, 96), (-1, 1, 64)])
def test_page_shapes_that_do_not_exist(layers: int, heads: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match=r"head_dim|at least one layer"):
        fmt.PageShape(layers, heads, head_dim)
