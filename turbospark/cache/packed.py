"""Key/value memory with packed old rows (TurboQuant): codes of all positions, the newest exact.

Rows are turned when they come, kept in half precision in a ring, and packed once, a block of 32 at
a time, when no later query reads them exactly. What is read how depends on positions alone. Knows
buffers and balance; does not know the codec's arithmetic, rope or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from turbospark.cache.attend import Step
from turbospark.cache.specs import CacheSpec, FullSpec, NgramSpec, PackedSpec, SparseSpec
from turbospark.kernels import kv_codec, packed_decode, packed_qsa
from turbospark.kernels.kv_codec import BLOCK, KEY_SEED, VALUE_SEED
from turbospark.kernels.kv_encode import encode_rows, encode_rows_reference
from turbospark.kernels.packed_attention import (
    SINKS,
    WINDOW,
    Near,
    Packed,
    first_exact,
    packed_attention_reference,
    packed_listed_reference,
)
from turbospark.kernels.packed_turn import turn_rows
from turbospark.kernels.qsa_attend import listed_tokens
from turbospark.kernels.source import in_own_memory

SLACK = 64
"""Exact rows kept beyond the window, for going back."""


@dataclass(frozen=True)
class Balance:
    """What is subtracted from a layer's keys, and what they are then multiplied by.

    mean, scale float32 [KV, dim]; queries are divided by the scale, so that scores change by what
    is the same for all keys.
    """

    mean: mx.array
    scale: mx.array


def layer_refusal(spec: CacheSpec, key_bits: int, value_bits: int) -> str | None:
    """Why a layer of keys and values cannot be packed; None when it can."""
    if isinstance(spec, SparseSpec):
        key_dim = value_dim = spec.head_dim
    elif isinstance(spec, FullSpec):
        key_dim, value_dim = spec.key_dim, spec.value_dim
    else:
        return "it does not keep keys and values of every position"
    if key_dim != value_dim:
        return f"keys have {key_dim} dims and values {value_dim}; they must be alike"
    if not kv_codec.turns(key_dim):
        return (
            f"heads have {key_dim} dims; works: powers of two 16..512, and 12 times a power "
            "of two up to 384"
        )
    for bits in (key_bits, value_bits):
        if not kv_codec.fills_words(key_dim, bits):
            widths = [str(b) for b in (2, 3, 4) if kv_codec.fills_words(key_dim, b)]
            works = " or ".join(widths)
            return f"{key_dim} dims of {bits} bits are not whole words; works: {works} bits"
    return None


def packed_specs(
    specs: Sequence[CacheSpec], key_bits: int, value_bits: int
) -> tuple[list[CacheSpec], str | None]:
    """The specs with layers that keep every position packed, and the first reason why one is not.

    The last layer of a stack of more than two stays as it is.
    """
    out, reason = list(specs), None
    layers = sum(not isinstance(spec, NgramSpec) for spec in specs)  # n-grams come after layers
    for layer, spec in enumerate(specs):
        if layers > 2 and layer == layers - 1:
            continue
        if not isinstance(spec, FullSpec | SparseSpec):
            continue
        why = layer_refusal(spec, key_bits, value_bits)
        if why is not None:
            reason = reason or why
        elif isinstance(spec, SparseSpec):
            packed = PackedSpec(spec.kv_heads, spec.head_dim, key_bits, value_bits)
            out[layer] = replace(spec, packed=packed)
        else:
            out[layer] = PackedSpec(spec.kv_heads, spec.key_dim, key_bits, value_bits)
    return out, reason


def packed_part(spec: CacheSpec) -> PackedSpec | None:
    """How the old keys and values of a layer are packed; None where they are not."""
    if isinstance(spec, SparseSpec):
        return spec.packed
    return spec if isinstance(spec, PackedSpec) else None


def unpacked(spec: CacheSpec) -> CacheSpec:
    """What the layer would remember without `kv_quant`."""
    if isinstance(spec, SparseSpec):
        return replace(spec, packed=None)
    return FullSpec(spec.kv_heads, spec.dim, spec.dim) if isinstance(spec, PackedSpec) else spec


def packed_bytes(spec: PackedSpec, context: int) -> int:
    """Bytes of one layer's caches at `context` positions."""
    capacity = -(-context // BLOCK) * BLOCK
    row = spec.dim * (spec.key_bits + spec.value_bits) // 8 + 4
    exact = (exact_rows(capacity) + SINKS) * spec.dim * 4
    return spec.kv_heads * (capacity * row + exact)


def exact_rows(capacity: int) -> int:
    """Rows of the ring of exact rows."""
    return min(WINDOW + SLACK, capacity)


class PackedKV:
    """Packed rows of every position and exact ones of the newest; position p lies in row p of the
    former and in row p % rows of the latter. Passes of at most `kernel_rows` rows run by kernels.
    """

    def __init__(
        self,
        spec: PackedSpec,
        max_context: int,
        balance: Balance | None = None,
        kernel_rows: int | None = None,
    ) -> None:
        self.spec, self.balance = spec, balance
        self.kernel_rows = kernel_rows if packed_decode.takes(spec.dim) else None
        self.capacity = -(-max_context // BLOCK) * BLOCK
        self.rows = exact_rows(self.capacity)
        kv, dim = spec.kv_heads, spec.dim
        self.keys = mx.zeros((kv, self.capacity, dim * spec.key_bits // 32), mx.uint32)
        self.values = mx.zeros((kv, self.capacity // BLOCK, spec.value_bits, dim), mx.uint32)
        self.key_scales = mx.zeros((kv, self.capacity), mx.float16)
        self.value_scales = mx.zeros((kv, self.capacity), mx.float16)
        self.new_keys = mx.zeros((kv, self.rows, dim), mx.float16)
        self.new_values = mx.zeros((kv, self.rows, dim), mx.float16)
        self.first_keys = mx.zeros((kv, SINKS, dim), mx.float16)
        self.first_values = mx.zeros((kv, SINKS, dim), mx.float16)

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated or counted; callers must not keep them."""
        return [
            self.keys, self.key_scales, self.values, self.value_scales,
            self.new_keys, self.new_values, self.first_keys, self.first_values,
        ]  # fmt: skip

    # --- going back and files ---------------------------------------------------------------------

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """Why the layer cannot go back to `to`: packed rows do not become exact again."""
        # One row more may have been overwritten by a pass that was begun and dropped.
        if self.rows == self.capacity or first_exact(to) > furthest - self.rows:
            return None
        return (
            f"a rewind of {furthest - to} tokens passes the exact rows of a packed cache, which "
            f"keeps {self.rows}"
        )

    def written(self, position: int, furthest: int) -> list[mx.array]:
        """Copies of the rows that matter at `position`, for a file."""
        coded = max(BLOCK, first_exact(position))
        blocks, new = coded // BLOCK, min(furthest, self.rows)
        rows = [
            self.keys[:, :coded], self.key_scales[:, :coded], self.values[:, :blocks],
            self.value_scales[:, :coded], self.new_keys[:, :new], self.new_values[:, :new],
            self.first_keys, self.first_values,
        ]  # fmt: skip
        return [mx.contiguous(a) for a in rows]

    def refill(self, saved: list[mx.array]) -> None:
        """Put back what `written` gave."""
        keys, key_scales, values, value_scales, new_keys, new_values, *first = saved
        coded, blocks, new = keys.shape[1], values.shape[1], new_keys.shape[1]
        self.keys[:, :coded], self.key_scales[:, :coded] = keys, key_scales
        self.values[:, :blocks], self.value_scales[:, :coded] = values, value_scales
        self.new_keys[:, :new], self.new_values[:, :new] = new_keys, new_values
        self.first_keys, self.first_values = first

    def snapshot(self) -> None:
        """Nothing: going back is moving the position, within the slack."""

    def restore(self, snapshot: None) -> None:
        """Nothing to put back."""

    def distortion(self, position: int, furthest: int) -> tuple[int, float, float] | None:
        """Rows held both exactly and packed, and the relative squared errors of their keys and
        values; None when there are none.
        """
        stop = first_exact(position)
        start = -(-max(0, furthest - self.rows + 1) // BLOCK) * BLOCK
        if start >= stop:
            return None
        packed = Packed(self.keys, self.key_scales, self.values, self.value_scales)
        errors: list[float] = []
        rings = (self.new_keys, self.new_values)
        for ring, coded in zip(rings, packed.tile(start, stop), strict=True):
            exact = mx.concatenate(self._ring_rows(ring, start, stop), axis=1).astype(mx.float32)
            error = mx.sum((exact - coded) ** 2) / mx.sum(exact**2)
            errors.append(float(np.array(error)))
        return stop - start, errors[0], errors[1]

    # --- a pass -----------------------------------------------------------------------------------

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        step: Step,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write rows k, v [1, KV, L, dim] of this step, then attend q [1, H, L, dim] causally."""
        if self.by_kernels(step):
            self.prepare(step)
            turned = self.turn(q, k, v, _length(step), scale)
            return _heads(self._attended(q, turned, step, scale, sinks), q)
        self.write(k, v, step)
        return self.read(q, step, scale, sinks)

    def write(self, k: mx.array, v: mx.array, step: Step) -> None:
        """Store rows k, v [1, KV, L, dim] of this step in plain MLX; the step keeps what its rows
        read exactly.
        """
        if self.balance is not None:
            mean, by = self.balance.mean[:, None], self.balance.scale[:, None]
            k = (k.astype(mx.float32) - mean) * by
        near = self._near(
            kv_codec.half(kv_codec.turn(k[0], KEY_SEED)),
            kv_codec.half(kv_codec.turn(v[0], VALUE_SEED)),
            step,
        )
        step.replays[self] = near
        self._pack(near, step)
        self._keep(near, step)

    def read(
        self, q: mx.array, step: Step, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend q over what `attend` wrote in this pass and before."""
        if self.by_kernels(step):
            turned, _ = self._turned(q[0], scale, None)
            return _heads(self._attended(q, turned, step, scale, sinks), q)
        packed = Packed(self.keys, self.key_scales, self.values, self.value_scales)
        near, rows = step.replays[self], q.shape[2]
        queries, logits = self._turned(q[0], scale, sinks)
        parts = [(0, rows)] if step.rows_attention else [(i, i + 1) for i in range(rows)]
        step.attention_calls += len(parts)
        out = []
        for begin, end in parts:
            start = step.start + begin
            used = _cut(near, first_exact(start), step.start + end)
            part = None if logits is None else logits[:, begin:end]
            out.append(packed_attention_reference(queries[:, begin:end], start, packed, used, part))
        joined = out[0] if len(out) == 1 else mx.concatenate(out, axis=1)
        return kv_codec.turn_back(joined, VALUE_SEED).astype(q.dtype)[None]

    def read_chosen(
        self,
        q: mx.array,
        ids: mx.array,
        ratio: int,
        start: int,
        step: Step,
        scale: float,
        kernels: bool,
    ) -> mx.array:
        """Attend q [1, H, L, dim] of positions from `start` on over what `write` stored: each row
        over its own blocks ids int32 [L, k] of `ratio` positions and the open one; with `kernels`
        by two launches, where they take the heads -> [L, H, dim].
        """
        packed = Packed(self.keys, self.key_scales, self.values, self.value_scales)
        queries, _ = self._turned(q[0], scale, None)
        near = step.replays[self]
        if kernels and packed_qsa.takes(q.shape[1], self.spec.kv_heads, self.spec.dim):
            rows = mx.contiguous(queries.swapaxes(0, 1))
            return packed_qsa.packed_qsa(rows, packed, near, ids, start, ratio, q.dtype)
        tokens, seen = listed_tokens(ids, start, ratio)
        out = packed_listed_reference(queries, tokens, seen, start, packed, near)
        return kv_codec.turn_back(out, VALUE_SEED).astype(q.dtype).swapaxes(0, 1)

    # --- by kernels -------------------------------------------------------------------------------

    def by_kernels(self, step: Step) -> bool:
        """Whether the pass runs by kernels, which store its rows where MLX does not see it."""
        return self.kernel_rows is not None and step.rows <= self.kernel_rows

    def prepare(self, step: Step) -> None:
        """Pack the blocks that this pass leaves behind: the ring holds them before it begins."""
        start, stop = first_exact(step.start), first_exact(step.end)
        if start < stop:
            keys, values = (
                mx.concatenate(self._ring_rows(ring, start, stop), axis=1)
                for ring in (self.new_keys, self.new_values)
            )
            self._store(keys, values, start)

    def turn(
        self, q: mx.array, k: mx.array, v: mx.array, length: mx.array, scale: float
    ) -> mx.array:
        """Store rows k, v [1, KV, M, dim] exactly; the turned queries [H, M, dim] of q."""
        mean, by = (None, None) if self.balance is None else (self.balance.mean, self.balance.scale)
        return turn_rows(q, k, v, mean, by, length, scale, self._ring())

    def attended(
        self, turned: mx.array, length: mx.array, dtype: mx.Dtype, logits: mx.array | None = None
    ) -> mx.array:
        """Turned queries [H, M, dim] over all rows, `logits` [H, M] of sinks -> [1, M, H * dim]."""
        packed = Packed(self.keys, self.key_scales, self.values, self.value_scales)
        return packed_decode.packed_decode(turned, packed, self._ring(), length, logits, dtype)

    def _ring(self) -> Near:
        return Near(0, self.new_keys, self.new_values, self.first_keys, self.first_values)

    def _attended(
        self, q: mx.array, turned: mx.array, step: Step, scale: float, sinks: mx.array | None
    ) -> mx.array:
        step.attention_calls += 1
        logits = None if sinks is None else self._turned(q[0], scale, sinks)[1]
        return self.attended(turned, _length(step), q.dtype, logits)

    # --- in plain MLX -----------------------------------------------------------------------------

    def _turned(
        self, q: mx.array, scale: float, sinks: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Queries [H, L, dim] as packed keys want them, and each row's sink logits [H, L]."""
        heads, rows, dim = q.shape
        q = q.astype(mx.float32)
        logits = None
        if sinks is not None:
            logits = mx.broadcast_to(sinks.astype(mx.float32)[:, None], (heads, rows))
        if self.balance is not None:
            grouped = q.reshape(self.spec.kv_heads, -1, dim)
            if logits is not None:  # keys lost their mean: every score is less by this much
                lost = mx.sum(grouped * self.balance.mean[:, None], axis=-1) * scale
                logits = logits - lost.reshape(heads, rows)
            q = (grouped / self.balance.scale[:, None]).reshape(heads, rows, dim)
        return kv_codec.turn(q, KEY_SEED) * scale, logits

    def _near(self, keys: mx.array, values: mx.array, step: Step) -> Near:
        """Exact rows [KV, n, dim] from the oldest that this pass reads to its last."""
        start = first_exact(step.start)
        old_keys, old_values = (
            self._ring_rows(ring, start, step.start) for ring in (self.new_keys, self.new_values)
        )
        if step.start < SINKS:
            until = min(step.end, SINKS)
            self.first_keys[:, step.start : until] = keys[:, : until - step.start]
            self.first_values[:, step.start : until] = values[:, : until - step.start]
        return Near(
            start,
            mx.concatenate([*old_keys, keys], axis=1),
            mx.concatenate([*old_values, values], axis=1),
            self.first_keys,
            self.first_values,
        )

    def _ring_rows(self, ring: mx.array, start: int, stop: int) -> list[mx.array]:
        """The rows of positions start..stop-1, as one or two slices."""
        if start == stop:
            return []
        low, high = start % self.rows, (stop - 1) % self.rows + 1
        return [ring[:, low:high]] if low < high else [ring[:, low:], ring[:, :high]]

    def _pack(self, near: Near, step: Step) -> None:
        """Pack the blocks that no query after this pass reads exactly; they are in `near`."""
        stop = first_exact(step.end)
        count = stop - near.start
        if count <= 0:
            return
        self._store(near.keys[:, :count], near.values[:, :count], near.start)

    def _store(self, keys: mx.array, values: mx.array, start: int) -> None:
        """Pack exact rows [KV, n, dim] of whole blocks from position `start` on."""
        encode = encode_rows_reference if self.kernel_rows is None else encode_rows
        part = slice(start, start + keys.shape[1])
        blocks = slice(start // BLOCK, part.stop // BLOCK)
        words, scales = encode(keys, self.spec.key_bits, True)
        self.keys[:, part], self.key_scales[:, part] = words, scales
        words, scales = encode(values, self.spec.value_bits, False)
        self.values[:, blocks], self.value_scales[:, part] = words, scales

    def _keep(self, near: Near, step: Step) -> None:
        """The newest rows of the pass into the ring."""
        count = min(step.rows, self.rows)
        at = step.end - count
        while at < step.end:
            slot = at % self.rows
            fit = min(step.end - at, self.rows - slot)
            part = slice(at - near.start, at - near.start + fit)
            self.new_keys[:, slot : slot + fit] = near.keys[:, part]
            self.new_values[:, slot : slot + fit] = near.values[:, part]
            at += fit


def _length(step: Step) -> mx.array:
    """int32 [1]: positions with those of the pass, made once for all layers."""
    name = (step.end,)
    if name not in step.masks:
        step.masks[name] = in_own_memory([step.end], mx.int32)[:1]
    return step.masks[name]


def _heads(rows: mx.array, q: mx.array) -> mx.array:
    """[1, M, H * dim] -> the shape of q [1, H, M, dim]."""
    _, heads, count, _ = q.shape
    return rows.reshape(1, count, heads, -1).swapaxes(1, 2)


def _cut(near: Near, start: int, stop: int) -> Near:
    """The rows of positions start..stop-1."""
    part = slice(start - near.start, stop - near.start)
    return Near(start, near.keys[:, part], near.values[:, part], near.first_keys, near.first_values)
