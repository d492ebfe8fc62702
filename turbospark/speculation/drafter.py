"""What a drafter is: the methods that a round calls, and what it proposes.

Knows token ids. Does not know how any one drafter finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Proposal:
    """A token, and where acceptance needs it the distribution it was drawn from.

    `ids` and `p` float64 [n], summing to 1, are that distribution's support; None: no
    probabilities.
    """

    token: int
    ids: np.ndarray | None = None
    p: np.ndarray | None = None

    def probability(self, tokens: np.ndarray) -> np.ndarray:
        """q of each of `tokens` [m] -> float64 [m]."""
        if self.ids is None or self.p is None:
            return (tokens == self.token).astype(np.float64)
        order = np.argsort(self.ids)
        ids = self.ids[order]
        at = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
        return np.where(ids[at] == tokens, self.p[order][at], 0.0)


Chooser = Callable[[Any, Sequence[int]], Proposal]
"""(a drafter's float32 logits [vocab], tokens proposed before it) -> a drawn proposal."""


class Drafter(Protocol):
    """Proposes tokens that the model is likely to say next."""

    name: str
    has_probabilities: bool
    """Whether it can draw from a distribution (`Chooser`)."""

    def begin(self, ids: Sequence[int]) -> None:
        """The prompt `ids` is in the model's cache now."""

    def propose(self, history: Sequence[int], count: int, choose: Chooser | None) -> list[Proposal]:
        """At most `count` tokens to follow `history`, whose last one is not fed yet.

        Each is drawn by `choose`, or the likeliest where that is None.
        """

    def keep(self, rows: int) -> None:
        """Of the pass that verified the newest proposals, the first `rows` rows stay."""
