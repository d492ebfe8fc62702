"""A packed product with what is fused around it, in plain MLX: the reference of the qmv kernels.

Knows packed planes and their neighbours; does not know kernels or layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.kernels.source import Value, constant
from turbospark.kernels.unpack import GLU

MAX_ROWS = 8


@dataclass(frozen=True)
class Around:
    """What is fused around a product; None leaves a part out.

    norm [K]: weight of an RMS norm of x with `eps`. bias [N]: added to the product. glu "silu" or
    "gelu" (tanh): outputs i and i + N/2 become act(y[i]) * y[i + N/2]. residual [..., out]: added
    last.
    """

    norm: mx.array | None = None
    eps: float = 0.0
    bias: mx.array | None = None
    glu: str | None = None
    residual: mx.array | None = None

    @property
    def parts(self) -> Parts:
        """Which parts there are."""
        norm, bias, residual = (a is not None for a in (self.norm, self.bias, self.residual))
        return Parts(norm, bias, self.glu, residual)


class Parts(NamedTuple):
    """Which parts of `Around` are there; a kernel is compiled for each set."""

    norm: bool
    bias: bool
    glu: str | None
    residual: bool

    def template(self, fmt: Quant) -> dict[str, Value]:
        """Template values of the parts and of the packed format."""
        return {
            "BITS": fmt.bits,
            "GROUP": fmt.group_size,
            "FP4": fmt.mode == "mxfp4",
            "NORM": self.norm,
            "BIAS": self.bias,
            "GLU": GLU[self.glu],
            "RESIDUAL": self.residual,
        }


PLAIN = Around()


def qmv_reference(
    x: mx.array,
    fmt: Quant,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    around: Around,
) -> mx.array:
    """glu(norm(x) W^T + bias) + residual.

    Shapes: x [..., K]; weight uint32 [N, K * bits / 32]; scales, biases [N, K / group_size];
    -> [..., N], or [..., N / 2] with a gated activation. dtype of x.
    """
    if around.norm is not None:
        x = mx.fast.rms_norm(x, around.norm, around.eps).astype(x.dtype)
    y = mx.quantized_matmul(
        x,
        weight,
        scales,
        biases,
        transpose=True,
        group_size=fmt.group_size,
        bits=fmt.bits,
        mode=fmt.mode,
    )
    if around.bias is not None:
        y = y + around.bias
    if around.glu is not None:
        gate, up = mx.split(y, 2, axis=-1)
        act = gate * mx.sigmoid(gate) if around.glu == "silu" else gelu_tanh(gate)
        y = act * up
    return y if around.residual is None else y + around.residual


def gelu_tanh(x: mx.array) -> mx.array:
    """gelu by the tanh approximation."""
    return 0.5 * x * (1.0 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def inputs(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array | None, around: Around
) -> list[mx.array]:
    """The inputs of both kernels; present ones stand in for absent ones, which are not read."""
    return [
        x,
        weight,
        scales,
        scales if biases is None else biases,
        x if around.norm is None else around.norm,
        constant(around.eps),
        x if around.bias is None else around.bias,
        x if around.residual is None else around.residual,
    ]
