"""Attention over rows of which the old ones are packed: TurboQuant keys and values.

A query at position p reads exactly, in turned half precision, the first 4 positions and those of
its own block of 32 and the block before; all others as codes. That depends on positions alone, so
neither chunks nor reuse change an answer. Queries come turned and scaled, the result leaves in the
turned space of the values. Knows tiles and masks; does not know who wrote the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark.kernels import kv_codec
from turbospark.kernels.kv_codec import BLOCK

SINKS = 4
"""First positions, always read exactly: attention rests on them."""
WINDOW = 2 * BLOCK
"""The most positions up to its own that a query reads exactly, besides the first."""
CPU_TILE = 256
GPU_SCORES = 1 << 26
"""Score elements of one tile on a GPU: 256 MiB."""


def first_exact(position: int) -> int:
    """The oldest position, the first ones aside, that the query at `position` reads exactly."""
    return BLOCK * max(position // BLOCK - 1, 0)


@dataclass(frozen=True)
class Packed:
    """Codes of all positions up to a capacity that is a multiple of 32.

    keys uint32 [KV, capacity, dim * key_bits / 32], values uint32 [KV, capacity / 32, value_bits,
    dim], their scales float16 [KV, capacity].
    """

    keys: mx.array
    key_scales: mx.array
    values: mx.array
    value_scales: mx.array

    @property
    def dim(self) -> int:
        return self.values.shape[-1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    @property
    def key_bits(self) -> int:
        return self.keys.shape[-1] * 32 // self.dim

    @property
    def value_bits(self) -> int:
        return self.values.shape[2]

    def tile(self, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Keys and values float32 [KV, stop - start, dim] of whole blocks, still turned."""
        part, blocks = slice(start, stop), slice(start // BLOCK, stop // BLOCK)
        keys = kv_codec.unpack_keys(self.keys[:, part], self.key_bits)
        values = kv_codec.unpack_values(self.values[:, blocks], self.value_bits)
        return (
            kv_codec.dequantize(keys, self.key_scales[:, part], self.key_bits),
            kv_codec.dequantize(values, self.value_scales[:, part], self.value_bits),
        )

    def rows(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values float32 [KV, ..., dim] of single tokens int32 [...], still turned."""
        keys = kv_codec.unpack_keys(self.keys[:, tokens], self.key_bits)
        values = kv_codec.values_at(self.values, tokens, self.value_bits)
        return (
            kv_codec.dequantize(keys, self.key_scales[:, tokens], self.key_bits),
            kv_codec.dequantize(values, self.value_scales[:, tokens], self.value_bits),
        )


@dataclass(frozen=True)
class Near:
    """Exact rows float16 [KV, n, dim] of the positions from `start` on, and of the first ones."""

    start: int
    keys: mx.array
    values: mx.array
    first_keys: mx.array
    first_values: mx.array

    def rows(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values float32 [KV, ..., dim] of single tokens int32 [...]; of those that are
        not here any row.
        """
        at = mx.where(tokens < SINKS, tokens, SINKS + mx.maximum(tokens - self.start, 0))
        sides = ([self.first_keys, self.keys], [self.first_values, self.values])
        keys, values = (mx.concatenate(side, axis=1)[:, at].astype(mx.float32) for side in sides)
        return keys, values


# --- reference ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """How rows of consecutive positions lie in blocks of 32; a lone block is not filled up."""

    start: int
    rows: int

    @property
    def first(self) -> int:
        return self.start // BLOCK

    @property
    def count(self) -> int:
        return (self.start + self.rows - 1) // BLOCK - self.first + 1

    @property
    def each(self) -> int:
        return self.rows if self.count == 1 else BLOCK

    @property
    def positions(self) -> np.ndarray:
        """[count, each]."""
        begin = self.start if self.count == 1 else self.first * BLOCK
        return begin + np.arange(self.count * self.each).reshape(self.count, self.each)

    @property
    def exact_from(self) -> np.ndarray:
        """[count]."""
        return BLOCK * np.maximum(self.first + np.arange(self.count) - 1, 0)

    def cut(self, x: mx.array, kv: int) -> mx.array:
        """[H, rows, n] -> [KV, count, H / KV * each, n]."""
        heads, rows, width = x.shape
        if self.count > 1:
            lead = self.start % BLOCK
            x = mx.pad(x, [(0, 0), (lead, self.count * BLOCK - rows - lead), (0, 0)])
        x = x.reshape(kv, heads // kv, self.count, self.each, width)
        return x.swapaxes(1, 2).reshape(kv, self.count, -1, width)

    def join(self, x: mx.array, heads: int) -> mx.array:
        """The inverse of `cut`."""
        kv, width = x.shape[0], x.shape[-1]
        x = x.reshape(kv, self.count, heads // kv, self.each, width).swapaxes(1, 2)
        x = x.reshape(heads, self.count * self.each, width)
        lead = 0 if self.count == 1 else self.start % BLOCK
        return x[:, lead : lead + self.rows]

    def pairs(self, rows: mx.array, start: int) -> mx.array:
        """Rows [KV, n, dim] from position `start` -> float32 [KV, count, 64, dim]: for each block
        the one before and itself, zeros where there are no rows.
        """
        lead = start - (self.first - 1) * BLOCK
        after = (self.count + 1) * BLOCK - lead - rows.shape[1]
        padded = mx.pad(rows.astype(mx.float32), [(0, 0), (lead, after), (0, 0)])
        blocks = padded.reshape(rows.shape[0], self.count + 1, BLOCK, -1)
        return mx.concatenate([blocks[:, :-1], blocks[:, 1:]], axis=2)


@dataclass
class _Running:
    """A softmax under way: the largest score, the sum and the weighted values so far."""

    top: mx.array
    total: mx.array
    out: mx.array

    def add(self, scores: mx.array, values: mx.array) -> None:
        """Scores [KV, rows, n] and values [KV, n, dim] of further keys."""
        top = mx.maximum(self.top, mx.max(scores, axis=-1, keepdims=True))
        fade, weights = mx.exp(self.top - top), mx.exp(scores - top)
        self.total = self.total * fade + mx.sum(weights, axis=-1, keepdims=True)
        self.out = self.out * fade + weights @ values
        self.top = top


def packed_attention_reference(
    q: mx.array,
    start: int,
    packed: Packed,
    near: Near,
    sinks: mx.array | None = None,
    soft_cap: float = 0.0,
) -> mx.array:
    """softmax(q K^T, with sinks) V of rows at positions from `start` on, tile by tile.

    Shapes: q float32 [H, L, dim]; near holds positions first_exact(start) to start + L - 1; sinks
    float32 [H, L], logits that take weight and give nothing -> float32 [H, L, dim]. A tile's keys
    are all that is ever expanded. Its bounds are absolute, and what a row does not see adds exact
    zeros, so that a row comes out the same alone and among others.
    """
    heads, rows, dim = q.shape
    kv = packed.keys.shape[0]
    blocks = _Blocks(start, rows)
    queries = blocks.cut(q, kv)
    state = _exact_part(queries, blocks, near, soft_cap)
    flat = queries.reshape(kv, -1, dim)
    limits = blocks.exact_from
    tile = _tile(heads * blocks.count * blocks.each)
    for at in range(0, int(limits[-1]), tile):
        stop = min(at + tile, packed.capacity)
        keys, values = packed.tile(at, stop)
        scores = _capped(flat @ keys.swapaxes(-1, -2), soft_cap)
        if at < SINKS or stop > limits[0]:
            seen = np.arange(at, stop)
            live = mx.array((seen >= SINKS) & (seen < limits[:, None]))[None, :, None]
            shape = scores.shape
            scores = scores.reshape(kv, blocks.count, -1, shape[-1])
            scores = mx.where(live, scores, -mx.inf).reshape(shape)
        state.add(scores, values)
    total, out = state.total, state.out
    if sinks is not None:
        logits = blocks.cut(sinks[..., None], kv).reshape(kv, -1, 1)
        top = mx.maximum(state.top, logits)
        fade = mx.exp(state.top - top)
        total, out = total * fade + mx.exp(logits - top), out * fade
    return blocks.join((out / total).reshape(*queries.shape), heads)


LISTED_BYTES = 64 << 20
"""Keys and values of listed positions expanded at once; more rows are taken in turns."""


def packed_listed_reference(
    q: mx.array,
    tokens: mx.array,
    seen: mx.array,
    start: int,
    packed: Packed,
    near: Near,
) -> mx.array:
    """Rows at positions from `start` on, each over its own list of positions.

    Shapes: q float32 [H, L, dim]; tokens int32 [L, n], of which those count where `seen`; near as
    above -> float32 [H, L, dim].
    """
    kv, (rows, count) = packed.keys.shape[0], tokens.shape
    limits = BLOCK * mx.maximum((start + mx.arange(rows)) // BLOCK - 1, 0)
    exact = (tokens < SINKS) | (tokens >= limits[:, None])
    step = max(1, LISTED_BYTES // (16 * kv * count * packed.dim))
    out = []
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        both = zip(near.rows(tokens[part]), packed.rows(tokens[part]), strict=True)
        keys, values = (mx.where(exact[part][..., None], *pair).swapaxes(0, 1) for pair in both)
        queries = q[:, part].swapaxes(0, 1)[:, :, None]
        mask = seen[part][:, None, None]
        found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)
        out.append(found[:, :, 0].swapaxes(0, 1))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=1)


def _exact_part(queries: mx.array, blocks: _Blocks, near: Near, soft_cap: float) -> _Running:
    """What rows read exactly: 64 positions around their block, and the first 4."""
    kv, count, grouped, _ = queries.shape
    keys, values = (blocks.pairs(a, near.start) for a in (near.keys, near.values))
    firsts = [a.astype(mx.float32)[:, None] for a in (near.first_keys, near.first_values)]
    scores = [queries @ k.swapaxes(-1, -2) for k in (keys, firsts[0])]
    position = (blocks.first + np.arange(count) - 1)[:, None] * BLOCK + np.arange(WINDOW)
    seen = (position[:, None] <= blocks.positions[..., None]) & (position[:, None] >= 0)
    far = np.broadcast_to(blocks.exact_from[:, None, None] > 0, (*seen.shape[:2], SINKS))
    live = np.concatenate([seen, far], axis=-1)
    live = np.repeat(live[:, None], grouped // blocks.each, axis=1).reshape(count, grouped, -1)
    joined = _capped(mx.concatenate(scores, axis=-1), soft_cap)
    joined = mx.where(mx.array(live), joined, -mx.inf)
    top = mx.max(joined, axis=-1, keepdims=True)
    weights = mx.exp(joined - top)
    out = weights[..., :WINDOW] @ values + weights[..., WINDOW:] @ firsts[1]
    total = mx.sum(weights, axis=-1, keepdims=True)
    return _Running(*(a.reshape(kv, count * grouped, -1) for a in (top, total, out)))


def _capped(scores: mx.array, soft_cap: float) -> mx.array:
    return soft_cap * mx.tanh(scores / soft_cap) if soft_cap else scores


def _tile(rows: int) -> int:
    """Keys expanded at once: few on a CPU, so that sums run in one order for any row count."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return CPU_TILE
    return max(CPU_TILE, min(4096, GPU_SCORES // rows // BLOCK * BLOCK))
