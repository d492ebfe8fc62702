"""The routed expert MLP over stacked weights [S, rows, words], S experts or slots.

Knows MLX's gathered matrix products. Does not know whether a row is an expert or a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from turbospark.dtypes import Quant, Raw
from turbospark.experts.base import Activation

# From this many (token, rank) routes on, rows are sorted by expert so that each expert's weights
# are walked once.
SORT_FROM = 64


@dataclass(frozen=True)
class StackedMatrix:
    """One projection of all experts: dense weight [S, rows, cols], or packed with companions.

    `bias` [S, rows] is the experts' own bias vector.
    """

    fmt: Quant | Raw
    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bias: mx.array | None = None

    def __call__(self, x: mx.array, which: mx.array, is_sorted: bool) -> mx.array:
        """x [..., 1, in] with which [...] choosing the matrix of each row -> [..., 1, out]."""
        if isinstance(self.fmt, Raw) or self.scales is None:
            y = mx.gather_mm(
                x, self.weight.swapaxes(-1, -2), rhs_indices=which, sorted_indices=is_sorted
            )
        else:
            y = mx.gather_qmm(
                x,
                self.weight,
                self.scales,
                self.biases,
                rhs_indices=which,
                transpose=True,
                group_size=self.fmt.group_size,
                bits=self.fmt.bits,
                mode=self.fmt.mode,
                sorted_indices=is_sorted,
            )
        return y if self.bias is None else y + self.bias[which][..., None, :]

    def arrays(self) -> list[mx.array]:
        """The arrays held."""
        held = (self.weight, self.scales, self.biases, self.bias)
        return [a for a in held if a is not None]


@dataclass(frozen=True)
class ExpertMLP:
    """down(activation(gate(x), up(x))) of the chosen experts, weighted and summed."""

    gate: StackedMatrix
    up: StackedMatrix
    down: StackedMatrix
    activation: Activation

    def __call__(self, x: mx.array, which: mx.array, weights: mx.array) -> mx.array:
        """x [T, H], which uint32 [T, k], weights [T, k] -> [T, H]."""
        tokens, k = which.shape
        if which.size < SORT_FROM:
            return weighted_sum(self.routes(x, which), weights)
        flat = which.flatten()
        order = mx.argsort(flat)
        y = self.sorted_routes(x[order // k], flat[order])
        return weighted_sum(y[mx.argsort(order)].reshape(tokens, k, -1), weights)

    def routes(self, x: mx.array, which: mx.array) -> mx.array:
        """x [T, H], which [T, k] -> the output of each route, [T, k, H]."""
        return self._mlp(mx.expand_dims(x, (-2, -3)), which, False).squeeze(-2)

    def sorted_routes(self, rows: mx.array, which: mx.array) -> mx.array:
        """rows [R, H] with which [R] ascending -> [R, H]."""
        return self._mlp(mx.expand_dims(rows, -2), which, True).squeeze(-2)

    def _mlp(self, rows: mx.array, which: mx.array, is_sorted: bool) -> mx.array:
        hidden = self.activation(self.gate(rows, which, is_sorted), self.up(rows, which, is_sorted))
        return self.down(hidden, which, is_sorted).astype(rows.dtype)

    def arrays(self) -> list[mx.array]:
        """The arrays held."""
        return [a for m in (self.gate, self.up, self.down) for a in m.arrays()]


def weighted_sum(outputs: mx.array, weights: mx.array) -> mx.array:
    """outputs [T, k, H], weights [T, k] -> [T, H]: added one rank at a time, in rank order."""
    scaled = outputs * weights[..., None].astype(outputs.dtype)
    total = scaled[:, 0]
    for rank in range(1, scaled.shape[1]):
        total = total + scaled[:, rank]
    return total
