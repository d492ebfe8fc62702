"""A pass begun on a guess: confirmed it saves a wait, wrong it leaves no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turbospark import OpenOptions, Runner, convert

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
# Full attention, a ring that turns, recurrent layers, latent attention, routed experts.
CASES = ["llama-base", "mistral-sliding", "qwen3_5-base", "deepseek_v2-lite", "qwen3_moe-base"]


@pytest.fixture(scope="module", params=CASES)
def runner(request, tmp_path_factory):
    install = tmp_path_factory.mktemp("ahead") / "model.gturbo"
    convert(ORACLES / request.param, install, progress=False)
    with Runner.open(install, OpenOptions(max_context=200, expert_residency="resident")) as opened:
        yield opened


def prompt(runner: Runner) -> list[int]:
    return [int(t) for t in np.random.default_rng(3).integers(0, runner.vocab_size, 40)]


def decode(runner: Runner, tokens: list[int] | None, ahead: bool, count: int = 24):
    """Logits of `count` steps, greedy or along `tokens`; then the state is left as it is."""
    runner.reset()
    logits = np.array(runner.prefill(prompt(runner)))
    rows, engine = [], runner._engine
    engine.run_ahead = ahead
    for i in range(count):
        token = int(logits.argmax()) if tokens is None else tokens[i]
        logits = np.array(runner.step(token))
        rows.append(logits)
    engine.run_ahead = False
    return np.stack(rows)


def test_right_guesses_give_the_same_logits_and_drop_nothing(runner):
    plain = decode(runner, None, ahead=False)
    before = runner.phase_counters
    np.testing.assert_array_equal(decode(runner, None, ahead=True), plain)
    spent = runner.phase_counters - before
    assert spent.passes_dropped == 0
    assert spent.calls == 40 + 24
    assert runner.position == 64


def test_wrong_guesses_are_undone_without_a_trace(runner):
    tokens = [int(t) for t in np.random.default_rng(4).integers(0, runner.vocab_size, 24)]
    plain = decode(runner, tokens, ahead=False)
    before = runner.phase_counters
    np.testing.assert_array_equal(decode(runner, tokens, ahead=True), plain)
    assert (runner.phase_counters - before).passes_dropped > 15


def test_a_pass_in_flight_is_dropped_by_whatever_comes_next(runner):
    decode(runner, None, ahead=True, count=3)
    continued = np.array(runner.prefill([5, 6, 7]))
    runner.reset()
    decode(runner, None, ahead=False, count=3)
    np.testing.assert_array_equal(np.array(runner.prefill([5, 6, 7])), continued)
    assert runner.position == 46


def test_the_last_position_of_the_context_is_still_reached(runner):
    runner.reset()
    runner.prefill([1] * (runner.max_context - 2))
    runner._engine.run_ahead = True
    runner.step(1)
    assert np.isfinite(np.array(runner.step(2))).all()
    runner._engine.run_ahead = False
    assert runner.position == runner.max_context
