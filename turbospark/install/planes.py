"""One stored tensor in memory: its packed words and companions as MLX arrays.

Knows how planes slice along rows and experts. Does not know files or names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Format, Quant, Raw

MX_DTYPES = {
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
    "float32": mx.float32,
    "uint8": mx.uint8,
}


@dataclass(frozen=True)
class Planes:
    """A tensor as stored. `shape` is logical; quantized `weight` is uint32 [..., rows, words].

    scales and biases are [..., rows, columns / group_size]; None where the format has none.
    """

    fmt: Format
    shape: tuple[int, ...]
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None

    def _map(self, shape: tuple[int, ...], take: Any) -> Planes:
        pick = lambda a: None if a is None else take(a)  # noqa: E731
        return Planes(self.fmt, shape, take(self.weight), pick(self.scales), pick(self.biases))

    def expert(self, index: int) -> Planes:
        """Entry `index` of the leading axis."""
        return self._map(self.shape[1:], lambda a: a[index])

    def rows(self, index: slice | mx.array) -> Planes:
        """Rows (second to last axis of a matrix, the only axis of a vector) by slice or ids."""
        axis = max(len(self.shape) - 2, 0)
        if isinstance(index, slice):
            count = len(range(*index.indices(self.shape[axis])))
            where = (slice(None),) * axis + (index,)
            take = lambda a: a[where]  # noqa: E731
        else:
            count = index.size
            take = lambda a: mx.take(a, index, axis=axis)  # noqa: E731
        return self._map((*self.shape[:axis], count, *self.shape[axis + 1 :]), take)

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """The values as an array of `shape` and `dtype`, computed in float32."""
        if isinstance(self.fmt, Raw):
            return self.weight.astype(dtype)
        fmt = self.fmt
        up = lambda a: a.astype(mx.float32) if fmt.mode == "affine" else a  # noqa: E731
        values = mx.dequantize(
            self.weight,
            up(self.scales),
            None if self.biases is None else up(self.biases),
            group_size=fmt.group_size,
            bits=fmt.bits,
            mode=fmt.mode,
        )
        return values.astype(dtype)

    def arrays(self) -> list[mx.array]:
        """The planes in file order: weight, scales, biases, absent ones left out."""
        return [a for a in (self.weight, self.scales, self.biases) if a is not None]


def plane_shapes(fmt: Format, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """(shape, dtype) of each plane of a tensor of logical `shape`, in file order."""
    if isinstance(fmt, Raw):
        return [(shape, MX_DTYPES[fmt.dtype])]
    companion = ((*shape[:-1], shape[-1] // fmt.group_size), MX_DTYPES[fmt.scale_dtype])
    planes = [((*shape[:-1], fmt.words(shape[-1])), mx.uint32), companion]
    return [*planes, companion] if fmt.has_biases else planes


def host_view(array: mx.array) -> np.ndarray:
    """A writable uint8 view of an evaluated array's memory; any dtype, bfloat16 included."""
    return np.frombuffer(array, dtype=np.uint8)  # type: ignore[call-overload]


def empty_planes(fmt: Format, shape: tuple[int, ...]) -> Planes:
    """Evaluated zero planes of that format, to be filled from a file through `host_view`."""
    arrays = [mx.zeros(s, dtype=d) for s, d in plane_shapes(fmt, shape)]
    mx.eval(arrays)
    return Planes(fmt, shape, *arrays)


def quantize(values: mx.array, fmt: Quant) -> Planes:
    """Quantize float `values` [..., rows, columns] to `fmt` with MLX's own quantizer."""
    dtype = MX_DTYPES[fmt.scale_dtype] if fmt.mode == "affine" else mx.float32
    fmt.check_columns(values.shape[-1], "quantize")
    arrays = mx.quantize(
        values.astype(dtype), group_size=fmt.group_size, bits=fmt.bits, mode=fmt.mode
    )
    mx.eval(arrays)
    return Planes(fmt, tuple(values.shape), *arrays)
