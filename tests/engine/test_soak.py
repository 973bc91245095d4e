"""A long, rough life of one engine under ZIPFUSION_CHECK=1: nothing breaks, and at its end all memory is back."""

import random
from typing import Any

import pytest

from tests.engine.harness import assert_all_memory_is_back, count_preemptions, engine, half_of, pool_of

REQUESTS = 2000
PREEMPTIONS = 200


def test_soak(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 requests of random length with shared prefixes, aborts at random moments and an arena that makes requests preempt."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prefixes = [[rng.randrange(3, 512) for _ in range(length)] for length in (16, 33, 64, 100)]
    with engine(
        monkeypatch,
        tiny_llama,
        max_model_len=512,
        num_gpu_blocks_override=90,
        max_num_seqs=24,
        max_num_batched_tokens=192,
    ) as llm:
        llm_engine, pool = llm.llm_engine, pool_of(llm)
        preempted = count_preemptions(llm, monkeypatch)
        added, finished, running = 0, 0, set[str]()

        def add() -> None:
            nonlocal added
            prefix = rng.choice([*prefixes, []])
            prompt = [*prefix, *(rng.randrange(3, 512) for _ in range(rng.randint(1, 120)))]
            params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 200), ignore_eos=True, detokenize=False)
            llm_engine.add_request(str(added), {"prompt_token_ids": prompt}, params)
            running.add(str(added))
            added += 1

        aborted = 0
        while added < REQUESTS or running:
            while added < REQUESTS and len(running) < 40:
                add()
            if running and rng.random() < 0.02:
                victim = rng.choice(sorted(running))
                llm_engine.abort_request([victim])
                running.discard(victim)
                aborted += 1
            for output in llm_engine.step():
                if output.finished:
                    running.discard(output.request_id)
                    finished += 1
        assert finished >= REQUESTS - aborted
        assert aborted > 20
        assert len(preempted) >= PREEMPTIONS
        assert pool.space.num_shrunk > REQUESTS
        assert half_of(llm).recorder.totals["dropped_answers"] == 0
        assert_all_memory_is_back(llm)


@pytest.mark.parametrize("model", ["tiny_llama", "incompressible_llama"])
def test_longest_request_in_the_smallest_arena(
    model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of exactly max_model_len finishes alone in the smallest arena that start-up accepts; one block less is refused."""
    from vllm import SamplingParams

    folder = request.getfixturevalue(model)
    smallest = smallest_arena(folder, monkeypatch, max_model_len=512)
    with engine(monkeypatch, folder, max_model_len=512, num_gpu_blocks_override=smallest) as llm:
        for length in (1, 300, 511):
            prompt = {"prompt_token_ids": [7 + i % 400 for i in range(length)]}
            params = SamplingParams(temperature=0.0, max_tokens=512 - length, ignore_eos=True, detokenize=False)
            output = llm.generate([prompt, prompt], params, use_tqdm=False)
            assert [len(o.outputs[0].token_ids) for o in output] == [512 - length] * 2
        assert_all_memory_is_back(llm)
    with (
        pytest.raises(ValueError, match="KV"),
        engine(monkeypatch, folder, max_model_len=512, num_gpu_blocks_override=smallest - 1),
    ):
        pass


def smallest_arena(model: str, monkeypatch: pytest.MonkeyPatch, max_model_len: int) -> int:
    """Logical pages of the smallest arena for one sequence, from the layout itself."""
    from zipfusion_vllm.memory.layout import min_blocks

    with engine(monkeypatch, model, max_model_len=max_model_len) as llm:
        layout = pool_of(llm).layout
    return min_blocks(layout.shape, layout.regions_per_chunk, -(-max_model_len // 16))


def test_idle_engine_takes_back_its_answers(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last token the engine keeps stepping until no answer is outstanding, and then rests."""
    from vllm import SamplingParams

    from tests.engine.harness import drain

    with engine(monkeypatch, tiny_llama) as llm:
        prompt: Any = {"prompt_token_ids": list(range(10, 110))}
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=60, detokenize=False), use_tqdm=False)
        assert drain(llm) <= 4
        assert not half_of(llm).has_outstanding
