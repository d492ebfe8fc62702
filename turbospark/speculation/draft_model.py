"""A second, smaller model of the same vocabulary as drafter.

Knows token ids and one engine. Does not know where the model came from. Its cache is keyed by the
tokens it holds: whatever it lacks of a history it is fed, so it can only be slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from turbospark.cache.pool import SessionPool
from turbospark.cache.state import Snapshot
from turbospark.errors import NonFiniteLogitsError
from turbospark.speculation.drafter import Chooser, Proposal


class Model(Protocol):
    """An engine of a model, with prefix reuse on."""

    pool: SessionPool
    vocab_size: int
    prefill_chunk: int | None

    @property
    def position(self) -> int:
        """Tokens in its cache."""

    def begin(self, ids: Sequence[int]) -> int:
        """Get ready for a prompt -> tokens of it already in the cache."""

    def feed(
        self, ids: Sequence[int], done: int, chunk: int | None
    ) -> Iterator[tuple[int, Any | None]]:
        """Feed tokens, yielding logits [vocab] at the end."""

    def step(self, token: int) -> Any:
        """Feed one token -> logits [vocab]."""


class DraftModel:
    """Proposes what `model` says; `vocab_size` is the verifying model's."""

    name = "draft_model"
    has_probabilities = True

    def __init__(self, model: Model, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._marks: list[Snapshot] = []
        self._blind = False

    def begin(self, ids: Sequence[int]) -> None:
        """Feed the prompt, or what of it no cached conversation shares."""
        self._marks = []
        self._blind = max(ids) >= self.model.vocab_size
        if not self._blind:
            kept = self.model.begin(ids)
            for _ in self.model.feed(ids[kept:], kept, self.model.prefill_chunk):
                pass

    def propose(self, history: Sequence[int], count: int, choose: Chooser | None) -> list[Proposal]:
        """`count` tokens, each fed back for the next; none after an id that the model lacks."""
        self._blind = self._blind or history[-1] >= self.model.vocab_size
        if self._blind:
            return []
        *_, (_, row) = self.model.feed(history[self.model.position :], 0, None)
        states = self.model.pool.live.states
        proposals: list[Proposal] = []
        self._marks = [states.snapshot()]
        while True:
            row = np.asarray(row)[: self.vocab_size]
            if not np.isfinite(row).all():
                raise NonFiniteLogitsError(
                    "the draft model's logits are not finite; its weights or the dtype are unfit"
                )
            tokens = [p.token for p in proposals]
            proposals.append(choose(row, tokens) if choose else Proposal(int(row.argmax())))
            if len(proposals) == count:
                return proposals
            row = self.model.step(proposals[-1].token)
            self._marks.append(states.snapshot())

    def keep(self, rows: int) -> None:
        """Forget what was fed of proposals that did not stay."""
        if self._marks:
            self.model.pool.live.restore(self._marks[min(rows, len(self._marks)) - 1])
            self._marks = []


def same_vocabulary(ours: Any | None, theirs: Any | None) -> bool:
    """Whether two tokenizers give every text and id the same meaning; two absent ones do."""
    if ours is None or theirs is None:
        return ours is theirs
    return ours.vocabulary == theirs.vocabulary
