"""Slot memory of one layer: records as they lie on disk, seen as matrices without a copy.

Knows pools, views and where a record's bytes go. Does not know which expert is where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark.experts.base import Activation
from turbospark.experts.mlp import ExpertMLP, StackedMatrix
from turbospark.experts.reader import Segment
from turbospark.install.planes import MX_DTYPES, host_view
from turbospark.install.record import PROJECTIONS, RecordLayout

_DTYPES = {**MX_DTYPES, "uint32": mx.uint32}


class SlotPool:
    """`slots` records in one array, and the expert MLP whose stacked matrices are views of it.

    Host writes through `segments` are seen by the views. MLX never writes a pool: an MLX update
    of an array with aliases moves it elsewhere. With `strided` False each plane has an array of
    its own, because CUDA's gathered products refuse strided matrices.
    """

    def __init__(
        self, record: RecordLayout, slots: int, activation: Activation, strided: bool
    ) -> None:
        self.record = record
        self.slots = slots
        if strided and all(t.offset % _DTYPES[t.dtype].size == 0 for t in record.tensors.values()):
            self._one_pool()
        else:
            self._plane_pools()
        self.mlp = mlp_of(record, self._views, activation)

    def segments(self, slot: int) -> Sequence[Segment]:
        """Where the bytes of a record go when it is read into `slot`."""
        return [(offset, rows[slot]) for offset, rows in self._rows]

    def fill(self, slot: int, data: np.ndarray) -> None:
        """Copy one record's uint8 bytes into `slot`."""
        for offset, row in self.segments(slot):
            row[:] = data[offset : offset + row.nbytes]

    def planes(self, slot: int) -> list[np.ndarray]:
        """The bytes of each plane of the record in `slot`, in file order, padding left out."""
        if len(self._rows) > 1:
            return [rows[slot] for _, rows in self._rows]
        row = self._rows[0][1][slot]
        return [row[t.offset : t.offset + t.size] for t in self.record.tensors.values()]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._pools)

    @property
    def buffers(self) -> int:
        return len(self._pools)

    def _one_pool(self) -> None:
        pool = mx.zeros((self.slots, self.record.stride // 4), dtype=mx.uint32)
        mx.eval(pool)
        self._pools = [pool]
        self._rows = [(0, host_view(pool).reshape(self.slots, -1))]
        self._views = record_views(self.record, pool)

    def _plane_pools(self) -> None:
        self._views = {
            role: mx.zeros((self.slots, *t.plane_shape), dtype=_DTYPES[t.dtype])
            for role, t in self.record.tensors.items()
        }
        self._pools = list(self._views.values())
        mx.eval(self._pools)
        self._rows = [
            (self.record.tensors[role].offset, host_view(pool).reshape(self.slots, -1))
            for role, pool in self._views.items()
        ]


def record_views(record: RecordLayout, pool: mx.array) -> dict[str, mx.array]:
    """Each plane of every record of `pool` uint32 [S, stride / 4], as strided views of it."""
    flat = pool.reshape(-1)
    views = {}
    for role, tensor in record.tensors.items():
        dtype = _DTYPES[tensor.dtype]
        strides = [record.stride // dtype.size]
        for i in range(len(tensor.plane_shape)):
            strides.append(math.prod(tensor.plane_shape[i + 1 :]))
        views[role] = mx.as_strided(
            flat.view(dtype),
            (pool.shape[0], *tensor.plane_shape),
            tuple(strides),
            offset=tensor.offset // dtype.size,
        )
    mx.eval(list(views.values()))
    return views


def mlp_of(record: RecordLayout, views: dict[str, mx.array], activation: Activation) -> ExpertMLP:
    """The expert MLP over planes stacked by role."""
    matrices = [
        StackedMatrix(
            record.tensors[name].fmt,
            views[name],
            views.get(f"{name}_scales"),
            views.get(f"{name}_biases"),
            views.get(f"{name}_bias"),
        )
        for name in PROJECTIONS
    ]
    return ExpertMLP(matrices[0], matrices[1], matrices[2], activation)


def strided_mlp(record: RecordLayout, pool: mx.array, activation: Activation) -> ExpertMLP:
    """The expert MLP over records that lie in `pool` uint32 [S, stride / 4]."""
    return mlp_of(record, record_views(record, pool), activation)
