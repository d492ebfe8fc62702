"""What every check of a kernel is made of: the check itself, inputs and exact values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Check:
    """One kernel at one shape: run on a back end, as MLX's operations, and in float64."""

    kernel: str
    shape: str
    dtype: mx.Dtype
    run: Callable[[str], mx.array]
    own: Callable[[], mx.array]
    want: np.ndarray
    nbytes: int


def floats(array: mx.array) -> np.ndarray:
    """Any float array in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """Normal random numbers, the same on every device."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return mx.array(values).astype(dtype)
