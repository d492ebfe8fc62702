"""The recurrence of gated delta nets: emulated kernel and plain versions against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, error, floats, normal
from emulator import emulate

from turbospark.kernels.delta_rows import DeltaInputs, gated_delta, gated_delta_reference, launch

Recurrence = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class Case:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rows: int

    def inputs(self) -> tuple[DeltaInputs, mx.array]:
        keys = (1, self.rows, self.key_heads, self.key_dim)
        q, k = normal(keys, mx.float32, 1, self.key_dim**-0.5), normal(keys, mx.float32, 2)
        k = k / mx.sqrt(mx.sum(k * k, axis=-1, keepdims=True))
        v = normal((1, self.rows, self.value_heads, self.value_dim), mx.float32, 3)
        gates = (1, self.rows, self.value_heads)
        decay, beta = (mx.sigmoid(normal(gates, mx.float32, seed) + 1) for seed in (4, 5))
        state = (1, self.value_heads, self.value_dim, self.key_dim)
        return DeltaInputs(q, k, v, decay, beta), normal(state, mx.float32, 6)


def loop(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """(o, state), head by head and row by row, in float64."""
    x, state = case.inputs()
    q, k, v, decay, beta = (floats(a)[0] for a in (x.q, x.k, x.v, x.decay, x.beta))
    out, after = np.zeros_like(v), floats(state)
    for head in range(case.value_heads):
        at = head // (case.value_heads // case.key_heads)
        memory = after[0, head]
        for t in range(case.rows):
            memory = memory * decay[t, head]
            missing = beta[t, head] * (v[t, head] - memory @ k[t, at])
            memory = memory + np.outer(missing, k[t, at])
            out[t, head] = memory @ q[t, at]
        after[0, head] = memory
    return out[None], after


CASES = {
    "one key head for two": Case(2, 4, 128, 128, 3),
    "as many key heads": Case(3, 3, 64, 64, 9),
    "three sharing, ragged": Case(1, 3, 48, 21, 7),
    "wide keys": Case(1, 2, 256, 40, 4),
    "one row": Case(1, 2, 32, 32, 1),
    "narrower than a simdgroup": Case(2, 2, 8, 3, 20),
}


@pytest.mark.parametrize("name", CASES)
def test_the_emulated_kernel_is_the_loop(name: str) -> None:
    case = CASES[name]
    want = loop(case)
    run = launch(*case.inputs())
    for seed in (0, 1):
        for got, exact in zip(emulate(run, seed).outputs, want, strict=True):
            assert error(got, exact) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("form", [gated_delta, gated_delta_reference])
@pytest.mark.parametrize("name", CASES)
def test_the_plain_versions_are_the_loop(name: str, form: Recurrence) -> None:
    case = CASES[name]
    for got, exact in zip(form(*case.inputs()), loop(case), strict=True):
        assert error(floats(got), exact) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("cut", [1, 4])
def test_rows_in_two_launches_give_the_same_bits(cut: int) -> None:
    case = CASES["as many key heads"]
    x, state = case.inputs()
    out, after = emulate(launch(x, state)).outputs
    one, middle = emulate(launch(x.rows(slice(0, cut)), state)).outputs
    middle_state = mx.array(middle.astype(np.float32))
    two, end = emulate(launch(x.rows(slice(cut, case.rows)), middle_state)).outputs
    assert np.array_equal(np.concatenate([one, two], axis=1), out)
    assert np.array_equal(end, after)


def test_the_number_of_rows_is_no_part_of_the_text() -> None:
    x, state = CASES["as many key heads"].inputs()
    texts = {launch(x.rows(slice(0, n)), state).plan.text("cuda") for n in (1, 2, 9)}
    assert len(texts) == 1
