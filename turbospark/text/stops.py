"""Stop strings in a stream of text pieces. Knows strings only."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Lets text through until a stop string is complete; what might become one is held back.

    The first stop string to be *completed* wins (of two completed by the same character, the one
    that began earlier), so the result never depends on how the text was cut into pieces: for stops
    "abcd" and "bc" the text "abcd" ends before "bc", whole or letter by letter.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, or None."""

    def push(self, piece: str) -> str:
        """Text that is now safe to show. After a match (`matched`) everything else is dropped."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = self._first(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Release what was held back: the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(stop), stop) for stop in self._stops)
        found = [(at + len(stop), at, stop) for at, stop in starts if at >= 0]
        if not found:
            return None
        _, at, stop = min(found)
        return at, stop

    def _partial(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins some stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
