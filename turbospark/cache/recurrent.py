"""State of a gated delta net layer: the fp32 matrix state and the last convolution inputs.

A pass makes new arrays, so a snapshot is a pair of references and costs nothing.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.cache.specs import RecurrentSpec

Saved = tuple[mx.array, mx.array]


class RecurrentState:
    """state float32 [1, value_heads, value_dim, key_dim]; conv [1, conv_rows, conv_channels]."""

    def __init__(self, spec: RecurrentSpec, dtype: mx.Dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self.reset()

    def reset(self) -> None:
        """Back to the empty past."""
        spec = self.spec
        self.state = mx.zeros((1, spec.value_heads, spec.value_dim, spec.key_dim), mx.float32)
        self.conv = mx.zeros((1, spec.conv_rows, spec.conv_channels), self.dtype)

    def arrays(self) -> list[mx.array]:
        """The current state arrays."""
        return [self.state, self.conv]

    def rewind_refusal(self, position: int, to: int) -> str | None:
        """A recurrent state cannot be unrolled."""
        return "a recurrent layer cannot go back without a snapshot"

    def snapshot(self) -> Saved:
        """References to the present state."""
        return self.state, self.conv

    def restore(self, snapshot: Saved) -> None:
        """Make an earlier state the present one."""
        self.state, self.conv = snapshot
