"""Constants applied to activations. Knows rounding; does not know which model has which constant.

A Python number meets a bfloat16 array as a bfloat16 number: sqrt(2816) would become 53.0, off by
0.1 %. These functions multiply in float32 and round the product once.
"""

from __future__ import annotations

import mlx.core as mx


def scaled(x: mx.array, factor: float) -> mx.array:
    """x * factor in the dtype of x."""
    return (x.astype(mx.float32) * factor).astype(x.dtype)


def soft_cap(logits: mx.array, cap: float) -> mx.array:
    """cap * tanh(logits / cap) in float32; a cap of 0 leaves the logits as they are."""
    logits = logits.astype(mx.float32)
    return mx.tanh(logits / cap) * cap if cap else logits
