"""A family run on random tensors held in memory: no files, no install.

Values are multiples of 2^-7 below 2, exact in bfloat16, so that 1 + w is exact too.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.cache.state import LayerStates
from turbospark.dtypes import Raw
from turbospark.families.base import Family
from turbospark.install.planes import Planes
from turbospark.layers.weights import Weights

Tensors = dict[str, np.ndarray]


class Reader:
    """What `Weights` reads from: canonical name -> float32 array."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> Planes:
        return planes(self.tensors[name])


def planes(array: np.ndarray) -> Planes:
    return Planes(Raw("float32"), array.shape, mx.array(array))


def random_tensors(family: Family, config: Any, seed: int = 0) -> Tensors:
    """One array per canonical tensor of a model without routed experts."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        values = np.clip(rng.standard_normal(shape) * scale, -1.9, 1.9)
        return (np.round(values * 128) / 128).astype(np.float32)

    return {name: draw(shape) for name, shape in family.weight_shapes(config).items()}


def gathered(pieces: Any, config: Any, source: Tensors) -> Tensors:
    """Source tensors under canonical names, as a conversion would store them."""
    found: Tensors = {}
    for name, array in source.items():
        pieces_of = pieces(config, name)
        assert pieces_of is not None, f"unknown tensor {name}"
        for piece in pieces_of:
            assert piece.target not in found, f"{piece.target} comes twice"
            part = planes(array) if piece.rows is None else planes(array).rows(piece.rows)
            part = part if piece.transform is None else piece.transform(part)
            found[piece.target] = np.array(part.dense(mx.float32))
    return found


def build(family: Family, config: Any, tensors: Tensors, dtype: mx.Dtype = mx.float32) -> Any:
    return family.build(config, Weights(Reader(tensors), family.weight_shapes(config), dtype), None)


def logits(family: Family, config: Any, tensors: Tensors, ids: list[int]) -> np.ndarray:
    """float32 [T, vocab] of one pass over `ids`."""
    model = build(family, config, tensors)
    states = LayerStates(model.cache_specs, len(ids), mx.float32)
    states.begin(len(ids))
    return np.array(model.head(model(mx.array([ids]), states))[0])
