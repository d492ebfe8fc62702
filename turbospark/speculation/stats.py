"""What drafting brought and cost. Knows counts and seconds only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from turbospark import display
from turbospark.errors import SpeculationUnavailableError

LEAST_ACCEPTANCE = 0.02
"""Below this share of accepted first proposals a drafter is broken, not just weak."""
ENOUGH = 50
"""First proposals from which on that share is judged: of fewer, one more would decide."""


@dataclass(frozen=True)
class SpeculationStats(display.Shown):
    """Rounds of one generation, or of all since open; sums with `+`, differences with `-`."""

    drafter: str
    width: int
    """Proposals per round at most."""
    rounds: int = 0
    """Verifying passes; a round in which nothing was proposed is a plain step and counts too."""
    offered: tuple[int, ...] = ()
    """offered[i]: rounds whose proposal number i was judged: all before it had been accepted."""
    matched: tuple[int, ...] = ()
    """matched[i]: how many of those were accepted."""
    committed: int = 0
    """Tokens that rounds gave: accepted proposals, corrections and bonus tokens."""
    rollbacks: int = 0
    """Rounds whose pass had to be cut."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rollback_seconds: float = 0.0

    @property
    def accepted(self) -> int:
        """Proposals that were accepted."""
        return sum(self.matched)

    @property
    def accepted_per_round(self) -> float | None:
        """Accepted proposals per round; None without rounds."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def committed_per_round(self) -> float | None:
        """Tokens per round; None without rounds."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def per_position_acceptance(self) -> tuple[float | None, ...]:
        """matched[i] / offered[i]; None where nothing was offered."""
        pairs = zip(self.matched, self.offered, strict=True)
        return tuple(m / n if n else None for m, n in pairs)

    def check(self) -> None:
        """Raise SpeculationUnavailableError where first proposals are hardly ever accepted.

        A broken drafter otherwise passes for one that does not pay. Fewer than 50 first proposals
        prove nothing, and prompt lookup has no weights that could be broken: both pass.
        """
        if self.drafter == "prompt_lookup":
            return
        first = self.offered[0] if self.offered else 0
        if first == 0:
            raise SpeculationUnavailableError(
                f"drafter {self.drafter} proposed nothing in {self.rounds} rounds; "
                "try a longer answer or another prompt"
            )
        if first >= ENOUGH and self.matched[0] < LEAST_ACCEPTANCE * first:
            raise SpeculationUnavailableError(
                f"drafter {self.drafter}: {self.matched[0]} of {first} first proposals were "
                f"accepted, less than {LEAST_ACCEPTANCE:.0%}; its weights do not fit this model, "
                "or its proposals do not fit this text"
            )

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return self._joined(other, 1)

    def __sub__(self, other: SpeculationStats) -> SpeculationStats:
        return self._joined(other, -1)

    def _joined(self, other: SpeculationStats, sign: int) -> SpeculationStats:
        def per_position(name: str) -> tuple[int, ...]:
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            return tuple(a + sign * b for a, b in pairs)

        def plain(name: str) -> Any:
            return getattr(self, name) + sign * getattr(other, name)

        return SpeculationStats(
            self.drafter,
            self.width,
            offered=per_position("offered"),
            matched=per_position("matched"),
            **{name: plain(name) for name in _SUMS},
        )

    def as_dict(self) -> dict[str, Any]:
        """Counts, seconds and what follows from them."""
        return {
            **vars(self),
            "accepted": self.accepted,
            "accepted_per_round": self.accepted_per_round,
            "committed_per_round": self.committed_per_round,
            "per_position_acceptance": self.per_position_acceptance,
        }

    def _repr_html_(self) -> str:
        if not self.rounds:
            return display.card("Speculation", f"{self.drafter}: no rounds")
        note = f"{self.drafter}, up to {self.width} proposals a round"
        shares = [
            "-" if share is None else f"{share:.0%}" for share in self.per_position_acceptance
        ]
        rows = {
            "rounds": f"{self.rounds}, {self.committed_per_round or 0:.2f} tokens each",
            "accepted": f"{self.accepted} of {sum(self.offered)} judged proposals",
            "by position": ", ".join(shares),
            "rollbacks": str(self.rollbacks),
        }
        parts = [(n, getattr(self, f"{n}_seconds")) for n in ("draft", "verify", "rollback")]
        stack = display.bar([(n, s, f"{s:.2f} s") for n, s in parts])
        named = display.legend((i, (n, f"{s:.2f} s", "")) for i, (n, s) in enumerate(parts) if s)
        return display.card("Speculation", note, display.facts(rows), stack, named)

    def __str__(self) -> str:
        if not self.rounds:
            return f"{self.drafter}: no rounds"
        shares = ["-" if a is None else f"{a:.0%}" for a in self.per_position_acceptance]
        return (
            f"{self.drafter}, up to {self.width} proposals: {self.rounds} rounds, "
            f"{self.committed_per_round:.2f} tokens each, accepted by position "
            f"{' '.join(shares) or 'none'}"
        )


_SUMS = (
    "rounds", "committed", "rollbacks", "draft_seconds", "verify_seconds", "rollback_seconds",
)  # fmt: skip


class Tally:
    """Counts while a generation runs; `stats()` is the frozen account."""

    def __init__(self, drafter: str, width: int) -> None:
        self.drafter, self.width = drafter, width
        self.offered = [0] * width
        self.matched = [0] * width
        self.rounds = self.committed = self.rollbacks = 0
        self.draft_seconds = self.verify_seconds = self.rollback_seconds = 0.0

    def stats(self) -> SpeculationStats:
        """The account so far."""
        return SpeculationStats(
            self.drafter,
            self.width,
            offered=tuple(self.offered),
            matched=tuple(self.matched),
            **{name: getattr(self, name) for name in _SUMS},
        )
