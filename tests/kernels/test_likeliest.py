"""The id of the largest logit: emulated kernels, plain version, and a loop."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from cases import floats, normal
from emulator import emulate

from turbospark.kernels.likeliest import launch_best, launch_shares, likeliest


def loop(logits: np.ndarray) -> int:
    best = 0
    for i, value in enumerate(logits):
        if not math.isfinite(value):
            return -1
        if value > logits[best]:
            best = i
    return best


def emulated(logits: mx.array, seed: int = 0) -> int:
    values, ids = emulate(launch_shares(logits), seed).outputs
    parts = (mx.array(values.astype(np.float32)), mx.array(ids.astype(np.int32)))
    (found,) = emulate(launch_best(*parts), seed).outputs
    return int(found[0])


def rows() -> dict[str, mx.array]:
    rounded = mx.round(normal((40_000,), mx.float32, 1))
    lowest = float(np.finfo(np.float32).min)
    return {
        "one": mx.array([-2.5]),
        "fewer than a share": normal((77,), mx.float32, 2),
        "more than all shares at once": normal((33_001,), mx.float32, 3),
        "16 bits, many equal": normal((20_000,), mx.bfloat16, 4),
        "many equal": rounded,
        "all equal": mx.zeros((20_000,)),
        "the lowest there is": mx.full((300,), lowest),
        "the last": mx.arange(17_000).astype(mx.float32),
        "the first": -mx.arange(17_000).astype(mx.float32),
    }


@pytest.mark.parametrize("name", rows())
def test_the_first_of_the_largest_is_found(name: str) -> None:
    logits = rows()[name]
    want = loop(floats(logits))
    assert emulated(logits) == emulated(logits, 3) == want
    assert likeliest(logits).tolist() == [want]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 31, 16_999])
def test_a_row_with_a_logit_that_is_not_finite_has_no_id(value: float, at: int) -> None:
    row = floats(normal((17_000,), mx.float32, 5)).astype(np.float32)
    row[at] = value
    assert emulated(mx.array(row)) == -1
    assert likeliest(mx.array(row)).tolist() == [-1]
