"""The gated delta net against loops over heads and positions written in numpy, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from turbospark.cache.state import LayerStates
from turbospark.dtypes import Raw
from turbospark.install.planes import Planes
from turbospark.kernels import delta_rows, delta_step
from turbospark.kernels.choices import PLAIN, Choices
from turbospark.kernels.delta_rows import DeltaInputs, gated_delta, gated_delta_reference
from turbospark.kernels.delta_step import decay_of
from turbospark.layers.gated_delta import (
    DeltaShape,
    GatedDeltaNet,
    causal_conv,
    l2_norm,
    replay_state,
)
from turbospark.layers.weights import Weights

SHAPES = [
    DeltaShape(2, 6, 32, 32, 4),
    DeltaShape(3, 3, 16, 24, 4),
    DeltaShape(1, 4, 8, 16, 2),
    DeltaShape(4, 8, 128, 128, 4),
]
Recurrence = Callable[[DeltaInputs, mx.array], tuple[mx.array, mx.array]]


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def inputs(s: DeltaShape, rows: int) -> DeltaInputs:
    q, k = (draw(1, rows, s.key_heads, s.key_dim, seed=i) for i in (1, 2))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v = draw(1, rows, s.value_heads, s.value_dim, seed=3)
    decay, beta = (sigmoid(draw(1, rows, s.value_heads, seed=i)) for i in (4, 5))
    return DeltaInputs(*map(mx.array, (q * s.key_dim**-0.5, k, v, decay, beta)))


def loop(x: DeltaInputs, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One head after the other: S = decay S; S += beta k (v - S^T k)^T; o = S^T q; S [Dk, Dv]."""
    q, k, v, decay, beta = (
        np.array(a[0], dtype=np.float64) for a in (x.q, x.k, x.v, x.decay, x.beta)
    )
    out, after = np.zeros(v.shape), np.zeros(state.shape)
    group = v.shape[1] // k.shape[1]
    for head in range(v.shape[1]):
        s = state[0, head].T.astype(np.float64)
        for t in range(v.shape[0]):
            key = k[t, head // group]
            s = decay[t, head] * s
            s = s + np.outer(key, beta[t, head] * (v[t, head] - s.T @ key))
            out[t, head] = s.T @ q[t, head // group]
        after[0, head] = s.T
    return out[None], after


# --- the recurrence -------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrence", [gated_delta_reference, gated_delta])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_forms_of_the_recurrence_are_the_loop(
    shape: DeltaShape, recurrence: Recurrence
) -> None:
    x = inputs(shape, 70)
    start = draw(1, shape.value_heads, shape.value_dim, shape.key_dim, seed=6)
    out, state = recurrence(x, mx.array(start))
    expected, after = loop(x, start)
    assert state.dtype == mx.float32
    np.testing.assert_allclose(np.array(out), expected, atol=2e-6)
    np.testing.assert_allclose(np.array(state), after, atol=2e-6)


@pytest.mark.parametrize("recurrence", [gated_delta_reference, gated_delta])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 64])
def test_rows_in_pieces_give_the_same_bits(size: int, recurrence: Recurrence) -> None:
    x, state = inputs(SHAPES[0], 70), mx.zeros((1, 6, 32, 32))
    whole, last = recurrence(x, state)
    parts = []
    for at in range(0, 70, size):
        out, state = recurrence(x.rows(slice(at, at + size)), state)
        parts.append(out)
    np.testing.assert_array_equal(np.array(mx.concatenate(parts, axis=1)), np.array(whole))
    np.testing.assert_array_equal(np.array(state), np.array(last))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17])
def test_a_replay_of_some_rows_is_single_steps_to_the_bit(rows: int) -> None:
    x, start = inputs(SHAPES[3], 20), mx.array(draw(1, 8, 128, 128, seed=6))
    state = start
    for t in range(rows):
        _, state = gated_delta(x.rows(slice(t, t + 1)), state)
    replayed = replay_state(x, start, rows)
    np.testing.assert_array_equal(np.array(replayed), np.array(state))


# --- its inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_the_convolution_reads_the_newest_rows_oldest_tap_first(taps: int) -> None:
    x, kernel = draw(1, taps - 1 + 9, 5, seed=1), draw(taps, 5, seed=2)
    found = np.array(causal_conv(mx.array(x), mx.array(kernel)))
    for row in range(9):
        for channel in range(5):
            exact = sum(float(x[0, row + i, channel]) * kernel[i, channel] for i in range(taps))
            assert found[0, row, channel] == pytest.approx(exact, abs=1e-6)


def test_one_row_convolves_to_the_bits_of_many() -> None:
    x, kernel = mx.array(draw(1, 12, 96, seed=1)), mx.array(draw(4, 96, seed=2))
    many = np.array(causal_conv(x, kernel))
    for row in range(9):
        one = np.array(causal_conv(x[:, row : row + 4], kernel))
        np.testing.assert_array_equal(one[:, 0], many[:, row])


def test_the_l2_norm_adds_epsilon_to_the_sum_of_squares() -> None:
    # A vector whose sum of squares is epsilon itself: its norm's root doubles.
    x = np.zeros((1, 1, 2, 16), dtype=np.float32)
    x[0, 0, 0, 3] = 1e-3
    x[0, 0, 1] = draw(16, seed=3)
    found = np.array(l2_norm(mx.array(x), mx.full((16,), 16**-0.5)))
    exact = x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-7)
    assert found[0, 0, 0, 3] == pytest.approx(0.5**0.5, rel=1e-4)


def test_the_decay_is_computed_in_float32_whatever_its_input() -> None:
    a, rate, bias = (draw(1, 3, 8, seed=i) * 6 for i in (1, 2, 3))
    rate, bias = -np.exp(rate[0, 0] / 6), bias[0, 0]
    low = mx.array(a).astype(mx.bfloat16)
    found = decay_of(low, mx.array(rate), mx.array(bias))
    x = np.array(low.astype(mx.float32)).astype(np.float64) + bias
    exact = np.exp(rate.astype(np.float64) * np.log1p(np.exp(x)))
    assert found.dtype == mx.float32
    np.testing.assert_allclose(np.array(found), exact, rtol=2e-5, atol=1e-7)


# --- the layer ------------------------------------------------------------------------------------

HIDDEN, EPS, SHAPE = 48, 3e-5, DeltaShape(2, 6, 16, 8, 4)


def tensors() -> dict[str, np.ndarray]:
    sizes = {"in_proj_qkv": SHAPE.channels, "in_proj_z": SHAPE.values, "in_proj_b": 6,
             "in_proj_a": 6}  # fmt: skip
    found = {
        f"m.{name}.weight": draw(rows, HIDDEN, seed=i) * HIDDEN**-0.5
        for i, (name, rows) in enumerate(sizes.items())
    }
    return found | {
        "m.out_proj.weight": draw(HIDDEN, SHAPE.values, seed=11) * 0.2,
        "m.conv1d.weight": draw(SHAPE.channels, 1, 4, seed=12) * 0.5,
        "m.A_log": draw(6, seed=13), "m.dt_bias": draw(6, seed=14) - 1,
        "m.norm.weight": 1 + 0.2 * draw(SHAPE.value_dim, seed=15),
    }  # fmt: skip


class Reader:
    def __init__(self, found: dict[str, np.ndarray]) -> None:
        self.found = found

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def read(self, name: str) -> Planes:
        array = self.found[name]
        return Planes(Raw("float32"), array.shape, mx.array(array))


def layer(sigmoid: bool = False, turned: bool = False, kernels: Choices = PLAIN) -> GatedDeltaNet:
    found = tensors()
    if turned:
        found["m.conv1d.weight"] = found["m.conv1d.weight"].swapaxes(1, 2)
    shapes = {n: a.shape for n, a in found.items()}
    weights = Weights(Reader(found), shapes, mx.float32, kernels=kernels)
    return GatedDeltaNet(weights, "m", 0, SHAPE, EPS, sigmoid)


def run(net: GatedDeltaNet, x: np.ndarray, sizes: list[int]) -> tuple[np.ndarray, LayerStates]:
    states = LayerStates([SHAPE.memory], 100, mx.float32)
    parts = []
    for size in sizes:
        states.begin(size)
        part = mx.array(x[:, states.position : states.position + size])
        parts.append(np.array(net(part, states)))
        mx.eval(states.arrays())
        states.advance()
    return np.concatenate(parts, axis=1), states


def plainly(x: np.ndarray, gate: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The layer as the paper writes it."""
    w = {name.removeprefix("m."): a.astype(np.float64) for name, a in tensors().items()}
    rows, s = x[0].astype(np.float64), SHAPE
    project = lambda name: rows @ w[f"in_proj_{name}.weight"].T  # noqa: E731
    past = np.concatenate([np.zeros((3, s.channels)), project("qkv")])
    taps = w["conv1d.weight"][:, 0]
    mixed = np.stack([(past[t : t + 4].T * taps).sum(1) for t in range(len(rows))])
    mixed = mixed * sigmoid(mixed)
    q, k, v = np.split(mixed, [s.keys, 2 * s.keys], axis=1)
    unit = lambda a: a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = (unit(a.reshape(len(rows), 2, 16)) for a in (q, k))
    decay = np.exp(-np.exp(w["A_log"]) * np.log1p(np.exp(project("a") + w["dt_bias"])))
    parts = (q / 4.0, k, v.reshape(-1, 6, 8), decay, sigmoid(project("b")))
    out, _ = loop(DeltaInputs(*(mx.array(a[None]) for a in parts)), np.zeros((1, 6, 8, 16)))
    out = out[0] / np.sqrt((out[0] ** 2).mean(-1, keepdims=True) + EPS) * w["norm.weight"]
    out = out * gate(project("z").reshape(-1, 6, 8))
    return (out.reshape(len(rows), -1) @ w["out_proj.weight"].T)[None]


X = draw(1, 40, HIDDEN, seed=20)


@pytest.mark.parametrize("turned", [False, True])
def test_the_layer_is_what_the_paper_writes(turned: bool) -> None:
    found, states = run(layer(turned=turned), X, [40])
    np.testing.assert_allclose(found, plainly(X, lambda z: z * sigmoid(z)), atol=2e-5)
    assert all(float(mx.abs(a).max()) > 0.01 for a in states.arrays())


def test_another_output_gate_can_be_asked_for() -> None:
    found, _ = run(layer(sigmoid=True), X, [40])
    np.testing.assert_allclose(found, plainly(X, sigmoid), atol=2e-5)


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 7, 7, 7, 7, 5], [1, 2, 30, 7], [39, 1]])
def test_the_layer_carries_its_memory_across_passes_to_the_bit(sizes: list[int]) -> None:
    whole, states = run(layer(), X, [40])
    found, again = run(layer(), X, sizes)
    np.testing.assert_array_equal(found, whole)
    for a, b in zip(again.arrays(), states.arrays(), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize("gated", [False, True])
def test_single_rows_may_pass_as_one_operation(gated: bool) -> None:
    net = layer(gated, kernels=replace(PLAIN, gated_delta=True))
    found, states = run(net, X, [9, *[1] * 20, 11])
    gate = sigmoid if gated else (lambda z: z * sigmoid(z))
    np.testing.assert_allclose(found, plainly(X, gate), atol=2e-5)
    assert states.step.counts == {"delta_rows": 11}
    _, last = run(layer(gated), X, [40])
    for a, b in zip(states.arrays(), last.arrays(), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-6)


def test_heads_too_large_for_one_launch_take_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_step, "takes", lambda key_dim, value_dim: False)
    monkeypatch.delattr(delta_step, "delta_step")
    found, states = run(layer(kernels=replace(PLAIN, gated_delta=True)), X, [39, 1])
    np.testing.assert_allclose(found, plainly(X, lambda z: z * sigmoid(z)), atol=2e-5)
    assert states.step.counts == {"delta_rows": 1}
    monkeypatch.setattr(delta_rows, "takes", lambda key_dim: False)
    _, states = run(layer(kernels=replace(PLAIN, gated_delta=True)), X, [39, 1])
    assert states.step.counts == {}


def test_a_taped_row_that_passed_as_one_operation_can_be_kept() -> None:
    net = layer(kernels=replace(PLAIN, gated_delta=True))
    states = LayerStates([SHAPE.memory], 100, mx.float32)
    states.begin(1, tape=True)
    net(mx.array(X[:, :1]), states)
    assert states.step.counts == {"delta_rows": 1}
    states.layers[0].keep_rows(0, 1)
    _, plain = run(layer(), X, [1])
    for a, b in zip(states.arrays(), plain.arrays(), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-6)


def test_the_kept_convolution_inputs_do_not_hold_the_whole_pass() -> None:
    s = DeltaShape(8, 8, 64, 64, 4)
    net = object.__new__(GatedDeltaNet)
    net.shape = s
    before = mx.get_active_memory()
    joined = mx.zeros((1, 2003, s.channels))
    tail = net._past(joined, 2000)
    mx.eval(tail)
    del joined
    assert tail.shape == (1, 3, s.channels)
    assert mx.get_active_memory() - before < 1 << 20
