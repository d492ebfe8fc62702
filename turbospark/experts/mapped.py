"""Experts as memory-mapped layer files: the operating system's page cache is the cache.

On Metal a mapping is wrapped without a copy and read where it lies. Elsewhere MLX cannot wrap
host memory, so the records that a pass needs are copied out of the mapping for that pass;
`zero_copy` tells which.
"""

from __future__ import annotations

import mmap
import os

import mlx.core as mx
import numpy as np

from turbospark.counters import PhaseClock
from turbospark.errors import ReadError
from turbospark.experts.base import Activation, Router
from turbospark.experts.mlp import ExpertMLP
from turbospark.experts.slots import SlotPool, strided_mlp
from turbospark.install.packed import PackedLayer, PackedLayout
from turbospark.policies import LiveToggles


class _Mapping:
    """One layer file mapped read-only, records in expert order."""

    def __init__(self, layer: PackedLayer) -> None:
        self.layer = layer
        fd = os.open(layer.path, os.O_RDONLY)
        try:
            self.size = os.fstat(fd).st_size
            need = layer.stride * layer.count
            if self.size < need:
                raise ReadError(
                    f"{layer.path}: truncated: expected {need} bytes, found {self.size}; "
                    "install it again"
                )
            self.memory = mmap.mmap(fd, need, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.words = np.frombuffer(self.memory, dtype=np.uint32).reshape(layer.count, -1)

    def check(self) -> None:
        """Refuse a file that shrank: touching a page past its end would kill the process."""
        try:
            size = self.layer.path.stat().st_size
        except OSError as error:
            raise ReadError(
                f"{self.layer.path}: {error.strerror} while mapped; put the file back or install "
                "it again"
            ) from error
        if size < self.size:
            raise ReadError(
                f"{self.layer.path}: truncated while mapped: expected {self.size} bytes, found "
                f"{size}; install it again"
            )

    def record(self, expert: int) -> np.ndarray:
        """The words of one record, still on disk until touched."""
        return self.words[self.layer.offset(expert) // self.layer.stride]


class MappedExperts:
    """Every expert addressable, none held: no slots, no reads of ours, hits equal requests."""

    residency = "mapped"
    slots = 0

    def __init__(
        self,
        layout: PackedLayout,
        activation: Activation,
        *,
        strided: bool,
        clock: PhaseClock,
        toggles: LiveToggles,
    ) -> None:
        self.clock = clock
        self.toggles = toggles
        self.activation = activation
        self.maps = {index: _Mapping(layer) for index, layer in layout.layers.items()}
        self.wrapped: dict[int, ExpertMLP] = {}
        self.strided = strided
        self.zero_copy = mx.metal.is_available()
        if self.zero_copy:
            for index, mapping in self.maps.items():
                words = mx.asarray(mapping.words, copy=False)
                self.wrapped[index] = strided_mlp(mapping.layer.record, words, activation)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def buffers(self) -> int:
        return 0

    def watch(self, layer: int, router: Router) -> None:
        """See `ExpertStore.watch`; reading ahead is the page cache's work."""

    def close(self) -> None:
        """See `ExpertStore.close`; mappings end with their last reader."""
        self.maps.clear()
        self.wrapped.clear()

    def routed(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        beside: mx.array | None = None,
    ) -> mx.array:
        """See `ExpertStore.routed`."""
        rows, k = x.shape[1], ids.shape[-1]
        x, ids, weights = x.reshape(rows, -1), ids.reshape(rows, k), weights.reshape(rows, k)
        if self.zero_copy:
            self._count(rows * k)
            return self.wrapped[layer](x, ids, weights)[None]
        with self.clock.phase("eval_wait"):
            mx.async_eval(ids)
            if beside is not None and self.toggles.shared_expert_overlap:
                mx.async_eval(beside)
            chosen = np.array(ids)
        if rows == 1 or self.toggles.routed_batch_prefill:
            return self._copied(layer, x, chosen, weights)[None]
        each = [
            self._copied(layer, x[t : t + 1], chosen[t : t + 1], weights[t : t + 1])
            for t in range(rows)
        ]
        return mx.concatenate(each, axis=0)[None]

    def _copied(self, layer: int, x: mx.array, chosen: np.ndarray, weights: mx.array) -> mx.array:
        """Copy the distinct experts of `chosen` [T, k] out of the mapping, then compute."""
        mapping = self.maps[layer]
        experts, which = np.unique(chosen, return_inverse=True)
        self._count(len(experts))
        with self.clock.phase("expert_io"):
            mapping.check()
            pool = SlotPool(mapping.layer.record, len(experts), self.activation, self.strided)
            for slot, expert in enumerate(experts):
                pool.fill(slot, mapping.record(int(expert)).view(np.uint8))
        with self.clock.phase("bind"):
            slots = mx.array(which.reshape(chosen.shape).astype(np.uint32))
        return pool.mlp(x, slots, weights)

    def _count(self, requests: int) -> None:
        self.clock.count("expert_requests", requests)
        self.clock.count("expert_hits", requests)
