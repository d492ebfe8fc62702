"""All that one conversation remembers inside the model: one cache per layer, one position.

Knows how to allocate, advance, go back and count. Does not know layers or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.cache.attend import Step
from turbospark.cache.kv import RING_SLACK, LinearKV, RingKV
from turbospark.cache.latent import LatentKV
from turbospark.cache.packed import Balance, PackedKV
from turbospark.cache.recurrent import CarriedState, NgramState, RecurrentState, RowState
from turbospark.cache.sparse import SparseKV
from turbospark.cache.specs import (
    CacheSpec,
    CarriedSpec,
    FullSpec,
    LatentSpec,
    NgramSpec,
    PackedSpec,
    RingSpec,
    RowSpec,
    SharedSpec,
    SparseSpec,
)
from turbospark.errors import NonFiniteScoresError, UnsupportedError
from turbospark.kernels.choices import choices
from turbospark.kernels.source import in_own_memory

Cache = LinearKV | PackedKV | RingKV | LatentKV | CarriedState


@dataclass(frozen=True)
class Snapshot:
    """A point to come back to: the position, and references to each recurrent layer's state."""

    position: int
    layers: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of state that only this snapshot may keep alive."""
        return sum(a.nbytes for saved in self.layers if saved is not None for a in saved)


def ring_capacity(window: int, max_context: int, override: int | None) -> int:
    """Rows of a ring: the window plus slack for going back, never more than the context."""
    return min(max_context, max(1, override) if override is not None else window + RING_SLACK)


class LayerStates:
    """Caches of every layer for one conversation of at most `max_context` positions.

    `kernels` is the open option: "auto" or "reference". `balance` has the tables of packed layers
    by layer, where there are any.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        max_context: int,
        dtype: mx.Dtype,
        ring_override: int | None = None,
        kernels: str = "auto",
        balance: Mapping[int, Balance] | None = None,
    ) -> None:
        self._balance = balance or {}
        best = choices(mx.default_device(), kernels)
        self._kernel_keys, self._packed_rows = best.attention_keys, best.packed_rows
        self._block_sparse = best.block_sparse
        self.specs = tuple(specs)
        self.max_context = max_context
        self.position = 0
        self.furthest = 0
        """Positions below it were written since the last reset; a ring holds the newest of them."""
        self.step = Step(0, 0)
        # Any: a family calls what its own specs asked for, which no common type could say.
        self.layers: list[Any] = []
        for spec in self.specs:
            self.layers.append(self._allocate(spec, dtype, ring_override))
        self.windows = _windows(self.layers)
        """One per layer, None where it sees everything; no tuple if a layer keeps other state."""
        self._length: tuple[int, mx.array] | None = None
        mx.eval(self.arrays())

    def _allocate(self, spec: CacheSpec, dtype: mx.Dtype, override: int | None) -> Cache:
        if isinstance(spec, SharedSpec):
            source = self.layers[spec.source]
            if isinstance(source, RingKV):
                source.shared = True
            return source
        if isinstance(spec, RingSpec) and spec.window >= self.max_context:
            # A window as wide as the context never drops a key.
            spec = FullSpec(spec.kv_heads, spec.key_dim, spec.value_dim)
        if isinstance(spec, RingSpec):
            return RingKV(spec, ring_capacity(spec.window, self.max_context, override), dtype)
        if isinstance(spec, PackedSpec):
            balance = self._balance.get(len(self.layers))
            return PackedKV(spec, self.max_context, balance, self._packed_rows)
        if isinstance(spec, FullSpec):
            return LinearKV(spec, self.max_context, dtype, self._kernel_keys)
        if isinstance(spec, LatentSpec):
            return LatentKV(spec, self.max_context, dtype)
        if isinstance(spec, SparseSpec):
            balance = self._balance.get(len(self.layers))
            return SparseKV(spec, self.max_context, dtype, self._block_sparse, balance)
        if isinstance(spec, NgramSpec):
            return NgramState(spec, dtype)
        if isinstance(spec, RowSpec):
            return RowState(spec, dtype)
        return RecurrentState(spec, dtype)

    def owned(self) -> list[Cache]:
        """The caches that have memory of their own, shared ones left out."""
        return [
            c for c, s in zip(self.layers, self.specs, strict=True) if not isinstance(s, SharedSpec)
        ]

    def arrays(self) -> list[mx.array]:
        """Every buffer, for evaluation; callers must not keep the list."""
        return [a for cache in self.owned() for a in cache.arrays()]

    def unevaluated(self) -> list[mx.array]:
        """Everything that a pass leaves behind, to be evaluated by the thread that built it."""
        beside = [None if self._length is None else self._length[1], self.step.fault]
        return self.arrays() + [a for a in beside if a is not None]

    def length(self) -> mx.array:
        """int32 [1]: positions with those of the pass begun."""
        return self.length_words()[:1]

    def length_words(self) -> mx.array:
        """int32 [4], the length first; on the device where a kernel left it, because a GPU waits
        for what the host writes.
        """
        end = self.step.end
        if self._length is None or self._length[0] != end:
            self._length = (end, in_own_memory([end], mx.int32))
        return self._length[1]

    def follow(self, words: mx.array) -> None:
        """`words` int32 [4] are what a pass of one more row will ask for."""
        self._length = (self.step.end + 1, words)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    @property
    def buffers(self) -> int:
        return len(self.arrays())

    @property
    def recurrent(self) -> bool:
        return any(isinstance(s, CarriedSpec) for s in self.specs)

    @property
    def longest(self) -> int:
        """The most rows that any attention layer reads at once."""
        rows = [self._rows_read(cache) for cache in self.owned()]
        return max(rows, default=0)

    def _rows_read(self, cache: Cache) -> int:
        if isinstance(cache, RingKV):
            return cache.capacity
        if isinstance(cache, SparseKV):
            return min(cache.spec.dense_keys, self.max_context)
        return 0 if isinstance(cache, CarriedState) else self.max_context

    def begin(
        self,
        rows: int,
        rows_attention: bool = True,
        tape: bool = False,
        force_dense: bool = False,
    ) -> Step:
        """Open a pass over the next `rows` positions; with `tape`, `keep_rows` can cut it."""
        self.step = Step(self.position, rows, rows_attention, tape, force_dense)
        return self.step

    def advance(self) -> None:
        """Close the pass opened by `begin`: its rows are now part of the past."""
        self.position = self.step.end
        self.furthest = max(self.furthest, self.position)
        self.step.masks.clear()
        self.step.replays.clear()

    def check(self) -> None:
        """Raise what the pass begun met on the device, once it is evaluated."""
        fault = self.step.fault
        worst = 0 if fault is None else int(np.array(fault).max())
        if worst:
            raise NonFiniteScoresError(
                f"layer {worst - 1}: the scores of key blocks have a NaN, so that none is the best"
            )

    def keep_rows(self, rows: int) -> None:
        """Cut the pass just closed to its first `rows`, as if it had had no others.

        Raises UnsupportedError when the pass was not taped and a layer is recurrent, and when a
        ring has overwritten what those rows read.
        """
        step, to = self.step, self.step.start + rows
        if step.end != self.position or not 1 <= rows <= step.rows:
            raise UnsupportedError(
                f"cannot keep {rows} rows: the newest pass has {step.rows} from position "
                f"{step.start} and the caches stand at {self.position}"
            )
        for cache in self.owned():
            if isinstance(cache, CarriedState):
                reason = cache.keep_refusal(step.start, rows)
                reason = reason or cache.rows_refusal(self.furthest, to)
            else:
                reason = cache.rewind_refusal(self.furthest, to)
            if reason:
                raise UnsupportedError(f"cannot keep {rows} of {step.rows} rows: {reason}")
        for cache in self.owned():
            if isinstance(cache, CarriedState):
                cache.keep_rows(step.start, rows)
        self.position = to

    def snapshot(self) -> Snapshot:
        """A point to come back to; costs references only."""
        return Snapshot(self.position, tuple(c.snapshot() for c in self.owned()))

    def rewind_refusal(self, to: int) -> str | None:
        """Why the caches cannot go back to `to` without a snapshot; None when they can."""
        if to == self.position:
            return None
        if not 0 <= to < self.position:
            return f"position {to} is outside 0..{self.position}"
        if to == 0:
            return None
        for cache in self.owned():
            reason = cache.rewind_refusal(self.furthest, to)
            if reason:
                return reason
        return None

    def rewind(self, to: int) -> None:
        """Forget positions >= `to`."""
        reason = self.rewind_refusal(to)
        if reason:
            raise UnsupportedError(f"cannot rewind from {self.position} to {to}: {reason}")
        if to == 0:
            self.reset()
        self.position = to

    def restore_refusal(self, snapshot: Snapshot) -> str | None:
        """Why the caches cannot go back to `snapshot`; None when they can."""
        for cache in self.owned():
            if isinstance(cache, CarriedState):
                reason = cache.rows_refusal(self.furthest, snapshot.position)
            else:
                reason = cache.rewind_refusal(self.furthest, snapshot.position)
            if reason:
                return reason
        return None

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot taken on these caches."""
        reason = self.restore_refusal(snapshot)
        if reason:
            raise UnsupportedError(f"cannot restore position {snapshot.position}: {reason}")
        for cache, saved in zip(self.owned(), snapshot.layers, strict=True):
            cache.restore(saved)
        self.position = snapshot.position

    def reset(self) -> None:
        """Forget everything; buffers stay."""
        recurrent = [c for c in self.owned() if isinstance(c, CarriedState)]
        for cache in recurrent:
            cache.reset()
        # Evaluated at once: another thread may feed these caches next.
        mx.eval([cache.arrays() for cache in recurrent])
        self.position = self.furthest = 0


def _windows(layers: Sequence[Any]) -> tuple[int | None, ...] | None:
    if not all(isinstance(cache, LinearKV | PackedKV | RingKV) for cache in layers):
        return None
    return tuple(c.window if isinstance(c, RingKV) else None for c in layers)
