"""Changes of layout between a checkpoint's tensors and the canonical ones.

Knows planes. Knows no names and no family.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Raw
from turbospark.errors import SourceError
from turbospark.install.planes import Planes


def rows_of_heads(heads: int, width: int, part: range) -> Callable[[Planes], Planes]:
    """Of every head's `width` consecutive rows, those in `part`; bytes unchanged."""

    def chosen(planes: Planes) -> Planes:
        if planes.shape[0] != heads * width:  # a config may claim more than memory holds
            raise SourceError(
                f"a tensor of {planes.shape[0]} rows does not hold {heads} heads of {width} rows"
            )
        index = (np.arange(heads)[:, None] * width + np.array(part)).reshape(-1)
        return planes.rows(mx.array(index.astype(np.uint32)))

    return chosen


def join_heads(planes: Planes) -> Planes:
    """[heads, rows, columns] as [heads * rows, columns], bytes unchanged."""
    flat = [a.reshape(-1, a.shape[-1]) for a in planes.arrays()]
    return Planes(planes.fmt, (planes.shape[0] * planes.shape[1], planes.shape[2]), *flat)


def turn_heads(planes: Planes) -> Planes:
    """[heads, columns, rows] as [heads * rows, columns]; see `transposed`."""
    return join_heads(transposed(planes))


def transposed(planes: Planes) -> Planes:
    """[..., rows, columns] as [..., columns, rows].

    Quantized groups run along the last axis and cannot be turned: their values become float32.
    """
    raw = isinstance(planes.fmt, Raw)
    values = planes.weight if raw else planes.dense(mx.float32)
    turned = mx.contiguous(values.swapaxes(-1, -2))
    return Planes(planes.fmt if raw else Raw("float32"), tuple(turned.shape), turned)
