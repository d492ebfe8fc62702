"""Planes of all experts' slots and the routed MLP over them, in plain MLX: the kernels' reference.

Knows slots, stacked arrays and records; does not know which expert is where, kernels or layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.kernels.source import Value, constant, constant_ints


@dataclass(frozen=True)
class Plane:
    """One plane of all slots: slot e begins at element e * stride + offset of the flat `array`."""

    array: mx.array
    offset: int
    stride: int

    def at(self, slots: mx.array, shape: tuple[int, ...]) -> mx.array:
        """The planes of `slots` [...] -> [..., *shape]."""
        rows = self.array.reshape(-1, self.stride)[slots]
        part = rows[..., self.offset : self.offset + math.prod(shape)]
        return part.reshape(*slots.shape, *shape)


def stacked(array: mx.array) -> Plane:
    """A plane with an array of its own, [slots, ...]."""
    return Plane(array, 0, array.size // array.shape[0])


def in_records(pool: mx.array, byte_offset: int, dtype: mx.Dtype) -> Plane:
    """A plane inside records: `pool` uint32 [slots, stride / 4]."""
    array = pool.view(dtype)
    return Plane(array, byte_offset // dtype.size, array.shape[1])


@dataclass(frozen=True)
class Matrix:
    """One projection [rows, columns] of all slots; `bias` is the experts' own bias vector."""

    fmt: Quant
    rows: int
    columns: int
    weight: Plane
    scales: Plane
    biases: Plane | None = None
    bias: Plane | None = None

    @property
    def kind(self) -> Kind:
        """What a kernel is compiled for."""
        return Kind(self.fmt, self.rows, self.columns, self.bias is not None)


class Kind(NamedTuple):
    """A matrix without its planes."""

    fmt: Quant
    rows: int
    columns: int
    bias: bool

    @property
    def template(self) -> dict[str, Value]:
        """Template values of the packed format."""
        return {
            "BITS": self.fmt.bits,
            "GROUP": self.fmt.group_size,
            "FP4": self.fmt.mode == "mxfp4",
            "BIAS": self.bias,
        }


@dataclass(frozen=True)
class Experts:
    """gate and up [F, H] of one format, down [H, F].

    glu "silu", "gelu" (tanh), or "clamped" with `alpha` and `limit` as ts_glu says.
    """

    gate: Matrix
    up: Matrix
    down: Matrix
    glu: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True)
class Around:
    """An RMS norm of x in front (weight [H] and eps); arrays [T, H] added behind."""

    norm: mx.array | None = None
    eps: float = 0.0
    residual: mx.array | None = None
    beside: mx.array | None = None


PLAIN = Around()


def expert_mlp_reference(
    x: mx.array, slots: mx.array, weights: mx.array, experts: Experts, around: Around = PLAIN
) -> mx.array:
    """sum over ranks of weight * down(glu(gate x, up x)), in rank order, in float32.

    Shapes: x [T, H]; slots int32 [T, k], negative for unused; weights [T, k] -> [T, H].
    """
    dtype = x.dtype
    if around.norm is not None:
        x = mx.fast.rms_norm(x.astype(mx.float32), around.norm.astype(mx.float32), around.eps)
    used = slots >= 0
    which = mx.where(used, slots, 0)
    row = x.astype(mx.float32)[:, None]
    hidden = gated(_product(row, experts.gate, which), _product(row, experts.up, which), experts)
    outputs = _product(hidden, experts.down, which)
    share = mx.where(used, weights.astype(mx.float32), 0.0)
    total = outputs[:, 0] * share[:, :1]
    for rank in range(1, slots.shape[1]):
        total = total + outputs[:, rank] * share[:, rank : rank + 1]
    for more in (around.residual, around.beside):
        total = total if more is None else total + more
    return total.astype(dtype)


def gated(gate: mx.array, up: mx.array, experts: Experts) -> mx.array:
    """The gated activation of `experts`."""
    if experts.glu == "gelu":
        cubic = gate + 0.044715 * gate * gate * gate
        return 0.5 * gate * (1.0 + mx.tanh(0.7978845608028654 * cubic)) * up
    if experts.glu == "clamped":
        gate = mx.minimum(gate, experts.limit)
        up = mx.clip(up, -experts.limit, experts.limit) + 1.0
        return up * gate * mx.sigmoid(experts.alpha * gate)
    return gate * mx.sigmoid(gate) * up


def _product(x: mx.array, m: Matrix, which: mx.array) -> mx.array:
    """x [T, k or 1, columns] times the matrices of slots which [T, k] -> float32 [T, k, rows]."""
    fmt, groups = m.fmt, m.columns // m.fmt.group_size
    scales = m.scales.at(which, (m.rows, groups))
    biases = None
    if m.biases is not None:
        scales = scales.astype(mx.float32)
        biases = m.biases.at(which, (m.rows, groups)).astype(mx.float32)
    dense = mx.dequantize(
        m.weight.at(which, (m.rows, fmt.words(m.columns))),
        scales,
        biases,
        group_size=fmt.group_size,
        bits=fmt.bits,
        mode=fmt.mode,
    ).astype(mx.float32)
    y = (dense @ x[..., None]).squeeze(-1)
    return y if m.bias is None else y + m.bias.at(which, (m.rows,)).astype(mx.float32)


def _planes(m: Matrix) -> list[Plane]:
    """Weight, scales, biases, linear bias; an absent one is stood in for by the scales."""
    return [m.weight, m.scales, m.biases or m.scales, m.bias or m.scales]


def arrays(m: Matrix) -> list[mx.array]:
    """The arrays of a matrix, as both kernels take them."""
    return [p.array for p in _planes(m)]


def sizes(m: Matrix) -> list[int]:
    """Offset and stride of each of those arrays."""
    return [n for p in _planes(m) for n in (p.offset, p.stride)]


def gate_up_inputs(
    x: mx.array, slots: mx.array, experts: Experts, around: Around
) -> list[mx.array]:
    """The inputs of the first launch of both kernels; x stands in for an absent norm."""
    gate, up = experts.gate, experts.up
    norm = x if around.norm is None else around.norm
    numbers = constant(around.eps, experts.alpha, experts.limit)
    where = constant_ints(*sizes(gate), *sizes(up))
    return [x, slots, *arrays(gate), *arrays(up), norm, numbers, where]


def down_inputs(
    h: mx.array, slots: mx.array, weights: mx.array, experts: Experts, around: Around
) -> list[mx.array]:
    """The inputs of the second launch of both kernels; h stands in for what is not added."""
    down = experts.down
    extra = [h if a is None else a for a in (around.residual, around.beside)]
    return [h, slots, weights, *arrays(down), *extra, constant_ints(*sizes(down))]
