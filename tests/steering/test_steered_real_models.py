"""Opt-in: a direction made on a real model, and how far it moves what the model says.

TURBOSPARK_REAL_MODELS names a folder with GGUF files; see tests/families/test_real_models.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from turbospark import Runner, SteeringPolicy, SteeringSet, convert
from turbospark.steering import extract

FOLDER = os.environ.get("TURBOSPARK_REAL_MODELS")
FILES = ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf")
QUESTION = "How was your day? Tell me: my day was"
THINGS = ("your day", "the weather", "a walk in the park", "your breakfast")
SAY = "Describe {}, as an extremely {} person. I am so"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDER, reason="TURBOSPARK_REAL_MODELS is not set"),
]


@pytest.fixture(scope="module", params=FILES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    model = Path(FOLDER or "", request.param)
    if not model.is_file():
        pytest.skip(f"{model.name} is not there")
    install = convert(model, tmp_path_factory.mktemp("real") / "m.gturbo", progress=False)
    with Runner.open(install, device="cpu", dtype="float32", max_context=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def mood(runner: Runner) -> SteeringSet:
    runner.set_steering(None)
    ups, downs = ([SAY.format(t, m) for t in THINGS] for m in ("joyful", "miserable"))
    return extract(runner, ups, downs, progress=False)


def log_p(runner: Runner, ids: list[int]) -> np.ndarray:
    """float64 [T, vocab]."""
    logits = np.array(runner.check_finite(runner.score(ids)), dtype=np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def divergences(runner: Runner, mood: SteeringSet, policies: list) -> tuple[list, list[int]]:
    """The largest KL divergence over a window of the unsteered answer, per policy; the window."""
    runner.set_steering(None)
    prompt = runner.encode(QUESTION)
    window = runner.generate(prompt, temperature=0, max_new_tokens=24, ignore_eos=True).token_ids
    ids = [*prompt, *window]
    plain = log_p(runner, ids)[len(prompt) - 1 : -1]
    found = []
    for policy in policies:
        runner.set_steering(policy)
        steered = log_p(runner, ids)[len(prompt) - 1 : -1]
        found.append((np.exp(plain) * (plain - steered)).sum(axis=-1).max())
    return found, window


def test_the_answer_diverges_over_a_window_and_more_with_strength(
    runner: Runner, mood: SteeringSet
) -> None:
    half = runner.arch.num_layers // 2
    middle = mood.restrict(half - 1, half + 1)
    strengths = (0, 0.25, 1.0)
    policies = [SteeringPolicy.single(middle, "add", s) for s in strengths]
    (null, weak, strong), _ = divergences(runner, mood, policies)
    assert null == 0.0
    assert weak > 0.01 and strong > 2 * weak


@pytest.mark.parametrize("mode", ["ablate", "clamp", "renorm"])
def test_every_mode_moves_the_answer_and_strength_0_does_not(
    runner: Runner, mood: SteeringSet, mode: str
) -> None:
    half = runner.arch.num_layers // 2
    band = mood.restrict(half - 4, half + 4)
    policies = [SteeringPolicy.single(band, mode, s, target=5.0) for s in (0.0, 0.3)]
    (null, moved), window = divergences(runner, mood, policies)
    assert null == 0.0 and moved > 1e-3
    runner.set_steering(policies[0])
    again = runner.generate(QUESTION, temperature=0, max_new_tokens=24, ignore_eos=True)
    assert again.token_ids == window
    rows = [row[0] for row in runner.steering_coefficients or [] if row[0] is not None]
    assert len(rows) == 9 and np.isfinite(rows).all() and all(rows)


def test_the_two_groups_part_along_the_direction(runner: Runner, mood: SteeringSet) -> None:
    """On prompts that it was not made from."""
    runner.set_steering(SteeringPolicy.single(mood, "add", 0.0))
    found = []
    for tone in ("joyful", "miserable"):
        runner.reset()
        runner.prefill(runner.encode(SAY.format("your journey home", tone)))
        coefficients = runner.steering_coefficients
        assert coefficients is not None
        found.append([row[0] for row in coefficients[1:]])
    up, down = np.array(found)
    assert (up > down).mean() > 0.9


def test_a_reply_of_moderate_strength_does_not_collapse(runner: Runner, mood: SteeringSet) -> None:
    half = runner.arch.num_layers // 2
    runner.set_steering(SteeringPolicy.single(mood.restrict(half - 1, half + 1), "renorm", 0.3))
    tokens = runner.generate(QUESTION, temperature=0, max_new_tokens=24).token_ids
    assert len(set(tokens)) > 2
