"""The routed expert MLP over stacked weights [S, rows, words], S experts or slots.

Knows MLX's gathered matrix products. Does not know whether a row is an expert or a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Quant, Raw
from turbospark.experts.base import Activation

# From this many (token, rank) routes on, rows are sorted by expert so that each expert's weights
# are walked once.
SORT_FROM = 64

BATCH_BYTES = 2 << 30
"""Unpacked weights of one padded batch."""

FEW_ROWS = 64
"""Rows up to which an expert costs as much as reading its weights: padding is free there."""


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
            weight, rows = self._cast(x.dtype, which)
            # Never `sorted_indices`: mlx 0.32.4 on CUDA then multiplies by the wrong experts.
            y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=rows)
        else:
            weight, scales, biases, rows = self._chosen(self.scales, x.dtype, which)
            y = mx.gather_qmm(
                x,
                weight,
                scales,
                biases,
                rhs_indices=rows,
                transpose=True,
                group_size=self.fmt.group_size,
                bits=self.fmt.bits,
                mode=self.fmt.mode,
                sorted_indices=is_sorted,
            )
        return y if self.bias is None else y + self.bias[which][..., None, :]

    def _chosen(
        self, scales: mx.array, dtype: mx.Dtype, which: mx.array
    ) -> tuple[mx.array, mx.array, mx.array | None, mx.array]:
        """Weights, companions and the indices into them; of the chosen matrices alone where MLX
        would widen the companions of all to `dtype`.
        """
        biases = self.biases
        if biases is None or biases.dtype == dtype or which.size >= len(self.weight):
            return self.weight, scales, biases, which
        ids = which.flatten()
        rows = mx.arange(which.size, dtype=mx.uint32).reshape(which.shape)
        return self.weight[ids], scales[ids].astype(dtype), biases[ids].astype(dtype), rows

    def _cast(self, dtype: mx.Dtype, which: mx.array) -> tuple[mx.array, mx.array]:
        """Dense weights in `dtype` and the indices into them; only the chosen ones are cast where
        they are fewer.
        """
        if self.weight.dtype == dtype or which.size >= self.weight.shape[0]:
            return self.weight.astype(dtype), which
        chosen = self.weight[which.flatten()].astype(dtype)
        return chosen, mx.arange(which.size, dtype=mx.uint32).reshape(which.shape)

    def unpacked(self, experts: mx.array, dtype: mx.Dtype) -> mx.array:
        """Dense weights [n, rows, cols] of `experts` [n]."""
        if not isinstance(self.fmt, Quant) or self.scales is None:
            return self.weight[experts].astype(dtype)
        biases = None if self.biases is None else self.biases[experts]
        return mx.dequantize(
            self.weight[experts],
            self.scales[experts],
            biases,
            group_size=self.fmt.group_size,
            bits=self.fmt.bits,
            mode=self.fmt.mode,
        ).astype(dtype)

    def batch(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [n, rows, in], one block of rows for each of `experts` [n] -> [n, rows, out]."""
        y = x @ self.unpacked(experts, x.dtype).swapaxes(-1, -2)
        return y if self.bias is None else y + self.bias[experts][:, None, :]

    def arrays(self) -> list[mx.array]:
        """The arrays held."""
        held = (self.weight, self.scales, self.biases, self.bias)
        return [a for a in held if a is not None]


@dataclass(frozen=True)
class ExpertMLP:
    """down(activation(gate(x), up(x))) of the chosen experts, weighted and summed.

    From `padded_routes` routes on, experts are unpacked and multiplied as padded batches.
    """

    gate: StackedMatrix
    up: StackedMatrix
    down: StackedMatrix
    activation: Activation
    padded_routes: int | None = None

    def __call__(self, x: mx.array, which: mx.array, weights: mx.array) -> mx.array:
        """x [T, H], which uint32 [T, k], weights [T, k] -> [T, H]."""
        tokens, k = which.shape
        if which.size < SORT_FROM:
            return weighted_sum(self.routes(x, which), weights)
        if self.padded_routes is not None and which.size >= self.padded_routes:
            return weighted_sum(padded_routes(self, x, np.array(which)), weights)
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


def token_by_token(compute: Callable[..., mx.array], *rows: mx.array) -> mx.array:
    """`compute` on one row of each [T, ...] argument after the other -> [T, H]."""
    tokens = rows[0].shape[0]
    return mx.concatenate([compute(*(a[t : t + 1] for a in rows)) for t in range(tokens)], axis=0)


def padded_routes(mlp: ExpertMLP, x: mx.array, which: np.ndarray) -> mx.array:
    """x [T, H], which [T, k] -> the output of each route, [T, k, H], as dense batched products.

    Experts with similarly many rows share a batch, padded to the longest of them; experts nobody
    chose are left out.
    """
    tokens, k = which.shape
    count = mlp.gate.weight.shape[0]
    flat = which.reshape(-1)
    # Ids of 16 bits are sorted ten times faster.
    order = np.argsort(flat.astype(np.uint16) if count <= 1 << 16 else flat, kind="stable")
    counts = np.bincount(flat, minlength=count)
    starts = np.cumsum(counts) - counts
    groups = list(batches(counts, x.shape[-1] * mlp.gate.weight.shape[-2] * 3 * x.dtype.size))
    routes: list[np.ndarray] = []
    places = np.empty(flat.size, np.uint32)
    done = 0
    for experts in groups:
        # Row r of expert e is route order[starts[e] + r]; rows past its count repeat a valid one.
        rank = np.minimum(np.arange(counts[experts].max()), counts[experts][:, None] - 1)
        route = order[starts[experts][:, None] + rank]
        places[route] = done + np.arange(len(experts))[:, None] * rank.shape[1] + rank
        routes.append(route)
        done += route.size
    # What the host writes is fetched by the device once, not batch by batch.
    rows_of = mx.array(np.concatenate([r.reshape(-1) for r in routes]).astype(np.uint32) // k)
    experts_of = mx.array(np.concatenate(groups).astype(np.uint32))
    outputs: list[mx.array] = []
    row = expert = 0
    for route in routes:
        ids = experts_of[expert : expert + len(route)]
        batch = x[rows_of[row : row + route.size].reshape(route.shape)]
        hidden = mlp.activation(mlp.gate.batch(batch, ids), mlp.up.batch(batch, ids))
        outputs.append(mlp.down.batch(hidden, ids).reshape(route.size, -1))
        row, expert = row + route.size, expert + len(route)
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return y[mx.array(places)].reshape(tokens, k, -1)


def batches(counts: np.ndarray, expert_bytes: int) -> Iterator[np.ndarray]:
    """Experts with rows, in batches whose longest has at most 1.5 times the rows of the shortest,
    or `FEW_ROWS`, and whose unpacked weights fit `BATCH_BYTES`.
    """
    experts = np.argsort(-counts, kind="stable")
    experts = experts[counts[experts] > 0]
    limit = max(1, BATCH_BYTES // expert_bytes)
    while experts.size:
        longest = counts[experts[0]]
        alike = int(np.count_nonzero(counts[experts] * 3 >= longest * 2))
        size = min(experts.size if longest <= FEW_ROWS else alike, limit)
        yield experts[:size]
        experts = experts[size:]
