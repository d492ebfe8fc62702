"""Prompt lookup: what followed the last time the newest tokens occurred.

Knows the history only, so it costs nothing and pays where answers repeat their prompt: edits,
extraction, code, quotations.
"""

from __future__ import annotations

from collections.abc import Sequence

from turbospark.speculation.drafter import Chooser, Proposal

LONGEST, SHORTEST = 4, 2
FIRST = 4
"""Proposals of the first round."""


class PromptLookup:
    """Matches the newest 4 tokens, else 3, else 2, with their latest earlier occurrence.

    Each row of a verifying pass costs, so a round proposes twice what the last one did when all of
    that was accepted, else one more than was.
    """

    name = "prompt_lookup"
    has_probabilities = False

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self._made, self._reach = 0, FIRST

    def begin(self, ids: Sequence[int]) -> None:
        """Start anew with a prompt."""
        self._after.clear()
        self._indexed = 0
        self._made, self._reach = 0, FIRST

    def propose(self, history: Sequence[int], count: int, choose: Chooser | None) -> list[Proposal]:
        """What followed then; past the end of the history it repeats itself."""
        at = self._find(history)
        if at is None:
            return []
        self._made = count = min(count, self._reach)
        text = list(history[at:])
        while len(text) < count:  # the occurrence overlaps the end: a loop goes on
            text.append(text[len(text) - (len(history) - at)])
        return [Proposal(token) for token in text[:count]]

    def keep(self, rows: int) -> None:
        """The next round proposes more, or as many as rows stayed."""
        self._reach = 2 * self._made if rows > self._made else rows

    def _find(self, history: Sequence[int]) -> int | None:
        """Where the text after the latest earlier occurrence begins."""
        end = len(history)
        # A gram is entered once something follows it, so that the newest never finds itself.
        for stop in range(self._indexed + 1, end):
            for size in range(SHORTEST, min(LONGEST, stop) + 1):
                self._after[tuple(history[stop - size : stop])] = stop
        self._indexed = max(self._indexed, end - 1)
        for size in range(min(LONGEST, end), SHORTEST - 1, -1):
            found = self._after.get(tuple(history[end - size :]))
            if found is not None:
                return found
        return None
