"""What every check of a kernel is made of: the check itself, inputs and exact values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Quant


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


Planes = tuple[mx.array, mx.array, mx.array | None]


def packed(shape: tuple[int, ...], fmt: Quant, dtype: mx.Dtype, seed: int) -> Planes:
    """Random codes and companions of a matrix [..., rows, columns]."""
    random = np.random.default_rng(seed)
    words = random.integers(0, 1 << 32, (*shape[:-1], fmt.words(shape[-1])), dtype=np.uint64)
    groups = (*shape[:-1], shape[-1] // fmt.group_size)
    weight = mx.array(words.astype(np.uint32))
    if fmt.mode != "affine":
        return weight, mx.array(random.integers(116, 122, groups).astype(np.uint8)), None
    scale = mx.array(random.uniform(0.5, 1.0, groups).astype(np.float32) / (1 << fmt.bits))
    bias = mx.array(random.uniform(-0.6, -0.4, groups).astype(np.float32))
    return weight, scale.astype(dtype), bias.astype(dtype)


def dense(planes: Planes, fmt: Quant) -> np.ndarray:
    """The values of packed planes in float64."""
    weight, scales, biases = planes
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    size, bits = fmt.group_size, fmt.bits
    values = mx.dequantize(weight, scales, biases, group_size=size, bits=bits, mode=fmt.mode)
    return floats(values)


def nbytes(planes: Planes) -> int:
    """Bytes of packed planes."""
    return sum(a.nbytes for a in planes if a is not None)
