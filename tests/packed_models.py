"""Models of the llama family with random packed matrices, held in memory, one pass at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from oracle_folders import ORACLES

from turbospark.cache.state import LayerStates
from turbospark.counters import PhaseClock
from turbospark.dtypes import Quant, Raw, affine
from turbospark.experts.mlp import ExpertMLP, StackedMatrix
from turbospark.experts.resident import ResidentExperts
from turbospark.families import family_for_model_type
from turbospark.families.config import ConfigReader
from turbospark.install.planes import Planes
from turbospark.kernels.choices import PLAIN, Choices
from turbospark.layers.fused_decode import AfterLayer
from turbospark.layers.moe import swiglu
from turbospark.layers.weights import Weights
from turbospark.policies import LiveToggles, RuntimeToggles

FMT = affine(4, 32, "float32")
FAMILY = family_for_model_type("llama")
WIDER = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=64)
FUSED = replace(PLAIN, fused_rows=4)


def config_of(name: str) -> dict[str, Any]:
    return json.loads((ORACLES / name / "config.json").read_text())


def packed(shape: tuple[int, ...], fmt: Quant, seed: int) -> Planes:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    codes, *companions = mx.quantize(mx.array(values * shape[-1] ** -0.5), fmt.group_size, fmt.bits)
    return Planes(fmt, shape, codes, *(exact(a) for a in companions))


def exact(array: mx.array) -> mx.array:
    """Rounded so that a model in bfloat16 computes with the same numbers."""
    return array.astype(mx.bfloat16).astype(mx.float32)


class Packed:
    """Random tensors by name: matrices packed but for those `dense`, vectors near one."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dense: str) -> None:
        self.shapes, self.dense = shapes, dense

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str) -> Planes:
        shape, seed = self.shapes[name], list(self.shapes).index(name)
        if len(shape) == 2 and not (self.dense and self.dense in name):
            return packed(shape, FMT, seed)
        values = np.random.default_rng(seed).standard_normal(shape) * 0.1 + (len(shape) == 1)
        return Planes(Raw("float32"), shape, exact(mx.array(values.astype(np.float32))))


class Side:
    """One model and its caches; `feed` gives the logits of each row."""

    def __init__(
        self,
        config: dict[str, Any],
        kernels: Choices,
        dense: str = "",
        dtype: mx.Dtype = mx.float32,
    ) -> None:
        c = FAMILY.read_config(ConfigReader(config))
        clock = PhaseClock()
        layers = {}
        for layer, shape in FAMILY.expert_shapes(c).items():
            matrices = []
            for i, name in enumerate(("gate", "up", "down")):
                p = packed((shape.count, *shape.matrix(name)), FMT, 1000 + 3 * layer + i)
                matrices.append(
                    StackedMatrix(FMT, p.weight, *(a.astype(dtype) for a in p.arrays()[1:]))
                )
            layers[layer] = ExpertMLP(*matrices, swiglu)
        toggles = LiveToggles(RuntimeToggles())
        store = ResidentExperts(layers, toggles, clock) if layers else None
        shapes = FAMILY.weight_shapes(c)
        weights = Weights(Packed(shapes, dense), shapes, dtype, kernels=kernels)
        self.clock = clock
        self.model = FAMILY.build(c, weights, store)
        self.states = LayerStates(self.model.cache_specs, 48, dtype, 12)
        self.fused = 0

    def feed(self, ids: list[int], after_layer: AfterLayer | None = None) -> np.ndarray:
        step = self.states.begin(len(ids))
        hidden = self.model(mx.array([ids]), self.states, after_layer)
        logits = self.model.head(hidden)[0]
        mx.eval(logits, self.states.unevaluated())
        self.fused = step.fused_layers
        assert step.attention_calls >= len(self.states.layers)
        self.states.advance()
        return np.array(logits)


def both(name: str, **changes: Any) -> tuple[Side, Side]:
    config = {**config_of(name), **WIDER}
    dense = changes.pop("dense", "")
    return Side(config, PLAIN, dense), Side(config, replace(FUSED, **changes), dense)


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return float(np.abs(one - other).max()) < 1e-5 * max(1.0, float(np.abs(other).max()))
