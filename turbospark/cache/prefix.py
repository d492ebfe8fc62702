"""Which tokens built a cache, by position: the only ground for reusing it.

Knows ids and positions. Does not know caches or models.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixRecord:
    """The ids actually fed, in order. A tainted record vouches for nothing until cleared."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.tainted = False

    def record(self, tokens: Sequence[int], position: int) -> None:
        """`tokens` were fed at `position`: append, overwrite what came after, or taint on a gap."""
        if position > len(self.tokens):
            self.clear()
            self.taint()
            return
        del self.tokens[position:]
        self.tokens.extend(tokens)

    def rewind_to(self, position: int) -> None:
        """Forget what was fed at `position` and after."""
        del self.tokens[position:]

    def taint(self) -> None:
        """Something other than these tokens may be in the cache."""
        self.tainted = True

    def clear(self) -> None:
        """The cache is empty again; only together with the cache's own reset."""
        self.tokens.clear()
        self.tainted = False

    def common_prefix(self, ids: Sequence[int]) -> int:
        """Longest equal prefix, at most len(ids) - 1: the last token is always fed anew."""
        if self.tainted:
            return 0
        limit = min(len(self.tokens), len(ids) - 1)
        kept = 0
        while kept < limit and self.tokens[kept] == ids[kept]:
            kept += 1
        return kept
