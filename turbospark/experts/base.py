"""Where routed experts live, behind one verb. Knows records; does not know routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

Activation = Callable[[mx.array, mx.array], mx.array]


class ExpertStore(Protocol):
    """Computes the routed part of a mixture layer wherever its weights are."""

    residency: str
    slots: int

    def routed(self, layer: int, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """x [1, L, H], ids uint32 [1, L, k] best first, weights [1, L, k] -> [1, L, H].

        Each token's experts are summed in rank order, whatever the residency.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of expert weights held in memory."""

    @property
    def buffers(self) -> int:
        """Arrays allocated at open."""
