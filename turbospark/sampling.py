"""One token out of one row of logits: penalties, truncations, temperature, one uniform number.

Knows numbers. Does not know models, text or MLX's random state, which it never touches: the same
seed gives the same tokens whatever else the process draws.

The order is fixed: finite check, repetition penalty, presence and frequency penalties, the mask of
a grammar, softmax at
temperature 1 over the whole vocabulary, top_k, top_p (on the whole vocabulary's mass), min_p
(relative to the top), then p^(1/T) renormalised, then one draw. Temperature comes after the
truncations, so it never changes which tokens are in the running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from time import time_ns
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turbospark.errors import NonFiniteLogitsError, TurbosparkError
from turbospark.options import GenerationOptions

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_BLOCK = 64

Row = NDArray[np.floating[Any]]
Ids = NDArray[np.intp]


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) of draw `step` under `seed`: splitmix64, top 53 bits."""
    z = ((seed ^ (step * _GAMMA & _MASK)) + _GAMMA) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return ((z ^ z >> 31) >> 11) / 2**53


class Constraint(Protocol):
    """What an answer is held to."""

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        """bool [vocab]: which tokens may follow."""


class Sampler:
    """Draws the tokens of one generation.

    `seed` is the options' seed, or one taken from the clock when they have none.
    """

    def __init__(
        self,
        options: GenerationOptions,
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.options = options
        self._constraint = constraint
        self.vocab_size = vocab_size
        self.seed = time_ns() & _MASK if options.seed is None else options.seed
        self._penalises = (
            options.repetition_penalty != 1
            or options.presence_penalty != 0
            or options.frequency_penalty != 0
        )
        self._tally = _Tally()

    @property
    def takes_likeliest(self) -> bool:
        """Whether every draw is the first of the largest logits as they come."""
        plain = not self._penalises and self._constraint is None
        return self.options.temperature == 0 and plain

    def sample(self, logits: Any, history: Sequence[int], prompt_len: int) -> int:
        """The next token id.

        `logits`: float32 [vocab], numpy or an evaluated MLX array. `history`: prompt, then what was
        generated; `history[prompt_len:]` alone is subject to presence and frequency penalties, and
        its length is the number of this draw. Ties go to the lower id.
        Raises NonFiniteLogitsError for NaN or infinite logits.
        """
        row = self._adjusted(logits, history, prompt_len)
        if self.options.temperature == 0:
            return int(np.argmax(row))  # the first, hence lowest, of equal maxima
        ids, log_p = self.distribution(row)
        return draw(ids, log_p, uniform(self.seed, len(history) - prompt_len))

    def shaped(self, logits: Any, history: Sequence[int], prompt_len: int) -> tuple[Ids, Row]:
        """Candidate ids and their probabilities (float64, summing to 1) for the same draw.

        Only where the temperature is above 0.
        """
        ids, log_p = self.distribution(self._adjusted(logits, history, prompt_len))
        mass = np.exp(log_p - log_p.max())
        return ids, mass / mass.sum()

    def uniforms(self) -> Iterator[float]:
        """Numbers in [0, 1) under this seed, never one twice; number 0 is `sample`'s first."""
        return (uniform(self.seed, step) for step in count(1))

    def _adjusted(self, logits: Any, history: Sequence[int], prompt_len: int) -> Row:
        row = self._checked(logits)
        if self._penalises:
            row = self._penalised(row, history, prompt_len)
        if self._constraint is not None:  # the rest sees a smaller vocabulary
            row = np.where(self._constraint.allowed(history[prompt_len:]), row, -np.inf)
        return row

    def distribution(self, row: Row) -> tuple[Ids, Row]:
        """Candidate ids and their log probabilities (float64, unnormalised), after everything but
        the draw. Ranked best first with top_k, in id order without.
        """
        options = self.options
        if options.top_k:
            ids = top_ids(row, options.top_k)
            log_p = row[ids].astype(np.float64)
        else:
            ids = np.arange(len(row))
            log_p = row.astype(np.float64)
        if self._constraint is not None:
            possible = log_p > -np.inf
            ids, log_p = ids[possible], log_p[possible]
        best = log_p.max()
        if options.top_p < 1:
            mass = np.subtract(row, best, dtype=np.float64)
            np.exp(mass, out=mass)
            ranked = np.exp(log_p - best)
            before = np.cumsum(ranked) - ranked
            keep = max(1, int(np.count_nonzero(before < options.top_p * mass.sum())))
            ids, log_p = ids[:keep], log_p[:keep]
        if options.min_p > 0:
            likely = log_p - best >= np.log(options.min_p)
            ids, log_p = ids[likely], log_p[likely]
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf
            return ids, (log_p - best) / options.temperature

    def _checked(self, logits: Any) -> Row:
        row: Row = np.asarray(logits, dtype=np.float32)
        if row.shape != (self.vocab_size,):
            raise TurbosparkError(
                f"logits of shape {row.shape} given to a sampler of {self.vocab_size} tokens"
            )
        finite = np.isfinite(row)
        if not finite.all():
            first = int(np.argmin(finite))
            raise NonFiniteLogitsError(
                f"{int(np.count_nonzero(~finite))} of {self.vocab_size} logits are not finite, "
                f"the first is {row[first]} for token {first}; the weights or the dtype are unfit"
            )
        return row

    def _penalised(self, row: Row, history: Sequence[int], prompt_len: int) -> Row:
        options, adjusted = self.options, row.astype(np.float64)
        self._tally.follow(history, prompt_len)
        seen, generated, counts = self._tally.arrays()
        if options.repetition_penalty != 1:
            values = adjusted[seen]
            penalty = options.repetition_penalty
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / penalty, values * penalty)
            if not np.isfinite(values).all():
                raise NonFiniteLogitsError(
                    f"repetition_penalty={penalty} makes logits infinite; use a value nearer to 1"
                )
            adjusted[seen] = values
        adjusted[generated] -= options.presence_penalty + options.frequency_penalty * counts
        return adjusted


def top_ids(row: Row, k: int) -> Ids:
    """Ids of the k largest values, largest first; of equal values the lower ids, in order."""
    if k >= len(row):
        return np.argsort(-row, kind="stable")
    candidates = _in_best_blocks(row, k)
    values = row[candidates]
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = candidates[values > threshold]
    level = candidates[values == threshold][: k - len(above)]
    ids = np.concatenate([above, level])
    return ids[np.lexsort((ids, -row[ids]))]


def _in_best_blocks(row: Row, k: int) -> Ids:
    """Ascending ids that surely include the top k: those in blocks whose maximum is in the top k.

    At least k values reach the k-th best block maximum, so nothing below it can be among the top.
    Scanning maxima is far cheaper than partitioning a row of 150,000.
    """
    blocks = len(row) // _BLOCK
    if blocks <= k:
        return np.arange(len(row))
    peaks = row[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    chosen = np.flatnonzero(peaks >= np.partition(peaks, blocks - k)[blocks - k])
    inside = (chosen[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    return np.concatenate([inside, np.arange(blocks * _BLOCK, len(row))])


def draw(ids: Ids, log_p: Row, u: float) -> int:
    """The id whose slice of the cumulated distribution holds `u` in [0, 1)."""
    edges = np.cumsum(np.exp(log_p - log_p.max()))
    at = int(np.searchsorted(edges, u * edges[-1], side="right"))
    return int(ids[min(at, len(ids) - 1)])


class _Tally:
    """Distinct ids of a growing history and counts of its generated part, kept incrementally."""

    def __init__(self) -> None:
        self._history: Sequence[int] | None = None
        self._length = 0
        self._seen: dict[int, None] = {}
        self._counts: dict[int, int] = {}

    def follow(self, history: Sequence[int], prompt_len: int) -> None:
        """Account for what `history` gained; another or shortened history starts over."""
        if history is not self._history or len(history) < self._length:
            self._history, self._length = history, 0
            self._seen, self._counts = {}, {}
        for position in range(self._length, len(history)):
            token = history[position]
            self._seen[token] = None
            if position >= prompt_len:
                self._counts[token] = self._counts.get(token, 0) + 1
        self._length = len(history)

    def arrays(self) -> tuple[Ids, Ids, NDArray[np.float64]]:
        """Distinct ids of all, distinct generated ids, and the latter's counts."""
        seen = np.fromiter(self._seen, np.intp, len(self._seen))
        generated = np.fromiter(self._counts, np.intp, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        return seen, generated, counts
