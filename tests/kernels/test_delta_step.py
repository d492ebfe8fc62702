"""One token through a gated delta net: emulated kernel, plain version, float64 loop."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, error, floats, normal
from emulator import emulate

from turbospark.kernels.delta_step import Delta, delta_step, delta_step_reference, launch, takes


@dataclass(frozen=True)
class Case:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    sigmoid: bool = False
    dtype: mx.Dtype = mx.float32
    past_dtype: mx.Dtype | None = None
    spread: float = 1.0
    rate: float = 1.0
    shift: float = 0.0

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def delta(self) -> Delta:
        return Delta(
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            normal((self.taps, self.channels), mx.float32, 1, 0.5),
            -self.rate * mx.exp(normal((self.value_heads,), mx.float32, 2)),
            normal((self.value_heads,), mx.float32, 3) + self.shift,
            normal((self.value_dim,), mx.float32, 4, 0.2) + 1.0,
            1e-3,
            self.sigmoid,
        )

    def inputs(self) -> tuple[mx.array, mx.array, mx.array, Delta]:
        width = self.channels + self.value_heads * (self.value_dim + 2)
        state = (1, self.value_heads, self.value_dim, self.key_dim)
        past = (1, self.taps - 1, self.channels)
        return (
            normal((1, 1, width), self.dtype, 5, self.spread),
            normal(past, self.past_dtype or self.dtype, 6, self.spread),
            normal(state, mx.float32, 7, 0.3),
            self.delta(),
        )


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def loop(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, next past, next state), head by head, in float64."""
    row, past, state = (floats(a) for a in case.inputs()[:3])
    d = case.delta()
    taps, rate, dt_bias, norm = (floats(a) for a in (d.taps, d.rate, d.dt_bias, d.norm))
    keys, values = case.key_heads * case.key_dim, case.value_heads * case.value_dim
    past = floats(mx.array(past[0].astype(np.float32)).astype(case.dtype))
    window = np.concatenate([past, row[0, :, : case.channels]])
    mixed = (window * taps).sum(0)
    mixed = mixed * sigmoid(mixed)
    z, b, a = np.split(row[0, 0, case.channels :], [values, values + case.value_heads])
    out = np.zeros((case.value_heads, case.value_dim))
    after = np.zeros_like(state)
    for head in range(case.value_heads):
        at = head // (case.value_heads // case.key_heads) * case.key_dim
        q, k = mixed[at : at + case.key_dim], mixed[keys + at : keys + at + case.key_dim]
        q = q / np.sqrt((q * q).sum() + 1e-6) / np.sqrt(case.key_dim)
        k = k / np.sqrt((k * k).sum() + 1e-6)
        part = slice(head * case.value_dim, (head + 1) * case.value_dim)
        memory = state[0, head] * np.exp(rate[head] * np.log1p(np.exp(a[head] + dt_bias[head])))
        missing = sigmoid(b[head]) * (mixed[2 * keys :][part] - memory @ k)
        memory = memory + np.outer(missing, k)
        o = memory @ q
        o = o / np.sqrt((o * o).mean() + d.eps) * norm
        gate = sigmoid(z[part])
        out[head] = o * (gate if case.sigmoid else z[part] * gate)
        after[0, head] = memory
    return out.reshape(1, 1, -1), window[None, 1:], after


CASES = {
    "one key head for two": Case(2, 4, 128, 128),
    "as many key heads": Case(3, 3, 64, 64),
    "three sharing, ragged": Case(1, 3, 48, 20, taps=3),
    "wide keys": Case(1, 2, 256, 40),
    "wide values": Case(1, 1, 32, 200),
    "narrower than a simdgroup": Case(2, 2, 8, 4),
    "two taps": Case(1, 2, 32, 32, taps=2),
    "sigmoid gate": Case(2, 2, 64, 64, sigmoid=True),
    "far gates": Case(2, 4, 32, 32, spread=6.0),
    "strong rates of shut gates": Case(1, 2, 32, 32, rate=1e4, shift=-12.0),
    "faint inputs": Case(1, 2, 32, 32, spread=1e-3),
    "bfloat16": Case(2, 4, 128, 128, dtype=mx.bfloat16),
    "float16": Case(1, 2, 64, 64, dtype=mx.float16),
    "past of another dtype": Case(1, 2, 64, 64, dtype=mx.bfloat16, past_dtype=mx.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_the_emulated_kernel_is_the_loop(name: str) -> None:
    case = CASES[name]
    want = loop(case)
    run = launch(*case.inputs())
    for seed in (0, 1):
        out, past, state = emulate(run, seed).outputs
        assert error(out, want[0]) < TOLERANCE[case.dtype]
        assert np.array_equal(past, want[1])
        assert error(state, want[2]) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("name", CASES)
def test_the_plain_version_is_the_loop(name: str) -> None:
    case = CASES[name]
    for form in (delta_step, delta_step_reference):
        out, past, state = form(*case.inputs())
        assert out.dtype == past.dtype == case.dtype and state.dtype == mx.float32
        want = loop(case)
        assert error(floats(out), want[0]) < TOLERANCE[case.dtype]
        assert np.array_equal(floats(past), want[1])
        assert error(floats(state), want[2]) < TOLERANCE[mx.float32]


def test_the_memory_is_read_once() -> None:
    case = CASES["one key head for two"]
    done = emulate(launch(*case.inputs()))
    assert done.reads["state"] == 4 * 128 * 128


def test_heads_too_large_for_the_registers_are_not_taken() -> None:
    assert takes(128, 128) and takes(256, 96) and not takes(256, 128)
    assert takes(384, 64) and not takes(385, 8)
