"""Experts of different width in one model: per layer and per projection, against a dense copy."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from layouts import dense_experts

from turbospark import OpenOptions, Runner, convert, synth
from turbospark.install.opening import Install

OVERRIDES = {
    "model.layers.1.mlp.experts.down_proj.weight": {"bits": 8, "group_size": 32},
    "model.layers.1.mlp.experts.up_proj.weight": {"bits": 3, "group_size": 64},
    "model.layers.2.mlp.experts.*.weight": None,
}
OPTIONS = OpenOptions(max_context=64)
IDS = [3, 400, 7, 7, 51, 200, 9, 18, 33, 301, 12, 5, 77, 2]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 0 all 4-bit in groups of 64; layer 1 of three widths; layer 2 not quantized."""
    path = tmp_path_factory.mktemp("synth") / "mixed"
    return synth("qwen3_moe", path, layers=3, bits=4, overrides=OVERRIDES, progress=False)


@pytest.fixture(scope="module")
def expected(mixed: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Logits of a checkpoint that holds the same values unpacked, experts by numpy."""
    folder = tmp_path_factory.mktemp("dense")
    with Install.open(mixed) as install:
        resident = install.resident
        tensors = {name: resident.read(name).dense(mx.float32) for name in resident.names}
        for (layer, expert), matrices in dense_experts(install.experts).items():
            for role, matrix in matrices.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"
                tensors[name] = mx.array(matrix)
        (folder / "config.json").write_text(json.dumps(dict(install.config)))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    path = convert(folder, folder / "install", progress=False)
    with Runner.open(path, OPTIONS.replace(expert_residency="resident")) as runner:
        return np.array(runner.score(IDS))


def test_strides_are_per_layer(mixed: Path) -> None:
    with Install.open(mixed) as install:
        formats = [
            {role: str(fmt) for role, (fmt, _) in layer.record.parts().items()}
            for layer in install.experts.layers.values()
        ]
        strides = [layer.stride for layer in install.experts.layers.values()]
    assert len(set(formats[1].values())) == 3
    assert [len(set(f.values())) for f in (formats[0], formats[2])] == [1, 1]
    assert strides[0] < strides[1] < strides[2]


@pytest.mark.parametrize(
    "options",
    [
        {"expert_residency": "resident"},
        {"expert_residency": "mapped"},
        {"expert_cache_slots": 4},
        {"expert_cache_slots": 7, "expert_lookahead": True, "verify_reads": True},
    ],
    ids=["resident", "mapped", "streamed", "look-ahead"],
)
def test_every_residency_gives_the_dense_logits(
    mixed: Path, expected: np.ndarray, options: dict
) -> None:
    with Runner.open(mixed, OPTIONS.replace(**options)) as runner:
        scores = np.array(runner.score(IDS))
        runner.reset()
        steps = np.stack([np.array(runner.step(token)) for token in IDS])
        if runner.expert_residency == "streamed":
            with Install.open(mixed) as install:
                assert runner.memory.experts == runner.expert_cache_slots * install.bytes_per_slot
    np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-4)
    with Runner.open(mixed, OPTIONS.replace(expert_residency="resident")) as runner:
        assert np.array_equal(scores, np.array(runner.score(IDS)))
    assert np.array_equal(steps, scores)
