"""The routed MLP's three ways (gathered, sorted, padded) against a numpy loop over routes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from turbospark.dtypes import Raw, affine
from turbospark.experts import mlp as rooms
from turbospark.experts.mlp import ExpertMLP, StackedMatrix, padded_routes
from turbospark.layers.moe import swiglu

EXPERTS, HIDDEN, WIDTH = 9, 64, 32


def matrix(rng: np.random.Generator, rows: int, columns: int, stored: str, bias: bool):
    values = mx.array(rng.normal(size=(EXPERTS, rows, columns)).astype(np.float32) / 8)
    vector = mx.array(rng.normal(size=(EXPERTS, rows)).astype(np.float32)) if bias else None
    if stored == "dense":
        return StackedMatrix(Raw("float32"), values, bias=vector), np.array(values)
    fmt = affine(4, 32, "float32")
    planes = mx.quantize(values, group_size=32, bits=4)
    dense = np.array(mx.dequantize(*planes, group_size=32, bits=4))
    return StackedMatrix(fmt, *planes, bias=vector), dense


def build(stored: str, bias: bool):
    rng = np.random.default_rng(5)
    parts = [
        matrix(rng, WIDTH, HIDDEN, stored, bias),
        matrix(rng, WIDTH, HIDDEN, stored, bias),
        matrix(rng, HIDDEN, WIDTH, stored, bias),
    ]
    mlp = ExpertMLP(*(p[0] for p in parts), swiglu)
    vectors = [None if p[0].bias is None else np.array(p[0].bias, np.float64) for p in parts]
    return mlp, [p[1].astype(np.float64) for p in parts], vectors


def by_hand(x, which, dense, vectors):
    """One route at a time, in float64."""
    out = np.zeros((*which.shape, HIDDEN))
    for t, k in np.ndindex(which.shape):
        e = which[t, k]
        add = [0 if v is None else v[e] for v in vectors]
        gate, up = dense[0][e] @ x[t] + add[0], dense[1][e] @ x[t] + add[1]
        out[t, k] = dense[2][e] @ (gate / (1 + np.exp(-gate)) * up) + add[2]
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stored", ["dense", "packed"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_every_way_equals_a_loop_over_routes(stored, bias, tokens, monkeypatch):
    monkeypatch.setattr(rooms, "FEW_ROWS", 0)  # so few rows would make one batch
    mlp, dense, vectors = build(stored, bias)
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, HIDDEN)).astype(np.float32)
    # Experts 0 and 8 are never chosen: a padded batch must cope with both ends missing.
    which = np.stack([rng.permutation(7)[:4] + 1 for _ in range(tokens)]).astype(np.uint32)
    expected = by_hand(x.astype(np.float64), which, dense, vectors)
    ways = {
        "gathered": mlp.routes(mx.array(x), mx.array(which)),
        "padded": padded_routes(mlp, mx.array(x), which),
    }
    order = np.argsort(which.reshape(-1), kind="stable")
    rows = mlp.sorted_routes(mx.array(x[order // 4]), mx.array(which.reshape(-1)[order]))
    ways["sorted"] = rows[mx.array(np.argsort(order))].reshape(tokens, 4, HIDDEN)
    for name, got in ways.items():
        np.testing.assert_allclose(np.array(got), expected, atol=2e-5, err_msg=name)


def test_padded_batches_may_be_split_by_their_bytes(monkeypatch):
    mlp, dense, vectors = build("packed", True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, HIDDEN)).astype(np.float32)
    which = np.stack([rng.permutation(EXPERTS)[:3] for _ in range(50)]).astype(np.uint32)
    monkeypatch.setattr(rooms, "BATCH_BYTES", 2 * 3 * WIDTH * HIDDEN * 4)
    got = padded_routes(mlp, mx.array(x), which)
    np.testing.assert_allclose(
        np.array(got), by_hand(x.astype(np.float64), which, dense, vectors), atol=2e-5
    )


def test_the_threshold_decides_the_way_and_not_the_answer(monkeypatch):
    mlp, _, _ = build("packed", False)
    rng = np.random.default_rng(1)
    x = mx.array(rng.normal(size=(30, HIDDEN)).astype(np.float32))
    which = np.stack([rng.permutation(EXPERTS)[:4] for _ in range(30)]).astype(np.uint32)
    weights = mx.array(rng.random((30, 4)).astype(np.float32))
    taken = []
    real = rooms.padded_routes
    monkeypatch.setattr(rooms, "padded_routes", lambda *args: taken.append(1) or real(*args))
    plain = mlp(x, mx.array(which), weights)
    assert taken == []
    padded = replace(mlp, padded_routes=120)(x, mx.array(which), weights)
    assert taken == [1]
    np.testing.assert_allclose(np.array(padded), np.array(plain), atol=2e-5)


def test_batches_hold_every_chosen_expert_once_and_pad_little():
    counts = np.array([0, 5, 900, 3, 0, 700, 650, 4, 1, 90, 64])
    groups = [g.tolist() for g in rooms.batches(counts, 1)]
    assert groups == [[2, 5, 6], [9, 10], [1, 7, 3, 8]]
