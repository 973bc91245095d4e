"""The scheduler's half of the channel: what each step tells the workers, and what becomes of their answers.

Reads the step that vLLM has planned (``build_commands`` runs last in ``schedule()``), asks the pool which pages are new and the manager which
are full, and hands the workers' counts to the space manager. It owns the books on outstanding batches; space itself belongs to
``memory/space.py``.
"""

from dataclasses import dataclass

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from zipfusion_vllm.config import ZipFusionConfig
from zipfusion_vllm.connector.messages import Audit, CompactionBatch, Placement, StepAnswers, StepCommands
from zipfusion_vllm.format import PAGE_TOKENS
from zipfusion_vllm.memory.manager import ZipFullAttentionManager
from zipfusion_vllm.memory.space import SpaceError
from zipfusion_vllm.metrics import StepRecorder

logger = init_logger(f"vllm.{__name__}")  # below vLLM's logger, so that its settings apply

LOST_AFTER_STEPS = 256
"""A batch without an answer for so many steps is given up: its pages stay raw, and an idle engine may rest. Answers come 0 to 3 steps late."""
AUDIT_PAGES = 64
"""Pages compared per step under ZIPFUSION_CHECK=1."""


@dataclass
class _Sequence:
    """A request that holds blocks."""

    request: Request
    num_seen: int = 0
    """Leading pages that were full before, and so are commanded already."""


@dataclass
class _Outstanding:
    batch: CompactionBatch
    sent_in_step: int
    missing_ranks: set[int]


class SchedulerHalf:
    def __init__(self, config: ZipFusionConfig, manager: ZipFullAttentionManager, num_ranks: int) -> None:
        self._config = config
        self._manager = manager
        self._pool = manager.zip_pool
        self._space = manager.zip_pool.space
        self._num_ranks = num_ranks
        self._sequences: dict[str, _Sequence] = {}
        self._outstanding: dict[int, _Outstanding] = {}
        self._step = 0
        self._next_batch = 0
        self._audited = 0
        self.recorder = StepRecorder(manager.zip_pool.layout)

    @property
    def has_outstanding(self) -> bool:
        """Whether answers are on their way; each comes, or is given up after ``LOST_AFTER_STEPS``."""
        return bool(self._outstanding)

    def admit(self, request: Request) -> None:
        """A request got its first blocks (new, or again after preemption)."""
        self._sequences[request.request_id] = _Sequence(request)

    def finish(self, request_id: str) -> None:
        """A request ended, in whatever way; its blocks may go any time now."""
        self._sequences.pop(request_id, None)

    def build_commands(self, output: SchedulerOutput) -> StepCommands:
        """The commands of the step that ``output`` plans. Placement covers every page handed out since the last call."""
        self._step += 1
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            # A request preempted and resumed in one step was admitted anew: it is scheduled, and stays.
            if request_id not in output.num_scheduled_tokens:
                self._sequences.pop(request_id, None)
        placement = self._placement()
        audit = self._audit(placement) if self._config.check else None
        compaction = self._compaction(output) if self._config.compaction else None
        self._give_up_lost()
        self._observe(output)
        return StepCommands(placement, compaction, audit)

    def apply_answers(self, answers: StepAnswers) -> None:
        """Take back what compaction freed. Answers that are doubled, late or unknown change nothing."""
        for breach in answers.breaches:
            self._report(breach)
        for answer in answers.answers:
            entry = self._outstanding.get(answer.batch)
            if entry is None or answer.rank not in entry.missing_ranks:
                self.recorder.count("dropped_answers")
                continue
            if answer.num_chunks.shape != entry.batch.pages.shape:
                self._report(f"rank {answer.rank} answered batch {answer.batch} with another number of pages")
                continue
            entry.missing_ranks.discard(answer.rank)
            if not entry.missing_ranks:
                del self._outstanding[answer.batch]
            self._space.answer(answer.rank, entry.batch.pages, entry.batch.generations, answer.num_chunks)
            self.recorder.add_measured(answer.num_blocks, answer.num_eligible)
        for fault in self._space.take_faults():
            self._report(fault)
        if self._config.check:
            try:
                self._space.check()
            except SpaceError as error:
                self._report(str(error))

    def _placement(self) -> Placement | None:
        pages = self._pool.take_new_pages()
        if not len(pages):
            return None
        return Placement(pages, self._space.generation[pages], self._space.chunk_lists(pages))

    def _compaction(self, output: SchedulerOutput) -> CompactionBatch | None:
        """Pages that this step's forward pass fills, and full ones that hits brought in raw."""
        full: list[int] = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            sequence = self._sequences.get(request_id)
            if sequence is None:
                continue
            request = sequence.request
            # num_tokens leaves out draft tokens, and lags a step under async scheduling: never a token too many.
            num_full = min(request.num_computed_tokens + num_scheduled, request.num_tokens) // PAGE_TOKENS
            if num_full > sequence.num_seen:
                blocks = self._manager.req_to_blocks[request_id]
                full += [block.block_id for block in blocks[sequence.num_seen : num_full]]
                sequence.num_seen = num_full
        if not full:
            return None
        pages, generations = self._space.begin_compaction(np.unique(np.array(full, dtype=np.int32)))
        if not len(pages):
            return None
        batch = CompactionBatch(self._next_batch, pages, generations)
        self._next_batch += 1
        self._outstanding[batch.batch] = _Outstanding(batch, self._step, set(range(self._num_ranks)))
        return batch

    def _give_up_lost(self) -> None:
        for number, entry in list(self._outstanding.items()):
            if self._step - entry.sent_in_step <= LOST_AFTER_STEPS:
                break  # batches are in the order in which they were sent
            del self._outstanding[number]
            self.recorder.count("lost_batches")
            logger.warning(
                "ZIPFUSION: no answer from ranks %s for %d pages in %d steps; the pages count as raw until they are freed.",
                sorted(entry.missing_ranks),
                len(entry.batch.pages),
                LOST_AFTER_STEPS,
            )

    def _audit(self, placement: Placement | None) -> Audit | None:
        """The next few pages that hold chunks: all come round in turn."""
        held = self._space.held_pages()
        if not len(held):
            return None
        first = self._audited % len(held)
        pages = held[first : first + AUDIT_PAGES]
        self._audited = first + len(pages)
        num_chunks = self._space.num_chunks_of(pages)
        return Audit(pages, self._space.generation[pages], self._space.chunk_lists(pages), num_chunks)

    def _report(self, breach: str) -> None:
        self.recorder.count("check_breaches")
        logger.error("ZIPFUSION_CHECK: %s", breach)

    def _observe(self, output: SchedulerOutput) -> None:
        resident = 0
        for request_id, sequence in self._sequences.items():
            resident += sequence.request.num_computed_tokens + output.num_scheduled_tokens.get(request_id, 0)
        self.recorder.observe(
            resident_tokens=resident,
            running=len(self._sequences),
            compact_pages=self._space.num_compact_pages,
            compact_chunks=self._space.num_compact_chunks,
            used_chunks=self._space.num_used_chunks,
            outstanding_batches=len(self._outstanding),
        )
