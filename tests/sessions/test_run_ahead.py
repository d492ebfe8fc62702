"""Guessing the next token while the last is sampled changes speed and counters, not answers.

The runner does it on a GPU alone; here it is forced on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conversation import KINDS, answer, open_cpu, ringed, same, tokens_of
from oracle_folders import ORACLES, Oracle

from turbospark import Runner
from turbospark.generation import Token

OPTIONS = {"prefix_reuse": True, "expert_residency": "resident"}


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_runs_ahead", lambda *_: True)


def prompt_of(name: str) -> list[int]:
    return tokens_of(Oracle(ORACLES / name), 30)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_right_and_wrong_guesses_give_the_plain_answer(
    name: str, temperature: float, installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(name)
    options = {"max_new_tokens": 12, "temperature": temperature, "seed": 3, "ignore_eos": True}
    with (
        open_cpu(installed(name), **OPTIONS, **ringed(name, 9)) as runner,
        open_cpu(installed(name)) as cold,
    ):
        guessed = runner.generate(prompt, **options)
        monkeypatch.undo()
        runner.reset()
        plain = runner.generate(prompt, **options)
        assert guessed.token_ids == plain.token_ids
        assert guessed.kv_position == plain.kv_position == 41
        assert guessed.phases.passes == plain.phases.passes
        assert plain.phases.passes_dropped == 0
        assert (guessed.phases.passes_dropped == 0) == (temperature == 0)
        following = [*prompt, *plain.token_ids, 5]
        again = answer(runner, following, 4)
        assert again.kept == 41
        if "mistral" not in name and "gemma" not in name and "gpt" not in name:
            assert same(again, answer(cold, following, 4))  # other rings add in another order


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("name", KINDS)
def test_a_stream_closed_with_a_pass_in_flight_leaves_the_right_state(
    name: str, installed: Callable[[str], Path], tmp_path: Path
) -> None:
    prompt = prompt_of(name)
    with (
        open_cpu(installed(name), **OPTIONS, **ringed(name, 9)) as runner,
        open_cpu(installed(name)) as other,
    ):
        expected = answer(runner, prompt, 5)
        runner.reset()
        stream = runner.stream(prompt, max_new_tokens=12, temperature=0, ignore_eos=True)
        made = [e.id for e in (next(stream) for _ in range(8)) if isinstance(e, Token)]
        stream.close()
        assert made[:5] == expected.tokens[: len(made)]
        held = [*prompt, *made[:-1]]
        assert runner.position == len(held)
        runner.save_session(tmp_path / "talk")
        assert other.position == 0
        again = answer(runner, [*held, 7], 3)
        assert again.kept == len(held)
        runner.load_session(tmp_path / "talk")
        assert same(answer(runner, [*held, 7], 3), again)
        runner.reset()
        assert same(answer(runner, [*held, 7], 3), again)


@pytest.mark.usefixtures("ahead")
def test_a_guess_never_passes_the_end_of_the_context(installed: Callable[[str], Path]) -> None:
    with open_cpu(installed("llama-base"), max_context=40) as runner:
        prompt = prompt_of("llama-base")
        result = runner.generate(prompt, max_new_tokens=None, temperature=0, ignore_eos=True)
        assert len(result.token_ids) == 10 and result.stop_reason == "context"


@pytest.mark.usefixtures("ahead")
def test_a_pass_in_flight_is_taken_up_by_another_thread(installed: Callable[[str], Path]) -> None:
    prompt = prompt_of("qwen3_5-base")
    options = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    with open_cpu(installed("qwen3_5-base")) as runner:
        expected = runner.generate(prompt, **options).token_ids
        stream = runner.stream(prompt, **options)
        made = [e.id for e in (next(stream) for _ in range(4)) if isinstance(e, Token)]
        rest: list[int] = []
        thread = threading.Thread(
            target=lambda: rest.extend(e.id for e in stream if isinstance(e, Token))
        )
        thread.start()
        thread.join()
        assert made + rest == expected
