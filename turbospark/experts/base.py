"""Where routed experts live, behind one verb. Knows records; does not know routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

Activation = Callable[[mx.array, mx.array], mx.array]
Router = Callable[[mx.array], mx.array]


class ExpertStore(Protocol):
    """Computes the routed part of a mixture layer wherever its weights are."""

    residency: str
    slots: int

    def routed(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        beside: mx.array | None = None,
    ) -> mx.array:
        """x [1, L, H], ids uint32 [1, L, k] best first, weights [1, L, k] -> [1, L, H].

        Each token's experts are summed in rank order, whatever the residency. `beside` is work
        that does not depend on the experts (a shared expert's output); a store that waits for
        files starts it first.
        """

    def watch(self, layer: int, router: Router) -> None:
        """Tell how `layer` chooses experts (hidden [1, L, H] -> ids [1, L, k]), for look-ahead."""

    def close(self) -> None:
        """Release files and wait for background work."""

    @property
    def nbytes(self) -> int:
        """Bytes of expert weights held in memory."""

    @property
    def buffers(self) -> int:
        """Arrays allocated at open."""
