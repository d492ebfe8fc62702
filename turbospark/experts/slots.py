"""Slot memory of one layer: records as they lie on disk, seen as matrices without a copy.

Knows pools, views, where a record's bytes go and which slots unfinished work still reads. Does not
know which expert is where.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark.experts.base import Activation
from turbospark.experts.mlp import ExpertMLP, StackedMatrix
from turbospark.experts.reader import Room
from turbospark.install.planes import MX_DTYPES, host_view
from turbospark.install.record import PROJECTIONS, RecordLayout

_DTYPES = {**MX_DTYPES, "uint32": mx.uint32}


class SlotPool:
    """`slots` records in one array, and the expert MLP whose stacked matrices are views of it.

    Host writes into `rooms` are seen by the views. MLX never writes a pool: an MLX update of an
    array with aliases moves it elsewhere. With `strided` False each plane has an array of its own,
    because CUDA's gathered products refuse strided matrices.

    A graph that is evaluated after a slot was overwritten sees the new bytes, so whoever computes
    with slots says so (`hold`), and nothing is written into `busy` slots before `release`.
    """

    def __init__(
        self, record: RecordLayout, slots: int, activation: Activation, strided: bool
    ) -> None:
        self.record = record
        self.slots = slots
        if strided and fits_views(record, slots):
            self._one_pool()
        else:
            self._plane_pools()
        self.mlp = mlp_of(record, self._views, activation)
        self._readers: deque[tuple[tuple[int, ...], mx.array]] = deque()

    def hold(self, slots: Sequence[int], y: mx.array) -> None:
        """`y` is computed from `slots` and may not be finished."""
        self._readers.append((tuple(slots), y))

    @property
    def busy(self) -> set[int]:
        """Slots that unfinished work may still read."""
        return {slot for slots, _ in self._readers for slot in slots}

    def release(self, everything: bool = True) -> None:
        """Wait for the work that reads slots: all of it, or what was begun first."""
        while self._readers:
            mx.eval(self._readers.popleft()[1])
            if not everything:
                return

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
        self._views = record_views(self.record, pool)
        rows = host_view(pool).reshape(self.slots, -1)
        self.rooms = [Room(((0, row),), tuple(self.record.planes(row))) for row in rows]

    def _plane_pools(self) -> None:
        tensors = self.record.tensors
        self._views = {
            role: mx.zeros((self.slots, *t.plane_shape), dtype=_DTYPES[t.dtype])
            for role, t in tensors.items()
        }
        self._pools = list(self._views.values())
        mx.eval(self._pools)
        rows = [host_view(pool).reshape(self.slots, -1) for pool in self._pools]
        offsets = [t.offset for t in tensors.values()]
        self.rooms = [
            Room(tuple(zip(offsets, planes, strict=True)), planes)
            for planes in zip(*rows, strict=True)
        ]


def fits_views(record: RecordLayout, slots: int) -> bool:
    """Whether strided views can address `slots` records: whole items, and 31-bit positions."""
    sizes = [_DTYPES[t.dtype].size for t in record.tensors.values()]
    aligned = all(
        t.offset % size == 0 for t, size in zip(record.tensors.values(), sizes, strict=True)
    )
    return aligned and slots * record.stride // min(sizes) < 2**31


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


def fill(room: Room, record: np.ndarray) -> None:
    """Copy one record's uint8 bytes into `room`."""
    for offset, buffer in room.segments:
        buffer[:] = record[offset : offset + buffer.nbytes]
