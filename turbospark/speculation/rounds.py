"""The one round loop: draft, verify in one pass, take tokens one by one, cut the rest off.

Knows the order. Does not know which drafter or law it drives, nor what ends a generation: it hands
out one token at a time, so that stops, penalties, events and cancelling see exactly what they see
when every token has a pass of its own. Invariant between rounds: the cache holds all of the history
but its last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from turbospark.counters import PhaseClock
from turbospark.speculation.acceptance import Law
from turbospark.speculation.drafter import Drafter, Proposal
from turbospark.speculation.stats import SpeculationStats, Tally


class Verifier(Protocol):
    """The model as a round needs it; an engine is one."""

    clock: PhaseClock
    max_context: int

    def step(self, token: int) -> Any:
        """Feed one token -> logits [vocab]."""

    def verify(self, ids: list[int]) -> Any:
        """Feed several in one pass that can be cut -> logits [n, vocab]."""

    def keep(self, rows: int) -> None:
        """Cut the pass just verified to its first rows."""

    def working(self) -> AbstractContextManager[None]:
        """Around a drafter's own passes: its device, and what a failure leaves."""


class Rounds:
    """Tokens of one generation, several per pass where proposals are accepted."""

    def __init__(self, model: Verifier, drafter: Drafter, law: Law, width: int) -> None:
        self.model, self.drafter, self.law, self.width = model, drafter, law, width
        self.tally = Tally(drafter.name, width)
        self._proposals: list[Proposal] = []
        self._rows: Any = None
        self._accepted = 0

    def begin(self, ids: Sequence[int]) -> None:
        """The prompt is fed: the drafter may read it."""
        with self._timed("draft_seconds"), self.model.working():
            self.drafter.begin(ids)

    def token(self, history: Sequence[int], prompt_len: int, left: int) -> int:
        """The token after `history`, of which the last is not fed yet unless a round is open.

        `left`: how many more tokens the generation may have, this one included.
        """
        if self._rows is None:
            self._open(history, prompt_len, left)
        at, proposals = self._accepted, self._proposals
        proposal = proposals[at] if at < len(proposals) else None
        with self.model.clock.phase("sampling"):
            row = self._rows[at]
            token, accepted = self.law.take(row, proposal, history, prompt_len)
        self.tally.committed += 1
        if proposal is not None:
            self.tally.offered[at] += 1
            self.tally.matched[at] += accepted
        if accepted:
            self._accepted += 1
        else:
            self._close(at + 1)
        return token

    def stop(self) -> None:
        """End an open round: its accepted rows stay, but for the newest token, which sequential
        decoding would not have fed either.
        """
        if self._rows is not None:
            self._close(max(1, self._accepted))

    def stats(self) -> SpeculationStats:
        """What these rounds brought and cost."""
        return self.tally.stats()

    def _open(self, history: Sequence[int], prompt_len: int, left: int) -> None:
        """Draft and verify. One token of `left` comes without a proposal: the bonus."""
        room = self.model.max_context - len(history)
        count = max(0, min(self.width, left - 1, room))
        self._accepted, self.tally.rounds = 0, self.tally.rounds + 1
        self._proposals = []
        if count:
            with self._timed("draft_seconds"), self.model.working():
                chooser = self.law.chooser(history, prompt_len)
                self._proposals = self.drafter.propose(history, count, chooser)[:count]
        with self._timed("verify_seconds"):
            feed = [history[-1], *(p.token for p in self._proposals)]
            if len(feed) == 1:
                self._rows = [self.model.step(feed[0])]
            else:
                self._rows = np.asarray(self.model.verify(feed))

    def _close(self, rows: int) -> None:
        """The round is over and `rows` of its rows stay."""
        fed, self._rows = len(self._proposals) + 1, None
        if fed == 1:
            return
        self.tally.rollbacks += rows < fed
        with self._timed("rollback_seconds"):
            self.model.keep(rows)
            with self.model.working():
                self.drafter.keep(rows)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            setattr(self.tally, name, getattr(self.tally, name) + perf_counter() - start)
