"""vLLM's own scheduler over ZIPFUSION's pool, with a worker that only answers: nothing ever stalls while memory is free.

1,000 random arenas, lengths and loads. The worker makes no model and no pages; it answers compaction commands with random counts, 0 to 3 steps late,
per rank, as ``connector/worker.py`` would.
"""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.harness import Shape, make_model
from zipfusion_vllm.connector.messages import CompactionAnswer, StepAnswers, StepCommands
from zipfusion_vllm.format import PAGE_TOKENS, PageShape
from zipfusion_vllm.memory.layout import min_blocks

ARENAS, BATCHES = 1000, 4


@pytest.fixture(scope="module")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A vLLM config with ZIPFUSION; each arena changes its own copy."""
    from vllm.engine.arg_utils import EngineArgs

    model = make_model(tmp_path_factory.mktemp("models") / "tiny", Shape())
    arguments = EngineArgs(
        model=model, dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, attention_backend="ZIPFUSION"
    )
    return arguments.create_engine_config()


class FakeWorker:
    """Answers every compaction command once per rank, late and in another order."""

    def __init__(self, rng: random.Random, chunks_per_raw_page: int, num_ranks: int) -> None:
        self._rng = rng
        self._chunks_per_raw_page = chunks_per_raw_page
        self._num_ranks = num_ranks
        self._pending: list[tuple[int, CompactionAnswer]] = []
        self._step = 0

    def step(self, commands: StepCommands) -> StepAnswers:
        import numpy as np

        self._step += 1
        if commands.compaction is not None:
            batch = commands.compaction
            for rank in range(self._num_ranks):
                low = -(-3 * self._chunks_per_raw_page // 4)
                counts = [self._rng.randint(low, self._chunks_per_raw_page) for _ in batch.pages]
                answer = CompactionAnswer(batch.batch, rank, np.array(counts, dtype=np.int32), 1, 1)
                self._pending.append((self._step + self._rng.randint(0, 3), answer))
        due = [answer for step, answer in self._pending if step <= self._step]
        self._pending = [(step, answer) for step, answer in self._pending if step > self._step]
        self._rng.shuffle(due)
        return StepAnswers(due)


class Arena:
    """One scheduler with a random arena, and the requests that it is given."""

    def __init__(self, config: Any, rng: random.Random) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from zipfusion_vllm.attention.spec import ZipFullAttentionSpec

        self.rng = rng
        num_ranks = rng.choice([1, 1, 2, 4])
        shape = PageShape(rng.randint(1, 6), rng.randint(1, 4), rng.choice([64, 128]))
        self.max_model_len = rng.choice([32, 100, 256])
        spec = ZipFullAttentionSpec(
            block_size=PAGE_TOKENS,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_dim,
            dtype=torch.bfloat16,
            state_content_bytes=shape.nominal_page_bytes // (shape.num_layers * shape.num_kv_heads * PAGE_TOKENS),
            num_layers=shape.num_layers,
            regions_per_chunk=rng.randint(1, 12),
            num_ranks=num_ranks,
            reserve=rng.choice([0.0, 0.25, 2.0]),
        )
        smallest = min_blocks(shape, spec.regions_per_chunk, -(-self.max_model_len // PAGE_TOKENS))
        num_blocks = smallest + rng.choice([0, 0, 1, 3, rng.randint(0, 100)])
        config = copy.copy(config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = self.max_model_len
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.enable_prefix_caching = rng.random() < 0.6
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_model_len = self.max_model_len
        config.scheduler_config.max_num_seqs = rng.choice([2, 8, 64])
        config.scheduler_config.max_num_batched_tokens = rng.choice([16, 64, 700])
        layers = [f"layer.{i}" for i in range(shape.num_layers)]
        kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
            hash_block_size=PAGE_TOKENS,
            cache_hit_alignment_tokens=PAGE_TOKENS,
        )
        self.scheduler = Scheduler(
            config, kv_cache_config, StructuredOutputManager(config), PAGE_TOKENS, hash_block_size=PAGE_TOKENS
        )
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(PAGE_TOKENS, hash_function)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = FakeWorker(rng, self.pool.layout.chunks_per_raw_page, num_ranks)
        self._prefix = [rng.randrange(500) for _ in range(self.max_model_len)]
        self._added = 0

    def add(self, prompt_length: int, output_length: int) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        shared = self.rng.choice([0, 0, prompt_length // 2, prompt_length])
        prompt = self._prefix[:shared] + [self.rng.randrange(500) for _ in range(prompt_length - shared)]
        params = SamplingParams(max_tokens=output_length, ignore_eos=True, temperature=0.0)
        request = Request(str(self._added), prompt, params, None, block_hasher=self._hasher)
        self._added += 1
        self.scheduler.add_request(request)
        return request.request_id

    def add_random(self) -> str:
        prompt_length = self.rng.randint(1, self.max_model_len - 1)
        return self.add(prompt_length, self.rng.randint(1, self.max_model_len - prompt_length))

    def step(self) -> int:
        """One step of the engine; returns the tokens that were scheduled."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        answers = self.worker.step(output.kv_connector_metadata)
        ids = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        tokens = [[self.rng.randrange(500)] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=tokens,
                kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=answers),
            ),
        )
        return output.total_num_scheduled_tokens

    def run_to_the_end(self, arrivals: Iterator[None]) -> int:
        """Step until every request is done; fails at the first step that schedules nothing. Returns the steps."""
        steps = 0
        while True:
            next(arrivals, None)
            if not self.scheduler.has_unfinished_requests():
                return steps
            assert self.step() > 0, "an empty step while a request could run"
            steps += 1
            assert steps < 100_000, "the requests never finish"

    def assert_rests(self) -> None:
        """An idle engine takes back its answers in a few steps, and then all memory is back."""
        for _ in range(10):
            if not self.scheduler.has_requests():
                break
            assert self.step() == 0
        assert not self.scheduler.has_requests()
        self.pool.space.check()
        assert self.pool.reset_prefix_cache()
        assert self.pool.space.num_used_chunks == 0
        assert self.pool.get_num_free_blocks() == self.pool.layout.raw_pages


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_empty_step_in_random_arenas(base_config: Any, batch: int) -> None:
    for seed in range(batch * ARENAS // BATCHES, (batch + 1) * ARENAS // BATCHES):
        arena = Arena(base_config, random.Random(seed))
        running = [arena.add_random() for _ in range(arena.rng.randint(1, 5))]

        def arrivals(arena: Arena = arena, running: list[str] = running) -> Iterator[None]:
            from vllm.v1.request import RequestStatus

            for _ in range(arena.rng.randint(0, 8)):
                for _ in range(arena.rng.randint(0, 10)):
                    yield
                if arena.rng.random() < 0.3:
                    arena.scheduler.finish_requests(arena.rng.choice(running), RequestStatus.FINISHED_ABORTED)
                else:
                    running.append(arena.add_random())

        arena.run_to_the_end(arrivals())
        arena.assert_rests()


def test_longest_request_alone_in_the_smallest_arena(base_config: Any) -> None:
    """Exactly max_model_len, in prompt or output, in 200 random smallest arenas (those above are larger by chance)."""
    for seed in range(200):
        arena = Arena(base_config, random.Random(10_000 + seed))
        for prompt_length in (1, arena.max_model_len // 2, arena.max_model_len - 1):
            arena.add(prompt_length, arena.max_model_len - prompt_length)
            arena.run_to_the_end(iter(()))
        arena.assert_rests()
