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
from turbospark.kernels import qmv_matrix
from turbospark.kernels.fused import Around, Parts
from turbospark.kernels.qmv import SCALAR, plan, qmv
from turbospark.kernels.qmv_scalar import Tuning, launch, takes


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    fmt: Quant
    dtype: mx.Dtype = mx.float32
    tuning: Tuning = SCALAR["cuda"]
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


MATRIX_CASES = {
    "one row": Case(1, 70, 2048, Q4, mx.bfloat16),
    "one row of halves": Case(1, 17, 768, affine(4, 64, "float16"), mx.float16),
    "five rows": Case(5, 33, 1024, Q4, mx.bfloat16),
    "eight rows of bytes": Case(8, 33, 768, affine(8, 64), mx.bfloat16),
    "bytes in halves": Case(2, 33, 96, affine(8, 32, "float16"), mx.float16, parts="bias"),
    "mxfp4": Case(2, 33, 768, MXFP4, mx.bfloat16),
    "mxfp4 in halves": Case(1, 33, 256, MXFP4, mx.float16, parts="bias residual"),
    "groups of 128": Case(3, 20, 1280, affine(4, 128), mx.bfloat16, parts="norm residual"),
    "norm and swiglu": Case(
        1, 2 * 37, 512, Q4, mx.bfloat16, parts="norm bias glu", extra={"glu": "silu"}
    ),
    "geglu of three rows in two tiles": Case(
        3, 2 * 20, 320, Q4, mx.bfloat16, parts="glu residual", extra={"glu": "gelu", "tiles": 2}
    ),
}


@pytest.mark.parametrize("name", MATRIX_CASES)
def test_the_matrix_kernel_equals_a_float64_loop(name: str) -> None:
    case = MATRIX_CASES[name]
    x, w, around = case.inputs()
    want = loop(x, w, around)
    tuning = qmv_matrix.Tuning(case.extra.get("tiles", 1), 4)
    run = qmv_matrix.launch(x, w.fmt, w.weight, w.scales, w.biases, around, tuning)
    for seed in (0, 1):
        assert error(emulate(run, seed).outputs[0], want) < TOLERANCE[case.dtype]


def test_the_matrix_kernel_takes_16_bit_inputs_and_4_or_8_bits() -> None:
    plain, norm = Around().parts, Parts(True, False, None, False)
    assert qmv_matrix.takes(Q4, mx.bfloat16, 4096, 8, norm)
    assert qmv_matrix.takes(MXFP4, mx.float16, 4096, 8, plain)
    # A half times a norm's weight could overflow before the norm divides it.
    assert not qmv_matrix.takes(Q4, mx.float16, 4096, 8, norm)
    assert not qmv_matrix.takes(Q4, mx.float32, 4096, 8, plain)
    assert not qmv_matrix.takes(affine(6, 64), mx.bfloat16, 4096, 8, plain)


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


def test_each_kernel_gets_what_it_is_for() -> None:
    def chosen(where: str, fmt: Quant, dtype: mx.Dtype, rows: int = 1) -> str | None:
        best = plan(where, fmt, 64, (rows, 256), dtype, Around().parts)
        return None if best is None else best.kernel.name

    assert chosen("cuda", Q4, mx.bfloat16) == "qmv_matrix"
    assert chosen("cuda", Q4, mx.float32) == "qmv_scalar"
    assert chosen("cuda", affine(6, 64), mx.bfloat16) == "qmv_scalar"
    assert chosen("cuda", Q4, mx.bfloat16, rows=9) is None
    assert chosen("metal", Q4, mx.bfloat16) is None
    assert chosen("cpu", Q4, mx.float32) is None
