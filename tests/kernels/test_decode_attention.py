"""Decode attention over whole buffers: emulated kernels, plain version, float64 loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, error, floats, normal
from emulator import Emulated, emulate, sparse

from turbospark.kernels.decode_attention import (
    Rules,
    Tuning,
    decode_attention,
    launch_combine,
    launch_partial,
    takes,
)


@dataclass(frozen=True)
class Case:
    kv: int
    group: int
    dim: int
    length: int
    capacity: int
    rows: int = 1
    window: int = 0
    ring: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    dtype: mx.Dtype = mx.float32
    tuning: Tuning = field(default_factory=lambda: Tuning(2, 3))

    def inputs(self) -> tuple[mx.array, ...]:
        q = normal((1, self.kv * self.group, self.rows, self.dim), self.dtype, 1)
        k, v = (normal((1, self.kv, self.capacity, self.dim), self.dtype, seed) for seed in (2, 3))
        return q, k, v

    @property
    def sink_logits(self) -> mx.array | None:
        return normal((self.kv * self.group,), mx.float32, 4) if self.sinks else None

    @property
    def rules(self) -> Rules:
        return Rules(self.dim**-0.5, self.window, self.ring, self.soft_cap)


def loop(case: Case) -> np.ndarray:
    """Head by head, row by row, position by position, in float64."""
    q, k, v = (floats(a)[0] for a in case.inputs())
    out = np.zeros((case.rows, case.kv * case.group, case.dim))
    for head in range(case.kv * case.group):
        for row in range(case.rows):
            position = case.length - case.rows + row
            oldest = max(0, position - case.window + 1) if case.window else 0
            slots = [p % case.capacity for p in range(oldest, position + 1)]
            keys, values = k[head // case.group, slots], v[head // case.group, slots]
            scores = keys @ q[head, row] * case.dim**-0.5
            if case.soft_cap:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            sink = case.sink_logits
            top = max(scores.max(), -np.inf if sink is None else floats(sink)[head])
            weights = np.exp(scores - top)
            total = weights.sum() + (0.0 if sink is None else np.exp(floats(sink)[head] - top))
            out[row, head] = weights @ values / total
    return out.reshape(1, case.rows, -1)


def emulated(case: Case, seed: int) -> np.ndarray:
    q, k, v = case.inputs()
    return run(case, q, k, v, seed)


def run(case: Case, q: mx.array, k: mx.array, v: mx.array, seed: int) -> np.ndarray:
    length = mx.array([case.length], dtype=mx.int32)
    first: Emulated = emulate(launch_partial(q, k, v, length, case.rules, case.tuning), seed)
    # What no split wrote stays poison, so that reading it shows.
    o, ml = (mx.array(a.astype(np.float32)) for a in first.outputs)
    second = launch_combine(q, o, ml, case.capacity, case.sink_logits, case.tuning)
    return emulate(second, seed).outputs[0]


CASES = {
    "grouped heads": Case(2, 4, 128, 150, 192),
    "one key": Case(2, 2, 64, 1, 64),
    "more splits than keys": Case(1, 2, 128, 20, 64, tuning=Tuning(1, 7)),
    "many splits": Case(1, 1, 64, 200, 200, tuning=Tuning(1, 40)),
    "five queries per key head": Case(2, 5, 128, 77, 80),
    "eight queries of 64 dims": Case(1, 8, 64, 130, 130),
    "256 dims": Case(1, 2, 256, 67, 96),
    "queries in two groups": Case(1, 12, 128, 45, 64),
    "three rows": Case(2, 2, 128, 70, 96, rows=3),
    "window": Case(2, 2, 64, 150, 192, window=40),
    "window of three rows": Case(1, 2, 128, 90, 128, rows=3, window=33),
    "ring": Case(1, 4, 64, 300, 96, window=64, ring=True),
    "ring not yet full": Case(1, 4, 64, 50, 96, window=64, ring=True),
    "ring of three rows": Case(1, 2, 64, 301, 96, rows=3, window=64, ring=True),
    "sinks": Case(2, 4, 64, 100, 128, sinks=True),
    "soft cap": Case(1, 4, 256, 60, 64, soft_cap=2.0),
    "bfloat16": Case(2, 4, 128, 150, 192, sinks=True, dtype=mx.bfloat16),
    "float16": Case(1, 7, 64, 100, 128, dtype=mx.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_a_float64_loop(name: str) -> None:
    case = CASES[name]
    want = loop(case)
    for seed in (0, 1):
        assert error(emulated(case, seed), want) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", CASES)
def test_the_plain_version_equals_the_loop(name: str) -> None:
    case = CASES[name]
    length = mx.array([case.length], dtype=mx.int32)
    got = decode_attention(*case.inputs(), length, case.rules, case.sink_logits)
    assert error(floats(got), loop(case)) < TOLERANCE[case.dtype]


def test_rows_past_the_length_are_never_read() -> None:
    case = CASES["grouped heads"]
    q, k, v = case.inputs()
    past = mx.arange(case.capacity)[:, None] >= case.length
    k, v = (mx.where(past, mx.nan, a) for a in (k, v))
    assert np.isfinite(run(case, q, k, v, 0)).all()
    length = mx.array([case.length], dtype=mx.int32)
    assert mx.isfinite(decode_attention(q, k, v, length, case.rules)).all().item()


def test_buffers_past_4_billion_elements_are_addressed() -> None:
    capacity = (1 << 24) + 64
    case = Case(3, 1, 128, 20, capacity)
    small = Case(3, 1, 128, 20, 64)
    q, k, v = small.inputs()
    buffers = []
    for rows in (k, v):
        buffer = sparse((1, 3, capacity, 128), mx.float32)
        buffer.bits[:, :, :64] = np.array(rows)
        buffers.append(buffer)
    assert error(run(case, q, *buffers, 0), loop(small)) < 3e-6


def test_other_shapes_go_to_the_plain_version() -> None:
    q, k, v = CASES["grouped heads"].inputs()
    assert takes(q, k, v)
    assert not takes(q[..., :96], k[..., :96], v[..., :96])
    assert not takes(q, k, v[..., :64])
    assert not takes(mx.repeat(q, 9, axis=2), k, v)
