"""Checks of a gated delta net's step; see `check`."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from turbospark.kernels.check_base import Check, floats, normal
from turbospark.kernels.delta_step import Delta, delta_step_reference, launch

KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 32, 128, 4
KEYS, VALUES = KEY_HEADS * DIM, VALUE_HEADS * DIM
CHANNELS = 2 * KEYS + VALUES


def delta_checks() -> Iterator[Check]:
    """What a step gives and the memory it leaves, at a published shape."""
    dtype, size, eps = mx.bfloat16, (VALUE_HEADS,), 1e-6
    taps = normal((TAPS, CHANNELS), mx.float32, 1) * 0.5
    rate, dt_bias = -mx.exp(normal(size, mx.float32, 2)), normal(size, mx.float32, 3)
    norm, heads = normal((DIM,), mx.float32, 4), (KEY_HEADS, VALUE_HEADS, DIM, DIM)
    delta = Delta(*heads, taps, rate, dt_bias, norm, eps, sigmoid=False)
    row = normal((1, 1, CHANNELS + VALUES + 2 * VALUE_HEADS), dtype, 5)
    past = normal((1, TAPS - 1, CHANNELS), dtype, 6)
    state = normal((1, VALUE_HEADS, DIM, DIM), mx.float32, 7) * 0.3
    want = exact_step(floats(row)[0, 0], floats(past)[0], floats(state)[0], delta)
    label = f"{KEY_HEADS} and {VALUE_HEADS} heads of {DIM}"
    for what, index, kind in (("out", 0, dtype), ("memory", 2, mx.float32)):
        yield Check(
            "delta_step",
            f"{label}, {what}",
            kind,
            lambda where, i=index: launch(row, past, state, delta).run(where)[i],  # type: ignore[misc]
            lambda i=index: delta_step_reference(row, past, state, delta)[i],  # type: ignore[misc]
            want[index // 2],
            2 * state.nbytes,
        )


def exact_step(
    row: np.ndarray, past: np.ndarray, state: np.ndarray, d: Delta
) -> tuple[np.ndarray, np.ndarray]:
    """(out [1, 1, V Dv], state [1, V, Dv, Dk]) in float64."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    mixed = (np.concatenate([past, row[None, :CHANNELS]]) * floats(d.taps)).sum(0)
    mixed *= sigmoid(mixed)
    z, b, a = np.split(row[CHANNELS:], [VALUES, VALUES + VALUE_HEADS])
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = (
        np.repeat(unit(x.reshape(KEY_HEADS, DIM)), VALUE_HEADS // KEY_HEADS, axis=0)
        for x in (mixed[:KEYS], mixed[KEYS : 2 * KEYS])
    )
    decay = np.exp(floats(d.rate) * np.log1p(np.exp(a + floats(d.dt_bias))))
    state = state * decay[:, None, None]
    known = np.einsum("vij,vj->vi", state, k)
    missing = sigmoid(b)[:, None] * (mixed[2 * KEYS :].reshape(-1, DIM) - known)
    state = state + missing[:, :, None] * k[:, None, :]
    out = np.einsum("vij,vj->vi", state, q * DIM**-0.5)
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + d.eps) * floats(d.norm)
    gate = z * sigmoid(z)
    return (out.reshape(-1) * gate)[None, None], state[None]
