"""One or two launches of every kernel, for the checks that read text instead of numbers."""

from __future__ import annotations

import mlx.core as mx
from cases import normal, packed

from turbospark.dtypes import MXFP4, affine
from turbospark.kernels import qmv
from turbospark.kernels.source import Launch


def qmv_fused() -> Launch:
    w = packed((64, 2048), affine(4, 64))
    around = qmv.Around(norm=normal((2048,), mx.bfloat16, 0), eps=1e-5, glu="silu")
    x = normal((2, 2048), mx.bfloat16, 1)
    return qmv.launch(x, w.fmt, w.weight, w.scales, w.biases, around, qmv.Tuning())


def qmv_plain() -> Launch:
    w = packed((48, 1024), MXFP4)
    x = normal((1, 1024), mx.float16, 1)
    around = qmv.Around(bias=normal((48,), mx.float16, 2), residual=normal((1, 48), mx.float16, 3))
    return qmv.launch(x, w.fmt, w.weight, w.scales, w.biases, around, qmv.Tuning(4, 4))


LAUNCHES = {f.__name__: f for f in (qmv_fused, qmv_plain)}
