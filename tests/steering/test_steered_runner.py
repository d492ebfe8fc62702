"""An open runner and its steering: opening, changing, reporting, refusing, forgetting."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from oracle_folders import ORACLES, Oracle
from steered import open_cpu, random_set

from turbospark import Runner
from turbospark.errors import (
    NonFiniteLogitsError,
    OptionError,
    RunnerBusyError,
    SessionFileError,
    UnsupportedError,
)
from turbospark.families import families
from turbospark.steering import SteeringPolicy, SteeringSet, SteeringVector, unsupported_reason

MODEL = "gemma3-text"  # four layers, some with rings
IDS = Oracle(ORACLES / MODEL).ids
Installed = Callable[[str], Path]


@pytest.fixture
def runner(installed: Installed) -> Iterator[Runner]:
    with open_cpu(installed(MODEL), prefix_reuse=True, session_slots=2) as opened:
        yield opened


def ablation(runner: Runner, alpha: float = 0.6) -> SteeringPolicy:
    return SteeringPolicy.single(random_set(runner, [1, 2]), "ablate", alpha)


# --- opening and changing -------------------------------------------------------------------------


def test_a_policy_given_at_open_equals_one_set_later(runner: Runner, installed: Installed) -> None:
    policy = ablation(runner)
    plain = np.array(runner.score(IDS))
    runner.set_steering(policy)
    later = np.array(runner.score(IDS))
    with open_cpu(installed(MODEL), steering=policy) as opened:
        assert np.array_equal(np.array(opened.score(IDS)), later)
        assert opened.steering == policy and opened.steering_line == runner.steering_line
    runner.set_steering(None)
    assert np.array_equal(np.array(runner.score(IDS)), plain)
    assert np.abs(later - plain).max() > 1e-2


@pytest.mark.parametrize("off", [None, SteeringPolicy.off()])
def test_off_hands_the_model_no_hook(runner: Runner, off: SteeringPolicy | None) -> None:
    runner.set_steering(ablation(runner))
    engine = runner._engine
    assert engine is not None and engine._after_layer({}) is engine.steering is not None
    runner.set_steering(off)
    assert engine._after_layer({}) is None
    assert runner.steering_line is runner.steering_coefficients is runner.resolved.steering is None


def test_line_and_coefficients_report_what_is_in_force(runner: Runner) -> None:
    layers = runner.arch.num_layers
    assert runner.steering is runner.steering_line is runner.steering_coefficients is None
    runner.set_steering(ablation(runner))
    assert runner.steering_line == runner.resolved.steering == f"ablate@0.6 on 2 of {layers} layers"
    assert "ablate@0.6" in str(runner.resolved)
    assert runner.steering_coefficients == [[None]] * layers
    runner.prefill(IDS)
    found = runner.steering_coefficients
    assert found is not None and [c[0] is None for c in found] == [
        i not in (1, 2) for i in range(layers)
    ]
    runner.step(5)
    assert runner.steering_coefficients != found


def test_coefficients_are_per_vector_in_order(runner: Runner) -> None:
    sets = [random_set(runner, layers, seed=i) for i, layers in enumerate(([1], [1, 2]))]
    runner.set_steering(SteeringPolicy([SteeringVector(s, "add", 0.5) for s in sets]))
    runner.prefill(IDS)
    found = runner.steering_coefficients
    assert found is not None
    covered = [[c is not None for c in layer] for layer in found]
    assert covered[1:3] == [[True, True], [False, True]]


def test_a_change_forgets_every_conversation(runner: Runner) -> None:
    runner.set_steering(ablation(runner))
    engine = runner._engine
    assert engine is not None
    for prompt in (IDS, IDS[::-1]):  # the second parks the first
        runner.generate(prompt, max_new_tokens=2, temperature=0)
    assert all(s.record.tokens for s in engine.pool.sessions)
    again = runner.generate(IDS, max_new_tokens=2, temperature=0)
    assert again.reused_prefix_tokens == len(IDS) - 1
    runner.set_steering(ablation(runner, 0.5))
    assert runner.position == 0 and not any(s.record.tokens for s in engine.pool.sessions)
    assert runner.generate(IDS, max_new_tokens=2, temperature=0).reused_prefix_tokens == 0


def test_reuse_under_steering_equals_a_fresh_answer(runner: Runner, installed: Installed) -> None:
    policy = ablation(runner)
    runner.set_steering(policy)
    first = runner.generate(IDS[:20], max_new_tokens=6, temperature=0, ignore_eos=True)
    second = runner.generate(
        [*IDS[:20], *first.token_ids, 7, 9], max_new_tokens=8, temperature=0, ignore_eos=True
    )
    reported = runner.steering_coefficients
    assert second.reused_prefix_tokens >= 25
    with open_cpu(installed(MODEL), steering=policy) as fresh:
        expected = fresh.generate(
            [*IDS[:20], *first.token_ids, 7, 9], max_new_tokens=8, temperature=0, ignore_eos=True
        )
        assert second.token_ids == expected.token_ids
        assert fresh.steering_coefficients == reported


def test_a_refused_change_changes_nothing(runner: Runner) -> None:
    runner.set_steering(ablation(runner))
    row = np.array(runner.prefill(IDS))
    line, position = runner.steering_line, runner.position
    with pytest.raises(OptionError, match="width 5"):
        runner.set_steering(SteeringPolicy.single(SteeringSet.of({1: np.ones(5)})))
    with pytest.raises(OptionError, match="works: a SteeringPolicy or None"):
        runner.set_steering("ablate")  # type: ignore[arg-type]
    assert (runner.steering_line, runner.position) == (line, position)
    runner.reset()
    assert np.array_equal(np.array(runner.prefill(IDS)), row)


def test_a_change_waits_for_its_turn(runner: Runner) -> None:
    events = runner.stream(IDS, max_new_tokens=4)
    next(events)
    with pytest.raises(RunnerBusyError):
        runner.set_steering(None)
    events.close()


def test_guessed_passes_are_reported_when_they_count(runner: Runner) -> None:
    """Running ahead builds the next pass before this one's answer is read."""
    runner.set_steering(ablation(runner))
    engine = runner._engine
    assert engine is not None
    runner.prefill(IDS)
    found = []
    for ahead in (False, True):
        engine.run_ahead = ahead
        runner.reset()
        runner.prefill(IDS)
        rows = []
        for token in (5, 7, 9):
            rows.append((np.array(engine.step(token)).tolist(), runner.steering_coefficients))
        found.append(rows)
        engine.end_run()
    assert found[0] == found[1]


@pytest.mark.parametrize("drafter", ["prompt_lookup", "draft_model"])
def test_drafting_under_steering_loses_nothing_and_reports_the_last_row_kept(
    runner: Runner, installed: Installed, drafter: str
) -> None:
    """A verifying pass has rows that are cut off again."""
    prompt, more = IDS[:12] * 3, {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    runner.set_steering(ablation(runner))
    expected = runner.generate(prompt, **more)
    # The draft model is the same one without steering: right at times, and wrong at times.
    how = {"prompt_lookup": 4} if drafter == "prompt_lookup" else {drafter: installed(MODEL)}
    with open_cpu(installed(MODEL), steering=ablation(runner), speculation=how) as drafting:
        found = drafting.generate(prompt, **more)
        assert found.token_ids == expected.token_ids
        assert found.speculation is not None and found.speculation.rollbacks > 0
        assert found.speculation.accepted > 0 or drafter == "prompt_lookup"
        position, reported = drafting.position, drafting.steering_coefficients
    runner.reset()
    runner.prefill([*prompt, *expected.token_ids][:position])
    assert runner.steering_coefficients == reported


# --- sessions -------------------------------------------------------------------------------------


def test_a_saved_session_belongs_to_its_steering(runner: Runner, tmp_path: Path) -> None:
    policy, path = ablation(runner), tmp_path / "chat.safetensors"
    runner.set_steering(policy)
    runner.prefill(IDS)
    expected = np.array(runner.step(3))
    runner.set_steering(policy)
    runner.prefill(IDS)
    runner.save_session(path)
    for other in (None, ablation(runner, 0.5)):
        runner.set_steering(other)
        with pytest.raises(
            SessionFileError, match=r"made with steering '\w+.* on .* \([0-9a-f]{12}\), but this"
        ) as caught:
            runner.load_session(path)
        assert "set that steering" in str(caught.value)
    runner.set_steering(SteeringPolicy([*policy.vectors]))
    assert runner.load_session(path) == len(IDS)
    assert np.array_equal(np.array(runner.step(3)), expected)


# --- refusals -------------------------------------------------------------------------------------


def test_an_unsupported_family_is_refused_in_the_words_of_its_reason(installed: Installed) -> None:
    install = installed("deepseek_v2-lite")
    with open_cpu(install) as runner:
        reason = runner.steering_unsupported_reason
        policy = SteeringPolicy.single(random_set(runner, [1]))
        assert reason is not None and not runner.steering_supported
        for call in (
            lambda: open_cpu(install, steering=policy),
            lambda: runner.set_steering(policy),
            lambda: runner.residuals([1, 2, 3]),
        ):
            with pytest.raises(UnsupportedError) as caught:
                call()
            assert str(caught.value) == reason
        runner.set_steering(SteeringPolicy.off())  # nothing to apply, nothing to refuse


def test_the_reason_names_the_family_and_every_other_with_its_cause() -> None:
    for family in families():
        reason = unsupported_reason(family)
        assert (reason is None) == (family.capabilities.steering is None)
        assert unsupported_reason(family.name) == reason
        if reason is not None:
            assert f"family {family.name} " in reason and "\n" not in reason
            for other in families():
                cause = other.capabilities.steering
                assert (other.name if cause is None else f"{other.name} ({cause})") in reason
    assert unsupported_reason("qwen3_moe") is None  # model types are names too


def test_directions_that_do_not_fit_are_refused_at_open(installed: Installed) -> None:
    install = installed(MODEL)
    with open_cpu(install) as runner:
        width, layers = runner.arch.hidden_size, runner.arch.num_layers
    wrong = SteeringSet.of({1: np.ones(width), 2: np.ones(width)}, source="v.gguf")
    narrow = SteeringSet.of({2: np.ones(width - 1)}, source="v.gguf")
    with pytest.raises(
        OptionError,
        match=rf"v.gguf has directions of width {width - 1} \(first at block 2\), "
        rf"but this model has hidden_size {width}",
    ):
        open_cpu(install, steering=SteeringPolicy.single(narrow))
    past = SteeringSet.of({1: np.ones(width), layers: np.ones(width)}, source="v.gguf")
    with pytest.raises(
        OptionError,
        match=rf"v.gguf has a direction for block {layers}, but this model's last is {layers - 1}",
    ):
        open_cpu(install, steering=SteeringPolicy.single(past))
    zero = SteeringSet.of({1: np.zeros(width), 2: np.ones(width)}, source="v.gguf")
    with pytest.raises(OptionError, match=r"of block 1 in v\.gguf is zero in float32"):
        open_cpu(install, steering=SteeringPolicy([SteeringVector(wrong), SteeringVector(zero)]))
    open_cpu(install, steering=SteeringPolicy.single(past.restrict(0, layers - 1))).close()


@pytest.mark.parametrize(
    ("made_on", "warned"),
    [(None, False), ("gemma3", False), ("Gemma-3", False), ("unknown", False), ("qwen2", True)],
)
def test_a_set_of_another_architecture_is_warned_of(
    runner: Runner, made_on: str | None, warned: bool
) -> None:
    made = random_set(runner, [1])
    policy = SteeringPolicy.single(SteeringSet(made.layers, declared_arch=made_on))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.set_steering(policy)
    assert ["made on 'qwen2'" in str(w.message) for w in caught] == [True] * warned
    assert not warned or caught[0].filename == __file__


# --- finite ---------------------------------------------------------------------------------------


def test_a_stream_that_overflows_can_be_told_from_one_that_does_not(runner: Runner) -> None:
    logits = runner.prefill(IDS)
    assert runner.check_finite(logits) is logits
    with pytest.raises(NonFiniteLogitsError, match=r"2 of 3 values are not finite"):
        runner.check_finite(mx.array([1.0, float("inf"), float("nan")]))
