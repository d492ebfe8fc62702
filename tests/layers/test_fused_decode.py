"""Fused layers against ordinary ones, on packed models with the configs of all llama oracles."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest
from oracle_folders import NAMES
from packed_models import FAMILY, FUSED, WIDER, Side, both, close, config_of

from turbospark.cache.state import LayerStates

CASES = [
    name
    for name in NAMES
    if config_of(name).get("model_type") in FAMILY.model_types and not name.startswith("mlx-")
]


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
