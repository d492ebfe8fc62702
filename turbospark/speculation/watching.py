"""A drafter that reads the model's passes: how it is told of them.

Knows residual streams and caches. Does not know drafters or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from turbospark.cache.state import LayerStates


class Watcher(Protocol):
    """A drafter that reads the model's passes and keeps its own memory beside the model's."""

    taps: tuple[int, ...]
    """Layers whose output it reads."""

    def watch(
        self, ids: mx.array, hidden: mx.array, taps: dict[int, mx.array], states: LayerStates
    ) -> None:
        """A pass over ids [1, L] is being built: its residual stream [1, L, H], tapped outputs."""

    def settle(self, rows: int, states: LayerStates) -> None:
        """The newest pass, which was taped, has been cut to `rows` rows."""


def collect(
    found: dict[int, mx.array], layers: Sequence[int]
) -> Callable[[int, mx.array], mx.array] | None:
    """An `after_layer` that puts the outputs of `layers` into `found`; None for none of them."""
    if not layers:
        return None

    def after(layer: int, x: mx.array) -> mx.array:
        if layer in layers:
            found[layer] = x
        return x

    return after
