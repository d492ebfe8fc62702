"""From stored tensors to layers: reads each named tensor once and casts it for the device.

Knows storage formats and the compute dtype. Does not know which names a family uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Quant
from turbospark.errors import MissingTensorError, TensorShapeError
from turbospark.experts.base import Activation
from turbospark.experts.mlp import ExpertMLP, StackedMatrix
from turbospark.install.planes import Planes
from turbospark.install.row_table import RowTable
from turbospark.kernels import host_product
from turbospark.kernels.choices import PLAIN, Choices
from turbospark.layers.linear import (
    AnyEmbedding,
    AnyLinear,
    Embedding,
    FusedLinear,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
    fuse,
)
from turbospark.layers.norm import RMSNorm


class TensorReader(Protocol):
    """What holds the tensors: the resident index of an install."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> Planes: ...


class Weights:
    """Named tensors as layers in `dtype`; quantized companions follow it, packed words stay.

    With `expand`, quantized matrices are unpacked to `dtype` and dense ones laid out for the CPU
    back end, which multiplies dense rows faster than packed ones. `shapes` are the family's; every
    read is checked against them. `kernels` says which products and layers run how. `tables` are
    looked up by rows, each under its canonical name.
    """

    def __init__(
        self,
        reader: TensorReader,
        shapes: dict[str, tuple[int, ...]],
        dtype: mx.Dtype,
        expand: bool = False,
        kernels: Choices = PLAIN,
        tables: Mapping[str, RowTable] | None = None,
    ) -> None:
        self.reader = reader
        self.shapes = shapes
        self.dtype = dtype
        self.expand = expand
        self.kernels = kernels
        self.tables = tables or {}
        self.nbytes = 0

    def of(self, dtype: mx.Dtype) -> Weights:
        """The same tensors in another compute dtype."""
        return Weights(self.reader, self.shapes, dtype, self.expand, self.kernels)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def planes(self, name: str) -> Planes:
        """The stored tensor, with its logical shape checked."""
        if name not in self.reader:
            raise MissingTensorError(
                f"missing resident tensor: {name}; expected shape {self.shapes.get(name)}; "
                "convert the checkpoint again"
            )
        planes = self.reader.read(name)
        wanted = self.shapes.get(name)
        if wanted is not None and tuple(planes.shape) != tuple(wanted):
            raise TensorShapeError(
                f"tensor {name} has shape {list(planes.shape)}; "
                f"the configuration implies {list(wanted)}"
            )
        return planes

    def table(self, name: str) -> RowTable:
        """A table that is looked up by rows."""
        if name not in self.tables:
            raise MissingTensorError(f"missing table: {name}; convert the checkpoint again")
        return self.tables[name]

    def array(self, name: str, dtype: mx.Dtype | None = None) -> mx.array:
        """A dense tensor in `dtype` (default: the compute dtype)."""
        return self._keep(self.planes(name).dense(dtype or self.dtype))

    def numpy(self, name: str) -> np.ndarray:
        """A dense tensor as float32 numpy, for constants computed on the host."""
        return np.array(self.planes(name).dense(mx.float32))

    def norm(self, name: str, eps: float, centred: bool = False) -> RMSNorm:
        """An RMS norm; `centred` adds one to the stored weight, in float32."""
        if not centred:
            return RMSNorm(self.array(name), eps)
        return RMSNorm(self._keep(1.0 + self.planes(name).dense(mx.float32)), eps)

    def linear(self, name: str, bias: bool = False) -> AnyLinear:
        """The matrix `name`.weight [out, in], with `name`.bias if the family has one."""
        vector = self.array(f"{name}.bias") if bias else None
        planes = self.planes(f"{name}.weight")
        packed = self._packed(planes, vector)
        if packed is not None:
            return packed
        return self._dense(planes, vector)

    def fused(self, names: Sequence[str], bias: bool = False) -> FusedLinear:
        """Several matrices over the same input, joined where their formats agree."""
        parts = [self.linear(name, bias) for name in names]
        return fuse(parts, [self.shapes[f"{name}.weight"][0] for name in names])

    def per_head(self, name: str, heads: int, transpose: bool = True) -> AnyLinear:
        """The matrix `name`.weight [heads * rows, columns] as one matrix per head.

        It maps [1, heads, L, columns] to [1, heads, L, rows]; without `transpose`, rows to columns.
        """
        planes = self._split(name, heads)
        packed = self._packed(planes, None)
        if packed is not None:
            return replace(packed, transpose=transpose)
        matrix = planes.dense(self.dtype)
        return Linear(self._keep(mx.contiguous(matrix.swapaxes(1, 2)) if transpose else matrix))

    def experts(self, name: str, count: int, activation: Activation) -> ExpertMLP:
        """`count` experts from `name`.gate_proj.weight [count * rows, columns], up and down."""

        def stacked(projection: str) -> StackedMatrix:
            planes = self._split(f"{name}.{projection}_proj", count)
            packed = self._packed(planes, None)
            if packed is None:
                return StackedMatrix(planes.fmt, self._keep(planes.dense(self.dtype)))
            return StackedMatrix(packed.fmt, packed.weight, packed.scales, packed.biases)

        gate, up, down = map(stacked, ("gate", "up", "down"))
        return ExpertMLP(gate, up, down, activation, self.kernels.padded_routes)

    def _split(self, name: str, parts: int) -> Planes:
        """The matrix `name`.weight [parts * rows, columns] as [parts, rows, columns]."""
        planes = self.planes(f"{name}.weight")
        split = [a.reshape(parts, -1, a.shape[-1]) for a in planes.arrays()]
        shape = (parts, planes.shape[0] // parts, planes.shape[1])
        return Planes(planes.fmt, shape, *split)

    def embedding(self, name: str) -> AnyEmbedding:
        """The table `name`.weight [rows, width]."""
        planes = self.planes(f"{name}.weight")
        packed = self._packed(planes, None)
        if packed is not None:
            return QuantizedEmbedding(packed, self.dtype)
        return Embedding(self._dense(planes, None))

    def _dense(self, planes: Planes, bias: mx.array | None) -> Linear:
        """A dense matrix as [in, out]. The CPU back end multiplies one row 1.5-2.5 times faster by
        a matrix that lies so; a GPU reads W^T as well where it is.
        """
        matrix = planes.dense(self.dtype).T
        if not self.expand:
            return Linear(self._keep(matrix), bias)
        host = self.dtype == mx.float32 and host_product.same_bits()
        return Linear(self._keep(mx.contiguous(matrix)), bias, host)

    def _packed(self, planes: Planes, bias: mx.array | None) -> QuantizedLinear | None:
        fmt, scales = planes.fmt, planes.scales
        if not isinstance(fmt, Quant) or scales is None or self.expand:
            return None
        biases = planes.biases
        if biases is not None:
            scales, biases = scales.astype(self.dtype), self._keep(biases.astype(self.dtype))
        return QuantizedLinear(
            fmt,
            self._keep(planes.weight),
            self._keep(scales),
            biases,
            bias,
            unpack_rows=self.kernels.unpack_rows,
        )

    def _keep(self, array: mx.array) -> mx.array:
        """Evaluate now: a lazy cast would keep the stored copy alive and belong to this thread."""
        mx.eval(array)
        self.nbytes += array.nbytes
        return array
