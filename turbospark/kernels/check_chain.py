"""Launches as phases of one, on a GPU: a feed-forward with its norm and residual.

Knows a launch of products; does not know how checks run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.dtypes import affine
from turbospark.kernels import qmv_matrix
from turbospark.kernels.chain import BACKENDS, as_one, counters
from turbospark.kernels.check_base import Check, dense, floats, nbytes, normal, packed
from turbospark.kernels.choices import backend
from turbospark.kernels.fused import Around, qmv_reference


def chain_checks() -> Iterator[Check]:
    """One feed-forward, where launches can be chained."""
    if backend(mx.default_device()) in BACKENDS:
        yield _feed_forward(2048, 6144)


def _feed_forward(hidden: int, width: int) -> Check:
    fmt, dtype = affine(4, 64), mx.bfloat16
    x, norm = normal((1, hidden), dtype, 0), normal((hidden,), dtype, 1)
    up = packed((2 * width, hidden), fmt, dtype, 2)
    down = packed((hidden, width), fmt, dtype, 3)
    first, last = Around(norm, 1e-5, glu="silu"), Around(residual=x)
    rows = floats(x)
    rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * floats(norm)
    gate, more = np.split(rows @ dense(up, fmt).T, 2, axis=-1)
    want = floats(x) + (gate / (1 + np.exp(-gate)) * more) @ dense(down, fmt).T

    def steps() -> Any:
        tuning = qmv_matrix.Tuning(simdgroups=4)
        # The backend is the recorder's to choose.
        h = qmv_matrix.launch(x, fmt, *up, first, tuning).run("cuda")[0]
        return qmv_matrix.launch(h, fmt, *down, last, tuning).run("cuda")[0]

    return Check(
        "chain",
        f"{hidden} -> {width} -> {hidden}",
        dtype,
        # Launches in flight at once must not count together.
        lambda where: as_one(where, counters(), steps),
        lambda: qmv_reference(qmv_reference(x, fmt, *up, first), fmt, *down, last),
        want,
        nbytes(up) + nbytes(down),
    )
