"""Compaction held against codec and packing rule: on a GPU if there is one, else in the Triton interpreter."""

import os

import pytest

torch = pytest.importorskip("torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from benchmarks.kernel_inputs import random_values  # noqa: E402
from zipfusion_vllm import codec  # noqa: E402
from zipfusion_vllm.format import PAGE_TOKENS, RAW_BASE, START_BYTES, PageShape  # noqa: E402
from zipfusion_vllm.kernels.compaction import Compactor  # noqa: E402
from zipfusion_vllm.kernels.reference import pages_to_values, table_entries  # noqa: E402
from zipfusion_vllm.memory.layout import ArenaLayout  # noqa: E402
from zipfusion_vllm.memory.packing import pack_pages  # noqa: E402

SHAPES = [
    (PageShape(2, 2, 64), 3),
    (PageShape(3, 2, 128), 4),
    (PageShape(2, 1, 256), 3),
    (PageShape(8, 3, 128), 6),
    (PageShape(2, 2, 64), 5),
]


def set_starts(table, page, starts, shape):
    flat = starts.view(shape.num_layers, shape.num_kv_heads, 2).to(DEVICE)
    rows = table[:, page].view(shape.num_layers, shape.num_kv_heads, 2, shape.entry_bytes)
    for byte in range(START_BYTES):
        rows[..., byte] = (flat >> 8 * byte & 0xFF).to(torch.uint8)
    rows[..., START_BYTES : START_BYTES + shape.blocks_per_region] = RAW_BASE


@pytest.mark.parametrize(("shape", "per_chunk"), SHAPES)
@pytest.mark.parametrize("eligible", [1.0, 0.8, 0.3, 0.0])
def test_compact(shape, per_chunk, eligible):
    generator = torch.Generator(DEVICE).manual_seed(3)
    num_pages = 4
    regions, raw_bytes = shape.regions_per_page, shape.raw_region_bytes
    chunks_each = -(-regions // per_chunk)
    probe = num_pages * chunks_each + 2
    layout = ArenaLayout(
        shape, num_pages, probe * per_chunk * raw_bytes + num_pages * shape.table_page_bytes + 512, per_chunk
    )
    arena = torch.full((layout.table_offset,), 0x5A, dtype=torch.uint8, device=DEVICE)
    table = torch.zeros(
        shape.num_layers, num_pages, shape.num_kv_heads, shape.row_bytes, dtype=torch.uint8, device=DEVICE
    )
    ids = torch.randperm(num_pages * chunks_each, generator=torch.Generator().manual_seed(1)) + 1
    own = ids.view(num_pages, chunks_each).int().to(DEVICE)
    values = random_values((num_pages * regions, PAGE_TOKENS, shape.head_dim), eligible, DEVICE, generator).view(
        num_pages, regions, PAGE_TOKENS, shape.head_dim
    )
    index = torch.arange(regions)
    for page in range(num_pages):
        starts = (
            own[page].cpu()[index // per_chunk].long() * layout.chunk_units + index % per_chunk * shape.raw_region_units
        )
        set_starts(table, page, starts, shape)
        for kind, name in ((0, "k"), (1, "v")):
            payload = codec.raw_regions(values[page, kind::2], name)
            for region, start in enumerate(starts[kind::2].tolist()):
                arena[start * 256 : start * 256 + raw_bytes] = payload[region]
    before, table_before = arena.clone(), table.clone()
    pages = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    answer = torch.zeros(5, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    Compactor(layout, 2, DEVICE).compact(pages, arena, table, own, answer)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    bases = codec.measure(values)
    packed = pack_pages(codec.region_units(bases).cpu().numpy(), layout.chunk_units)
    assert answer[:2].tolist() == packed.num_chunks[[3, 1]].tolist() and not answer[2:].any()
    touched = set()
    for page in range(num_pages):
        rows = table[:, page].flatten(0, 1)
        for kind, name in ((0, "k"), (1, "v")):
            got = pages_to_values(arena, rows, shape.head_dim, name)
            assert torch.equal(got.view(torch.int16), values[page, kind::2].view(torch.int16))
            if page in (3, 1):
                starts, got_bases = table_entries(rows, shape.head_dim, name)
                assert torch.equal(got_bases, bases[page, kind::2])
                want = (
                    own[page].cpu().numpy()[packed.chunk[page, kind::2]].astype("int64") * layout.chunk_units
                    + packed.offset[page, kind::2]
                )
                assert starts.tolist() == want.tolist()
                touched.update(own[page].tolist())
    for page in (0, 2):
        assert torch.equal(table[:, page], table_before[:, page])
    chunk_bytes = layout.chunk_bytes
    for chunk in range(layout.num_chunks):
        if chunk not in touched:
            part = slice(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)
            assert torch.equal(arena[part], before[part])


def test_refused():
    layout = ArenaLayout(PageShape(1, 1, 64), 4, 1 << 20, 4)
    compactor = Compactor(layout, 1, DEVICE)
    pages = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="2 pages"):
        compactor.compact(pages, pages, pages, pages, pages)
