"""Which proposals are accepted, so that what is committed follows the model's own law.

Knows distributions and uniform numbers. Does not know drafters or caches. `match` (and greedy,
where the sampler takes the best) draws from the model and looks whether that was proposed: exact
for any drafter, and the tokens of sequential decoding for the same seed. `rejection` accepts a
proposal x drawn from q with probability min(1, p(x) / q(x)) and else draws from what p has more
than q: exact in distribution (Leviathan et al. 2023, Chen et al. 2023), and accepts more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from turbospark.speculation.drafter import Chooser, Proposal

NO_RESIDUAL = 1e-12


class Sampler(Protocol):
    """What a law needs of the sampler: its draw, and the distribution behind it."""

    def sample(self, logits: Any, history: Sequence[int], prompt_len: int) -> int:
        """One token."""

    def shaped(
        self, logits: Any, history: Sequence[int], prompt_len: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Candidate ids and their probabilities, after penalties, truncations, temperature."""


class Law(Protocol):
    """Judges proposals; `chooser` is None where they should be the drafter's likeliest."""

    def chooser(self, history: Sequence[int], prompt_len: int) -> Chooser | None:
        """How a drafter draws what follows `history`."""

    def take(
        self, row: Any, proposal: Proposal | None, history: Sequence[int], prompt_len: int
    ) -> tuple[int, bool]:
        """The token after `history` given the model's logits, and whether it was `proposal`."""


class Matching:
    """Draw as sequential decoding does; a proposal is accepted when it is what was drawn."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def chooser(self, history: Sequence[int], prompt_len: int) -> None:
        """Proposals are the drafter's likeliest: any will do."""

    def take(
        self, row: Any, proposal: Proposal | None, history: Sequence[int], prompt_len: int
    ) -> tuple[int, bool]:
        """The sampler's token."""
        token = self.sampler.sample(row, history, prompt_len)
        return token, proposal is not None and token == proposal.token


class Rejection:
    """Accept with probability min(1, p / q), else draw from the normalised max(p - q, 0).

    `uniforms` gives every number in turn: those that draw proposals, those that judge them and
    those that draw corrections are independent.
    """

    def __init__(self, sampler: Sampler, drafting: Sampler, uniforms: Iterator[float]) -> None:
        self.sampler, self.drafting, self.uniforms = sampler, drafting, uniforms

    def chooser(self, history: Sequence[int], prompt_len: int) -> Chooser:
        """Draw from the drafter's logits, shaped as the model's own will be."""
        past = list(history)
        base = len(past)

        def choose(row: Any, proposed: Sequence[int]) -> Proposal:
            past[base:] = proposed
            ids, q = self.drafting.shaped(row, past, prompt_len)
            return Proposal(_draw(ids, q, next(self.uniforms)), ids, q)

        return choose

    def take(
        self, row: Any, proposal: Proposal | None, history: Sequence[int], prompt_len: int
    ) -> tuple[int, bool]:
        """The proposal, or a token drawn so that both together follow p."""
        ids, p = self.sampler.shaped(row, history, prompt_len)
        if proposal is None:
            return _draw(ids, p, next(self.uniforms)), False
        token = np.array([proposal.token])
        own = float(p[ids == proposal.token].sum())
        # Strictly: with <= a token of probability 0 would be accepted when u is 0.
        if next(self.uniforms) * float(proposal.probability(token)[0]) < own:
            return proposal.token, True
        residual = np.maximum(p - proposal.probability(ids), 0.0)
        if residual.sum() < NO_RESIDUAL:
            residual = p
        return _draw(ids, residual, next(self.uniforms)), False


def _draw(ids: np.ndarray, mass: np.ndarray, u: float) -> int:
    """The id whose slice of the cumulated `mass` holds u in [0, 1)."""
    edges = np.cumsum(mass)
    at = int(np.searchsorted(edges, u * edges[-1], side="right"))
    return int(ids[min(at, len(ids) - 1)])
