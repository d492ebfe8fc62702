"""Where routed experts live, behind one verb. Knows records; does not know routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

Activation = Callable[[mx.array, mx.array], mx.array]
Router = Callable[[mx.array], mx.array]


class ExpertStore(Protocol):
    """Computes the routed part of a mixture layer wherever its weights are."""

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

    def watch(self, layer: int, router: Router, beside: bool = False) -> None:
        """Tell how `layer` chooses experts (hidden [1, L, H] -> ids [1, L, k]), for look-ahead,
        and whether it passes `beside`.
        """

    def settle(self) -> None:
        """Evaluate whatever of a pass is not evaluated yet, in this thread."""

    def close(self) -> None:
        """Release memory and files, and wait for background work."""

    @property
    def effective(self) -> set[str]:
        """Names of the runtime toggles that this store reads."""

    @property
    def nbytes(self) -> int:
        """Bytes of expert weights held in memory."""

    @property
    def formula(self) -> str:
        """How `nbytes` comes about, for people."""

    @property
    def buffers(self) -> int:
        """Arrays allocated at open."""


def rows_of(x: mx.array, *others: mx.array) -> list[mx.array]:
    """[1, L, ...] arrays as [L, ...]."""
    return [a.reshape(a.shape[1], a.shape[2]) for a in (x, *others)]
