"""The plan and the portable decode kernel, in the interpreter (on a GPU if there is one), against float64 attention."""

import os

import pytest

torch = pytest.importorskip("torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from benchmarks.kernel_inputs import make_pages  # noqa: E402
from zipfusion_vllm.kernels.decode import DecodeAttention  # noqa: E402
from zipfusion_vllm.kernels.plan import RECORD_INTS, TILE_TOKENS, plan_decode  # noqa: E402
from zipfusion_vllm.kernels.reference import attention  # noqa: E402


@pytest.mark.parametrize("lengths", [[1], [0, 0], [5000], [64, 0, 129, 1000, 65], [300] * 20])
@pytest.mark.parametrize(("lists", "programs", "small"), [(1, 12, 8), (3, 40, 20)])
def test_plan_covers_every_tile_once(lengths, lists, programs, small):
    records = torch.full((programs, RECORD_INTS), -7, dtype=torch.int32, device=DEVICE)
    plan_decode(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), records, lists, small)
    tiles = [
        (s, i, t) for s, n in enumerate(lengths) for i in range(lists) for t in range(max(1, -(-n // TILE_TOKENS)))
    ]
    covered, sizes = [], []
    for sequence, index, tile, count, first, total, working, _ in records.tolist():
        assert total == len(tiles) and working <= programs
        if count:
            assert tiles[first] == (sequence, index, tile)
            covered += tiles[first : first + count]
            sizes.append(count)
    assert covered == tiles and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("dim", "group", "query"), [(64, 3, 1), (128, 4, 3), (256, 2, 1)])
@pytest.mark.parametrize("eligible", [0.8, 0.0])
def test_portable(dim, group, query, eligible):
    torch.manual_seed(0)
    heads, lengths = 2, [20, 0, 16, 1]
    pages = make_pages(6, heads, dim, eligible, device=DEVICE, pool=6)
    table = torch.full((4, 3), 2**30, dtype=torch.int32, device=DEVICE)
    table[0, 0], table[0, 1], table[2, 0], table[3, 0] = 5, 2, 1, 4
    tokens = [min(query, max(n, 1)) for n in lengths]
    start = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    q = torch.randn(sum(tokens), group * heads, dim, device=DEVICE).bfloat16()
    out, lse = torch.full_like(q, float("nan")), torch.zeros(group * heads, len(q), device=DEVICE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    decode = DecodeAttention(group * heads, heads, dim, DEVICE, query, portable=True)
    decode.plan(seq_lens)
    decode.run(q, pages.arena, pages.table, table, seq_lens, start, out, lse)
    for i, n in enumerate(lengths):
        rows = slice(int(start[i]), int(start[i + 1]))
        if n == 0:
            assert (out[rows] == 0).all() and (lse[:, rows] == float("-inf")).all()
            continue
        ids = table[i, : -(-n // 16)].long()
        k, v = (x[ids].flatten(0, 1)[:n].double() for x in (pages.k, pages.v))
        want, want_lse = attention(q[rows].double(), k, v, dim**-0.5)
        assert (out[rows].double() - want).norm() / want.norm() < 5e-3
        torch.testing.assert_close(lse[:, rows].double(), want_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("change", [{"head_dim": 96}, {"q_heads": 34}, {"q_heads": 7}, {"max_query_tokens": 9}])
def test_refused(change):
    arguments = {"q_heads": 8, "kv_heads": 2, "head_dim": 128, "device": DEVICE, "portable": True} | change
    with pytest.raises(ValueError, match="decode attention takes"):
        DecodeAttention(**arguments)
