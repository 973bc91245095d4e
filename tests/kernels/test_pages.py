"""Write and restore held against the codec, bit for bit: on a GPU if there is one, else in the Triton interpreter."""

import os

import pytest

torch = pytest.importorskip("torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from benchmarks.kernel_inputs import make_pages  # noqa: E402
from zipfusion_vllm import codec  # noqa: E402
from zipfusion_vllm.format import PAGE_TOKENS, RAW_BASE, START_BYTES, UNIT_BYTES, PageShape  # noqa: E402
from zipfusion_vllm.kernels import pages as kernels  # noqa: E402
from zipfusion_vllm.kernels.reference import pages_to_values  # noqa: E402


def raw_pages(num_pages, heads, dim):
    """(arena full of 0xA5 with a guard at the end, table of raw pages one after the other)."""
    shape = PageShape(1, heads, dim)
    region = shape.raw_region_units
    arena = torch.full(((num_pages * heads * 2 * region + 4) * UNIT_BYTES,), 0xA5, dtype=torch.uint8, device=DEVICE)
    starts = torch.randperm(num_pages * heads * 2, device=DEVICE).view(num_pages, heads, 2) * region
    table = torch.zeros(num_pages, heads, 2, shape.entry_bytes, dtype=torch.uint8, device=DEVICE)
    for byte in range(START_BYTES):
        table[..., byte] = (starts >> 8 * byte & 0xFF).to(torch.uint8)
    table[..., START_BYTES : START_BYTES + shape.blocks_per_region] = RAW_BASE
    return arena, table.view(num_pages, heads, shape.row_bytes)


def bits(shape):
    return torch.randint(-(2**15), 2**15, shape, device=DEVICE).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("runs", [[(0, 16)], [(3, 1), (7, 1)], [(5, 40), (48, 16), (70, 1)], [(0, 48), (50, 14)]])
def test_write(dim, runs):
    torch.manual_seed(dim)
    heads, num_pages = 2, 5
    arena, table = raw_pages(num_pages, heads, dim)
    slots = torch.cat(
        [torch.tensor([-1])] + [torch.arange(first, first + n) for first, n in runs] + [torch.tensor([-1, -1])]
    )
    slots = slots.to(DEVICE)
    k, v = bits((len(slots), heads, dim)), bits((len(slots), heads, dim))
    before = arena.clone()
    kernels.write_tokens(k, v, slots, arena, table)
    for kind, values in (("k", k), ("v", v)):
        old = (
            pages_to_values(before, table.flatten(0, 1), dim, kind)
            .view(num_pages, heads, PAGE_TOKENS, dim)
            .transpose(1, 2)
        )
        new = (
            pages_to_values(arena, table.flatten(0, 1), dim, kind)
            .view(num_pages, heads, PAGE_TOKENS, dim)
            .transpose(1, 2)
        )
        want = old.flatten(0, 1).clone()
        want[slots[slots >= 0]] = values[slots >= 0]
        assert torch.equal(new.flatten(0, 1).view(torch.int16), want.view(torch.int16))
    assert (arena[-4 * UNIT_BYTES :] == 0xA5).all()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("eligible", [1.0, 0.7, 0.0])
def test_restore(dim, eligible):
    torch.manual_seed(1)
    heads, n = 2, 3
    pages = make_pages(n, heads, dim, eligible, device=DEVICE)
    index = torch.tensor([2, 0, 1], device=DEVICE)
    counts = torch.tensor([16, 16, 5], device=DEVICE)
    first = torch.tensor([0, 16, 32], device=DEVICE)
    k = torch.full((40, heads, dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    v = k.clone()
    kernels.restore_pages(pages.arena, pages.table, index, first, counts, k, v)
    for out, values in ((k, pages.k), (v, pages.v)):
        want = values[index].flatten(0, 1)[:37]
        assert torch.equal(out[:37].view(torch.int16), want.view(torch.int16)) and out[37:].isnan().all()


@pytest.mark.parametrize("kind", ["k", "v"])
def test_restore_all_bit_patterns(kind):
    every = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(torch.bfloat16)
    dim = 128
    values = every.view(-1, 1, PAGE_TOKENS, dim).transpose(1, 2).contiguous()
    pages = make_pages(len(values), 1, dim, 1.0, device=DEVICE, k=values, v=values)
    n = len(values)
    out = torch.zeros(n * 16, 1, dim, dtype=torch.bfloat16, device=DEVICE)
    other = torch.zeros_like(out)
    index = torch.arange(n, device=DEVICE)
    kernels.restore_pages(pages.arena, pages.table, index, index * 16, torch.full_like(index, 16), out, other)
    got = (out if kind == "k" else other).view(torch.int16)
    assert torch.equal(got, values.view(torch.int16).flatten(0, 1))
    assert codec.measure(values[:, :, 0]).unique().numel() > 2  # the patterns do hold compact blocks


def test_refused():
    arena, table = raw_pages(1, 1, 64)
    k = bits((4, 1, 64))
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.write_tokens(k.float(), k.float(), torch.zeros(4, dtype=torch.int64), arena, table)
    with pytest.raises(ValueError, match="slots"):
        kernels.write_tokens(k, k, torch.zeros(4, dtype=torch.int32), arena, table)
    with pytest.raises(ValueError, match="table"):
        kernels.write_tokens(k, k, torch.zeros(4, dtype=torch.int64), arena, table.view(torch.int8))
