"""Packed matvec with fused neighbours: emulated kernel, plain version, float64 loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, Packed, error, floats, normal, packed
from emulator import emulate

from turbospark.dtypes import MXFP4, Quant, affine
from turbospark.kernels.qmv import TUNED, Around, Tuning, launch, qmv, takes


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    fmt: Quant
    dtype: mx.Dtype = mx.float32
    tuning: Tuning = TUNED["cuda"]
    parts: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[mx.array, Packed, Around]:
        outs = self.n // 2 if "glu" in self.parts else self.n
        around = Around(
            norm=normal((self.k,), self.dtype, 1) if "norm" in self.parts else None,
            eps=1e-3,
            bias=normal((self.n,), self.dtype, 2) if "bias" in self.parts else None,
            glu=self.extra.get("glu"),
            residual=normal((self.m, outs), self.dtype, 3) if "residual" in self.parts else None,
        )
        x = normal((self.m, self.k), self.dtype, 4)
        return x, packed((self.n, self.k), self.fmt), around


def loop(x: mx.array, w: Packed, around: Around) -> np.ndarray:
    """Row by row in float64."""
    rows = []
    for t, row in enumerate(floats(x)):
        if around.norm is not None:
            row = row / np.sqrt((row * row).mean() + around.eps) * floats(around.norm)
        y = np.array([np.dot(row, values) for values in w.values])
        if around.bias is not None:
            y = y + floats(around.bias)
        if around.glu is not None:
            gate, up = y[: len(y) // 2], y[len(y) // 2 :]
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            silu = gate / (1 + np.exp(-gate))
            y = (silu if around.glu == "silu" else 0.5 * gate * (1 + np.tanh(inner))) * up
        rows.append(y if around.residual is None else y + floats(around.residual)[t])
    return np.array(rows)


Q4 = affine(4, 64)
CASES = {
    "one row": Case(1, 70, 2048, Q4, mx.bfloat16),
    "one row, tail of a tile": Case(1, 21, 4096 + 96, affine(4, 32, "float32")),
    "three rows of fp32": Case(3, 33, 1056, affine(8, 32, "float32")),
    "eight rows, four at a time": Case(8, 19, 96, affine(4, 32, "float16"), mx.float16),
    "five rows leave a ragged pair of groups": Case(5, 9, 1120, affine(4, 32, "float32")),
    "2 bits": Case(2, 17, 256, affine(2, 64, "float32")),
    "3 bits": Case(1, 17, 1216, affine(3, 64, "float32")),
    "5 bits": Case(1, 17, 256, affine(5, 128, "float32")),
    "6 bits": Case(2, 17, 192, affine(6, 64, "float32")),
    "mxfp4": Case(2, 17, 1184, MXFP4, mx.float16),
    "norm, bias and residual": Case(2, 40, 1088, Q4, mx.bfloat16, parts="norm bias residual"),
    "norm and swiglu": Case(
        1, 2 * 77, 640, Q4, mx.bfloat16, parts="norm bias glu", extra={"glu": "silu"}
    ),
    "geglu of three rows": Case(
        3, 2 * 5, 192, affine(4, 64, "float32"), parts="glu residual", extra={"glu": "gelu"}
    ),
    "one row per simdgroup": Case(1, 5, 320, affine(4, 64, "float32"), tuning=Tuning(1, 1)),
    "four rows per simdgroup": Case(
        2, 23, 320, affine(4, 64, "float32"), tuning=Tuning(4, 4), parts="norm"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_a_float64_loop(name: str) -> None:
    case = CASES[name]
    x, w, around = case.inputs()
    want = loop(x, w, around)
    for seed in (0, 1):
        run = launch(x, w.fmt, w.weight, w.scales, w.biases, around, case.tuning)
        assert error(emulate(run, seed).outputs[0], want) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", ["three rows of fp32", "norm, bias and residual", "mxfp4"])
def test_without_a_gpu_the_plain_version_runs(name: str) -> None:
    x, w, around = CASES[name].inputs()
    got = qmv(x, w.fmt, w.weight, w.scales, w.biases, around)
    # MLX's own 16-bit sums on a CPU are this coarse.
    tolerance = 3e-6 if x.dtype == mx.float32 else 0.1
    assert error(floats(got), loop(x, w, around)) < tolerance


def test_leading_axes_of_x_are_kept() -> None:
    x, w, around = CASES["three rows of fp32"].inputs()
    run = launch(x[None], w.fmt, w.weight, w.scales, w.biases, around, Tuning())
    assert run.plan.outputs[0][0] == (1, 3, 33)


def test_only_what_the_body_reads_is_taken() -> None:
    assert takes(Q4, 4096, 8)
    assert not takes(Q4, 4096, 9)
    assert not takes(affine(1, 64), 4096, 1)
    assert not takes(Quant("nvfp4", 4, 16, "uint8"), 4096, 1)
