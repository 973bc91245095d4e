"""The KV samples of tests/data (described there), as arrays."""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zipfusion_vllm.format import BLOCK_DIMS, BLOCK_VALUES, MAX_D, PAGE_TOKENS, PageShape

DATA = Path(__file__).parent / "data"
LAYERS = (0, 9, 18, 29)
TEXTS = ("english", "code")
HEAD_DIM = 64


class EligibleCount(NamedTuple):
    text: str
    kind: str
    layer_index: int
    blocks: int
    eligible: int


def high_bytes(text: str, kind: str) -> np.ndarray:
    """uint8 [layers, kv_heads, tokens, head_dim]; kind "K" or "V"."""
    with np.load(DATA / "kv_high_bytes.npz") as samples:
        return samples[f"{text}.{kind}"]


def full_layers() -> list[tuple[str, np.ndarray]]:
    """The layers of which all bits are there: (kind, uint16 [kv_heads, tokens, head_dim])."""
    layers = []
    with np.load(DATA / "kv_low_bytes.npz") as samples:
        for name, low in samples.items():
            text, kind, index = name.split(".")
            high = high_bytes(text, kind)[int(index)]
            layers.append((kind, high.astype(np.uint16) << 8 | low))
    return layers


def eligible_counts() -> list[EligibleCount]:
    """The counts of sample_eligible.csv."""
    with open(DATA / "sample_eligible.csv", newline="") as file:
        return [
            EligibleCount(
                row["file"].split(".")[1],
                row["kind"],
                LAYERS.index(int(row["layer"])),
                int(row["blocks"]),
                int(row["eligible"]),
            )
            for row in csv.DictReader(file)
        ]


def eligible_blocks(high: np.ndarray) -> np.ndarray:
    """bool [..., pages, blocks] of high bytes uint8 [..., tokens, head_dim], by the definition: all exponents within [b, b+15]."""
    top7 = (high & 0x7F).reshape(*high.shape[:-2], -1, PAGE_TOKENS, high.shape[-1] // BLOCK_DIMS, BLOCK_DIMS)
    top7 = np.moveaxis(top7, -3, -2).reshape(*top7.shape[:-3], -1, BLOCK_VALUES)
    return np.ptp(top7, axis=-1) <= MAX_D


def sampled_blocks() -> np.ndarray:
    """bool [regions, 2]: which blocks of the regions of all samples are eligible."""
    regions = [
        eligible_blocks(high_bytes(text, kind)).reshape(-1, HEAD_DIM // BLOCK_DIMS) for text in TEXTS for kind in "KV"
    ]
    return np.concatenate(regions)


def sampled_region_units(shape: PageShape, num_pages: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [pages, regions]: sizes of regions of ``shape``, resampled from the regions of the samples (as many as a region has blocks)."""
    blocks = sampled_blocks()
    per_region = shape.blocks_per_region // blocks.shape[1]
    drawn = rng.integers(len(blocks), size=(num_pages, shape.regions_per_page, per_region))
    return (~blocks[drawn]).sum(axis=(-1, -2)) + shape.compact_region_units
