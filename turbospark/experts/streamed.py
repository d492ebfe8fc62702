"""Experts read from SSD on demand into a few slots per layer.

Knows when to plan, read, compute and evaluate. Does not know policies' arithmetic (`policy`),
files (`reader`) or memory layout (`slots`). Waits once per routed layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np

from turbospark.counters import PhaseClock
from turbospark.errors import ReadError
from turbospark.experts.base import Activation, Router, rows_of
from turbospark.experts.mlp import token_by_token, weighted_sum
from turbospark.experts.policy import Plan, Policy, SlotCache
from turbospark.experts.reader import DiskMeter, RecordReader, Room
from turbospark.experts.routes import ChunkRoutes, in_groups
from turbospark.experts.slots import SlotPool
from turbospark.install.packed import PackedLayout
from turbospark.policies import LiveToggles


@dataclass(frozen=True)
class _Prefetch:
    """Records being read before they are asked for."""

    plan: Plan
    wanted: list[tuple[int, Room]]
    tasks: list[list[Future[None]]]


@dataclass
class _Layer:
    """One routed layer: its cache, memory, file, and what is being read ahead."""

    cache: SlotCache
    pool: SlotPool
    reader: RecordReader
    stride: int
    count: int
    router: Router | None = None
    prefetch: _Prefetch | None = None

    def rooms(self, plan: Plan) -> list[tuple[int, Room]]:
        """What must be read for `plan`, and where it goes."""
        return [(plan.experts[i], self.pool.rooms[plan.slots[i]]) for i in plan.misses]


class StreamedExperts:
    """`slots` experts of every layer in memory, the rest on disk.

    Expert memory never exceeds slots * layers * stride. Results do not depend on what is cached:
    each route is computed alone and a token's routes are summed in rank order.
    """

    def __init__(
        self,
        layout: PackedLayout,
        activation: Activation,
        slots: int,
        *,
        policy: Policy,
        strided: bool,
        clock: PhaseClock,
        toggles: LiveToggles,
        lookahead: bool = False,
        verify_reads: bool = False,
        measure_disk: bool = False,
    ) -> None:
        self.slots = slots
        self.clock = clock
        self.toggles = toggles
        self.lookahead = lookahead
        self.meter = DiskMeter(clock, measure_disk)
        self.layers: dict[int, _Layer] = {}
        for index, layer in layout.layers.items():
            held = min(slots, layer.count)
            self.layers[index] = _Layer(
                SlotCache(held, layer.count, policy),
                SlotPool(layer.record, held, activation, strided),
                RecordReader(layer, verify_reads),
                layer.stride,
                layer.count,
            )
        self._next = dict(pairwise(sorted(self.layers)))
        self._beside = False

    @property
    def effective(self) -> set[str]:
        names = {"routed_pipeline", "routed_batch_prefill"}
        return names | {"shared_expert_overlap"} if self._beside else names

    @property
    def nbytes(self) -> int:
        return sum(layer.pool.nbytes for layer in self.layers.values())

    @property
    def formula(self) -> str:
        per_slot = sum(layer.stride for layer in self.layers.values())
        return f"{self.slots} slots x {per_slot} bytes (one record in {len(self.layers)} layers)"

    @property
    def buffers(self) -> int:
        return sum(layer.pool.buffers for layer in self.layers.values())

    def watch(self, layer: int, router: Router, beside: bool = False) -> None:
        """See `ExpertStore.watch`."""
        self._beside |= beside
        if self.lookahead:
            self.layers[layer].router = router

    def settle(self) -> None:
        """See `ExpertStore.settle`."""
        for layer in self.layers.values():
            layer.pool.release()

    def close(self) -> None:
        """See `ExpertStore.close`."""
        for layer in self.layers.values():
            self._collect(layer, ())
            layer.pool.release()
            layer.reader.close()
        self.layers.clear()

    def routed(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        beside: mx.array | None = None,
    ) -> mx.array:
        """See `ExpertStore.routed`."""
        state = self.layers[layer]
        guess = self._guess(layer, x)
        x, ids, weights = rows_of(x, ids, weights)
        chosen = self._read_back(ids, beside, guess)
        if len(chosen) > 1 and self.toggles.routed_batch_prefill:
            y = self._chunk(state, x, chosen, weights)
        else:
            tokens = iter(chosen.tolist())
            y = token_by_token(lambda x, w: self._one_token(state, x, next(tokens), w), x, weights)
        self._launch(y)
        if guess is not None:
            self._read_ahead(self.layers[self._next[layer]], np.array(guess).ravel().tolist())
        return y[None]

    # --- reading back and planning ----------------------------------------------------------------

    def _read_back(
        self, ids: mx.array, beside: mx.array | None, guess: mx.array | None
    ) -> np.ndarray:
        """The router's choice on the host: the one wait per routed layer."""
        with self.clock.phase("eval_wait"):
            mx.async_eval(ids if guess is None else (ids, guess))
            if beside is not None and self.toggles.shared_expert_overlap:
                mx.async_eval(beside)
                self.clock.count("shared_started")
            return np.array(ids)

    def _admit(self, state: _Layer, experts: Sequence[int]) -> tuple[int, ...]:
        """Bring `experts` into slots, reading those that are missing; their slots, in order."""
        self._collect(state, experts)
        with self.clock.phase("router"):
            plan = state.cache.plan(experts, state.pool.busy)
        while plan is None:
            self._release(state, everything=False)
            plan = state.cache.plan(experts, state.pool.busy)
        self.clock.count("expert_requests", len(experts))
        self.clock.count("expert_hits", plan.hits)
        if plan.misses:
            self.clock.count("expert_io_bytes_requested", len(plan.misses) * state.stride)
            with self.clock.phase("expert_io"), self.meter.sample():
                state.reader.read(state.rooms(plan))
        state.cache.commit(plan)
        return plan.slots

    def _release(self, state: _Layer, everything: bool = True) -> None:
        with self.clock.phase("pipeline_wait"):
            state.pool.release(everything)

    def _launch(self, y: mx.array) -> None:
        """Start the routed work now (pipeline), or finish it before going on."""
        if self.toggles.routed_pipeline:
            mx.async_eval(y)
            self.clock.count("routed_deferred")
        else:
            with self.clock.phase("pipeline_wait"):
                mx.eval(y)

    # --- computing --------------------------------------------------------------------------------

    def _one_token(
        self, state: _Layer, x: mx.array, experts: Sequence[int], weights: mx.array
    ) -> mx.array:
        """x [1, H], weights [1, k] -> [1, H]."""
        self._release(state)
        slots = self._admit(state, experts)
        with self.clock.phase("bind"):
            which = mx.array([slots], dtype=mx.uint32)
        y = weighted_sum(state.pool.mlp.routes(x, which), weights)
        state.pool.hold(slots, y)
        self.clock.count("routed_passes")
        return y

    def _chunk(self, state: _Layer, x: mx.array, chosen: np.ndarray, weights: mx.array) -> mx.array:
        """x [T, H]: every needed expert is read at most once, in groups that fit the slots."""
        self._release(state)
        routes = ChunkRoutes(x, chosen, state.count)
        for group in self._groups(state, np.unique(chosen).tolist()):
            slots = self._admit(state, group)
            with self.clock.phase("bind"):
                routes.compute(state.pool, group, slots)
            self.clock.count("routed_passes")
        return routes.total(weights)

    def _groups(self, state: _Layer, experts: list[int]) -> list[Sequence[int]]:
        """A chunk's experts in groups, those already in slots first.

        With the pipeline on, a group takes half the slots: the next group's records are read
        into the other half while this one computes.
        """
        self._collect(state, experts)
        slots = len(state.cache.held)
        experts.sort(key=lambda e: (state.cache.slot_of(e) is None, e))
        return in_groups(experts, slots // 2 if self.toggles.routed_pipeline else slots)

    # --- look-ahead -------------------------------------------------------------------------------

    def _guess(self, layer: int, x: mx.array) -> mx.array | None:
        """What the next layer's router would choose for this layer's input; decoding only."""
        if not self.lookahead or x.shape[1] > 1 or layer not in self._next:
            return None
        router = self.layers[self._next[layer]].router
        return None if router is None else router(x)

    def _read_ahead(self, state: _Layer, experts: list[int]) -> None:
        """Begin reading predicted experts of the next layer; results never depend on it.

        As many slots stay free as the layer's own request may need.
        """
        self._release(state)
        plan = state.cache.reserve(experts, keep=len(experts))
        if not plan.experts:
            return
        wanted = state.rooms(plan)
        try:
            tasks = state.reader.start(wanted)
        except ReadError:
            # The request itself will meet the same file and report it.
            state.cache.publish(plan, ())
            return
        state.prefetch = _Prefetch(plan, wanted, tasks)
        self.clock.count("prefetch_requests", len(plan.experts))
        self.clock.count("prefetch_bytes", len(plan.experts) * state.stride)

    def _collect(self, state: _Layer, experts: Sequence[int]) -> None:
        """End a background read, given what is really needed: wrong guesses not begun are dropped,
        what arrived whole is held from now on.
        """
        ahead = state.prefetch
        if ahead is None:
            return
        with self.clock.phase("expert_io"):
            for expert, tasks in zip(ahead.plan.experts, ahead.tasks, strict=True):
                for task in tasks:
                    if expert not in experts:
                        task.cancel()
            arrived = state.reader.arrived(ahead.wanted, ahead.tasks)
        state.prefetch = None
        state.cache.publish(ahead.plan, arrived)
        hits = sum(ahead.plan.experts[i] in experts for i in arrived)
        self.clock.count("prefetch_hits", hits)
