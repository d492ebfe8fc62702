"""What tests/data/steered.npz was made with: models, directions and edits, in numpy alone.

Shared by make_steered.py, which records what transformers and mlx-lm answer when their layers'
outputs are edited so, and by the tests, which compare.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

NAMES = (
    "llama-base",
    "mistral-sliding",
    "mixtral-base",
    "qwen2-base",
    "qwen3-base",
    "qwen3_moe-base",
    "gemma3-text",
    "gemma4-31b-text",
    "gemma4-26b-a4b-text",
    "gemma4-e2b-text",
    "gpt_oss-bf16",
    "muse_glimmer-base",
    "qwen3_5-text",
    "qwen3_5_moe-text",
    "spark2_5-base",
)
ROWS = 2  # of the last logits


@dataclass(frozen=True)
class Vector:
    """One vector of a policy: which directions, which layers (None is all), mode and strength."""

    seed: int
    mode: str
    alpha: float
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Edits:
    """A policy: vectors in order, and what they share."""

    vectors: tuple[Vector, ...]
    target: float = 0.0
    gate: float = 0.0


# Fractional strengths and a target other than 0: at 1 and 0 some modes are the same function.
EDITS = {
    "ablate": Edits((Vector(1, "ablate", 0.7),)),
    "add": Edits((Vector(1, "add", 0.05),)),
    "clamp": Edits((Vector(1, "clamp", 0.4),), target=0.9),
    "renorm": Edits((Vector(1, "renorm", 0.7),)),
    "chain": Edits((Vector(1, "clamp", 0.3, (0, 1)), Vector(2, "ablate", 0.8)), 0.5, gate=0.05),
}


def direction(name: str, seed: int, layer: int, hidden: int) -> np.ndarray:
    """float32 [hidden], of no particular length."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, layer])
    return (rng.standard_normal(hidden) * 0.5).astype(np.float32)


def edited(name: str, edits: Edits, layer: int, rows: np.ndarray) -> tuple[np.ndarray, list]:
    """float64 [..., hidden] after `layer` -> (edited, coefficient [...] per vector or None)."""
    coefficients: list[np.ndarray | None] = []
    for vector in edits.vectors:
        if vector.layers is not None and layer not in vector.layers:
            coefficients.append(None)
            continue
        d = direction(name, vector.seed, layer, rows.shape[-1]).astype(np.float64)
        flat = rows.reshape(-1, rows.shape[-1])
        pairs = [edited_row(row, d, vector, edits) for row in flat]
        rows = np.stack([row for row, _ in pairs]).reshape(rows.shape)
        coefficients.append(np.array([c for _, c in pairs]).reshape(rows.shape[:-1]))
    return rows, coefficients


def edited_row(
    x: np.ndarray, d: np.ndarray, vector: Vector, edits: Edits
) -> tuple[np.ndarray, float]:
    """One row, from the definitions."""
    length = np.sqrt((d * d).sum())
    unit = d / length
    c = float((x * unit).sum())
    if edits.gate > 0 and abs(c) < edits.gate:
        return x, c
    if vector.mode == "add":
        return x + vector.alpha * d, c
    if vector.mode == "clamp":
        return x + vector.alpha * (edits.target - c) * unit, c
    out = x - vector.alpha * c * unit
    if vector.mode == "renorm":
        out = out * (np.sqrt((x * x).sum()) / np.sqrt((out * out).sum()))
    return out, c
