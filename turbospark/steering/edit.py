"""The edit of the residual stream: four operators, one function that applies them, one model's set.

Knows rows, directions and float32 sums. Does not know families: it is handed each layer's output.
With c the coefficient of a row x along the unit direction u, and d the direction as it is stored:

    ablate   x - alpha c u
    add      x + alpha d
    clamp    x + alpha (target - c) u
    renorm   ablate, scaled back to the length of x
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from turbospark.errors import OptionError
from turbospark.kernels.choices import fused
from turbospark.policies import SteeringMode
from turbospark.steering.vectors import SteeringPolicy, SteeringVector

if TYPE_CHECKING:
    from turbospark.install.arch import ArchConfig

MAX_REACH = 1e15
"""The farthest that one edit may move a row: squares of sums of such moves stay below 3e38."""

Rows = mx.array
"""float32 [..., hidden]."""

# --- operators ------------------------------------------------------------------------------------


def ablate(x: Rows, c: mx.array, unit: mx.array, alpha: float) -> Rows:
    """Take a share of the direction out. Shapes: c [..., 1], unit [hidden]."""
    return x - alpha * c * unit


def add(x: Rows, direction: mx.array, alpha: float) -> Rows:
    """Add the direction with its own length. Shapes: direction [hidden]."""
    return x + alpha * direction


def clamp(x: Rows, c: mx.array, unit: mx.array, alpha: float, target: float) -> Rows:
    """Move the coefficient towards `target`. Shapes: c [..., 1], unit [hidden].

    alpha multiplies the whole move, so that 0 changes nothing here as in the other modes.
    """
    return x + alpha * (target - c) * unit


def renorm(x: Rows, c: mx.array, unit: mx.array, xx: mx.array, alpha: float) -> Rows:
    """`ablate`, then back to the row's length. Shapes: c, xx = x.x [..., 1], unit [hidden].

    A row that nothing is left of stays as ablated.
    """
    left = xx - alpha * (2 - alpha) * c * c
    factor = mx.sqrt(xx / left)
    usable = (left > 0) & (factor < float("inf"))
    return ablate(x, c, unit, alpha) * mx.where(usable, factor, 1.0)


# --- one direction --------------------------------------------------------------------------------


class Edit:
    """One vector's direction at one layer, ready to be applied; dtype is that of the stream.

    Raises OptionError when nothing of the direction, or nothing finite, is left in `dtype`, and
    when it moves rows so far that the squares a norm sums would overflow.
    """

    def __init__(
        self, vector: SteeringVector, layer: int, policy: SteeringPolicy, dtype: mx.Dtype
    ) -> None:
        stored = mx.array(vector.set.layers[layer]).astype(dtype).astype(mx.float32)
        values = np.array(stored, dtype=np.float64)
        norm = float(np.linalg.norm(values))
        if not 0 < norm < float("inf"):
            found = "zero" if norm == 0 else "not finite"
            raise OptionError(
                f"steering: the direction of block {layer} in {vector.set} is {found} in "
                f"{str(dtype).rpartition('.')[2]}; restrict the set to other blocks"
            )
        _check_reach(vector, layer, policy, norm)
        self.direction = stored
        self.unit = mx.array((values / norm).astype(np.float32))
        self.renorms = vector.mode is SteeringMode.RENORM
        self._project = fused(lambda x, unit: x.astype(mx.float32) * unit)
        self._square = fused(lambda x: x.astype(mx.float32) * x.astype(mx.float32))
        self._finish = fused(_finisher(vector, policy))
        mx.eval(self.direction, self.unit)

    def __call__(self, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """hidden [..., hidden] -> (edited, coefficients before the edit, float32 [..., 1])."""
        c = mx.sum(self._project(hidden, self.unit), axis=-1, keepdims=True)
        parts = [hidden, c, self.unit, self.direction]
        if self.renorms:
            parts.append(mx.sum(self._square(hidden), axis=-1, keepdims=True))
        return self._finish(*parts), c


def _check_reach(vector: SteeringVector, layer: int, policy: SteeringPolicy, norm: float) -> None:
    """Refuse what drowns the stream. Past 1e19 a norm divides by an infinite sum of squares: rows
    become zero, which is finite, and every token looks alike without any sign of it.
    """
    share = {SteeringMode.ADD: norm, SteeringMode.CLAMP: max(1.0, abs(policy.target))}
    reach = abs(vector.alpha) * share.get(vector.mode, 1.0)
    if reach > MAX_REACH:
        raise OptionError(
            f"steering: {vector} of {vector.set} moves rows of block {layer} by {reach:.3g}, and "
            f"no norm holds that; works: strength times length (clamp: times target) up to "
            f"{MAX_REACH:g}"
        )


def _finisher(vector: SteeringVector, policy: SteeringPolicy) -> Callable[..., mx.array]:
    """(x, c, unit, direction[, x.x]) -> edited x, all of it elementwise."""
    mode, alpha, target, gate = vector.mode, vector.alpha, policy.target, policy.gate

    def finish(
        hidden: mx.array, c: mx.array, unit: mx.array, direction: mx.array, *xx: mx.array
    ) -> mx.array:
        x = hidden.astype(mx.float32)
        if mode is SteeringMode.ABLATE:
            x = ablate(x, c, unit, alpha)
        elif mode is SteeringMode.ADD:
            x = add(x, direction, alpha)
        elif mode is SteeringMode.CLAMP:
            x = clamp(x, c, unit, alpha, target)
        else:
            x = renorm(x, c, unit, xx[0], alpha)
        edited = x.astype(hidden.dtype)
        return mx.where(mx.abs(c) < gate, hidden, edited) if gate > 0 else edited

    return finish


# --- a whole model --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Placed:
    """An edit and which of the policy's vectors it belongs to."""

    vector: int
    edit: Edit


class Steering:
    """A policy on one model: called with every layer's output, gives it back edited.

    An uncovered layer's output comes back as the same object. What is reported are the
    coefficients of the newest pass that was committed: one may be built and given up.
    """

    def __init__(self, policy: SteeringPolicy, arch: ArchConfig, dtype: mx.Dtype) -> None:
        for vector in policy.vectors:
            vector.set.validate(arch)
        self.policy = policy
        self.num_layers = arch.num_layers
        self._edits = {
            layer: [
                _Placed(index, Edit(vector, layer, policy, dtype))
                for index, vector in enumerate(policy.vectors)
                if layer in vector.set.covered_layers
            ]
            for layer in policy.covered_layers
        }
        self._building: dict[tuple[int, int], mx.array] = {}
        self._committed: dict[tuple[int, int], mx.array] = {}
        self._row = -1

    def begin(self) -> Steering:
        """A pass is about to be built."""
        self._building = {}
        return self

    def __call__(self, layer: int, hidden: mx.array) -> mx.array:
        """The output of `layer` [B, L, hidden], edited by every vector that covers it."""
        for placed in self._edits.get(layer, ()):
            hidden, self._building[layer, placed.vector] = placed.edit(hidden)
        return hidden

    def arrays(self) -> list[mx.array]:
        """Coefficients of the pass being built, to be evaluated with it."""
        return list(self._building.values())

    def commit(self) -> None:
        """The pass that was built has happened."""
        self._committed, self._row = self._building, -1

    def cut(self, rows: int) -> None:
        """Of the pass just committed only the first `rows` count: report the last of them."""
        self._row = rows - 1

    def coefficients(self) -> list[list[float | None]]:
        """[layer][vector], of the last row; None where uncovered, or before any pass."""
        return [
            [self._coefficient(layer, index) for index in range(len(self.policy.vectors))]
            for layer in range(self.num_layers)
        ]

    def _coefficient(self, layer: int, vector: int) -> float | None:
        found = self._committed.get((layer, vector))
        return None if found is None else float(np.array(found)[0, self._row, 0])
