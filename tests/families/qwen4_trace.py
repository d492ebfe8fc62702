"""What passes of a qwen4_exp model compute on the way: streams, n-gram rows, positions attended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turbospark import Runner
from turbospark.cache.sparse import PlainRows, SparseKV
from turbospark.kernels import qsa_attend

RECORDED = Path(__file__).parents[1] / "data" / "qwen4_traces.npz"
NAMES = ("qwen4_exp-base", "qwen4_exp-text")
ROOM: dict[str, Any] = {"max_context": 64, "device": "cpu", "dtype": "float32"}
BOUND = 1e-4
Arrays = dict[str, np.ndarray]


def pieces_of(size: int) -> Callable[[list[int]], list[list[int]]]:
    return lambda ids: [ids[at : at + size] for at in range(0, len(ids), size)]


WAYS: dict[str, Callable[[list[int]], list[list[int]]]] = {
    "one pass": lambda ids: [ids],
    "a prompt, then steps": lambda ids: [ids[:41], *([token] for token in ids[41:])],
    "chunks of 1": pieces_of(1),
    "chunks of 4": pieces_of(4),
    "chunks of 7": pieces_of(7),
    "a cut inside a block": lambda ids: [ids[:31], ids[31:]],
}
"""How a prompt is fed."""


def expected(name: str) -> Arrays:
    """What transformers computes on the way; the arrays of make_qwen4_traces.py."""
    with np.load(RECORDED) as arrays:
        return {key.removeprefix(f"{name}/"): arrays[key] for key in arrays if name in key}


def faults(trace: Trace, want: Arrays, way: str) -> list[str]:
    """What differs from the reference, in the order in which it is computed."""
    logits = trace.run(WAYS[way](want["ids"].tolist()))
    found = []
    for key in sorted(want):
        what, _, layer = key.partition("/")
        if what == "rows" and not np.array_equal(trace.rows(int(layer)), want[key]):
            found.append(key)
        if what == "sees" and not np.array_equal(trace.attended(int(layer)), want[key]):
            found.append(key)
    for layer, (ours, theirs) in enumerate(zip(trace.streams, want["streams"], strict=True)):
        if not np.abs(ours - theirs).max() < BOUND:
            found.append(f"streams/{layer}")
    return found if np.abs(logits - want["logits"]).max() < BOUND else [*found, "logits"]


class Trace:
    """Records a runner's passes from now on, as long as `patch` lasts.

    `logits` [T, vocab], `streams` [layers, T, streams * H]; by layer `rows` [T, heads] that its
    table was asked for and `attended` [T, T], 1 where a row attends to a position.
    """

    def __init__(self, runner: Runner, patch: pytest.MonkeyPatch) -> None:
        engine: Any = runner._engine
        self.runner = runner
        self._outputs: dict[int, list[np.ndarray]] = defaultdict(list)
        self._rows: dict[int, list[np.ndarray]] = defaultdict(list)
        self._attended: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        self._logits: list[np.ndarray] = []
        self._layer = -1
        self._watch_attention(patch)
        for i, layer in enumerate(engine.model.layers):
            if layer.ngrams is not None:
                heads = len(layer.ngrams.shape.hash.sizes)
                table = _Table(layer.ngrams.table, self._rows[i], heads)
                patch.setattr(layer.ngrams, "table", table)
        patch.setattr(engine, "model", _Model(engine.model, self._outputs, self._logits))

    def _watch_attention(self, patch: pytest.MonkeyPatch) -> None:
        attend, every, listed = SparseKV.attend, PlainRows.attend_all, qsa_attend.listed_tokens

        def watch(cache: Any, q: Any, k: Any, v: Any, index: Any, step: Any, scale: float) -> Any:
            self._layer = index.layer
            return attend(cache, q, k, v, index, step, scale)

        def watch_every(rows: Any, q: Any, step: Any, scale: float) -> Any:
            for row in range(step.start, step.start + q.shape[0]):
                self._attended[self._layer].append((row, np.arange(row + 1)))
            return every(rows, q, step, scale)

        def watch_listed(ids: Any, start: int, ratio: int) -> Any:
            tokens, seen = listed(ids, start, ratio)
            for i, (found, counts) in enumerate(zip(np.array(tokens), np.array(seen), strict=True)):
                self._attended[self._layer].append((start + i, found[counts]))
            return tokens, seen

        patch.setattr(SparseKV, "attend", watch)
        patch.setattr(PlainRows, "attend_all", watch_every)
        patch.setattr(qsa_attend, "listed_tokens", watch_listed)

    def run(self, pieces: Sequence[Sequence[int]]) -> np.ndarray:
        """Feed an empty session piece by piece -> logits float32 [T, vocab] of every position."""
        for seen in (self._outputs, self._rows, self._attended):
            for found in seen.values():
                found.clear()
        self._logits.clear()
        self.runner.reset()
        for piece in pieces:
            row = self.runner.prefill(piece) if len(piece) > 1 else self.runner.step(piece[0])
            assert np.array_equal(np.array(row), self._logits[-1][-1])
        return np.concatenate(self._logits)

    @property
    def streams(self) -> np.ndarray:
        """float32 [layers, T, streams * H]: the wide stream after every layer."""
        return np.stack([np.concatenate(self._outputs[i]) for i in sorted(self._outputs)])

    def rows(self, layer: int) -> np.ndarray:
        """int64 [T, heads]: the rows of its table that a layer with n-grams read."""
        return np.concatenate(self._rows[layer])

    def attended(self, layer: int) -> np.ndarray:
        """int64 [T, T]: how often each row of a sparse layer attended to each position (column)."""
        found = self._attended[layer]
        times = np.zeros((len(found), len(found)), np.int64)
        for row, positions in found:
            np.add.at(times[row], positions, 1)
        return times


class _Model:
    """A model whose streams and logits are kept."""

    def __init__(
        self, model: Any, outputs: dict[int, list[np.ndarray]], logits: list[np.ndarray]
    ) -> None:
        self.model, self.outputs, self.logits = model, outputs, logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: mx.array, states: Any, after_layer: Any = None) -> mx.array:
        def keep(layer: int, hidden: mx.array) -> mx.array:
            self.outputs[layer].append(np.array(hidden[0]))
            return hidden

        hidden = self.model(ids, states, keep)
        self.logits.append(np.array(self.model.head(hidden)[0]))
        return hidden


class _Table:
    """A table whose row numbers are kept."""

    def __init__(self, table: Any, rows: list[np.ndarray], heads: int) -> None:
        self.table, self.rows, self.heads = table, rows, heads

    def planes(self, rows: np.ndarray) -> Any:
        self.rows.append(rows.reshape(-1, self.heads).copy())
        return self.table.planes(rows)
