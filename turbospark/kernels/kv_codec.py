"""The TurboQuant row codec in plain MLX: rotate, quantize with a row scale, pack, and back.

A row is balanced (keys), multiplied by fixed signs, turned by a Hadamard matrix and coded with one
codebook for all dims, whose elements are close to normal after the turn. Knows rows, codes and
words. Does not know caches or attention. Source of the method: arXiv 2504.19874; of the row scale
that keeps inner products unbiased: arXiv 2604.18555.

Words hold codes as planes of 4, 2 or 1 bits (3 bits are a plane of 2 and one of 1), and a word's
halves hold the two codes of a pair, so that one mask takes a pair out as two 16-bit fields.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

PLANES = {2: (2,), 3: (2, 1), 4: (4,)}
"""Bits of each plane that a code of so many bits is cut into, lowest bits first."""
BLOCK = 32
"""Tokens that are packed together: a value word holds a dim of several tokens."""
# Values u (A + B u^2) at u = code - (levels - 1) / 2, in half precision as kernels compute them:
# within 2 % of the squared error of the best codebook for normal elements, and no table.
_CUBIC = {2: (1.33934, 0.17108), 3: (1.65012, 0.49667), 4: (1.80370, 0.88498)}
SEARCH = (0.86, 0.93, 1.00, 1.07, 1.14)
KEY_SEED, VALUE_SEED = 0, 1
LARGEST = 65504.0


def turns(dim: int) -> bool:
    """Whether rows of `dim` elements can be turned: their Hadamard matrix is its own inverse."""
    base = dim // 12 if dim % 12 == 0 else dim
    return 16 <= dim <= 512 and base & (base - 1) == 0


def fills_words(dim: int, bits: int) -> bool:
    """Whether `dim` codes of `bits` bits are whole words in every plane."""
    return all(dim * plane % 32 == 0 for plane in PLANES[bits])


@cache
def cubic(bits: int) -> tuple[float, float]:
    """(A, B) of the codebook, rounded to half precision."""
    a, b = _CUBIC[bits]
    unit = 2.0 / ((1 << bits) - 1)
    return float(np.float16(a * unit)), float(np.float16(b * unit**3))


@cache
def levels(bits: int) -> np.ndarray:
    """float32 [2^bits], ascending and odd: what a code stands for, for elements of variance 1."""
    a, b = (np.float16(x) for x in cubic(bits))
    u = (np.arange(1 << bits) - ((1 << bits) - 1) / 2).astype(np.float16)
    inner = (b.astype(np.float64) * (u * u) + a.astype(np.float64)).astype(np.float16)
    return (u * inner).astype(np.float32)


@cache
def codebook(bits: int) -> mx.array:
    """`levels` as an array."""
    return mx.array(levels(bits))


@cache
def signs(dim: int, seed: int) -> mx.array:
    """float32 [dim] of +1 and -1, the same wherever and whenever: splitmix64 of seed and dim."""
    mask = (1 << 64) - 1
    state = (seed + dim * 7919) & mask
    out = []
    for _ in range(dim):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(1.0 if (z ^ (z >> 31)) >> 63 else -1.0)
    return mx.array(out, dtype=mx.float32)


def turn(x: mx.array, seed: int) -> mx.array:
    """float32 rows [..., dim] by the signs of `seed`, then the Hadamard matrix."""
    return mx.hadamard_transform(x.astype(mx.float32) * signs(x.shape[-1], seed))


def turn_back(x: mx.array, seed: int) -> mx.array:
    """The inverse of `turn`, float32."""
    return mx.hadamard_transform(x.astype(mx.float32)) * signs(x.shape[-1], seed)


def half(x: mx.array) -> mx.array:
    """float16, what exceeds its range at its ends."""
    return mx.clip(x, -LARGEST, LARGEST).astype(mx.float16)


# --- codes ----------------------------------------------------------------------------------------


def quantize_rows(rows: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Codes and scales of turned rows.

    Shapes: rows [..., dim] -> codes uint32 [..., dim], scales float16 [...]. Of five widths of the
    codebook the one whose direction is nearest is taken; the scale makes the inner product with the
    row itself exact.
    """
    rows = rows.astype(mx.float32)
    dim, upper = rows.shape[-1], 1 << (bits - 1)
    norm = mx.sqrt(mx.sum(rows * rows, axis=-1, keepdims=True))
    unit = rows * (dim**0.5 / mx.maximum(norm, 1e-30))
    size, values = mx.abs(unit), levels(bits)[upper:]
    middles = (values[1:] + values[:-1]) / 2
    best = codes = along = None
    for width in SEARCH:
        magnitude = mx.zeros(size.shape, dtype=mx.uint32)
        for middle in middles:
            magnitude = magnitude + (size > float(middle) * width)
        found = mx.where(unit > 0, upper + magnitude, upper - 1 - magnitude)
        coded = mx.take(codebook(bits), found)
        inner = mx.sum(unit * coded, axis=-1, keepdims=True)
        merit = inner * inner / mx.sum(coded * coded, axis=-1, keepdims=True)
        if best is None or codes is None or along is None:
            best, codes, along = merit, found, inner
        else:
            better = merit > best
            best = mx.where(better, merit, best)
            codes = mx.where(better, found, codes)
            along = mx.where(better, inner, along)
    assert codes is not None and along is not None
    scale = norm * dim**0.5 / mx.maximum(along, 1e-30)
    scale = mx.where(norm > 0, scale, 0.0)
    return mx.where(norm > 0, codes, 0).astype(mx.uint32), half(scale.squeeze(-1))


# --- words ----------------------------------------------------------------------------------------


def pack_pairs(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., n, 2] as words uint32 [..., n * bits / 16], plane after plane.

    In a plane of B bits, with n = 16 / B, code e of pair p lies in word p / n, at bit p % n * B +
    16 e.
    """
    words, below = [], 0
    for plane in PLANES[bits]:
        per = 16 // plane
        part = (codes >> below) & ((1 << plane) - 1)
        part = part.reshape(*codes.shape[:-2], -1, per, 2)
        shift = mx.arange(per, dtype=mx.uint32)[:, None] * plane
        shift = shift + mx.array([0, 16], dtype=mx.uint32)
        words.append(mx.sum(part << shift, axis=(-1, -2)).astype(mx.uint32))
        below += plane
    return mx.concatenate(words, axis=-1)


def unpack_pairs(words: mx.array, bits: int) -> mx.array:
    """The inverse of `pack_pairs`: uint32 [..., n, 2]."""
    count, at, below, codes = words.shape[-1] * 16 // bits, 0, 0, None
    for plane in PLANES[bits]:
        per = 16 // plane
        shift = mx.arange(per, dtype=mx.uint32)[:, None] * plane
        shift = shift + mx.array([0, 16], dtype=mx.uint32)
        part = words[..., at : at + count // per]
        found = (part[..., None, None] >> shift) & ((1 << plane) - 1)
        found = found.reshape(*words.shape[:-1], count, 2) << below
        codes = found if codes is None else codes | found
        at, below = at + count // per, below + plane
    assert codes is not None
    return codes


def pack_keys(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., dim] as words [..., dim * bits / 32]; dims 2 p and 2 p + 1 are pair p."""
    return pack_pairs(codes.reshape(*codes.shape[:-1], -1, 2), bits)


def unpack_keys(words: mx.array, bits: int) -> mx.array:
    """The inverse of `pack_keys`."""
    pairs = unpack_pairs(words, bits)
    return pairs.reshape(*words.shape[:-1], -1)


def pack_values(codes: mx.array, bits: int) -> mx.array:
    """Codes [..., tokens, dim] as words [..., tokens / 32, bits, dim].

    Tokens 8 j + 2 t and 8 j + 2 t + 1 of a block are pair 4 t + j: a kernel's lane t of four then
    finds its tokens side by side.
    """
    *lead, tokens, dim = codes.shape
    pairs = codes.reshape(*lead, tokens // BLOCK, 4, 4, 2, dim)  # j, t, e
    n = len(lead) + 1
    order = [*range(n), n + 3, n + 1, n, n + 2]
    pairs = pairs.transpose(order).reshape(*lead, tokens // BLOCK, dim, 16, 2)
    return pack_pairs(pairs, bits).swapaxes(-1, -2)


def unpack_values(words: mx.array, bits: int) -> mx.array:
    """The inverse of `pack_values`."""
    *lead, blocks, _, dim = words.shape
    pairs = unpack_pairs(words.swapaxes(-1, -2), bits).reshape(*lead, blocks, dim, 4, 4, 2)
    n = len(lead) + 1  # dim, t, j, e -> j, t, e, dim
    order = [*range(n), n + 2, n + 1, n + 3, n]
    return pairs.transpose(order).reshape(*lead, blocks * BLOCK, dim)


def values_at(words: mx.array, tokens: mx.array, bits: int) -> mx.array:
    """Codes uint32 [KV, ..., dim] of single tokens int32 [...] in words [KV, blocks, bits, dim]."""
    inside = tokens % BLOCK
    pair, shift = inside % 8 // 2 * 4 + inside // 8, inside % 2 * 16
    at, below, codes = 0, 0, None
    for plane in PLANES[bits]:
        per = 16 // plane
        part = words[:, tokens // BLOCK, at + pair // per]
        by = (shift + pair % per * plane).astype(mx.uint32)[..., None]
        found = ((part >> by) & ((1 << plane) - 1)) << below
        codes = found if codes is None else codes | found
        at, below = at + plane, below + plane
    assert codes is not None
    return codes


def dequantize(codes: mx.array, scales: mx.array, bits: int) -> mx.array:
    """Turned rows float32 [..., dim] of codes [..., dim] and scales [...]."""
    return mx.take(codebook(bits), codes) * scales.astype(mx.float32)[..., None]
