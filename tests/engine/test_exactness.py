"""Compaction on and off give bitwise the same tokens and log-probabilities, on real weights, whatever the engine does meanwhile.

Runs are compared with the same schedule, because a CPU's matrix products depend on the batch: where compaction would change who runs when
(a full arena), ``freeze_space`` lets pages be compacted and read compact, and hands nothing back.
"""

import random
from typing import Any

import pytest

from tests.engine.harness import (
    assert_all_memory_is_back,
    count_preemptions,
    engine,
    freeze_space,
    half_of,
    outcome,
    pool_of,
)

BLOCKS = 2200
"""Logical pages: 1,600 raw pages, more than all prompts need at once."""


def prompts() -> list[dict[str, Any]]:
    """20 prompts: 1 token, 15, 16 and 17, ends inside a page, shared prefixes, 1,500 tokens."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, 40000) for _ in range(count)]

    shared = tokens(333)
    lists = [tokens(n) for n in (1, 2, 15, 16, 17, 31, 32, 33, 47, 100, 200, 333, 500)]
    lists += [shared + tokens(n) for n in (1, 16, 30)] + [shared[:320] + tokens(5)]
    lists += [tokens(1500), tokens(1500)[:1499], shared + tokens(700)]
    assert len(lists) == 20
    return [{"prompt_token_ids": ids} for ids in lists]


def sampling(greedy: bool, n: int = 1) -> list[Any]:
    """Greedy, or drawn with a seed per request."""
    from vllm import SamplingParams

    return [
        SamplingParams(
            temperature=0.0 if greedy else 0.9,
            top_p=1.0 if greedy else 0.95,
            seed=None if greedy else 1000 + i,
            n=n,
            max_tokens=24 // n,
            logprobs=3,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(20)
    ]


def run(llm: Any, params: list[Any]) -> list[Any]:
    return outcome(llm.generate(prompts(), params, use_tqdm=False))


CASES = {
    "greedy": (dict(), dict(greedy=True)),
    # One step for all prompts: vLLM 0.32 fails on a CPU when a prompt with a seed is split ("CPU Generator does not use offset").
    "seeded": (dict(max_num_batched_tokens=16384), dict(greedy=False)),
    "chunked_prefill": (dict(max_num_batched_tokens=64, max_num_seqs=16), dict(greedy=True)),
    "no_prefix_caching": (dict(enable_prefix_caching=False), dict(greedy=True)),
    "two_samples": (dict(max_num_batched_tokens=16384), dict(greedy=False, n=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_compaction_on_equals_off(case: str, smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, how = CASES[case]
    arguments = {"num_gpu_blocks_override": BLOCKS, **arguments}
    results = []
    for compaction in (True, False):
        with engine(monkeypatch, smollm2, compaction=compaction, **arguments) as llm:
            first = run(llm, sampling(**how))
            second = run(llm, sampling(**how))  # reads cached, by then compact, pages
            results.append((first, second))
            shrunk = pool_of(llm).space.num_shrunk
            assert (shrunk > 300) if compaction else (shrunk == 0)
            assert_all_memory_is_back(llm)
    assert results[0] == results[1]
    assert len(results[0][0]) == 20 * how.get("n", 1)


def test_stock_vllm_gives_the_same(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not promised on a GPU; on a CPU the arithmetic is stock vLLM's own kernel on the same bits."""
    results = []
    for backend in ("ZIPFUSION", None):
        # 128-token blocks in stock vLLM: the same number of tokens needs fewer of them, and its scheduler admits alike.
        with engine(monkeypatch, smollm2, backend=backend, enable_prefix_caching=False) as llm:
            results.append(run(llm, sampling(greedy=True)))
    assert results[0] == results[1]


def test_forced_preemption(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena of two long prompts: requests are preempted, recomputed, and end with the same tokens."""
    freeze_space(monkeypatch)
    results, preemptions = [], []
    for compaction in (True, False):
        with engine(monkeypatch, smollm2, compaction=compaction, num_gpu_blocks_override=290, max_num_seqs=20) as llm:
            count = count_preemptions(llm, monkeypatch)
            results.append(run(llm, [params_of(p, max_tokens=80) for p in sampling(greedy=True)]))
            preemptions.append(len(count))
            assert_all_memory_is_back(llm)
    assert preemptions[0] == preemptions[1] > 0
    assert results[0] == results[1]


def test_aborts_in_mid_stream(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third request is aborted at some step; the others do not notice, and no page is lost."""
    results = []
    for compaction in (True, False):
        with engine(
            monkeypatch, smollm2, compaction=compaction, num_gpu_blocks_override=BLOCKS, max_num_batched_tokens=256
        ) as llm:
            llm_engine = llm.llm_engine
            for i, (prompt, params) in enumerate(zip(prompts(), sampling(greedy=True), strict=True)):
                llm_engine.add_request(str(i), prompt, params)
            done: dict[str, Any] = {}
            step = 0
            while llm_engine.has_unfinished_requests():
                step += 1
                if step % 5 == 0 and step // 5 <= 6:
                    llm_engine.abort_request([str(3 * (step // 5))])
                done |= {output.request_id: output for output in llm_engine.step() if output.finished}
            results.append([(i, outcome([done[i]])) for i in sorted(done)])
            assert len(done) < 20
            assert_all_memory_is_back(llm)
    assert results[0] == results[1]


def params_of(params: Any, **changes: Any) -> Any:
    params = params.clone()
    for name, value in changes.items():
        setattr(params, name, value)
    return params


def test_eligible_share_is_that_of_the_samples(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random token ids compress about as real text does (92 %): the pages really are compact."""
    with engine(monkeypatch, smollm2, num_gpu_blocks_override=BLOCKS) as llm:
        run(llm, sampling(greedy=True))
        recorder = half_of(llm).recorder
        assert 0.85 < recorder.num_eligible / recorder.num_blocks < 0.98
