"""The worker's half of the channel: carries out the commands of each step on the worker's pages.

``bind`` runs before the forward pass and places pages, ``finish_step`` after it and compacts; in between attention writes and reads. Knows
the page store and the messages, no scheduler.
"""

import numpy as np

from zipfusion_vllm.attention.page_store import PageStore
from zipfusion_vllm.connector.messages import (
    Audit,
    CompactionAnswer,
    CompactionBatch,
    Placement,
    StepAnswers,
    StepCommands,
)


class WorkerHalf:
    def __init__(self, store: PageStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._commands: StepCommands | None = None
        self._answers: list[CompactionAnswer] = []
        self._breaches: list[str] = []

    def bind(self, commands: StepCommands) -> None:
        """Before the forward pass: place new pages in the lookup table."""
        self._commands = commands
        if commands.placement is not None:
            self._place(commands.placement)

    def finish_step(self) -> None:
        """After the forward pass: compact what is full now. Does nothing when called again before the next ``bind``."""
        commands, self._commands = self._commands, None
        if commands is None:
            return
        if commands.audit is not None:
            self._audit(commands.audit)
        if commands.compaction is not None:
            self._answers.append(self._compact(commands.compaction))

    def take_answers(self) -> StepAnswers | None:
        """What there is to tell the scheduler since the last call."""
        if not self._answers and not self._breaches:
            return None
        answers = StepAnswers(self._answers, self._breaches)
        self._answers, self._breaches = [], []
        return answers

    def _place(self, placement: Placement) -> None:
        self._store.place(placement.pages, placement.generations, placement.chunks)

    def _compact(self, batch: CompactionBatch) -> CompactionAnswer:
        shape = self._store.layout.shape
        num_blocks = len(batch.pages) * shape.regions_per_page * shape.blocks_per_region
        num_chunks, num_eligible = self._store.compact(batch.pages)
        return CompactionAnswer(batch.batch, self._rank, num_chunks, num_blocks, num_eligible)

    def _audit(self, audit: Audit) -> None:
        """Compare the manager's view of some pages with this worker's, before this step's compaction changes it."""
        store = self._store
        kept = np.arange(audit.chunks.shape[1]) < audit.num_chunks[:, None]
        stale = store.generation[audit.pages] != audit.generations
        moved = ((store.own[audit.pages] != audit.chunks) & kept).any(1)
        for page in audit.pages[stale | moved]:
            self._breaches.append(
                f"page {page} on rank {self._rank}: its chunks or generation differ from the manager's"
            )
        for page in store.check(audit.pages, audit.num_chunks):
            self._breaches.append(
                f"page {page} on rank {self._rank}: a region lies outside the page's chunks or over another"
            )
