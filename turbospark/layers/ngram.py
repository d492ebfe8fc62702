"""Hashed n-gram embeddings: the rows of a big table that a token reads, and the layer.

In this order: the hash (on the host, in 64-bit integers), the layer. Knows tokens and streams; does
not know where the table lives.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark.cache.recurrent import NgramState, Saved
from turbospark.cache.specs import NgramSpec
from turbospark.cache.state import LayerStates
from turbospark.layers.gated_delta import silu
from turbospark.layers.hyper import GroupedNorm
from turbospark.layers.weights import Weights

GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


# --- the hash -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NgramHash:
    """One multiplier per place in an n-gram; per head a prime number of rows and where they begin.

    The first `per_size` heads hash pairs of tokens, the next ones triples, and so on. `eos` ends a
    text: what stands before it is not part of a later n-gram, and it stands for missing tokens.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    per_size: int
    eos: int
    rows: int
    """Rows of the table: the heads' rows, padded."""

    @classmethod
    def derive(
        cls, *, vocab: int, size: int, per_size: int, base: int, divisor: int, seed: int,
        module: int, eos: int,
    ) -> NgramHash:  # fmt: skip
        """The hash of the `module`-th layer that has one, for n-grams of up to `size` tokens.

        `base` is the least number of rows per head, `divisor` what the table's rows are padded to.
        """
        half = max(1, ((2**63 - 1) // vocab) // 2)
        start = seed + 10007 * module
        multipliers = tuple(
            2 * (_splitmix64((start + GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(size)
        )
        heads = (size - 1) * per_size
        sizes = _primes(base, (module + 1) * heads)[module * heads :]
        rows = -(-sum(sizes) // divisor) * divisor
        return cls(multipliers, tuple(sizes), per_size, eos, rows)

    @property
    def offsets(self) -> np.ndarray:
        """The first row of each head, int64."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)

    def table_rows(self, ids: np.ndarray, register: np.ndarray) -> np.ndarray:
        """ids int64 [L] after those of `register` [size - 1], newest first -> int64 [L, heads].

        Products stay below 2^63 for ids of the vocabulary.
        """
        context = self._context(ids, register)
        mixed = context[0] * self.multipliers[0]
        parts = []
        for place in range(1, len(self.multipliers)):
            mixed = mixed ^ (context[place] * self.multipliers[place])
            heads = slice((place - 1) * self.per_size, place * self.per_size)
            sizes = np.array(self.sizes[heads], np.int64)
            parts.append(mixed[:, None] % sizes + self.offsets[heads])
        return np.concatenate(parts, axis=1)

    def register_after(self, ids: np.ndarray, register: np.ndarray) -> np.ndarray:
        """The register once `ids` have been read; int64 [size - 1]."""
        # What a token after the last one would see behind it.
        following = self._context(np.append(ids, self.eos), register)
        return np.array([place[-1] for place in following[1:]], np.int64)

    def _context(self, ids: np.ndarray, register: np.ndarray) -> list[np.ndarray]:
        """Per place s, the token s back of each, or eos where one of those between is eos."""
        history = np.concatenate([register[::-1], ids]).astype(np.int64)
        places = [ids.astype(np.int64)]
        for back in range(1, len(self.multipliers)):
            first = len(register) - back
            token = history[first : first + len(ids)]
            if back > 1:
                token = np.where(places[-1] == self.eos, self.eos, token)
            places.append(token)
        return places


def _splitmix64(value: int) -> int:
    value = (value + GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes(least: int, count: int) -> list[int]:
    """The first `count` primes >= `least`."""
    found: list[int] = []
    number = max(least, 2)
    while len(found) < count:
        if _is_prime(number):
            found.append(number)
        number += 1
    return found


def _is_prime(n: int) -> bool:
    """Miller and Rabin's test; certain with these bases below 3.2e9."""
    for p in (2, 3, 5, 7):
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7):
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


# --- the layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NgramShape:
    """Sizes of the layer: `streams` of width `hidden`, `taps` of the convolution."""

    hash: NgramHash
    streams: int
    hidden: int
    taps: int

    @property
    def dilation(self) -> int:
        return len(self.hash.multipliers)

    @property
    def memory(self) -> NgramSpec:
        """What a cache must hold."""
        return NgramSpec(
            (self.taps - 1) * self.dilation,
            self.streams * self.hidden,
            self.dilation - 1,
            self.hash.eos,
        )


class NgramEmbedding:
    """What a token's n-grams add to every stream: gated values and their dilated convolution."""

    def __init__(self, w: Weights, name: str, state: int, shape: NgramShape, eps: float) -> None:
        self.state, self.shape = state, shape
        self.table = w.table(f"{name}.ple_embedding.ngram_embedding.weight")
        self.key_proj, self.value_proj = (
            w.linear(f"{name}.key_proj"),
            w.linear(f"{name}.value_proj"),
        )
        self.norm_key, self.norm_query, self.norm_conv = (
            GroupedNorm(w, f"{name}.norm_{part}.weight", shape.streams, eps)
            for part in ("key", "query", "conv")
        )
        kernel = w.array(f"{name}.conv1d.weight", mx.float32)
        self.kernel = mx.contiguous(kernel.reshape(-1, shape.taps).T)
        self.dtype = w.dtype
        mx.eval(self.kernel)

    def __call__(self, x: mx.array, ids: mx.array, states: LayerStates) -> mx.array:
        """x [1, L, streams * H], ids [1, L] -> what is added to x; the memory moves on by L."""
        shape, rows = self.shape, x.shape[1]
        memory: NgramState = states.layers[self.state]
        tokens = np.array(ids)[0].astype(np.int64)
        register = np.array(memory.register)[0].astype(np.int64)
        gathered = self.table.planes(shape.hash.table_rows(tokens, register).reshape(-1))
        embedded = gathered.dense(self.dtype).reshape(1, rows, -1)
        values = self._gate(x, embedded) * self.value_proj(embedded)[..., None, :]
        values = values.reshape(x.shape)
        joined = mx.concatenate([memory.conv, self.norm_conv(values)], axis=1)

        def after(count: int) -> Saved:
            newest = shape.hash.register_after(tokens[:count], register)
            past = mx.contiguous(joined[:, count : count + memory.conv.shape[1]])
            return past, mx.array(newest[None].astype(np.int32))

        memory.update(states.step, after(rows), after)
        return values + silu(self._conv(joined, rows)).astype(x.dtype)

    def _gate(self, x: mx.array, embedded: mx.array) -> mx.array:
        """[1, L, streams, 1]: the sigmoid of a signed root of how well keys fit the streams."""
        grouped = (1, x.shape[1], self.shape.streams, self.shape.hidden)
        key = self.norm_key(self.key_proj(embedded)).reshape(grouped)
        query = self.norm_query(x).reshape(grouped)
        fit = mx.sum((key * query).astype(mx.float32), axis=-1, keepdims=True)
        fit = fit * self.shape.hidden**-0.5
        root = mx.sign(fit) * mx.sqrt(mx.maximum(mx.abs(fit), 1e-6))
        return mx.sigmoid(root).astype(x.dtype)

    def _conv(self, joined: mx.array, rows: int) -> mx.array:
        """Depthwise, every `dilation`-th row, oldest first; float32 [1, L, channels]."""
        wide = joined.astype(mx.float32)
        out = wide[:, :rows] * self.kernel[0]
        for tap in range(1, self.shape.taps):
            at = tap * self.shape.dilation
            out = out + wide[:, at : at + rows] * self.kernel[tap]
        return out
