"""The bytes of a tensor on their way into a file, checked against its declared format.

Knows planes and host memory. Does not know files or layouts.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Format
from turbospark.errors import TensorShapeError
from turbospark.install.planes import Planes, host_view, plane_shapes


def stored_bytes(
    planes: Planes, fmt: Format, shape: tuple[int, ...], where: str
) -> list[np.ndarray]:
    """uint8 views of weight, scales, biases in file order, row major.

    Raises TensorShapeError if `planes` is not exactly a tensor of `fmt` and logical `shape`.
    """
    if planes.fmt != fmt or tuple(planes.shape) != tuple(shape):
        raise TensorShapeError(
            f"{where}: declared as {fmt} {list(shape)}; got {planes.fmt} {list(planes.shape)}"
        )
    arrays = planes.arrays()
    expected = plane_shapes(fmt, tuple(shape))
    found = [(tuple(a.shape), a.dtype) for a in arrays]
    if found != expected:
        raise TensorShapeError(f"{where}: planes {found}; {fmt} {list(shape)} needs {expected}")
    rows = [mx.contiguous(a) for a in arrays]
    mx.eval(rows)
    return [host_view(a) for a in rows]
