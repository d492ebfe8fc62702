"""Packed caches by launches, every one emulated, against the same caches in plain MLX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import emulate

from turbospark.cache.packed import Balance, PackedKV
from turbospark.cache.specs import PackedSpec
from turbospark.cache.state import LayerStates
from turbospark.kernels import kv_encode, packed_decode, packed_turn
from turbospark.kernels.source import Launch, Plan

STEP = ["packed_turn", "packed_partial", "packed_combine"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was launched, in order, once the device claims to be a GPU of CUDA."""
    names: list[str] = []

    def run(plan: Plan, where: str, inputs: list[mx.array]) -> list[mx.array]:
        assert where == "cuda"
        names.append(plan.kernel.name)
        done = emulate(Launch(plan, inputs))
        given: dict[str, Any] = dict(zip(plan.kernel.inputs, inputs, strict=True))
        for name, values in done.updated.items():
            given[name][:] = mx.array(values.astype(np.float32)).astype(given[name].dtype)
        return [
            mx.array(v.astype(np.uint32 if dtype == mx.uint32 else np.float32)).astype(dtype)
            for v, (_, dtype) in zip(done.outputs, plan.outputs, strict=True)
        ]

    monkeypatch.setattr(Plan, "run", run)
    for module in (kv_encode, packed_decode, packed_turn):
        monkeypatch.setattr(module, "backend", lambda device: "cuda")
    return names


def rows_of(count: int, seed: int, heads: Sequence[int], dim: int) -> list[mx.array]:
    random = np.random.default_rng(seed)
    return [mx.array(random.standard_normal((1, h, count, dim), np.float32)) for h in heads]


def feed(cache: PackedKV, states: LayerStates, count: int, sinks: mx.array | None) -> np.ndarray:
    states.layers[0] = cache
    dim = cache.spec.dim
    q, k, v = rows_of(count, states.position, (4, 2, 2), dim)
    step = states.begin(count)
    out = cache.attend(q, k, v, step, dim**-0.5, sinks)
    mx.eval(out, cache.arrays())
    assert step.attention_calls == 1
    states.advance()
    return np.array(out)


@pytest.mark.parametrize(
    ("bits", "balanced", "sinks"),
    [((4, 4), False, False), ((4, 3), True, False), ((2, 2), True, True)],
)
def test_steps_by_launches_equal_plain_ones(
    bits: tuple[int, int], balanced: bool, sinks: bool, launched: list[str]
) -> None:
    spec, context = PackedSpec(2, 64, *bits), 320
    random = np.random.default_rng(3)
    tables = [random.uniform(0.5, 1.5, (2, 64)).astype(np.float32) for _ in range(2)]
    balance = Balance(*map(mx.array, tables)) if balanced else None
    logits = mx.array([0.5, -1.0, 2.0, 0.0]) if sinks else None
    caches = [PackedKV(spec, context, balance, rows) for rows in (None, 8)]
    states = [LayerStates([spec], context, mx.float32) for _ in caches]
    # From the first row by launches, a prompt's chunk by neither, rows over two blocks' ends.
    for count in (1, 1, 3, 150, 1, 4, 8, 8, 8, 1, 8, 7):
        launched.clear()
        plain, ours = (
            feed(cache, state, count, logits) for cache, state in zip(caches, states, strict=True)
        )
        assert np.abs(ours - plain).max() < 4e-3 * np.abs(plain).max(), states[0].position
        at = states[0].position
        packs = at // 32 > (at - count) // 32 and at >= 64
        encoded = ["kv_encode"] * 2 if packs else []
        assert launched == encoded + (STEP if count <= 8 else [])
    codes = [np.array(c.keys) for c in caches]
    assert codes[0].any() and (codes[0] == codes[1]).mean() > 0.99
    assert np.abs(np.array(caches[0].new_keys) - np.array(caches[1].new_keys)).max() < 2e-2


def test_layers_that_share_a_cache_read_it_by_launches(launched: list[str]) -> None:
    spec = PackedSpec(2, 64, 4, 4)
    outs = []
    for rows in (None, 8):
        cache, states = PackedKV(spec, 256, None, rows), LayerStates([spec], 256, mx.float32)
        feed(cache, states, 100, None)
        feed(cache, states, 1, None)
        step = states.begin(1)
        q, k, v = rows_of(1, 7, (4, 2, 2), 64)
        cache.attend(q, k, v, step, 0.1)
        launched.clear()
        outs.append(np.array(cache.read(q * 2, step, 0.1)))
    assert launched == STEP[1:]
    assert np.abs(outs[0] - outs[1]).max() < 4e-3 * np.abs(outs[0]).max()
