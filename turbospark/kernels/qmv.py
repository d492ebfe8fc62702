"""Packed matrix times 1 to 8 rows with its neighbours: by a kernel where one wins, else plain MLX.

Knows which kernel takes what on which back end; the kernels are `qmv_matrix` and `qmv_scalar`, the
reference is in `fused`. Metal keeps MLX's own products: unmeasured there.
"""

from __future__ import annotations

import math
from functools import lru_cache

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.kernels import qmv_matrix, qmv_scalar
from turbospark.kernels.choices import backend
from turbospark.kernels.fused import PLAIN, Around, Parts, inputs, qmv_reference
from turbospark.kernels.source import Plan

__all__ = ["PLAIN", "Around", "qmv", "qmv_reference"]

SCALAR = {"cuda": qmv_scalar.Tuning(rows=2, simdgroups=8)}


def matrix_tuning(where: str, outs: int, m: int) -> qmv_matrix.Tuning | None:
    """How the matrix kernel runs on back end `where`; None where it is not used.

    One H200, GPU time: 4096 x 4096 takes 6.4 us with 8 simdgroups sharing K and 6.9 with 4;
    6144 x 4096 8.3 and 7.3; 28672 x 4096 26.8 and 24.5, 23.8 with two tiles as well; four rows of
    the last 47.6 with one tile, 39.7 with two. A chain wants the same number in all its launches.
    """
    if where != "cuda":
        return None
    if m > 2:
        return qmv_matrix.Tuning(tiles=2, simdgroups=8)
    return qmv_matrix.Tuning(tiles=1 if outs <= 8192 else 2, simdgroups=4)


@lru_cache(maxsize=1024)
def plan(
    where: str, fmt: Quant, n: int, x: tuple[int, ...], dtype: mx.Dtype, parts: Parts
) -> Plan | None:
    """The launch for inputs of shape `x` on back end `where`; None where plain MLX is kept."""
    k, m = x[-1], math.prod(x[:-1])
    tuning = matrix_tuning(where, n // 2 if parts.glu else n, m)
    if tuning is not None and qmv_matrix.takes(fmt, dtype, k, m, parts):
        return qmv_matrix.plan(fmt, n, x, dtype, parts, tuning)
    if where in SCALAR and qmv_scalar.takes(fmt, k, m):
        return qmv_scalar.plan(fmt, n, x, dtype, parts, SCALAR[where])
    return None


def qmv(
    x: mx.array,
    fmt: Quant,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    around: Around = PLAIN,
) -> mx.array:
    """`qmv_reference`, by a kernel where one takes it. x must begin at a multiple of 16 bytes."""
    where = backend(mx.default_device())
    best = plan(where, fmt, weight.shape[0], tuple(x.shape), x.dtype, around.parts)
    if best is None:
        return qmv_reference(x, fmt, weight, scales, biases, around)
    return best.run(where, inputs(x, weight, scales, biases, around))[0]
