"""Root mean square norms. Knows plain and centred weights; does not know which layer asks."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32.

    weight is [D], or None for a norm without weight. A centred norm passes 1 + w, kept float32:
    rounding the sum to bfloat16 would change a third of its elements.
    """

    weight: mx.array | None
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps).astype(x.dtype)
