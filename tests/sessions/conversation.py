"""Driving an open runner at the level where logits can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from oracle_folders import NAMES, Oracle

from turbospark import OpenOptions, Runner

# Shards and transformers 5 configurations change how a model is written down, not what it computes.
MODELS = [name for name in NAMES if not name.endswith(("-v5", "-shards"))]

# One oracle per kind of memory: every position, a ring, rings that other layers read, latent rows,
# recurrent states, and experts over rings.
KINDS = (
    "llama-base",
    "mistral-sliding",
    "gemma4-e2b",
    "deepseek_v2-lite",
    "qwen3_5-base",
    "gpt_oss-mxfp4",
)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, the float32 logits [n, vocab] each was taken from, and what was reused."""

    tokens: list[int]
    logits: np.ndarray
    kept: int


def answer(runner: Runner, prompt: Sequence[int], count: int) -> Answer:
    """`count` greedy tokens after `prompt`, the way `Runner.generate` makes them."""
    engine = runner._engine
    assert engine is not None
    kept = engine.begin(prompt)
    *_, (_, row) = engine.prefill_steps(list(prompt), kept)
    rows, tokens = [np.array(row)], [int(np.array(row).argmax())]
    while len(tokens) < count:
        rows.append(np.array(engine.step(tokens[-1])))
        tokens.append(int(rows[-1].argmax()))
    assert engine.finish()["reused_prefix_tokens"] == kept
    return Answer(tokens, np.stack(rows), kept)


def same(a: Answer, b: Answer) -> bool:
    """Equal tokens and equal logits, to the bit."""
    return a.tokens == b.tokens and np.array_equal(a.logits, b.logits)


def vocabulary(oracle: Oracle) -> int:
    return oracle.logits.shape[1]


def tokens_of(oracle: Oracle, count: int, seed: int = 0) -> list[int]:
    """Random token ids of the oracle's vocabulary."""
    return np.random.default_rng(seed).integers(0, vocabulary(oracle), count).tolist()


def window(runner: Runner) -> int | None:
    """The narrowest attention window of the model, None when it has none that turns."""
    assert runner._engine is not None
    rings = [getattr(c, "window", None) for c in runner._engine.states.layers]
    return min((w for w in rings if w is not None), default=None)


def ringed(name: str, rows: int) -> dict[str, int]:
    """The option for rings of `rows` slots, where a model of `KINDS` has any."""
    has = name in ("mistral-sliding", "gemma4-e2b", "gpt_oss-mxfp4")
    return {"swa_ring_capacity": rows} if has else {}


def is_recurrent(runner: Runner) -> bool:
    assert runner._engine is not None
    return runner._engine.states.recurrent


def open_cpu(install: Path, **options: Any) -> Runner:
    """The install in float32 on the CPU, where equal work gives equal bits."""
    settings = {"max_context": 160, "device": "cpu", "dtype": "float32", **options}
    return Runner.open(install, OpenOptions(**settings))
