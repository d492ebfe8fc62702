"""Steered families against transformers and mlx-lm with the same edits, and what must not change.

steered.npz holds their answers; tests/data/make_steered.py makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import steered
from oracle_folders import ORACLES, Oracle
from steered import open_cpu, policy, random_set
from steering_cases import EDITS, NAMES, ROWS

from turbospark import Runner
from turbospark.families import families, family_for_model_type
from turbospark.steering import SteeringPolicy, SteeringVector

MODES = ("ablate", "add", "clamp", "renorm")
Installed = Callable[[str], Path]


@pytest.fixture(scope="module", params=NAMES)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return Oracle(ORACLES / request.param)


@pytest.fixture(scope="module")
def runner(oracle: Oracle, installed: Installed) -> Iterator[Runner]:
    with open_cpu(installed(oracle.name), expert_residency="resident") as opened:
        yield opened


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(steered.DATA / "steered.npz") as arrays:
        return dict(arrays)


def steer(runner: Runner, name: str, what: str) -> SteeringPolicy:
    sizes = runner.arch.num_layers, runner.arch.hidden_size
    chosen = policy(name, EDITS[what], *sizes)
    runner.set_steering(chosen)
    return chosen


def coefficients(runner: Runner) -> np.ndarray:
    """float64 [layers, vectors], nan where there is none."""
    return np.array(runner.steering_coefficients, dtype=np.float64)


def test_every_steered_family_is_among_the_recorded() -> None:
    seen = {family_for_model_type(Oracle(ORACLES / n).config["model_type"]).name for n in NAMES}
    assert seen == {f.name for f in families() if f.capabilities.steering is None}


@pytest.mark.parametrize("what", EDITS)
def test_the_edit_is_the_references_at_the_references_place(
    runner: Runner, oracle: Oracle, recorded: dict[str, np.ndarray], what: str
) -> None:
    steer(runner, oracle.name, what)
    logits = np.array(runner.score(oracle.ids))[-ROWS:]
    np.testing.assert_allclose(logits, recorded[f"{oracle.name}/{what}/logits"], atol=2e-4)
    expected = recorded[f"{oracle.name}/{what}/coefficients"]
    np.testing.assert_allclose(coefficients(runner), expected, atol=2e-4)


def test_residuals_are_the_references_layer_outputs(
    runner: Runner, oracle: Oracle, recorded: dict[str, np.ndarray]
) -> None:
    runner.set_steering(None)
    found = np.array(runner.residuals(oracle.ids))
    np.testing.assert_allclose(found, recorded[f"{oracle.name}/residuals"], atol=2e-4)


@pytest.mark.parametrize("what", EDITS)
def test_pieces_of_any_size_and_single_steps_equal_one_pass_to_the_bit(
    runner: Runner, oracle: Oracle, what: str
) -> None:
    steer(runner, oracle.name, what)
    whole, ids = np.array(runner.score(oracle.ids)), oracle.ids
    reported = coefficients(runner)
    for size in (3, 16):
        runner.reset()
        for at in range(0, len(ids), size):
            row = np.array(runner.prefill(ids[at : at + size]))
        assert np.array_equal(row, whole[-1])
        assert np.array_equal(coefficients(runner), reported, equal_nan=True)
    runner.reset()
    runner.prefill(ids[:-2])
    for token, expected in zip(ids[-2:], whole[-2:], strict=True):
        assert np.array_equal(np.array(runner.step(token)), expected)
    assert np.array_equal(coefficients(runner), reported, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_strength_0_equals_off_to_the_bit_and_still_measures(
    runner: Runner, oracle: Oracle, mode: str
) -> None:
    runner.set_steering(None)
    plain = np.array(runner.score(oracle.ids))
    tokens = runner.generate(oracle.ids, temperature=0, max_new_tokens=24, ignore_eos=True)
    vector = SteeringVector(random_set(runner), mode, 0.0)
    runner.set_steering(SteeringPolicy([vector], target=3.0))
    assert np.array_equal(np.array(runner.score(oracle.ids)), plain)
    again = runner.generate(oracle.ids, temperature=0, max_new_tokens=24, ignore_eos=True)
    assert again.token_ids == tokens.token_ids
    found = coefficients(runner)
    assert np.isfinite(found).all() and (found != 0).all()


def test_layers_below_the_edit_are_left_as_they_were(runner: Runner, oracle: Oracle) -> None:
    runner.set_steering(None)
    plain = np.array(runner.residuals(oracle.ids))
    for layer in (1, runner.arch.num_layers - 1):
        runner.set_steering(SteeringPolicy.single(random_set(runner, [layer]), "ablate", 0.7))
        found = np.array(runner.residuals(oracle.ids))
        assert np.array_equal(found[:layer], plain[:layer])
        assert np.abs(found[layer] - plain[layer]).max() > 1e-3


def test_adding_and_its_reverse_move_the_stream_oppositely(runner: Runner, oracle: Oracle) -> None:
    layer = runner.arch.num_layers - 1
    found = []
    for alpha in (None, 0.25, -0.25):
        one = alpha and SteeringPolicy.single(random_set(runner, [layer]), "add", alpha)
        runner.set_steering(one)
        found.append(np.array(runner.residuals(oracle.ids))[layer])
    plain, up, down = found
    np.testing.assert_allclose(up - plain, plain - down, atol=1e-5)
    assert np.abs(up - plain).max() > 0.1
