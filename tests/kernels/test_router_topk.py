"""Router top-k: emulated kernel, plain version, and a sorted list of (logit, index)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cases import floats, normal
from emulator import emulate

from turbospark.kernels.router_topk import launch, router_topk


def loop(logits: np.ndarray, k: int, normalize: bool, scale: float) -> tuple[np.ndarray, ...]:
    ids, weights = [], []
    for row in logits:
        order = sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
        share = np.exp(row - row.max())
        chosen = share[order] / (share[order].sum() if normalize else share.sum())
        ids.append(order)
        weights.append(chosen * scale)
    return np.array(ids), np.array(weights)


CASES = {
    "128 experts": (3, 128, 8, True, 1.0),
    "as many as there are": (2, 8, 8, True, 1.0),
    "a ragged number": (2, 37, 5, False, 2.5),
    "512 experts, 32 chosen": (1, 512, 32, False, 1.0),
    "one chosen": (4, 60, 1, True, 1.0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_come_first_and_the_lower_index_wins_ties(name: str, ties: bool) -> None:
    tokens, experts, k, normalize, scale = CASES[name]
    logits = normal((tokens, experts), mx.float32, 0, 2.0)
    if ties:
        logits = mx.round(logits)
    want_ids, want = loop(floats(logits), k, normalize, scale)
    run = launch(logits, k, normalize, scale)
    for ids, weights in (emulate(run).outputs, emulate(run, 3).outputs):
        assert np.array_equal(ids, want_ids)
        assert np.allclose(weights, want, rtol=2e-6)
    ids, weights = router_topk(logits, k, normalize, scale)
    assert np.array_equal(np.array(ids), want_ids)
    assert np.allclose(floats(weights), want, rtol=2e-6)


def test_16_bit_logits_are_read_exactly() -> None:
    logits = normal((2, 64), mx.bfloat16, 1)
    want_ids, want = loop(floats(logits), 4, True, 1.0)
    ids, weights = emulate(launch(logits, 4, True, 1.0)).outputs
    assert np.array_equal(ids, want_ids)
    assert np.allclose(weights, want, rtol=2e-6)


def test_logits_that_are_not_numbers_give_ids_in_range_and_weights_that_are_not() -> None:
    logits = mx.full((1, 40), mx.nan)
    ids, weights = emulate(launch(logits, 4, True, 1.0)).outputs
    assert ((ids >= 0) & (ids < 40)).all()
    assert np.isnan(weights).all()
