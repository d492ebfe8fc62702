"""Latent attention memory: one row [latent | rotated shared key] per position, one head.

Attention is computed on the latent itself (queries absorbed), so keys are the whole row and
values are its latent part: nothing is stored twice.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.cache.attend import Step, causal_attention
from turbospark.cache.specs import LatentSpec


class LatentKV:
    """rows [1, 1, capacity, latent_dim + rope_dim]; position p lives in row p."""

    def __init__(self, spec: LatentSpec, capacity: int, dtype: mx.Dtype) -> None:
        self.spec = spec
        self.rows = mx.zeros((1, 1, capacity, spec.latent_dim + spec.rope_dim), dtype=dtype)

    def arrays(self) -> list[mx.array]:
        """The buffer, to be evaluated or counted; callers must not keep it."""
        return [self.rows]

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """Going back is moving the position."""
        return None

    def written(self, position: int, furthest: int) -> list[mx.array]:
        """Copies of the rows that matter at `position`, for a file."""
        return [mx.contiguous(self.rows[:, :, :position])]

    def refill(self, saved: list[mx.array]) -> None:
        """Put back what `written` gave."""
        self.rows[:, :, : saved[0].shape[2]] = saved[0]

    def snapshot(self) -> None:
        """Nothing to keep."""

    def restore(self, snapshot: None) -> None:
        """Nothing to put back."""

    def write(self, rows: mx.array, step: Step) -> None:
        """Store this step's rows [1, 1, L, latent_dim + rope_dim]."""
        self.rows[:, :, step.start : step.end] = rows

    def attend(self, q: mx.array, step: Step, scale: float) -> mx.array:
        """q [1, H, L, latent_dim + rope_dim] -> [1, H, L, latent_dim] over all written rows."""
        keys = self.rows[:, :, : step.end]
        values = keys[..., : self.spec.latent_dim]
        return causal_attention(q, keys, values, scale, None, step)
