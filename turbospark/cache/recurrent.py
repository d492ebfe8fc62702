"""State that a pass replaces as a whole: gated delta nets, n-grams, the open part of a block, the
newest row of a draft head.

A pass makes new arrays, so a snapshot is a tuple of references and costs nothing. Going back inside
a pass needs its tape. Does not know the arithmetic: the layer hands over what a pass left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from turbospark.cache.attend import Step
from turbospark.cache.specs import NgramSpec, RecurrentSpec, RowSpec
from turbospark.errors import UnsupportedError

Saved = tuple[mx.array, ...]


@dataclass(frozen=True)
class Tape:
    """One pass of `rows` rows from position `start`; `replay(n)` is the state after n of them."""

    start: int
    rows: int
    replay: Callable[[int], Saved]


class CarriedState:
    """Arrays `saved` that every pass replaces; `initial` makes those of the empty past."""

    def __init__(self, initial: Callable[[], Saved]) -> None:
        self.initial = initial
        self.reset()

    def reset(self) -> None:
        """Back to the empty past."""
        self.saved = self.initial()
        self.tape: Tape | None = None

    def arrays(self) -> list[mx.array]:
        """The current state arrays."""
        return list(self.saved)

    def update(self, step: Step, saved: Saved, replay: Callable[[int], Saved]) -> None:
        """The pass `step` leads to the state `saved`; `replay` is kept when it is taped."""
        self.saved = saved
        self.tape = Tape(step.start, step.rows, replay) if step.tape else None

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """Such a state cannot be unrolled."""
        return "a recurrent layer cannot go back without a snapshot"

    def rows_refusal(self, furthest: int, to: int) -> str | None:
        """Why what a snapshot does not hold cannot go back to `to`; here it holds all."""
        return None

    def written(self, position: int, furthest: int) -> list[mx.array]:
        """The present state, for a file."""
        return self.arrays()

    def refill(self, saved: list[mx.array]) -> None:
        """Put back what `written` gave."""
        self.saved = tuple(saved)
        self.tape = None

    def keep_refusal(self, start: int, rows: int) -> str | None:
        """Why the pass begun at `start` cannot be cut to its first `rows`; None when it can."""
        if self.tape is None:
            return "the newest pass of a recurrent layer was not taped; begin it with tape=True"
        if self.tape.start != start:
            return f"the tape begins at position {self.tape.start}, the pass at {start}"
        if not 1 <= rows <= self.tape.rows:
            return f"the tape holds {self.tape.rows} rows; keep 1..{self.tape.rows} of them"
        return None

    def keep_rows(self, start: int, rows: int) -> None:
        """Become what the first `rows` rows of the taped pass left, within rounding.

        The tape is used up. Raises UnsupportedError where `keep_refusal` has a reason.
        """
        reason = self.keep_refusal(start, rows)
        if self.tape is None or reason is not None:
            raise UnsupportedError(f"cannot keep {rows} rows of a pass: {reason}")
        if rows < self.tape.rows:
            self.saved = self.tape.replay(rows)
        self.tape = None

    def snapshot(self) -> Saved:
        """References to the present state."""
        return self.saved

    def restore(self, snapshot: Saved) -> None:
        """Make an earlier state the present one."""
        self.saved = snapshot
        self.tape = None


class RecurrentState(CarriedState):
    """state float32 [1, value_heads, value_dim, key_dim]; conv [1, conv_rows, conv_channels]."""

    def __init__(self, spec: RecurrentSpec, dtype: mx.Dtype) -> None:
        self.spec = spec
        shape = (1, spec.value_heads, spec.value_dim, spec.key_dim)
        super().__init__(
            lambda: (
                mx.zeros(shape, mx.float32),
                mx.zeros((1, spec.conv_rows, spec.conv_channels), dtype),
            )
        )

    @property
    def state(self) -> mx.array:
        return self.saved[0]

    @property
    def conv(self) -> mx.array:
        return self.saved[1]


class RowState(CarriedState):
    """One row [1, 1, width]."""

    def __init__(self, spec: RowSpec, dtype: mx.Dtype) -> None:
        super().__init__(lambda: (mx.zeros((1, 1, spec.width), dtype),))


class NgramState(CarriedState):
    """conv [1, conv_rows, conv_channels]; register int32 [1, tokens], the newest token first."""

    def __init__(self, spec: NgramSpec, dtype: mx.Dtype) -> None:
        self.spec = spec
        super().__init__(
            lambda: (
                mx.zeros((1, spec.conv_rows, spec.conv_channels), dtype),
                mx.full((1, spec.tokens), spec.fill, mx.int32),
            )
        )

    @property
    def conv(self) -> mx.array:
        return self.saved[0]

    @property
    def register(self) -> mx.array:
        return self.saved[1]
