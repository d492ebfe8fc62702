"""Fused layers against ordinary ones, on packed models with the configs of all llama oracles."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracle_folders import NAMES, ORACLES

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


CASES = [
    name
    for name in NAMES
    if config_of(name).get("model_type") in FAMILY.model_types and not name.startswith("mlx-")
]


def packed(shape: tuple[int, ...], fmt: Quant, seed: int) -> Planes:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    parts = mx.quantize(mx.array(values * shape[-1] ** -0.5), fmt.group_size, fmt.bits)
    return Planes(fmt, shape, *parts)


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
        return Planes(Raw("float32"), shape, mx.array(values.astype(np.float32)))


class Side:
    """One model and its caches; `feed` gives the logits of each row."""

    def __init__(self, config: dict[str, Any], kernels: Choices, dense: str = "") -> None:
        c = FAMILY.read_config(ConfigReader(config))
        clock = PhaseClock()
        layers = {}
        for layer, shape in FAMILY.expert_shapes(c).items():
            matrices = []
            for i, name in enumerate(("gate", "up", "down")):
                p = packed((shape.count, *shape.matrix(name)), FMT, 1000 + 3 * layer + i)
                matrices.append(StackedMatrix(FMT, p.weight, p.scales, p.biases))
            layers[layer] = ExpertMLP(*matrices, swiglu)
        toggles = LiveToggles(RuntimeToggles())
        store = ResidentExperts(layers, toggles, clock) if layers else None
        shapes = FAMILY.weight_shapes(c)
        weights = Weights(Packed(shapes, dense), shapes, mx.float32, kernels=kernels)
        self.clock = clock
        self.model = FAMILY.build(c, weights, store)
        self.states = LayerStates(self.model.cache_specs, 48, mx.float32, 12)
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


@pytest.mark.parametrize("name", CASES)
def test_fused_rows_give_what_ordinary_layers_give(name: str) -> None:
    plain, fused = both(name)
    random = np.random.default_rng(7)
    # A prompt, single rows past every window, three rows at once, one more.
    for rows in (7, *[1] * 12, 3, 1):
        ids = random.integers(0, plain.model.vocab_size, rows).tolist()
        assert close(fused.feed(ids), plain.feed(ids))
        assert plain.fused == 0
        assert fused.fused == (len(fused.model.layers) if rows <= 4 else 0)
    assert plain.states.position == fused.states.position == 23
    assert plain.clock.snapshot() == fused.clock.snapshot()


def test_a_dense_router_is_multiplied_apart() -> None:
    plain, fused = both("qwen3_moe-base", dense="mlp.gate.")
    for token in (3, 5, 8):
        assert close(fused.feed([token]), plain.feed([token]))
        assert fused.fused == len(fused.model.layers)


def test_layers_that_cannot_be_fused_run_between_those_that_can() -> None:
    plain, fused = both("llama-base", dense="layers.0.self_attn.o_proj")
    for token in (3, 5, 8):
        assert close(fused.feed([token]), plain.feed([token]))
        assert fused.fused == len(fused.model.layers) - 1
        assert fused.states.step.attention_calls == len(fused.model.layers)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_stands_between_layers_is_called_and_obeyed(compiled: bool) -> None:
    plain, fused = both("qwen3-base", compiled=compiled)
    seen: list[int] = []

    def shifted(layer: int, x: mx.array) -> mx.array:
        seen.append(layer)
        return x + 0.25 * (layer + 1)

    expected = plain.feed([3], shifted)
    assert close(fused.feed([3], shifted), expected)
    assert not close(fused.feed([3]), expected)
    assert seen == 2 * list(range(len(plain.model.layers)))
    assert fused.fused == len(fused.model.layers)


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles graphs for a CPU with g++")
@pytest.mark.parametrize("name", ["llama-yarn", "mistral-sliding", "qwen3_moe-mixed"])
def test_a_traced_step_gives_the_same_at_every_position_and_for_every_conversation(
    name: str,
) -> None:
    plain, fused = both(name, compiled=True)
    sessions = [(side.states, LayerStates(side.states.specs, 48, mx.float32, 12))
                for side in (plain, fused)]  # fmt: skip
    traced = []
    for turn in range(24):
        for side, states in zip((plain, fused), sessions, strict=True):
            side.states = states[turn // 3 % 2]
        if turn == 20:  # back to a position whose length the device does not have
            for side in (plain, fused):
                side.states.rewind(side.states.position - 2)
        assert close(fused.feed([turn]), plain.feed([turn]))
        assert fused.fused == len(fused.model.layers)
        traced.append(dict(fused.model.decode._traced))
    assert all(t == traced[0] for t in traced) and len(traced[0]) == 1


def test_rows_that_would_overwrite_what_others_read_are_left_to_ordinary_layers() -> None:
    plain, fused = both("mistral-sliding", fused_rows=8)
    slack = fused.states.layers[0].capacity - fused.states.layers[0].window + 1
    for rows in (13, slack, slack + 1, slack + 2):
        ids = list(range(rows))
        assert close(fused.feed(ids), plain.feed(ids))
        assert (fused.fused > 0) == (rows == slack)


def test_without_kernels_nothing_is_fused() -> None:
    _, fused = both("llama-base")
    same = Side({**config_of("llama-base"), **WIDER}, FUSED.without_kernels())
    assert close(same.feed([4]), fused.feed([4]))
    assert same.fused == 0 and fused.fused > 0
