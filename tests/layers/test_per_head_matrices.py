"""One matrix per attention head, dense and packed, both ways, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turbospark.dtypes import Quant, Raw
from turbospark.install.planes import Planes, quantize
from turbospark.layers.linear import QuantizedLinear
from turbospark.layers.weights import Weights

HEADS, ROWS, COLUMNS = 4, 32, 64


class OneTensor:
    """A reader whose every name is the same tensor."""

    def __init__(self, planes: Planes) -> None:
        self.planes = planes

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str) -> Planes:
        return self.planes


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("stored", ["dense", "packed", "expanded"])
def test_every_head_is_multiplied_by_its_own_rows(stored: str, transpose: bool) -> None:
    rng = np.random.default_rng(1)
    matrix = mx.array(rng.standard_normal((HEADS * ROWS, COLUMNS)).astype(np.float32))
    planes = quantize(matrix, Quant("affine", 4, 32, "float32"))
    dense = planes.dense(mx.float32)
    if stored == "dense":
        planes = Planes(Raw("float32"), planes.shape, dense)
    weights = Weights(OneTensor(planes), {}, mx.float32, expand=stored == "expanded")
    layer = weights.per_head("m", HEADS, transpose)
    assert isinstance(layer, QuantizedLinear) == (stored == "packed")
    x = rng.standard_normal((1, HEADS, 3, COLUMNS if transpose else ROWS)).astype(np.float32)
    heads = np.array(dense).reshape(HEADS, ROWS, COLUMNS)
    exact = np.einsum("bhlc,hrc->bhlr" if transpose else "bhlr,hrc->bhlc", x, heads)
    np.testing.assert_allclose(np.array(layer(mx.array(x))), exact, rtol=2e-5, atol=2e-5)
