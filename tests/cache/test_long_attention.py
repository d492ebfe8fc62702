"""From some length on one row attends through the kernel's function; the answer stays."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from turbospark.cache import kv
from turbospark.cache.specs import FullSpec
from turbospark.cache.state import LayerStates
from turbospark.kernels import choices


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_long_cache_attends_the_other_way_with_the_same_result(monkeypatch, with_sinks):
    long = replace(choices.CHOICES["cpu"], attention_keys=7)
    monkeypatch.setitem(choices.CHOICES, "cpu", long)
    taken = []
    real = kv.decode_attention
    monkeypatch.setattr(kv, "decode_attention", lambda *a: taken.append(1) or real(*a))
    rng = np.random.default_rng(0)
    states = LayerStates([FullSpec(2, 64, 64)], 20, mx.float32)
    sinks = rng.normal(size=4).astype(np.float32) if with_sinks else None
    keys, values = np.zeros((2, 0, 64)), np.zeros((2, 0, 64))
    for position in range(10):
        q, k, v = (rng.normal(size=(1, h, 1, 64)).astype(np.float32) for h in (4, 2, 2))
        step = states.begin(1)
        out = states.layers[0].attend(
            mx.array(q), mx.array(k), mx.array(v), step, 0.125,
            None if sinks is None else mx.array(sinks),
        )  # fmt: skip
        states.advance()
        keys, values = np.concatenate([keys, k[0]], 1), np.concatenate([values, v[0]], 1)
        for head in range(4):
            scores = keys[head // 2] @ q[0, head, 0] * 0.125
            weight = np.exp(scores)
            total = weight.sum() + (0 if sinks is None else np.exp(sinks[head]))
            expected = weight @ values[head // 2] / total
            np.testing.assert_allclose(np.array(out)[0, head, 0], expected, atol=1e-5)
        assert len(taken) == max(0, position + 1 - 6)
        assert step.attention_calls == 1
