"""Decode attention on the GPU against float64 attention over the same values."""

import pytest
import torch

from benchmarks.kernel_inputs import make_pages
from zipfusion_vllm.kernels.decode import DecodeAttention
from zipfusion_vllm.kernels.reference import attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"


def make_case(lengths, group, heads, dim, eligible, query=1, seed=0, raw=False, poison=True):
    torch.manual_seed(seed)
    pages_each = [-(-n // 16) for n in lengths]
    num = sum(pages_each) + 1
    pages = make_pages(num, heads, dim, eligible, seed=seed, pool=num)
    k, v = pages.k.clone(), pages.v.clone()
    order = torch.randperm(num - 1, device=DEVICE) + 1
    table = torch.full(
        (len(lengths), max([*pages_each, 1]) + 3), 2**30, dtype=torch.int32, device=DEVICE
    )  # garbage past the end
    values, at = [], 0
    for i, (n, count) in enumerate(zip(lengths, pages_each, strict=True)):
        ids = order[at : at + count]
        at += count
        table[i, :count] = ids.int()
        values.append((k[ids].flatten(0, 1)[:n].clone(), v[ids].flatten(0, 1)[:n].clone()))
        if poison and n % 16:
            k[ids[-1], n % 16 :] = float("nan")
            v[ids[-1], n % 16 :] = float("nan")
    pages = make_pages(num, heads, dim, eligible, seed=seed, k=k, v=v, raw=raw)
    tokens = [min(query, n) if n else 1 for n in lengths]
    start = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    q = torch.randn(sum(tokens), group * heads, dim, device=DEVICE).bfloat16()
    return pages, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), start, q, values


def run(case, group, heads, dim, query, soft_cap=0.0):
    pages, table, lengths, start, q, _ = case
    decode = DecodeAttention(group * heads, heads, dim, DEVICE, query, soft_cap=soft_cap)
    out = torch.full_like(q, float("nan"))
    lse = torch.full((group * heads, len(q)), float("nan"), device=DEVICE)
    decode.plan(lengths)
    decode.run(q, pages.arena, pages.table, table, lengths, start, out, lse)
    assert not decode.counters.any()
    return out, lse


def check(case, out, lse, dim, soft_cap=0.0):
    _, _, _, start, q, values = case
    for i, (k, v) in enumerate(values):
        rows = slice(int(start[i]), int(start[i + 1]))
        want, want_lse = attention(q[rows].double(), k.double(), v.double(), dim**-0.5, soft_cap)
        if len(k) == 0:
            assert (out[rows] == 0).all() and (lse[:, rows] == float("-inf")).all()
            continue
        peer, _ = attention(q[rows], k, v, dim**-0.5, soft_cap)
        error = (out[rows].double() - want).norm() / want.norm()
        peer_error = (peer.double() - want).norm() / want.norm()
        assert error <= max(2 * peer_error, 4e-3), (i, len(k), float(error), float(peer_error))
        torch.testing.assert_close(lse[:, rows].double(), want_lse, rtol=1e-3, atol=2e-3)


LENGTHS = [1, 15, 16, 17, 0, 63, 64, 65, 128, 1000, 4097, 33]
SHAPES = [(4, 8, 128, 1), (1, 8, 128, 1), (8, 8, 128, 1), (4, 8, 64, 1), (4, 8, 256, 1), (16, 2, 128, 1), (9, 1, 128, 1),
          (3, 3, 64, 1), (4, 8, 128, 2), (4, 8, 128, 4), (4, 8, 128, 8), (16, 1, 128, 8), (8, 1, 256, 2), (5, 2, 64, 3)]  # fmt: skip


@pytest.mark.parametrize(("group", "heads", "dim", "query"), SHAPES)
@pytest.mark.parametrize("eligible", [1.0, 0.9, 0.0])
def test_against_float64(group, heads, dim, query, eligible):
    case = make_case(LENGTHS, group, heads, dim, eligible, query)
    out, lse = run(case, group, heads, dim, query)
    check(case, out, lse, dim)


@pytest.mark.parametrize("lengths", [[1], [0], [64], [70000], [0, 0, 5], [100] * 300, [30000, 1, 2, 3, 500]])
def test_lengths(lengths):
    case = make_case(lengths, 4, 2, 128, 0.9)
    out, lse = run(case, 4, 2, 128, 1)
    check(case, out, lse, 128)


def test_soft_cap():
    case = make_case([500, 20], 4, 2, 128, 0.9)
    out, lse = run(case, 4, 2, 128, 1, soft_cap=5.0)
    check(case, out, lse, 128, 5.0)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_compaction_does_not_change_a_bit(dim):
    compact = make_case(LENGTHS, 4, 4, dim, 0.9)
    raw = make_case(LENGTHS, 4, 4, dim, 0.9, raw=True)
    first, again, other = run(compact, 4, 4, dim, 1), run(compact, 4, 4, dim, 1), run(raw, 4, 4, dim, 1)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_graph_replay_with_other_lengths():
    case = make_case([4000, 3000, 17, 900], 4, 2, 128, 0.9, poison=False)
    pages, table, lengths, start, q, values = case
    decode = DecodeAttention(8, 2, 128, DEVICE)
    out, lse = torch.empty_like(q), torch.empty(8, len(q), device=DEVICE)

    def step():
        decode.plan(lengths)
        decode.run(q, pages.arena, pages.table, table, lengths, start, out, lse)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ([4000, 3000, 17, 900], [1, 2999, 0, 64], [129, 0, 0, 0]):
        lengths.copy_(torch.tensor(new))
        out.fill_(float("nan"))
        graph.replay()
        cut = [(k[:n], v[:n]) for (k, v), n in zip(values, new, strict=True)]
        check((pages, table, lengths, start, q, cut), out, lse, 128)
    lengths.copy_(torch.tensor([4000, 3000, 17, 900]))
    graph.replay()
    first = out.clone()
    for _ in range(10_000):
        graph.replay()
    assert torch.equal(out, first) and not decode.counters.any()
