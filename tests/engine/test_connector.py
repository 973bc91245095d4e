"""The channel under faults: answers that are doubled, late, reordered or lost change no token and lose no memory."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import assert_all_memory_is_back, drain, engine, freeze_space, half_of, outcome, pool_of
from zipfusion_vllm.connector import scheduler as scheduler_module
from zipfusion_vllm.connector.messages import CompactionAnswer, StepAnswers
from zipfusion_vllm.connector.worker import WorkerHalf


def generate(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 512) for _ in range(rng.randint(1, 200))]} for _ in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=70, logprobs=1, ignore_eos=True, detokenize=False)
    return outcome(llm.generate(prompts, params, use_tqdm=False))


def with_faults(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[CompactionAnswer]], list[CompactionAnswer]]
) -> None:
    """Put ``change`` between worker and scheduler: it sees each step's answers, and gives those that get through."""
    take = WorkerHalf.take_answers

    def take_changed(self: WorkerHalf) -> StepAnswers | None:
        answers = take(self) or StepAnswers()
        return StepAnswers(change(answers.answers), answers.breaches)

    monkeypatch.setattr(WorkerHalf, "take_answers", take_changed)


class Late:
    """Holds answers back for some steps, and lets them through in another order, some twice."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.held: list[CompactionAnswer] = []

    def __call__(self, answers: list[CompactionAnswer]) -> list[CompactionAnswer]:
        self.held += answers
        self.rng.shuffle(self.held)
        through = [answer for answer in self.held if self.rng.random() < 0.4]
        self.held = [answer for answer in self.held if not any(answer is other for other in through)]
        return through + [answer for answer in through if self.rng.random() < 0.3]


def test_late_reordered_and_doubled_answers(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an arena so full that pages are freed and reused while their answers are on the way."""
    freeze_space(monkeypatch)
    arguments = {"num_gpu_blocks_override": 120, "max_model_len": 512, "max_num_batched_tokens": 128}
    with engine(monkeypatch, tiny_llama, compaction=False, **arguments) as llm:
        expected = generate(llm)
    with monkeypatch.context() as patch:
        with_faults(patch, Late())
        with engine(patch, tiny_llama, **arguments) as llm:
            assert generate(llm) == expected
            drain(llm)
            space = pool_of(llm).space
            assert half_of(llm).recorder.totals["dropped_answers"] > 0  # doubled
            assert space.num_stale > 0  # for pages that were freed meanwhile
            assert_all_memory_is_back(llm)


def test_lost_answers_are_given_up(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages stay raw in the books, the idle engine rests, and the pages come back when they are freed."""
    monkeypatch.setattr(scheduler_module, "LOST_AFTER_STEPS", 20)
    rng = random.Random(2)
    with_faults(monkeypatch, lambda answers: [answer for answer in answers if rng.random() < 0.7])
    with engine(monkeypatch, tiny_llama) as llm:
        generate(llm)
        assert drain(llm) <= 25
        half, pool = half_of(llm), pool_of(llm)
        assert half.recorder.totals["lost_batches"] > 0
        assert half.recorder.totals["check_breaches"] == 0
        assert pool.reset_prefix_cache()
        assert pool.space.num_used_chunks == 0
        pool.space.check()


def test_impossible_answers_are_reported_and_not_applied(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(answers: list[CompactionAnswer]) -> list[CompactionAnswer]:
        return [
            CompactionAnswer(answer.batch, answer.rank, answer.num_chunks * 100, answer.num_blocks, answer.num_eligible)
            for answer in answers
        ]

    with_faults(monkeypatch, spoil)
    with engine(monkeypatch, tiny_llama) as llm, errors_of_zipfusion(caplog):
        generate(llm)
        assert half_of(llm).recorder.totals["check_breaches"] > 0
        assert pool_of(llm).space.num_shrunk == 0
        pool_of(llm).space.check()
    assert any("rank 0 answered" in message for message in caplog.messages)


def test_check_reports_a_damaged_page_with_page_and_rank(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A table entry that points into another page's chunks is found by ZIPFUSION_CHECK=1 within a few steps."""
    damaged: list[int] = []
    finish = WorkerHalf.finish_step

    def damage_then_finish(self: WorkerHalf) -> None:
        if not damaged and self._commands is not None and self._commands.audit is not None:
            pages = self._commands.audit.pages
            if len(pages) > 1:
                damaged.append(int(pages[0]))
                self._store.starts[:, pages[0]] = self._store.starts[:, pages[1]]
        finish(self)

    monkeypatch.setattr(WorkerHalf, "finish_step", damage_then_finish)
    with engine(monkeypatch, tiny_llama) as llm, errors_of_zipfusion(caplog):
        generate(llm)
        assert half_of(llm).recorder.totals["check_breaches"] > 0
    assert any(f"page {damaged[0]} on rank 0" in message for message in caplog.messages)


def test_check_reports_books_that_do_not_add_up(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(monkeypatch, tiny_llama) as llm, errors_of_zipfusion(caplog):
        space = pool_of(llm).space
        space._stack[0] = space._stack[1]
        generate(llm)
        assert half_of(llm).recorder.totals["check_breaches"] > 0
    assert any("ZIPFUSION_CHECK" in message and "chunk" in message for message in caplog.messages)


def test_messages_are_small(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numpy bytes, no tensors, and nothing at all in a step without news."""
    import pickle

    sizes: list[int] = []
    build = scheduler_module.SchedulerHalf.build_commands

    def measured(self: Any, output: Any) -> Any:
        commands = build(self, output)
        sizes.append(len(pickle.dumps(commands)))
        for part in (commands.placement, commands.compaction):
            if part is not None:
                assert all(isinstance(value, int | np.ndarray) for value in vars(part).values())
        return commands

    monkeypatch.setattr(scheduler_module.SchedulerHalf, "build_commands", measured)
    with engine(monkeypatch, tiny_llama, check=False) as llm:
        generate(llm)
    assert min(sizes) < 200
    assert max(sizes) < 100_000


@contextmanager
def errors_of_zipfusion(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM's logger does not propagate to the root, where caplog listens: listen to it directly."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
