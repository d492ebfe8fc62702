"""Fused layers against answers that mlx-lm computed from the same packed weights, and gated delta
nets whose single rows pass as one operation against recorded ones.

A CPU expands packed matrices and fuses nothing; here it is made to behave like a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracle_folders import ORACLES, Oracle

from turbospark import OpenOptions, Runner, opening
from turbospark.kernels import choices
from turbospark.layers.weights import Weights

DELTA_NETS = ["qwen3_5-irregular", "mlx-qwen3_5_moe-base-4bit", "qwen4_exp-base"]
CASES = ["mlx-llama-llama3-4bit", "mlx-mixtral-base-4bit", "mlx-qwen3_moe-base-4bit"]


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(choices.CHOICES["cpu"], fused_rows=1, gated_delta=True)
    monkeypatch.setitem(choices.CHOICES, "cpu", row)
    monkeypatch.setattr(opening, "Weights", _packed)


def _packed(*args: object, expand: bool, **kwargs: object) -> Weights:
    return Weights(*args, expand=False, **kwargs)  # type: ignore[arg-type]


def follow(runner: Runner, oracle: Oracle) -> int:
    """Steps through the recorded greedy continuation, all of which must agree; their number."""
    row = np.array(runner.prefill(oracle.ids))
    rows = []
    for token in oracle.greedy_ids:
        rows.append(row)
        assert int(row.argmax()) == token
        row = np.array(runner.step(token))
    assert float(np.abs(np.stack(rows) - oracle.greedy_logits).max()) < 2e-4
    return len(rows)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_steps_follow_the_greedy_continuation(
    name: str, kernels: str, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    options = OpenOptions(expert_residency="resident", max_context=200, kernels=kernels)
    with Runner.open(installed(name), options) as runner:
        assert runner.resolved.kernels == kernels
        steps = follow(runner, oracle)
        layers = oracle.config["num_hidden_layers"]
        fused = steps * layers if kernels == "auto" else 0
        assert runner.phase_counters.fused_layers == fused


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", DELTA_NETS)
def test_gated_delta_nets_follow_the_greedy_continuation(
    name: str, kernels: str, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    options = OpenOptions(expert_residency="auto", max_context=200, kernels=kernels)
    with Runner.open(installed(name), options) as runner:
        rows = len(oracle.ids) + follow(runner, oracle)
        layers = oracle.config.get("text_config", oracle.config)["layer_types"]
        nets = layers.count("linear_attention") if kernels == "auto" else 0
        assert runner.phase_counters.delta_rows == rows * nets


def test_streamed_experts_leave_their_layers_as_they_are(installed: Callable[[str], Path]) -> None:
    with Runner.open(
        installed(CASES[1]), OpenOptions(expert_cache_slots=8, max_context=50)
    ) as runner:
        runner.prefill([1, 2, 3])
        runner.step(4)
        assert runner.phase_counters.fused_layers == 0


def test_a_machine_without_kernels_says_so(
    installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with Runner.open(installed(CASES[0]), OpenOptions(max_context=50)) as runner:
        assert runner.resolved.kernels == "reference"
