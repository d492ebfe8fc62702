"""Layers that read another layer's ring see what it wrote, however long the pass."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turbospark.cache.specs import FullSpec, RingSpec, SharedSpec
from turbospark.cache.state import LayerStates

HEADS, KV, WIDTH, WINDOW = 4, 2, 16, 8
LENGTH = 431  # three times window + slack, and no multiple of anything
RING = RingSpec(KV, WIDTH, WIDTH, WINDOW)
RNG = np.random.default_rng(3)
K, V = (RNG.standard_normal((1, KV, LENGTH, WIDTH)).astype(np.float32) for _ in range(2))
Q = [RNG.standard_normal((1, HEADS, LENGTH, WIDTH)).astype(np.float32) for _ in range(3)]


def expected(q: np.ndarray, window: int) -> np.ndarray:
    """Plain attention: row i over positions i - window < j <= i, in float64."""
    k, v = (np.repeat(a, HEADS // KV, axis=1).astype(np.float64) for a in (K, V))
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) * 0.3
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def run(specs: list, chunks: list[int], rows_attention: bool = True) -> list[np.ndarray]:
    """One writing layer and two that share it, fed in `chunks` rows at a time."""
    states = LayerStates(specs, LENGTH, mx.float32)
    outputs: list[list[np.ndarray]] = [[], [], []]
    for rows in chunks:
        step = states.begin(rows, rows_attention)
        k, v = (mx.array(a[:, :, step.start : step.end]) for a in (K, V))
        for i, q in enumerate(Q):
            part = mx.array(q[:, :, step.start : step.end])
            cache = states.layers[i]
            out = cache.read(part, step, 0.3) if i else cache.attend(part, k, v, step, 0.3)
            outputs[i].append(np.array(out))
        mx.eval(states.arrays())
        states.advance()
    assert states.position == LENGTH
    return [np.concatenate(parts, axis=2) for parts in outputs]


def cut(sizes: list[int]) -> list[int]:
    """Sizes repeated until LENGTH is reached."""
    chunks: list[int] = []
    while (left := LENGTH - sum(chunks)) > 0:
        chunks.append(min(sizes[len(chunks) % len(sizes)], left))
    return chunks


SHARED = [RING, SharedSpec(0), SharedSpec(0)]
WHOLE = run(SHARED, [LENGTH])


def test_one_pass_far_longer_than_the_ring_is_plain_windowed_attention_in_every_layer() -> None:
    for got, q in zip(WHOLE, Q, strict=True):
        np.testing.assert_allclose(got, expected(q, WINDOW), atol=1e-5)


@pytest.mark.parametrize("sizes", [[1], [7], [128], [129], [130], [136, 137], [1, 300]])
def test_every_chunking_gives_the_same_bits_in_every_layer(sizes: list[int]) -> None:
    for got, whole in zip(run(SHARED, cut(sizes)), WHOLE, strict=True):
        np.testing.assert_array_equal(got, whole)


def test_row_by_row_attention_gives_the_same_bits() -> None:
    for got, whole in zip(run(SHARED, [LENGTH], False), WHOLE, strict=True):
        np.testing.assert_array_equal(got, whole)


def test_layers_share_a_full_cache_alike() -> None:
    full = [FullSpec(KV, WIDTH, WIDTH), SharedSpec(0), SharedSpec(0)]
    for got, q in zip(run(full, cut([100])), Q, strict=True):
        np.testing.assert_allclose(got, expected(q, LENGTH), atol=1e-5)


def test_what_a_pass_overwrote_is_let_go_when_it_ends() -> None:
    states = LayerStates(SHARED, LENGTH, mx.float32)
    states.begin(LENGTH)
    k, v, q = (mx.array(a) for a in (K, V, Q[0]))
    states.layers[0].attend(q, k, v, states.step, 0.3)
    assert states.step.replays
    states.advance()
    assert not states.step.replays


def test_a_ring_that_nobody_shares_keeps_nothing_of_a_pass() -> None:
    states = LayerStates([RING], LENGTH, mx.float32)
    states.begin(LENGTH)
    states.layers[0].attend(mx.array(Q[0]), mx.array(K), mx.array(V), states.step, 0.3)
    assert not states.step.replays


def test_sharing_layers_own_no_memory() -> None:
    alone, shared = LayerStates([RING], LENGTH, mx.float32), LayerStates(SHARED, LENGTH, mx.float32)
    assert shared.nbytes == alone.nbytes and shared.buffers == alone.buffers == 2
