"""Random inputs for kernels, and packed planes read by an independent numpy decoder."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Quant

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Packed:
    """A packed matrix and its values in float64."""

    fmt: Quant
    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    values: np.ndarray


def packed(shape: tuple[int, ...], fmt: Quant, seed: int = 0) -> Packed:
    """Random codes and companions [..., rows, columns] of `fmt`."""
    random = np.random.default_rng(seed)
    words = (*shape[:-1], fmt.words(shape[-1]))
    groups = (*shape[:-1], shape[-1] // fmt.group_size)
    weight = random.integers(0, 1 << 32, words, dtype=np.uint64).astype(np.uint32)
    if fmt.mode == "mxfp4":
        exponents = random.integers(118, 126, groups).astype(np.uint8)
        values = e2m1_values(weight) * np.repeat(2.0 ** (exponents - 127.0), 32, axis=-1)
        return Packed(fmt, mx.array(weight), mx.array(exponents), None, values)
    dtype = getattr(mx, fmt.scale_dtype)
    step = 1.0 / (1 << fmt.bits)
    scales = mx.array(random.uniform(0.5, 1.0, groups) * step).astype(dtype)
    biases = mx.array(random.uniform(-0.6, -0.4, groups)).astype(dtype)
    codes = unpack_codes(weight, fmt.bits)
    wide = lambda a: np.repeat(floats(a), fmt.group_size, axis=-1)  # noqa: E731
    return Packed(fmt, mx.array(weight), scales, biases, codes * wide(scales) + wide(biases))


def unpack_codes(weight: np.ndarray, bits: int) -> np.ndarray:
    """Words [..., n] as the codes of an LSB-first bit stream."""
    raw = np.ascontiguousarray(weight).view(np.uint8)
    stream = np.unpackbits(raw, axis=-1, bitorder="little")
    codes = stream.reshape(*weight.shape[:-1], -1, bits).astype(np.int64)
    return codes @ (1 << np.arange(bits))


def e2m1_values(weight: np.ndarray) -> np.ndarray:
    """Words [..., n] as 4-bit floats [..., 8 n]."""
    codes = unpack_codes(weight, 4)
    return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]


def floats(array: mx.array) -> np.ndarray:
    """Any float array in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def normal(shape: tuple[int, ...], dtype: mx.Dtype, seed: int, scale: float = 1.0) -> mx.array:
    """Normal random numbers, drawn by numpy."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return mx.array(values.astype(np.float32)).astype(dtype)


TOLERANCE = {mx.float32: 3e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}
"""Largest error over largest value that rounding the output once, and float32 sums, explain."""


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest wanted value; NaN if anything is."""
    return float(np.abs(got - want).max() / np.abs(want).max())
