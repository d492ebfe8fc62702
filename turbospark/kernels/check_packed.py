"""Checks of the kernels of packed caches; see `check`."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from turbospark.kernels import kv_codec, packed_decode, packed_qsa
from turbospark.kernels.check_base import Check, floats, normal
from turbospark.kernels.kv_encode import encode_rows_reference, launch_encode
from turbospark.kernels.packed_attention import (
    Near,
    Packed,
    first_exact,
    packed_attention_reference,
    packed_listed_reference,
)
from turbospark.kernels.packed_turn import launch_turn
from turbospark.kernels.qsa_attend import listed_tokens
from turbospark.kernels.source import ceil_div


def packed_checks() -> Iterator[Check]:
    """Packed caches of one, three and eight rows, and rows on their way into one."""
    yield _packed(8, 4, 128, 8192, (4, 4), 1)
    yield _packed(8, 4, 128, 4001, (4, 3), 3)
    yield _packed(4, 8, 64, 2000, (2, 2), 8)
    yield _packed(2, 4, 256, 3000, (3, 3), 1)
    yield _chosen((4, 4))
    yield _chosen((3, 3))
    yield _turned()
    yield _encoded(True)
    yield _encoded(False)


def _packed(kv: int, group: int, dim: int, length: int, bits: tuple[int, int], rows: int) -> Check:
    dtype, capacity, heads = mx.float16, ceil_div(length, 32) * 32, kv * group
    q = normal((heads, rows, dim), mx.float32, 0) * 0.1
    exact = [normal((kv, capacity, dim), dtype, seed) for seed in (1, 2)]
    parts: list[mx.array] = []
    for a, width, keys in zip(exact, bits, (True, False), strict=True):
        parts += encode_rows_reference(a, width, keys)
    packed, start = Packed(*parts), first_exact(length - rows)
    slots = np.arange(128)
    ring = mx.array(np.maximum(slots + (length - 1 - slots) // 128 * 128, 0))
    firsts = [a[:, :4] for a in exact]
    held = Near(0, *(mx.contiguous(a[:, ring]) for a in exact), *firsts)
    near = Near(start, *(a[:, start:length] for a in exact), *firsts)
    count, tuning = mx.array([length], dtype=mx.int32), packed_decode.tuned(dim, kv)

    def run(where: str) -> mx.array:
        o, ml = packed_decode.launch_partial(q, packed, held, count, tuning).run(where)
        return packed_decode.launch_combine(q, o, ml, None, dtype, tuning).run(where)[0]

    def own() -> mx.array:
        out = packed_attention_reference(q, length - rows, packed, near)
        return kv_codec.turn_back(out, kv_codec.VALUE_SEED).swapaxes(0, 1).astype(dtype)

    coded, newest = [floats(a) for a in packed.tile(0, capacity)], [floats(a) for a in exact]
    want = np.zeros((rows, heads, dim))
    for m in range(rows):
        i = length - rows + m
        p = np.arange(i + 1)
        as_is = ((p < 4) | (p >= first_exact(i)))[:, None]
        for head in range(heads):
            k, v = (
                np.where(as_is, a[head // group, p], b[head // group, p])
                for a, b in zip(newest, coded, strict=True)
            )
            scores = k @ floats(q)[head, m]
            share = np.exp(scores - scores.max())
            want[m, head] = share @ v / share.sum()
    turned = kv_codec.turn_back(mx.array(want.astype(np.float32)), kv_codec.VALUE_SEED)
    label = f"{rows} x {kv}x{group} of {dim}, {length} keys {bits[0]}/{bits[1]}"
    read = sum(a.nbytes for a in parts)
    return Check("packed_decode", label, dtype, run, own, floats(turned).reshape(-1), read)


def _chosen(bits: tuple[int, int]) -> Check:
    """512 of the blocks of four before position 32767, each head over 2,051 positions."""
    kv, group, dim, last, splits = 2, 12, 256, 32766, packed_qsa.SPLITS
    q = normal((1, kv * group, dim), mx.float32, 0) * 0.1
    exact = [normal((kv, 32768, dim), mx.float16, seed) for seed in (1, 2)]
    parts: list[mx.array] = []
    for a, width, keys in zip(exact, bits, (True, False), strict=True):
        parts += encode_rows_reference(a, width, keys)
    packed, first = Packed(*parts), first_exact(last)
    near = Near(first, *(a[:, first : last + 1] for a in exact), *(a[:, :4] for a in exact))
    blocks = np.sort(np.random.default_rng(3).permutation((last + 1) // 4)[:512])
    ids = mx.array(blocks[None].astype(np.int32))

    def run(where: str) -> mx.array:
        start = mx.array([last], dtype=mx.int32)
        o, ml = packed_qsa.launch_partial(q, packed, near, ids, start, 4, splits).run(where)
        return packed_qsa.launch_combine(q, o, ml, mx.float16, splits).run(where)[0]

    def own() -> mx.array:
        tokens, seen = listed_tokens(ids, last, 4)
        out = packed_listed_reference(q.swapaxes(0, 1), tokens, seen, last, packed, near)
        return kv_codec.turn_back(out, kv_codec.VALUE_SEED).astype(mx.float16)

    spots = np.concatenate([(blocks[:, None] * 4 + np.arange(4)).ravel(), np.arange(32764, 32767)])
    as_is = ((spots < 4) | (spots >= first))[:, None]
    coded = [floats(a)[:, spots] for a in packed.tile(0, 32768)]
    k, v = (np.where(as_is, floats(a)[:, spots], b) for a, b in zip(exact, coded, strict=True))
    want = np.zeros((kv * group, dim))
    for head in range(kv * group):
        share = np.exp(k[head // group] @ floats(q)[0, head])
        want[head] = share @ v[head // group] / share.sum()
    turned = kv_codec.turn_back(mx.array(want.astype(np.float32)), kv_codec.VALUE_SEED)
    label = f"512 of 8191 blocks, {kv}x{group} of {dim}, {bits[0]}/{bits[1]}"
    read = 2051 * kv * (dim * sum(bits) // 8 + 4)
    return Check("packed_qsa", label, mx.float16, run, own, floats(turned).reshape(-1), read)


def _turned() -> Check:
    q, k, v = (normal((1, h, 1, 128), mx.bfloat16, h) for h in (32, 8, 4))
    v = mx.concatenate([v, v], axis=1)
    count = mx.array([300], dtype=mx.int32)

    def run(where: str) -> mx.array:
        ring = [mx.zeros((8, 128, 128), mx.float16) for _ in range(2)]
        first = [mx.zeros((8, 4, 128), mx.float16) for _ in range(2)]
        mx.eval(ring, first)
        near = Near(0, *ring, *first)
        out = launch_turn(q, k, v, None, None, count, 1.0, near).run(where)[0]
        mx.eval(out)  # the rows are there once the queries are
        return mx.concatenate([a.astype(mx.float32).reshape(-1) for a in (out, ring[0][:, 43])])

    def own() -> mx.array:
        parts = [kv_codec.turn(a, kv_codec.KEY_SEED) for a in (q, k)]
        return mx.concatenate([parts[0].reshape(-1), kv_codec.half(parts[1]).reshape(-1)])

    matrix = np.ones((1, 1))
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = floats(kv_codec.signs(128, kv_codec.KEY_SEED))
    want = np.concatenate([(floats(a) * signs @ matrix).reshape(-1) for a in (q, k)]) / 128**0.5
    return Check("packed_turn", "32 + 2 x 8 heads of 128", mx.float16, run, own, want, q.nbytes)


def _encoded(keys: bool) -> Check:
    """The cosine of every row with what it is read as: 1 - error of 4 bits."""
    rows = normal((8, 1024, 128), mx.float16, 0)

    def cosines(words: mx.array, scales: mx.array) -> mx.array:
        unpack = kv_codec.unpack_keys if keys else kv_codec.unpack_values
        got = kv_codec.dequantize(unpack(words, 4), scales, 4)
        exact = rows.astype(mx.float32)
        lengths = (exact * exact).sum(-1) * (got * got).sum(-1)
        return mx.mean((exact * got).sum(-1) / mx.sqrt(lengths)).reshape(1)

    def run(where: str) -> mx.array:
        words, scales = launch_encode(rows, 4, keys).run(where)
        return cosines(words, scales)

    want = np.array([(1 - 0.0082) ** 0.5])
    label = f"8 x 1024 {'keys' if keys else 'values'} of 128, 4 bits"
    return Check(
        "kv_encode",
        label,
        mx.float16,
        run,
        lambda: cosines(*encode_rows_reference(rows, 4, keys)),
        want,
        rows.nbytes,
    )
