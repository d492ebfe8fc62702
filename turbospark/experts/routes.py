"""The routes of a prompt chunk, computed a group of experts at a time.

Knows which (token, rank) goes to which slot, and how outputs return to router order. Does not know
how experts get into slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from turbospark.experts.mlp import weighted_sum
from turbospark.experts.slots import SlotPool


class ChunkRoutes:
    """Outputs of the routes `chosen` [T, k] (expert ids on the host) over rows x [T, H]."""

    def __init__(self, x: mx.array, chosen: np.ndarray, count: int) -> None:
        self.x = x
        self.chosen = chosen
        self.count = count
        self._outputs: list[mx.array] = []
        self._order: list[np.ndarray] = []

    def compute(self, pool: SlotPool, experts: Sequence[int], slots: Sequence[int]) -> None:
        """All routes to `experts`, which are in `slots` of `pool`; started, not waited for."""
        slot_of = np.full(self.count, -1, np.int64)
        slot_of[list(experts)] = slots
        of_route = slot_of[self.chosen.reshape(-1)]
        routes = np.flatnonzero(of_route >= 0)
        routes = routes[np.argsort(of_route[routes], kind="stable")]
        which = mx.array(of_route[routes].astype(np.uint32))
        tokens = mx.array((routes // self.chosen.shape[1]).astype(np.uint32))
        y = pool.mlp.sorted_routes(self.x[tokens], which)
        mx.async_eval(y)
        pool.hold(slots, y)
        self._outputs.append(y)
        self._order.append(routes)

    def total(self, weights: mx.array) -> mx.array:
        """weights [T, k] -> [T, H], once every route was computed."""
        rows, k = self.chosen.shape
        back = mx.array(np.argsort(np.concatenate(self._order)).astype(np.uint32))
        y = mx.concatenate(self._outputs, axis=0)[back].reshape(rows, k, -1)
        return weighted_sum(y, weights)


def in_groups(experts: Sequence[int], size: int) -> list[Sequence[int]]:
    """`experts` in runs of `size`, at least 1."""
    step = max(1, size)
    return [experts[at : at + step] for at in range(0, len(experts), step)]
