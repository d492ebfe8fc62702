"""Matrices applied to rows: dense, quantized, fused, and embedding tables.

Knows how each storage format multiplies on each device. Does not know tensor names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Quant
from turbospark.kernels import host_product


@dataclass(frozen=True)
class Linear:
    """y = x W^T + bias with W dense, kept transposed as `matrix` [in, out].

    With `host` large products are computed by numpy (`kernels.host_product`).
    """

    matrix: mx.array
    bias: mx.array | None = None
    host: bool = False

    @cached_property
    def _values(self) -> np.ndarray:
        return np.asarray(self.matrix)

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., in] -> [..., out]."""
        if self.host:
            large = host_product.pays(x, self.matrix)
            y = host_product.product(x, self._values) if large else x @ self.matrix
            return y if self.bias is None else y + self.bias
        if self.bias is not None:
            return mx.addmm(self.bias, x, self.matrix)
        return x @ self.matrix


@dataclass(frozen=True)
class QuantizedLinear:
    """y = x W^T + bias with W [out, in] packed as `fmt` says.

    Without `transpose` the packed matrix is [in, out] and y = x W. From `unpack_rows` rows of x on
    the matrix is unpacked first: a dense product pays for it.
    """

    fmt: Quant
    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bias: mx.array | None = None
    transpose: bool = True
    unpack_rows: int | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., in] -> [..., out]."""
        if self.unpack_rows is not None and x.shape[-2] >= self.unpack_rows:
            matrix = unpack(self.fmt, self.weight, self.scales, self.biases).astype(x.dtype)
            y = x @ (matrix.swapaxes(-1, -2) if self.transpose else matrix)
            return y if self.bias is None else y + self.bias
        y = mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=self.transpose,
            group_size=self.fmt.group_size,
            bits=self.fmt.bits,
            mode=self.fmt.mode,
        )
        return y if self.bias is None else y + self.bias


AnyLinear = Linear | QuantizedLinear


def unpack(fmt: Quant, weight: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
    """The values of packed planes."""
    return mx.dequantize(
        weight, scales, biases, group_size=fmt.group_size, bits=fmt.bits, mode=fmt.mode
    )


@dataclass(frozen=True)
class FusedLinear:
    """Several matrices over the same input; one multiplication where their formats agree."""

    parts: tuple[AnyLinear, ...]
    sizes: tuple[int, ...]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """x [..., in] -> one [..., size] per fused matrix, in order."""
        if len(self.parts) > 1:
            return [part(x) for part in self.parts]
        if len(self.sizes) == 1:
            return [self.parts[0](x)]
        return list(mx.split(self.parts[0](x), list(accumulate(self.sizes))[:-1], axis=-1))

    def joined(self, x: mx.array) -> mx.array:
        """The same side by side: x [..., in] -> [..., all sizes together]."""
        found = [part(x) for part in self.parts]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=-1)


def fuse(parts: Sequence[AnyLinear], sizes: Sequence[int]) -> FusedLinear:
    """Join matrices along their outputs when they are stored alike; else keep them apart."""
    apart = FusedLinear(tuple(parts), tuple(sizes))
    dense = [p for p in parts if isinstance(p, Linear)]
    packed = [p for p in parts if isinstance(p, QuantizedLinear)]
    if len({p.bias is None for p in parts}) > 1:
        return apart
    joined: AnyLinear
    bias = _join([p.bias for p in parts])
    if not packed:
        matrix = mx.concatenate([p.matrix for p in dense], axis=1)
        joined = Linear(matrix, bias, dense[0].host)
    elif not dense and len({p.fmt for p in packed}) == 1:
        joined = replace(
            packed[0],
            weight=mx.concatenate([p.weight for p in packed]),
            scales=mx.concatenate([p.scales for p in packed]),
            biases=_join([p.biases for p in packed]),
            bias=bias,
        )
    else:
        return apart
    mx.eval([a for a in vars(joined).values() if isinstance(a, mx.array)])
    return FusedLinear((joined,), tuple(sizes))


def _join(arrays: Sequence[mx.array | None]) -> mx.array | None:
    """All of them along the first axis; None where one is absent."""
    present = [a for a in arrays if a is not None]
    return mx.concatenate(present) if len(present) == len(arrays) else None


@dataclass(frozen=True)
class Embedding:
    """A dense table looked up by id and usable as a tied head, the matrix of which it is."""

    head: Linear

    def __call__(self, ids: mx.array) -> mx.array:
        """ids int [1, L] -> [1, L, width]."""
        return self.head.matrix.T[ids]

    def as_linear(self, x: mx.array) -> mx.array:
        """x [..., width] -> [..., rows]: the tied output head."""
        return self.head(x)


@dataclass(frozen=True)
class QuantizedEmbedding:
    """A packed table, unpacked row by row as it is looked up."""

    packed: QuantizedLinear
    dtype: mx.Dtype

    def __call__(self, ids: mx.array) -> mx.array:
        """ids int [1, L] -> [1, L, width]."""
        p = self.packed
        biases = None if p.biases is None else p.biases[ids]
        return unpack(p.fmt, p.weight[ids], p.scales[ids], biases).astype(self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """x [..., width] -> [..., rows]: the tied output head."""
        return self.packed(x)

    @property
    def head(self) -> AnyLinear:
        """The tied output head as a matrix."""
        return self.packed


AnyEmbedding = Embedding | QuantizedEmbedding
