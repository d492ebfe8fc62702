"""Head norms, rope and stored rows: emulated kernels, plain version, float64 loop."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from cases import error, floats, normal
from emulator import emulate

from turbospark.kernels.rope_kv import Heads, Turn, launch_rotate, launch_store, rope_kv


@dataclass(frozen=True)
class Case:
    query: int
    key: int
    dim: int
    length: int
    capacity: int = 48
    rows: int = 1
    dims: int = 0
    interleaved: bool = False
    norms: bool = False
    factor: float = 1.0
    ring: bool = False
    dtype: mx.Dtype = mx.float32

    def heads(self) -> Heads:
        q_norm, k_norm = (
            normal((self.dim,), self.dtype, s) if self.norms else None for s in (1, 2)
        )
        return Heads(self.query, self.key, self.dim, q_norm, k_norm, 1e-3)

    def turn(self) -> Turn:
        dims = self.dims or self.dim
        periods = 100.0 ** (np.arange(0, dims, 2) / dims)
        periods[-1] = np.inf
        return Turn(dims, mx.array(periods.astype(np.float32)), self.interleaved, self.factor)

    def inputs(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        qkv = normal((1, self.rows, (self.query + 2 * self.key) * self.dim), self.dtype, 3)
        shape = (1, self.key, self.capacity, self.dim)
        length = mx.array([self.length], dtype=mx.int32)
        return qkv, normal(shape, self.dtype, 4), normal(shape, self.dtype, 5), length


def loop(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q, keys, values), element by element, in float64."""
    heads, turn = case.heads(), case.turn()
    qkv, keys, values = (floats(a) for a in case.inputs()[:3])
    q = np.zeros((1, case.query, case.rows, case.dim))
    for m in range(case.rows):
        position = case.length - case.rows + m
        slot = position % case.capacity if case.ring else position
        parts = qkv[0, m].reshape(-1, case.dim)
        for head, x in enumerate(parts):
            norm = heads.q_norm if head < case.query else heads.k_norm
            if head >= case.query + case.key:
                values[0, head - case.query - case.key, slot] = x
                continue
            if norm is not None:
                x = x / np.sqrt((x * x).mean() + heads.eps) * floats(norm)
            x = rotated(x, turn, position)
            if head < case.query:
                q[0, head, m] = x
            else:
                keys[0, head - case.query, slot] = x
    return q, keys, values


def rotated(x: np.ndarray, turn: Turn, position: int) -> np.ndarray:
    out = x.copy()
    for i, period in enumerate(floats(turn.periods)):
        a, b = (2 * i, 2 * i + 1) if turn.interleaved else (i, i + turn.dims // 2)
        angle = position / period
        cosine, sine = turn.factor * np.cos(angle), turn.factor * np.sin(angle)
        out[a] = x[a] * cosine - x[b] * sine
        out[b] = x[a] * sine + x[b] * cosine
    return out


CASES = {
    "half split": Case(3, 2, 128, 20),
    "first position": Case(2, 1, 64, 1),
    "interleaved": Case(2, 1, 64, 33, interleaved=True),
    "part of the head": Case(2, 2, 96, 40, dims=36),
    "interleaved part of the head": Case(2, 2, 80, 40, dims=32, interleaved=True),
    "head norms": Case(4, 2, 128, 25, norms=True),
    "norms over a part": Case(1, 1, 256, 25, dims=64, norms=True),
    "attention factor": Case(2, 1, 64, 25, factor=1.25),
    "three rows": Case(2, 1, 64, 30, rows=3),
    "three rows around a ring": Case(2, 2, 64, 97, rows=3, ring=True),
    "bfloat16": Case(5, 1, 128, 25, norms=True, dtype=mx.bfloat16),
}
TOLERANCE = {mx.float32: 3e-6, mx.bfloat16: 4e-3}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_stored_in_place_and_q_returned(name: str) -> None:
    case = CASES[name]
    want = loop(case)
    qkv, keys, values, length = case.inputs()
    run = launch_store(qkv, keys, values, length, case.heads(), case.turn(), case.ring)
    for seed in (0, 1):
        done = emulate(run, seed)
        got = (done.outputs[0], done.updated["keys"], done.updated["values"])
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", CASES)
def test_the_plain_version_stores_and_returns_the_same(name: str) -> None:
    case = CASES[name]
    got = rope_kv(*case.inputs(), case.heads(), case.turn(), case.ring)
    # MLX rounds after the norm and again after the rope.
    tolerance = 3e-6 if case.dtype == mx.float32 else 2e-2
    for a, b in zip(got, loop(case), strict=True):
        assert error(floats(a), b) < tolerance


@pytest.mark.parametrize("name", ["three rows", "head norms", "bfloat16"])
def test_rows_can_be_returned_instead(name: str) -> None:
    case = CASES[name]
    qkv, _, _, length = case.inputs()
    q, k, v = emulate(launch_rotate(qkv, length, case.heads(), case.turn())).outputs
    want_q, keys, values = loop(case)
    rows = slice(case.length - case.rows, case.length)
    for a, b in ((q, want_q), (k, keys[:, :, rows]), (v, values[:, :, rows])):
        assert error(a, b) < TOLERANCE[case.dtype]
