"""Experts as memory-mapped layer files: the operating system's page cache is the cache.

On Metal a mapping is wrapped without a copy and read where it lies. Elsewhere MLX cannot wrap
host memory, so the records that a pass needs are copied out of the mapping for that pass into a
scratch of a few records; `zero_copy` tells which.
"""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark.counters import PhaseClock
from turbospark.errors import ReadError
from turbospark.experts.base import Activation, Router, rows_of
from turbospark.experts.mlp import ExpertMLP, token_by_token, weighted_sum
from turbospark.experts.reader import DiskMeter, LayerFile, Room
from turbospark.experts.routes import ChunkRoutes, in_groups
from turbospark.experts.slots import SlotPool, fill, mlp_of, record_views
from turbospark.install.packed import PackedLayer, PackedLayout
from turbospark.install.record import RecordLayout
from turbospark.policies import LiveToggles

# Linux 5.14: brings pages in and reports what touching them would answer with a deadly signal.
_MADV_POPULATE_READ = 22 if sys.platform == "linux" else None


def zero_copy(layout: PackedLayout) -> bool:
    """Whether this build of MLX can compute on the layer files where they are mapped: expert e
    must be the e-th record.
    """
    return mx.metal.is_available() and all(
        layer.offset(e) == e * layer.stride
        for layer in layout.layers.values()
        for e in range(layer.count)
    )


def scratch_bytes(layout: PackedLayout, slots: int) -> int:
    """Bytes that copying from mappings takes: `slots` records of each distinct layout."""
    if zero_copy(layout):
        return 0
    return slots * sum(record.stride for record in _distinct(layout))


def _distinct(layout: PackedLayout) -> list[RecordLayout]:
    found: list[RecordLayout] = []
    for layer in layout.layers.values():
        if layer.record not in found:
            found.append(layer.record)
    return found


class _Mapping:
    """One layer file mapped read-only."""

    def __init__(self, layer: PackedLayer, verify: bool) -> None:
        self.layer = layer
        self.file = LayerFile(layer, verify)
        self._fd = -1
        self._map(self.file.fd(0))

    def copy(self, wanted: Sequence[tuple[int, Room]]) -> None:
        """Copy records out of the mapping. Raises ReadError."""
        try:
            fd = self.file.fd(wanted[0][0])
            if fd != self._fd:
                self._map(fd)
            for expert, room in wanted:
                self._populate(expert)
                at = self.layer.offset(expert)
                fill(room, self.bytes[at : at + self.layer.stride])
                self.file.check(expert, room.planes)
        except ReadError:
            self.file.drop()
            self._fd = -1
            raise

    def close(self) -> None:
        self.file.close()

    def _map(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, self.file.size, prot=mmap.PROT_READ)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self._fd = fd

    def _populate(self, expert: int) -> None:
        """Bring a record's pages in, so that an I/O error or a cut file is an error of ours."""
        if _MADV_POPULATE_READ is None:
            return
        offset, stride = self.layer.offset(expert), self.layer.stride
        try:
            self.memory.madvise(_MADV_POPULATE_READ, offset, stride)
        except OSError as error:
            if error.errno == errno.EINVAL:  # an older kernel
                return
            raise ReadError(
                f"{self.file.where(expert)}: expected {stride} bytes, found pages that cannot be "
                f"read: {error.strerror}; put the file back or install it again"
            ) from error


class MappedExperts:
    """Every expert addressable, none kept: no slots, no reads of ours, hits equal requests.

    Where mappings are copied, `slots` records are copied at a time into a scratch that layers with
    the same record share.
    """

    def __init__(
        self,
        layout: PackedLayout,
        activation: Activation,
        slots: int,
        *,
        strided: bool,
        clock: PhaseClock,
        toggles: LiveToggles,
        verify_reads: bool = False,
        measure_disk: bool = False,
    ) -> None:
        self.slots = slots
        self.clock = clock
        self.toggles = toggles
        self.meter = DiskMeter(clock, measure_disk)
        self.maps = {i: _Mapping(layer, verify_reads) for i, layer in layout.layers.items()}
        self.zero_copy = zero_copy(layout)
        self.wrapped: dict[int, ExpertMLP] = {}
        self.scratch: list[SlotPool] = []
        self._beside = False
        if self.zero_copy:
            self.wrapped = {i: _wrap(mapping, activation) for i, mapping in self.maps.items()}
        else:
            self.scratch = [
                SlotPool(record, min(slots, layout.experts_per_layer), activation, strided)
                for record in _distinct(layout)
            ]

    @property
    def effective(self) -> set[str]:
        names = {"routed_batch_prefill"}
        overlaps = self._beside and not self.zero_copy
        return names | {"shared_expert_overlap"} if overlaps else names

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.scratch)

    @property
    def formula(self) -> str:
        if self.zero_copy:
            return "mapped (zero-copy): pages of the system's cache"
        strides = " + ".join(str(pool.record.stride) for pool in self.scratch)
        return f"mapped (copied per use): scratch of {self.slots} records x {strides} bytes"

    @property
    def buffers(self) -> int:
        return sum(pool.buffers for pool in self.scratch)

    def watch(self, layer: int, router: Router, beside: bool = False) -> None:
        """See `ExpertStore.watch`; reading ahead is the page cache's work."""
        self._beside |= beside

    def settle(self) -> None:
        """See `ExpertStore.settle`."""
        for pool in self.scratch:
            pool.release()

    def close(self) -> None:
        """See `ExpertStore.close`; mappings end with their last reader."""
        for mapping in self.maps.values():
            mapping.close()
        self.maps.clear()
        self.wrapped.clear()
        self.scratch.clear()

    def routed(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        beside: mx.array | None = None,
    ) -> mx.array:
        """See `ExpertStore.routed`."""
        x, ids, weights = rows_of(x, ids, weights)
        batched = len(x) == 1 or self.toggles.routed_batch_prefill is True
        self.clock.count("routed_passes", 1 if batched else len(x))
        if self.zero_copy:
            self._count(ids.size)
            mlp = self.wrapped[layer]
            return (mlp(x, ids, weights) if batched else token_by_token(mlp, x, ids, weights))[None]
        chosen = self._read_back(ids, beside)
        mapping = self.maps[layer]
        pool = next(p for p in self.scratch if p.record == mapping.layer.record)
        if len(x) > 1 and batched:
            return self._chunk(mapping, pool, x, chosen, weights)[None]
        tokens = iter(chosen.tolist())
        return token_by_token(
            lambda x, w: self._one_token(mapping, pool, x, next(tokens), w), x, weights
        )[None]

    def _read_back(self, ids: mx.array, beside: mx.array | None) -> np.ndarray:
        with self.clock.phase("eval_wait"):
            mx.async_eval(ids)
            if beside is not None and self.toggles.shared_expert_overlap:
                mx.async_eval(beside)
                self.clock.count("shared_started")
            return np.array(ids)

    def _one_token(
        self,
        mapping: _Mapping,
        pool: SlotPool,
        x: mx.array,
        experts: Sequence[int],
        weights: mx.array,
    ) -> mx.array:
        """x [1, H], weights [1, k] -> [1, H]."""
        slots = self._copy(mapping, pool, experts)
        with self.clock.phase("bind"):
            which = mx.array([slots], dtype=mx.uint32)
        y = weighted_sum(pool.mlp.routes(x, which), weights)
        pool.hold(slots, y)
        return y

    def _chunk(
        self,
        mapping: _Mapping,
        pool: SlotPool,
        x: mx.array,
        chosen: np.ndarray,
        weights: mx.array,
    ) -> mx.array:
        """x [T, H]: every needed expert is copied once, as many at a time as the scratch holds."""
        routes = ChunkRoutes(x, chosen, mapping.layer.count)
        for group in in_groups(np.unique(chosen).tolist(), pool.slots):
            slots = self._copy(mapping, pool, group)
            with self.clock.phase("bind"):
                routes.compute(pool, group, slots)
        return routes.total(weights)

    def _copy(self, mapping: _Mapping, pool: SlotPool, experts: Sequence[int]) -> list[int]:
        """Copy `experts` into the first slots of the scratch, once nobody reads it any more."""
        with self.clock.phase("pipeline_wait"):
            pool.release()
        self._count(len(experts))
        slots = list(range(len(experts)))
        with self.clock.phase("expert_io"), self.meter.sample():
            mapping.copy([(e, pool.rooms[s]) for e, s in zip(experts, slots, strict=True)])
        return slots

    def _count(self, requests: int) -> None:
        self.clock.count("expert_requests", requests)
        self.clock.count("expert_hits", requests)


def _wrap(mapping: _Mapping, activation: Activation) -> ExpertMLP:
    """The expert MLP over a whole layer file, where it lies."""
    words = mapping.bytes.view(np.uint32).reshape(mapping.layer.count, -1)
    record = mapping.layer.record
    return mlp_of(record, record_views(record, mx.asarray(words, copy=False)), activation)
