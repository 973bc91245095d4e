"""What travels between the scheduler's process and the workers: commands down, answers up, once per step.

Small plain objects of numpy arrays, pickled by vLLM's own queues; never tensors. Every compaction command carries a batch number, and
an answer names the batch and the rank, so that a doubled, late or missing answer is told from a good one.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class Placement:
    """Pages that are raw from now on, and where."""

    pages: np.ndarray
    """int32 [n] page ids."""
    generations: np.ndarray
    """uint32 [n]: which life of the page this is."""
    chunks: np.ndarray
    """int32 [n, chunks per raw page]."""


@dataclass(frozen=True)
class CompactionBatch:
    """Pages to compact after the forward pass of this step: all their 16 tokens are computed by then."""

    batch: int
    pages: np.ndarray
    """int32 [n] page ids."""
    generations: np.ndarray
    """uint32 [n]."""


@dataclass(frozen=True)
class Audit:
    """What the manager holds of some pages: a worker with ZIPFUSION_CHECK=1 compares it with its own view."""

    pages: np.ndarray
    """int32 [n] page ids."""
    generations: np.ndarray
    """uint32 [n]."""
    chunks: np.ndarray
    """int32 [n, chunks per raw page]: the first ``num_chunks`` of each row are the page's."""
    num_chunks: np.ndarray
    """int32 [n]."""


@dataclass(frozen=True)
class StepCommands(KVConnectorMetadata):
    """One step's commands, applied in this order: place, (forward pass), compact, audit."""

    placement: Placement | None = None
    compaction: CompactionBatch | None = None
    audit: Audit | None = None


@dataclass(frozen=True)
class CompactionAnswer:
    """What one rank made of one batch."""

    batch: int
    rank: int
    num_chunks: np.ndarray
    """int32 [n]: chunks that each page of the batch needs on this rank, in the order of the batch."""
    num_blocks: int
    """Blocks measured."""
    num_eligible: int
    """Blocks compressed."""


@dataclass(frozen=True)
class StepAnswers(KVConnectorWorkerMetadata):
    """All answers of one step; vLLM's aggregator merges those of all ranks."""

    answers: list[CompactionAnswer] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    """Broken invariants found by ZIPFUSION_CHECK=1, a sentence each, with page and rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        assert isinstance(other, StepAnswers)
        return type(self)(self.answers + other.answers, self.breaches + other.breaches)
