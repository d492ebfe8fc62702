"""Greedy decoding reads an id back, not the row; anything that needs the row still gets it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from turbospark import OpenOptions, Runner
from turbospark.engine import Engine
from turbospark.errors import NonFiniteLogitsError
from turbospark.sampling import Sampler

PROMPT = [5, 17, 42, 3, 9]
AHEAD = [False, True]


@pytest.fixture
def runner(installed: Callable[[str], Path]) -> Runner:
    return Runner.open(installed("llama-base"), OpenOptions(max_context=64))


def greedy(runner: Runner, **changes: object) -> list[int]:
    runner.reset()
    options = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, **changes}
    return runner.generate(PROMPT, **options).token_ids


@pytest.mark.parametrize("ahead", AHEAD)
def test_no_row_is_read_and_the_tokens_are_the_samplers(
    ahead: bool, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "_runs_ahead", lambda *_: ahead)
    with monkeypatch.context() as sampled:
        sampled.setattr(Sampler, "takes_likeliest", False)
        expected = greedy(runner)
    monkeypatch.setattr(Sampler, "sample", None)
    before = runner.phase_counters
    assert greedy(runner) == expected
    spent = runner.phase_counters - before
    # A prompt and all tokens but the last; the one begun behind that is undone.
    assert (spent.passes, spent.passes_dropped) == (12, int(ahead))


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"temperature": 0.5, "seed": 1}])
def test_penalties_and_chance_see_the_row(
    changes: dict, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "likeliest", None)
    assert len(greedy(runner, **changes)) == 12


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_logit_that_is_not_finite_is_named(
    ahead: bool, steps: int, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "_runs_ahead", lambda *_: ahead)
    model, seen = runner._engine.model, []

    def head(hidden: mx.array) -> mx.array:
        seen.append(1)
        logits = type(model).head(model, hidden)
        return logits if len(seen) <= steps else mx.concatenate(
            [logits[..., :7], mx.full((1, 1, 1), -mx.inf), logits[..., 8:]], axis=-1
        )  # fmt: skip

    monkeypatch.setattr(model, "head", head)
    with pytest.raises(NonFiniteLogitsError, match=r"1 of 101 logits .* -inf for token 7"):
        greedy(runner)
    assert len(seen) >= steps


@pytest.mark.parametrize("ahead", AHEAD)
def test_an_id_belongs_to_its_own_row(ahead: bool, runner: Runner) -> None:
    engine = runner._engine
    runner.reset()
    rows = [runner.prefill(PROMPT)]
    engine.run_ahead = ahead
    for token in (1, 2, 3):
        rows.append(engine.step(token))
    engine.end_run()
    for row in rows:
        assert engine.likeliest(row) == int(mx.argmax(row).item())
