"""Experts read from SSD on demand into a few slots per layer.

Knows when to plan, read, compute and evaluate. Does not know policies' arithmetic (`policy`),
files (`reader`) or memory layout (`slots`). Apart from the engine the only room that evaluates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np

from turbospark.counters import PhaseClock
from turbospark.errors import ReadError
from turbospark.experts.base import Activation, Router
from turbospark.experts.mlp import weighted_sum
from turbospark.experts.policy import Plan, SlotCache
from turbospark.experts.reader import DiskBytes, RecordReader
from turbospark.experts.slots import SlotPool
from turbospark.install.packed import PackedLayout
from turbospark.policies import LiveToggles


@dataclass
class _Layer:
    """One routed layer: its cache, memory, file, and what is still in flight."""

    cache: SlotCache
    pool: SlotPool
    reader: RecordReader
    pending: mx.array | None = None
    prefetch: tuple[Plan, list[Future[None]]] | None = None
    router: Router | None = None


class StreamedExperts:
    """`slots` experts of every layer in memory, the rest on disk.

    Expert memory never exceeds slots * layers * stride. Results do not depend on what is cached:
    each route is computed alone and a token's routes are summed in rank order.
    """

    residency = "streamed"

    def __init__(
        self,
        layout: PackedLayout,
        activation: Activation,
        slots: int,
        *,
        policy: str,
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
        self.verify_reads = verify_reads
        self.disk = DiskBytes(measure_disk)
        self.layers: dict[int, _Layer] = {}
        for index, layer in layout.layers.items():
            count = min(slots, layer.count)
            self.layers[index] = _Layer(
                SlotCache(count, layer.count, policy),
                SlotPool(layer.record, count, activation, strided),
                RecordReader(layer),
            )
        order = sorted(self.layers)
        self._next = dict(pairwise(order))

    @property
    def nbytes(self) -> int:
        return sum(layer.pool.nbytes for layer in self.layers.values())

    @property
    def buffers(self) -> int:
        return sum(layer.pool.buffers for layer in self.layers.values())

    def watch(self, layer: int, router: Router) -> None:
        """See `ExpertStore.watch`."""
        self.layers[layer].router = router

    def close(self) -> None:
        """See `ExpertStore.close`."""
        for layer in self.layers.values():
            self._collect(layer)
            layer.reader.close()

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
        rows, k = x.shape[1], ids.shape[-1]
        guess = self._guess(layer, x) if rows == 1 else None
        chosen = self._read_back(ids.reshape(rows, k), beside, guess)
        x, weights = x.reshape(rows, -1), weights.reshape(rows, k)
        if rows == 1:
            y = self._one_token(state, x, chosen[0], weights)
        elif self.toggles.routed_batch_prefill:
            y = self._chunk(state, x, chosen, weights)
        else:
            each = [
                self._one_token(state, x[t : t + 1], chosen[t], weights[t : t + 1])
                for t in range(rows)
            ]
            y = mx.concatenate(each, axis=0)
        self._launch(state, y)
        if guess is not None:
            self._prefetch(self.layers[self._next[layer]], guess)
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
            return np.array(ids)

    def _admit(self, state: _Layer, experts: Sequence[int], avoiding: Sequence[int] = ()) -> Plan:
        """Bring `experts` into slots, reading those that are missing."""
        self._collect(state, experts)
        with self.clock.phase("router"):
            plan = state.cache.plan(experts, avoiding)
        if plan is None:
            self._settle(state)
            with self.clock.phase("router"):
                plan = state.cache.plan(experts)
            assert plan is not None
        self.clock.count("expert_requests", len(experts))
        self.clock.count("expert_hits", plan.hits)
        self._read(state, plan)
        state.cache.commit(plan)
        return plan

    def _read(self, state: _Layer, plan: Plan) -> None:
        if not plan.misses:
            return
        stride = state.reader.layer.stride
        self.clock.count("expert_io_bytes_requested", len(plan.misses) * stride)
        with self.clock.phase("expert_io"):
            before = self.disk.now()
            try:
                state.reader.read(
                    [(plan.experts[i], state.pool.segments(plan.slots[i])) for i in plan.misses]
                )
            finally:
                after = self.disk.now()
                if before is not None and after is not None:
                    self.clock.count("expert_io_bytes_physical", after - before)
                    self.clock.count("expert_io_samples")
            if self.verify_reads:
                for i in plan.misses:
                    state.reader.verify(plan.experts[i], state.pool.planes(plan.slots[i]))

    def _settle(self, state: _Layer) -> None:
        """Wait until nothing unevaluated reads this layer's slots."""
        if state.pending is not None:
            with self.clock.phase("pipeline_wait"):
                mx.eval(state.pending)
            state.pending = None

    def _launch(self, state: _Layer, y: mx.array) -> None:
        """Start the routed work now (pipeline), or finish it before going on."""
        if self.toggles.routed_pipeline:
            mx.async_eval(y)
            state.pending = y
        else:
            with self.clock.phase("pipeline_wait"):
                mx.eval(y)

    # --- computing --------------------------------------------------------------------------------

    def _one_token(
        self, state: _Layer, x: mx.array, experts: np.ndarray, weights: mx.array
    ) -> mx.array:
        """x [1, H] -> [1, H]."""
        self._settle(state)
        plan = self._admit(state, [int(e) for e in experts])
        with self.clock.phase("bind"):
            slots = mx.array([plan.slots], dtype=mx.uint32)
        y = weighted_sum(state.pool.mlp.routes(x, slots), weights)
        state.pending = y
        return y

    def _chunk(self, state: _Layer, x: mx.array, chosen: np.ndarray, weights: mx.array) -> mx.array:
        """x [T, H]: every needed expert is read once; groups of experts that fit the slots."""
        self._settle(state)
        rows, k = chosen.shape
        flat = chosen.reshape(-1)
        outputs: list[mx.array] = []
        order: list[np.ndarray] = []
        previous: tuple[int, ...] = ()
        for group in self._groups(state, chosen):
            if len(outputs) > 1:
                # Only the last group's slots are avoided; those before it must be done.
                with self.clock.phase("pipeline_wait"):
                    mx.eval(outputs[-2])
            plan = self._admit(state, group, previous)
            with self.clock.phase("bind"):
                slot_of = np.full(state.reader.layer.count, -1, np.int64)
                slot_of[list(plan.experts)] = plan.slots
                slots = slot_of[flat]
                routes = np.flatnonzero(slots >= 0)
                routes = routes[np.argsort(slots[routes], kind="stable")]
                which = mx.array(slots[routes].astype(np.uint32))
                tokens = mx.array((routes // k).astype(np.uint32))
            y = state.pool.mlp.sorted_routes(x[tokens], which)
            mx.async_eval(y)
            state.pending = y
            previous = plan.slots
            outputs.append(y)
            order.append(routes)
        back = mx.array(np.argsort(np.concatenate(order)).astype(np.uint32))
        y = mx.concatenate(outputs, axis=0)[back].reshape(rows, k, -1)
        return weighted_sum(y, weights)

    def _groups(self, state: _Layer, chosen: np.ndarray) -> Iterator[list[int]]:
        """The chunk's distinct experts in groups, those already in slots first.

        With the pipeline on, a group takes half the slots: the next group's records are read
        into the other half while this one computes.
        """
        size = len(state.cache.held)
        if self.toggles.routed_pipeline:
            size = max(1, size // 2)
        experts = [int(e) for e in np.unique(chosen)]
        experts.sort(key=lambda e: (state.cache.slot_of(e) is None, e))
        for at in range(0, len(experts), size):
            yield experts[at : at + size]

    # --- look-ahead -------------------------------------------------------------------------------

    def _guess(self, layer: int, x: mx.array) -> mx.array | None:
        """What the next layer's router would choose for this layer's input."""
        following = self._next.get(layer)
        router = self.layers[following].router if following is not None else None
        return router(x) if self.lookahead and router is not None else None

    def _prefetch(self, state: _Layer, guess: mx.array) -> None:
        """Begin reading predicted experts of the next layer; results never depend on it."""
        experts = [int(e) for e in np.array(guess).reshape(-1)]
        self._settle(state)
        plan = state.cache.reserve(experts, keep=len(experts))
        if not plan.experts:
            return
        self.clock.count("prefetch_requests", len(plan.experts))
        self.clock.count("prefetch_bytes", len(plan.experts) * state.reader.layer.stride)
        try:
            tasks = state.reader.start(
                [
                    (expert, state.pool.segments(slot))
                    for expert, slot in zip(plan.experts, plan.slots, strict=True)
                ],
                inline=False,
            )
        except ReadError:
            # The request itself will meet the same file and report it.
            state.cache.publish(plan, ())
            return
        state.prefetch = (plan, tasks)

    def _collect(self, state: _Layer, experts: Sequence[int] = ()) -> None:
        """End a background read: what arrived whole is held from now on."""
        if state.prefetch is None:
            return
        plan, tasks = state.prefetch
        state.prefetch = None
        with self.clock.phase("expert_io"):
            loaded: range | tuple[int, ...] = range(len(plan.experts))
            try:
                state.reader.join(tasks)
                if self.verify_reads:
                    for expert, slot in zip(plan.experts, plan.slots, strict=True):
                        state.reader.verify(expert, state.pool.planes(slot))
            except ReadError:
                loaded = ()
        state.cache.publish(plan, loaded)
        used = len(set(plan.experts) & set(experts)) if loaded else 0
        self.clock.count("prefetch_hits", used)
