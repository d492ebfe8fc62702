"""Key/value memory: every position (LinearKV) or the newest ones (RingKV).

Knows buffers and which rows a query reads. Does not know rope, norms or models.
Buffers are allocated once; no second handle to a buffer is ever kept, because slice
assignment to a buffer with two handles copies all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from turbospark.cache.attend import Step, causal_attention, masked_attention, ring_mask
from turbospark.cache.specs import FullSpec, RingSpec
from turbospark.errors import UnsupportedError
from turbospark.kernels.decode_attention import Rules, decode_attention
from turbospark.kernels.source import in_own_memory

RING_SLACK = 128


class LinearKV:
    """K [1, KV, capacity, D] and V [1, KV, capacity, Dv]; position p lives in row p.

    From `kernel_keys` keys on one row attends by the split-K kernel.
    """

    def __init__(
        self, spec: FullSpec, capacity: int, dtype: mx.Dtype, kernel_keys: int | None = None
    ) -> None:
        self.kernel_keys = kernel_keys
        self.keys = mx.zeros((1, spec.kv_heads, capacity, spec.key_dim), dtype=dtype)
        self.values = mx.zeros((1, spec.kv_heads, capacity, spec.value_dim), dtype=dtype)

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated or counted; callers must not keep them."""
        return [self.keys, self.values]

    def put(self, keys: mx.array, values: mx.array) -> None:
        """Take buffers with the newest rows written in place of those held."""
        self.keys, self.values = keys, values

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """Why the layer cannot go back to `to`; None when it can."""
        return None

    def written(self, position: int, furthest: int) -> list[mx.array]:
        """Copies of the rows that matter at `position`, for a file."""
        return [mx.contiguous(a[:, :, :position]) for a in self.arrays()]

    def refill(self, saved: list[mx.array]) -> None:
        """Put back what `written` gave."""
        rows = saved[0].shape[2]
        self.keys[:, :, :rows], self.values[:, :, :rows] = saved

    def snapshot(self) -> None:
        """Nothing: going back is moving the position."""

    def restore(self, snapshot: None) -> None:
        """Nothing to put back."""

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        step: Step,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write rows k, v [1, KV, L, D] of this step, then attend q [1, H, L, D] causally."""
        self.keys[:, :, step.start : step.end] = k
        self.values[:, :, step.start : step.end] = v
        return self.read(q, step, scale, sinks)

    def read(
        self, q: mx.array, step: Step, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend q over rows already written, this step's included."""
        if step.rows == 1 and self.kernel_keys is not None and step.end >= self.kernel_keys:
            step.attention_calls += 1
            length = in_own_memory([step.end], mx.int32)[:1]
            out = decode_attention(q, self.keys, self.values, length, Rules(scale), sinks)
            return out.reshape(1, 1, q.shape[1], -1).swapaxes(1, 2)
        return causal_attention(
            q,
            self.keys[:, :, : step.end],
            self.values[:, :, : step.end],
            scale,
            sinks,
            step,
        )


@dataclass(frozen=True)
class _Ring:
    """Buffers in which position p lives in row p % capacity, written and read as one."""

    keys: mx.array
    values: mx.array
    window: int

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def alias(self) -> _Ring:
        """The present content under handles of its own: later writes to either copy first."""
        return _Ring(self.keys[:], self.values[:], self.window)

    def write(self, k: mx.array, v: mx.array, start: int) -> None:
        """Store rows k, v [1, KV, L, D] of positions from `start` on."""
        rows, slot = k.shape[2], start % self.capacity
        head = min(rows, self.capacity - slot)
        self.keys[:, :, slot : slot + head] = k[:, :, :head]
        self.values[:, :, slot : slot + head] = v[:, :, :head]
        if head < rows:
            self.keys[:, :, : rows - head] = k[:, :, head:]
            self.values[:, :, : rows - head] = v[:, :, head:]

    def read(
        self, q: mx.array, step: Step, start: int, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend q [1, H, L, D] of positions from `start` on, the newest ones stored."""
        rows = q.shape[2]
        end = start + rows
        length = min(end, self.capacity)
        keys, values = self.keys[:, :, :length], self.values[:, :, :length]
        if end <= self.window:
            return causal_attention(q, keys, values, scale, sinks, step)
        name = (start, rows, self.window, self.capacity)
        if name not in step.masks:
            step.masks[name] = mx.array(ring_mask(start, rows, self.window, self.capacity))
        return masked_attention(q, keys, values, step.masks[name], scale, sinks, step)

    def turn(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        step: Step,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Write and attend a pass in blocks, so that no row overwrites a key still needed."""
        block = self.capacity - self.window + 1
        outputs = []
        for at in range(0, step.rows, block):
            part = slice(at, at + block)
            self.write(k[:, :, part], v[:, :, part], step.start + at)
            outputs.append(self.read(q[:, :, part], step, step.start + at, scale, sinks))
        return mx.concatenate(outputs, axis=2)


class RingKV:
    """The newest `capacity` positions; position p lives in row p % capacity.

    A pass that turns the ring and has more rows than `capacity - window + 1` is taken in blocks of
    that many, so that no row overwrites a key that an earlier row of its block still needs. Keys
    are always read in slot order, which makes every chunking of a prompt sum in the same order.

    With `shared`, other layers read the pass after this one wrote it. What a blockwise pass
    overwrote is then kept until the pass ends: the ring as it was and the rows that came.
    """

    def __init__(self, spec: RingSpec, capacity: int, dtype: mx.Dtype) -> None:
        if capacity < spec.window:
            raise UnsupportedError(
                f"swa_ring_capacity {capacity} is below the attention window {spec.window}; "
                f"use at least {spec.window}"
            )
        self.window = spec.window
        self.capacity = capacity
        self.shared = False
        self.ring = _Ring(
            mx.zeros((1, spec.kv_heads, capacity, spec.key_dim), dtype=dtype),
            mx.zeros((1, spec.kv_heads, capacity, spec.value_dim), dtype=dtype),
            spec.window,
        )

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated or counted; callers must not keep them."""
        return [self.ring.keys, self.ring.values]

    def put(self, keys: mx.array, values: mx.array) -> None:
        """Take buffers with the newest rows written in place of those held."""
        self.ring = _Ring(keys, values, self.window)

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """Why the ring cannot go back to `to`; None when it can.

        What counts is not the present position but the furthest one ever written: rows that were
        overwritten on the way there do not come back when the position does.
        """
        slack = self.capacity - self.window
        if furthest <= self.capacity or furthest - to <= slack:
            return None
        return (
            f"a rewind of {furthest - to} tokens passes the ring's slack of {slack} "
            f"(capacity {self.capacity}, window {self.window})"
        )

    def written(self, position: int, furthest: int) -> list[mx.array]:
        """Copies of the rows that matter at `position`, for a file: all of a ring that turned."""
        rows = position if furthest <= self.capacity else self.capacity
        return [mx.contiguous(a[:, :, :rows]) for a in self.arrays()]

    def refill(self, saved: list[mx.array]) -> None:
        """Put back what `written` gave."""
        rows = saved[0].shape[2]
        self.ring.keys[:, :, :rows], self.ring.values[:, :, :rows] = saved

    def snapshot(self) -> None:
        """Nothing: going back is moving the position, within the slack."""

    def restore(self, snapshot: None) -> None:
        """Nothing to put back."""

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        step: Step,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write rows k, v [1, KV, L, D] and attend q [1, H, L, D] within the window."""
        if self._in_one(step):
            self.ring.write(k, v, step.start)
            return self.ring.read(q, step, step.start, scale, sinks)
        if self.shared:
            step.replays[self] = (self.ring.alias(), k, v)
        return self.ring.turn(q, k, v, step, scale, sinks)

    def read(
        self, q: mx.array, step: Step, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend q over what `attend` wrote in this pass and before, within the window."""
        if self._in_one(step):
            return self.ring.read(q, step, step.start, scale, sinks)
        before, k, v = step.replays[self]
        return before.alias().turn(q, k, v, step, scale, sinks)

    def _in_one(self, step: Step) -> bool:
        return step.rows <= self.capacity - self.window + 1 or step.end <= self.capacity
