"""How close packed pages come to their bytes, on region sizes resampled from the KV samples of SmolLM2."""

import numpy as np
import pytest

from tests.samples import sampled_blocks, sampled_region_units
from zipfusion_vllm.format import PageShape
from zipfusion_vllm.memory.layout import choose_regions_per_chunk, chunks_per_raw_page
from zipfusion_vllm.memory.packing import count_chunks

EXPECTED_ELIGIBLE = 0.92
"""The default of ZipFusionConfig: what a server chooses its chunk size by."""


def packed(shape: PageShape, regions_per_chunk: int, num_pages: int = 300) -> tuple[float, float]:
    """(chunk space over bytes, share of raw chunks kept) of compact pages of ``shape``."""
    units = sampled_region_units(shape, num_pages, np.random.default_rng(11))
    counts = count_chunks(units, regions_per_chunk * shape.raw_region_units)
    assert counts.max() <= chunks_per_raw_page(shape, regions_per_chunk)
    space = counts.sum() * regions_per_chunk * shape.raw_region_units
    return space / units.sum(), counts.mean() / chunks_per_raw_page(shape, regions_per_chunk)


@pytest.mark.parametrize(
    ("shape", "loss"),
    [(PageShape(32, 8, 128), 0.015), (PageShape(30, 3, 64), 0.035), (PageShape(48, 4, 128), 0.02)],
    ids=str,
)
def test_packed_space_is_near_the_byte_bound(shape: PageShape, loss: float) -> None:
    space_over_bytes, kept = packed(shape, choose_regions_per_chunk(shape, EXPECTED_ELIGIBLE))
    assert space_over_bytes <= 1 + loss
    assert kept <= 0.805  # 1.24x pages


def test_the_choice_is_near_the_best_of_all_candidates() -> None:
    """The choice knows one number, the expected share; the best is picked with the sizes at hand."""
    for shape in (PageShape(32, 8, 128), PageShape(30, 3, 64), PageShape(80, 1, 128)):
        chosen, _ = packed(shape, choose_regions_per_chunk(shape, EXPECTED_ELIGIBLE), num_pages=60)
        best = min(packed(shape, candidate, num_pages=60)[0] for candidate in range(3, 17))
        assert chosen <= 1.01 * best


def test_the_samples_are_as_eligible_as_expected() -> None:
    assert abs(sampled_blocks().mean() - EXPECTED_ELIGIBLE) < 0.01
