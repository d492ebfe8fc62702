"""Checks of a gated delta net's step and recurrence; see `check`."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from turbospark.kernels import delta_rows, delta_step
from turbospark.kernels.check_base import Check, floats, normal
from turbospark.kernels.delta_step import Delta

KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 32, 128, 4
KEYS, VALUES = KEY_HEADS * DIM, VALUE_HEADS * DIM
CHANNELS = 2 * KEYS + VALUES


def delta_checks() -> Iterator[Check]:
    """One row with all around it, and the recurrence of many."""
    yield from step_checks()
    yield from rows_checks(512)


def rows_checks(rows: int) -> Iterator[Check]:
    """What `rows` rows give and leave."""
    keys, values = (1, rows, KEY_HEADS, DIM), (1, rows, VALUE_HEADS, DIM)
    q, k = normal(keys, mx.float32, 1) / DIM, normal(keys, mx.float32, 2)
    k = k / mx.sqrt(mx.sum(k * k, axis=-1, keepdims=True))
    gates = (mx.sigmoid(normal(values[:-1], mx.float32, seed) + 1) for seed in (4, 5))
    x = delta_rows.DeltaInputs(q, k, normal(values, mx.float32, 3), *gates)
    state = normal((1, VALUE_HEADS, DIM, DIM), mx.float32, 6)
    memory, want = floats(state)[0], []
    inputs = [floats(a)[0] for a in (x.q, x.k, x.v, x.decay, x.beta)]
    for q_row, k_row, v_row, decay, beta in zip(*inputs, strict=True):
        q_row, k_row = (np.repeat(a, VALUE_HEADS // KEY_HEADS, axis=0) for a in (q_row, k_row))
        out, memory = exact_row(memory, q_row, k_row, v_row, decay, beta)
        want.append(out)
    read = sum(a.nbytes for a in vars(x).values()) + 2 * state.nbytes
    label = f"{rows} rows, {KEY_HEADS} and {VALUE_HEADS} heads"
    found = {"out": np.stack(want)[None], "memory": memory[None]}
    for i, (what, exact) in enumerate(found.items()):
        yield Check(
            "delta_rows",
            f"{label}, {what}",
            mx.float32,
            lambda where, i=i: delta_rows.launch(x, state).run(where)[i],  # type: ignore[misc]
            lambda i=i: delta_rows.gated_delta_primitive(x, state)[i],  # type: ignore[misc]
            exact,
            read,
        )


def step_checks() -> Iterator[Check]:
    """What a step gives and the memory it leaves, at a published shape."""
    dtype, size, eps = mx.bfloat16, (VALUE_HEADS,), 1e-6
    taps = normal((TAPS, CHANNELS), mx.float32, 1) * 0.5
    rate, dt_bias = -mx.exp(normal(size, mx.float32, 2)), normal(size, mx.float32, 3)
    norm, heads = normal((DIM,), mx.float32, 4), (KEY_HEADS, VALUE_HEADS, DIM, DIM)
    delta = Delta(*heads, taps, rate, dt_bias, norm, eps, sigmoid=False)
    row = normal((1, 1, CHANNELS + VALUES + 2 * VALUE_HEADS), dtype, 5)
    past = normal((1, TAPS - 1, CHANNELS), dtype, 6)
    state = normal((1, VALUE_HEADS, DIM, DIM), mx.float32, 7) * 0.3
    out, memory = exact_step(floats(row)[0, 0], floats(past)[0], floats(state)[0], delta)
    label = f"{KEY_HEADS} and {VALUE_HEADS} heads of {DIM}"
    newest = np.concatenate([floats(past)[0, 1:], floats(row)[0, :, :CHANNELS]])[None]
    found = {"out": (dtype, out), "past": (dtype, newest), "memory": (mx.float32, memory)}
    for index, (what, (kind, exact)) in enumerate(found.items()):
        yield Check(
            "delta_step",
            f"{label}, {what}",
            kind,
            lambda where, i=index: delta_step.launch(row, past, state, delta).run(where)[i],  # type: ignore[misc]
            lambda i=index: delta_step.delta_step_reference(row, past, state, delta)[i],  # type: ignore[misc]
            exact,
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
    v = mixed[2 * KEYS :].reshape(-1, DIM)
    out, state = exact_row(state, q * DIM**-0.5, k, v, decay, sigmoid(b))
    out = out / np.sqrt((out * out).mean(-1, keepdims=True) + d.eps) * floats(d.norm)
    gate = z * sigmoid(z)
    return (out.reshape(-1) * gate)[None, None], state[None]


def exact_row(
    memory: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(o [V, Dv], memory [V, Dv, Dk]) after one row of q, k [V, Dk], v [V, Dv], gates [V]."""
    memory = memory * decay[:, None, None]
    missing = beta[:, None] * (v - np.einsum("vij,vj->vi", memory, k))
    memory = memory + missing[:, :, None] * k[:, None, :]
    return np.einsum("vij,vj->vi", memory, q), memory
