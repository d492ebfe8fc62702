"""Routed experts from stacked arrays and from records: emulated kernels and float64 loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, Packed, error, floats, normal, packed
from emulator import emulate

from turbospark.dtypes import MXFP4, Quant, affine
from turbospark.kernels import expert_matrix
from turbospark.kernels.expert_mlp import expert_mlp, takes
from turbospark.kernels.expert_scalar import Tuning, launch_down, launch_gate_up
from turbospark.kernels.experts import Around, Experts, Matrix, in_records, stacked


@dataclass(frozen=True)
class Case:
    tokens: int
    ranks: int
    hidden: int
    inner: int
    fmt: Quant
    dtype: mx.Dtype = mx.float32
    slots: int = 4
    parts: str = ""
    glu: str = "silu"
    tuning: Tuning = field(default_factory=Tuning)

    def shapes(self) -> list[tuple[int, int]]:
        return [(self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)]

    def packed(self) -> list[Packed]:
        return [packed((self.slots, *s), self.fmt, i) for i, s in enumerate(self.shapes())]

    def linear_biases(self) -> list[mx.array | None]:
        if "bias" not in self.parts:
            return [None] * 3
        return [normal((self.slots, s[0]), self.dtype, 7 + i) for i, s in enumerate(self.shapes())]

    def experts(self) -> Experts:
        """Every plane an array of its own."""
        matrices = []
        for shape, p, bias in zip(self.shapes(), self.packed(), self.linear_biases(), strict=True):
            planes = [None if a is None else stacked(a) for a in (p.biases, bias)]
            matrices.append(Matrix(self.fmt, *shape, stacked(p.weight), stacked(p.scales), *planes))
        return Experts(*matrices, glu=self.glu, alpha=1.5, limit=0.9)

    def records(self) -> Experts:
        """All planes of a slot in one record, padded to 256 bytes."""
        arrays, at = [], 0
        for p, bias in zip(self.packed(), self.linear_biases(), strict=True):
            for array in (p.weight, p.scales, p.biases, bias):
                if array is not None:
                    arrays.append((array, at))
                    at += -(-array.nbytes // self.slots // 16) * 16
        stride = -(-at // 256) * 256
        pool = np.zeros((self.slots, stride), np.uint8)
        for array, offset in arrays:
            raw = np.frombuffer(array, np.uint8).reshape(self.slots, -1)
            pool[:, offset : offset + raw.shape[1]] = raw
        whole = mx.array(pool.view(np.uint32))
        planes = iter(in_records(whole, offset, array.dtype) for array, offset in arrays)
        matrices = []
        for shape, p, bias in zip(self.shapes(), self.packed(), self.linear_biases(), strict=True):
            parts = [None if a is None else next(planes) for a in (p.weight, p.scales, p.biases)]
            parts.append(None if bias is None else next(planes))
            matrices.append(Matrix(self.fmt, *shape, *parts))
        return Experts(*matrices, glu=self.glu, alpha=1.5, limit=0.9)

    def routed(self) -> tuple[mx.array, mx.array, mx.array]:
        random = np.random.default_rng(5)
        slots = np.stack([random.permutation(self.slots)[: self.ranks] for _ in range(self.tokens)])
        if "unused" in self.parts:
            slots[0, -1] = -1
        weights = random.uniform(0.1, 1.0, slots.shape).astype(np.float32)
        x = normal((self.tokens, self.hidden), self.dtype, 6)
        return x, mx.array(slots.astype(np.int32)), mx.array(weights)

    def around(self) -> Around:
        shape = (self.tokens, self.hidden)
        return Around(
            norm=normal((self.hidden,), self.dtype, 20) if "norm" in self.parts else None,
            eps=1e-3,
            residual=normal(shape, self.dtype, 21) if "residual" in self.parts else None,
            beside=normal(shape, self.dtype, 22) if "beside" in self.parts else None,
        )


def activation(case: Case, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if case.glu == "clamped":
        gate, up = np.minimum(gate, 0.9), np.clip(up, -0.9, 0.9) + 1.0
        return up * gate / (1 + np.exp(-1.5 * gate))
    if case.glu == "gelu":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inner)) * up
    return gate / (1 + np.exp(-gate)) * up


def loop(case: Case) -> np.ndarray:
    """Token by token, rank by rank, in float64."""
    x, slots, weights = (floats(a) if a.dtype != mx.int32 else np.array(a) for a in case.routed())
    around, out = case.around(), []
    gate, up, down = (p.values for p in case.packed())
    biases = [None if b is None else floats(b) for b in case.linear_biases()]
    add = lambda y, b, e: y if b is None else y + b[e]  # noqa: E731
    for t in range(case.tokens):
        row, total = x[t], np.zeros(case.hidden)
        if around.norm is not None:
            row = row / np.sqrt((row * row).mean() + around.eps) * floats(around.norm)
        for rank, e in enumerate(slots[t]):
            if e < 0:
                continue
            g, u = add(gate[e] @ row, biases[0], e), add(up[e] @ row, biases[1], e)
            y = add(down[e] @ activation(case, g, u), biases[2], e)
            total = total + weights[t, rank] * y
        for more in (around.residual, around.beside):
            total = total if more is None else total + floats(more)[t]
        out.append(total)
    return np.array(out)


def emulated(case: Case, experts: Experts, seed: int) -> np.ndarray:
    x, slots, weights = case.routed()
    first = launch_gate_up(x, slots, experts, case.around(), case.tuning)
    h = mx.array(emulate(first, seed).outputs[0].astype(np.float32))
    second = launch_down(h, slots, weights, experts, case.around(), case.dtype, case.tuning)
    return emulate(second, seed).outputs[0]


Q4 = affine(4, 64)
FULL4 = affine(4, 32, "float32")
CASES = {
    "one token": Case(1, 2, 512, 192, Q4, mx.bfloat16),
    "tokens with an unused rank": Case(3, 3, 96, 64, FULL4, parts="unused"),
    "more columns than a tile": Case(1, 2, 4160, 32, FULL4, slots=2, tuning=Tuning(2, 2)),
    "more hidden values than a tile": Case(1, 4, 64, 1184, FULL4, tuning=Tuning(2, 2)),
    "8 bits, norm and residual": Case(
        2, 2, 320, 96, affine(8, 32, "float16"), mx.float16, parts="norm residual"
    ),
    "mxfp4 with clamped activation and biases": Case(
        1, 3, 288, 96, MXFP4, glu="clamped", parts="bias unused"
    ),
    "gelu and a shared expert beside": Case(2, 2, 160, 96, FULL4, glu="gelu", parts="beside"),
    "four rows per simdgroup": Case(1, 2, 288, 160, FULL4, tuning=Tuning(4, 1)),
    "biases of affine experts": Case(1, 2, 256, 64, Q4, mx.bfloat16, parts="bias"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_a_float64_loop(name: str) -> None:
    case = CASES[name]
    want, experts = loop(case), case.experts()
    for seed in (0, 1):
        assert error(emulated(case, experts, seed), want) < TOLERANCE[case.dtype]


MATRIX_CASES = {
    "one token": Case(1, 2, 512, 192, Q4, mx.bfloat16),
    "tokens with an unused rank": Case(3, 3, 256, 96, MXFP4, mx.bfloat16, parts="unused"),
    "8 bits and residual": Case(
        2, 2, 320, 96, affine(8, 32, "float16"), mx.float16, parts="residual"
    ),
    "norm, clamped activation and biases": Case(
        1, 3, 288, 96, affine(4, 32), mx.bfloat16, glu="clamped", parts="bias norm unused"
    ),
    "a shared expert beside": Case(2, 2, 512, 512, Q4, mx.bfloat16, glu="gelu", parts="beside"),
    "twelve groups a turn": Case(1, 3, 64, 768, Q4, mx.bfloat16, parts="unused"),
    "twelve small groups a turn": Case(1, 2, 32, 384, affine(4, 32), mx.bfloat16),
}


@pytest.mark.parametrize("name", MATRIX_CASES)
def test_the_matrix_kernels_equal_a_float64_loop(name: str) -> None:
    case = MATRIX_CASES[name]
    want = loop(case)
    x, slots, weights = case.routed()
    for experts, tiles in ((case.experts(), 1), (case.records(), 2)):
        tuning = expert_matrix.Tuning(tiles, 4)
        first = expert_matrix.launch_gate_up(x, slots, experts, case.around(), tuning)
        h = mx.array(emulate(first, tiles).outputs[0].astype(np.float32))
        second = expert_matrix.launch_down(
            h, slots, weights, experts, case.around(), case.dtype, tuning
        )
        assert error(emulate(second, tiles).outputs[0], want) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", ["one token", "mxfp4 with clamped activation and biases"])
def test_records_give_the_same_bits_as_stacked_arrays(name: str) -> None:
    case = CASES[name]
    assert np.array_equal(emulated(case, case.records(), 0), emulated(case, case.experts(), 0))


@pytest.mark.parametrize("name", CASES)
def test_the_plain_version_equals_the_loop(name: str) -> None:
    case = CASES[name]
    for experts in (case.experts(), case.records()):
        got = expert_mlp(*case.routed(), experts, case.around())
        assert error(floats(got), loop(case)) < TOLERANCE[case.dtype]


def test_planes_off_16_bytes_go_to_the_plain_version() -> None:
    case = CASES["one token"]
    experts = case.experts()
    assert takes(experts, 8)
    assert not takes(experts, 9)
    pool = mx.zeros((4, 4096), dtype=mx.uint32)
    odd = Matrix(Q4, 192, 512, in_records(pool, 4, mx.uint32), experts.gate.scales)
    assert not takes(Experts(odd, experts.up, experts.down), 1)
