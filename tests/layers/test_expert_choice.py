"""How experts are chosen and gated, against numpy written from the papers' formulas."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark.layers.moe import clamped_swiglu, keep_groups, top_k_softmax


def test_groups_compete_by_their_best_score() -> None:
    rng = np.random.default_rng(3)
    scores = rng.random((1, 50, 12)).astype(np.float32)
    kept = np.array(keep_groups(mx.array(scores), 4, 2))
    for row, ours in zip(scores[0], kept[0], strict=True):
        best = [row[3 * g : 3 * g + 3].max() for g in range(4)]
        winners = sorted(range(4), key=lambda g: -best[g])[:2]
        expected = [s if i // 3 in winners else 0.0 for i, s in enumerate(row)]
        np.testing.assert_array_equal(ours, np.float32(expected))


def test_one_high_score_beats_a_group_that_is_better_on_average() -> None:
    scores = mx.array([[[0.0, 0.9, 0.8, 0.8]]])
    np.testing.assert_array_equal(
        np.array(keep_groups(scores, 2, 1)), np.float32([[[0.0, 0.9, 0.0, 0.0]]])
    )


def test_only_the_chosen_logits_share_the_weight() -> None:
    logits = np.float32([[[0.5, -1.0, 2.0, 1.5]], [[9.0, 1.0, 8.0, -3.0]]])
    ids, weights = top_k_softmax(mx.array(logits), 2)
    assert np.array(ids).tolist() == [[[2, 3]], [[0, 2]]]
    share = 1 / (1 + np.exp(-np.array([0.5, 1.0])))
    expected = np.stack([share, 1 - share], axis=-1)[:, None]
    np.testing.assert_allclose(np.array(weights), expected, rtol=1e-6)


def test_the_gate_is_clamped_above_only_and_up_on_both_sides() -> None:
    gate = np.float32([-20.0, -9.0, 0.5, 6.9, 9.0, 100.0])
    up = np.float32([3.0, -9.0, -0.5, 9.0, 1.0, -100.0])
    ours = clamped_swiglu(7.0, 1.702)(mx.array(gate), mx.array(up))
    g, u = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    np.testing.assert_allclose(np.array(ours), (u + 1) * g / (1 + np.exp(-1.702 * g)), rtol=1e-5)


def test_the_clamped_gate_keeps_the_type_of_the_activations() -> None:
    half = mx.array([1.0, 8.0], dtype=mx.bfloat16)
    assert clamped_swiglu(7.0, 1.702)(half, half).dtype == mx.bfloat16
