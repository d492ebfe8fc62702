"""Rows times a dense float32 matrix on the host, each row of the matrix read once for all of them.

In this order: the product, where it pays, whether it may be taken. Knows arrays; does not know
models. MLX's wheels for Linux multiply by the reference BLAS, which takes one number at a time and
the whole matrix anew for each row. numpy's einsum takes four numbers at a time and adds them up in
the same order: the same bits, and several rows cost little more than one. Where MLX has a BLAS that
adds otherwise (Accelerate, OpenBLAS) it is fast itself and keeps the work.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

ROWS = 16
"""Rows multiplied at once: their sums stay in a core's cache while the matrix passes."""
LEAST_WORK = 1 << 18
"""Multiplications from which waiting for the input costs less than is saved."""
LEAST_COLUMNS = 64
"""Below this einsum may sum along the rows of the matrix, in another order."""


def product(x: mx.array, matrix: np.ndarray) -> mx.array:
    """x float32 [..., in] by matrix float32 [in, out] -> [..., out]. Waits for x."""
    rows = np.asarray(x).reshape(-1, matrix.shape[0])
    y = np.empty((len(rows), matrix.shape[1]), dtype=np.float32)
    for start in range(0, len(rows), ROWS):
        part = slice(start, start + ROWS)
        # Column by column, so that einsum's innermost loop but one runs over the rows.
        np.einsum("ri,io->ro", np.asfortranarray(rows[part]), matrix, out=y[part])
    return mx.array(y).reshape(*x.shape[:-1], matrix.shape[1])


def pays(x: mx.array, matrix: mx.array) -> bool:
    """Whether a product is large enough for the host, and of a shape that einsum sums in order."""
    if matrix.shape[-1] < LEAST_COLUMNS or x.dtype != mx.float32:
        return False
    return x.size // x.shape[-1] * matrix.size >= LEAST_WORK


@cache
def same_bits() -> bool:
    """Whether MLX's CPU back end gives the bits of `product`; found out once, by trying."""
    random = np.random.default_rng(0)
    matrix = random.standard_normal((1500, 96), dtype=np.float32)
    with mx.stream(mx.cpu):
        for rows in (1, 2, 5, ROWS + 1):
            x = mx.array(random.standard_normal((1, rows, 1500), dtype=np.float32))
            if not mx.array_equal(product(x, matrix), x @ mx.array(matrix)).item():
                return False
    return True
