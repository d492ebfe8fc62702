"""State that a pass replaces: of a gated delta net the fp32 matrix state and the last convolution
inputs, of a draft head the newest hidden row.

A pass makes new arrays, so a snapshot is a pair of references and costs nothing. Going back inside
a pass needs its tape. Does not know the arithmetic: the layer hands over what a pass left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from turbospark.cache.attend import Step
from turbospark.cache.specs import RecurrentSpec, RowSpec
from turbospark.errors import UnsupportedError

Saved = tuple[mx.array, ...]


@dataclass(frozen=True)
class Tape:
    """One pass of `rows` rows from position `start`; `replay(n)` is the state after n of them."""

    start: int
    rows: int
    replay: Callable[[int], Saved]


class RecurrentState:
    """`saved`: state float32 [1, value_heads, value_dim, key_dim] and conv [1, conv_rows,
    conv_channels]; of a `RowSpec` one row [1, 1, width].
    """

    saved: Saved

    def __init__(self, spec: RecurrentSpec | RowSpec, dtype: mx.Dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self.reset()

    def reset(self) -> None:
        """Back to the empty past."""
        spec = self.spec
        if isinstance(spec, RowSpec):
            self.saved = (mx.zeros((1, 1, spec.width), self.dtype),)
        else:
            state = mx.zeros((1, spec.value_heads, spec.value_dim, spec.key_dim), mx.float32)
            self.saved = (state, mx.zeros((1, spec.conv_rows, spec.conv_channels), self.dtype))
        self.tape: Tape | None = None

    @property
    def state(self) -> mx.array:
        return self.saved[0]

    @property
    def conv(self) -> mx.array:
        return self.saved[1]

    def arrays(self) -> list[mx.array]:
        """The current state arrays."""
        return list(self.saved)

    def update(self, step: Step, saved: Saved, replay: Callable[[int], Saved]) -> None:
        """The pass `step` leads to the state `saved`; `replay` is kept when it is taped."""
        self.saved = saved
        self.tape = Tape(step.start, step.rows, replay) if step.tape else None

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """A recurrent state cannot be unrolled."""
        return "a recurrent layer cannot go back without a snapshot"

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
        """Become what the first `rows` rows of the taped pass left; bit for bit, on one device.

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
