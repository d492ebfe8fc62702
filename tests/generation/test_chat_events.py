"""`Runner.chat`: the pieces of an answer beside the answer as the model wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models

from turbospark import Content, Finished, Prefill, Runner
from turbospark.errors import OptionError, RunnerBusyError, TokenizerMissingError, UnsupportedError

HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner.open(tiny_models.talking(tmp_path_factory.mktemp("m") / "m.gturbo")) as opened:
        yield opened


def test_the_pieces_of_a_plain_answer_are_its_text(runner: Runner) -> None:
    events = list(runner.chat(HI, **GREEDY))
    assert isinstance(events[0], Prefill) and isinstance(events[-1], Finished)
    expected = runner.generate(HI, **GREEDY)
    assert events[-1].result.token_ids == expected.token_ids
    text = "".join(e.text for e in events if isinstance(e, Content))
    assert text == expected.text and text


def test_closing_a_chat_frees_the_runner(runner: Runner) -> None:
    events = runner.chat(HI, **GREEDY)
    next(events)
    with pytest.raises(RunnerBusyError):
        runner.reset()
    events.close()
    runner.reset()


def test_a_chat_refuses_before_anything_is_computed(runner: Runner, tmp_path: Path) -> None:
    before = runner.phase_counters.passes
    with pytest.raises(UnsupportedError, match=r"chatml fallback.* never reads tools"):
        runner.chat(HI, tools=[{"type": "function", "function": {"name": "f"}}])
    for wrong in ({"tools": [5]}, {"reasoning": "max"}, {"temperature": -1}):
        with pytest.raises(OptionError):
            runner.chat(HI, **wrong)
    with pytest.raises(OptionError, match=r"messages\[0\] has no role"):
        runner.chat([{"content": "x"}])
    assert runner.phase_counters.passes == before
    with (
        Runner.open(tiny_models.wordless(tmp_path / "w.gturbo")) as silent,
        pytest.raises(TokenizerMissingError, match="a chat needs a tokenizer"),
    ):
        silent.chat(HI)
