"""Packed matrix times 1 to 8 rows with its neighbours: by a kernel where one wins, else plain MLX.

Knows which kernel takes what on which back end; the kernels are `qmv_matrix` and `qmv_scalar`, the
reference is in `fused`. Metal keeps MLX's own products: unmeasured there.
"""

from __future__ import annotations

import math

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.kernels import qmv_matrix, qmv_scalar
from turbospark.kernels.choices import backend
from turbospark.kernels.fused import PLAIN, Around, inputs, qmv_reference
from turbospark.kernels.source import Plan

__all__ = ["PLAIN", "Around", "qmv", "qmv_reference"]

MATRIX = {"cuda": qmv_matrix.Tuning()}
SCALAR = {"cuda": qmv_scalar.Tuning()}


def plan(
    where: str, fmt: Quant, n: int, x: tuple[int, ...], dtype: mx.Dtype, around: Around
) -> Plan | None:
    """The launch for inputs of shape `x` on back end `where`; None where plain MLX is kept."""
    parts, k, m = around.parts, x[-1], math.prod(x[:-1])
    if where in MATRIX and qmv_matrix.takes(fmt, dtype, k, m, parts):
        return qmv_matrix.plan(fmt, n, x, dtype, parts, MATRIX[where])
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
    best = plan(where, fmt, weight.shape[0], tuple(x.shape), x.dtype, around)
    if best is None:
        return qmv_reference(x, fmt, weight, scales, biases, around)
    return best.run(where, inputs(x, weight, scales, biases, around))[0]
