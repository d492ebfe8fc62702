"""run and chat: what is sent to the model, what is shown, how it is interrupted."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turbospark import OpenOptions, Runner
from turbospark.cli import talk
from turbospark.generation import Finished, Token
from turbospark.result import GenerationResult

Command = Callable[..., Any]
GREEDY = ("--temperature", 0, "--max-new", 12, "--ignore-eos")


def expected(model: Path, prompt: Any, **options: Any) -> Any:
    """The library's own answer."""
    chosen = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, **options}
    with Runner.open(model, OpenOptions(max_context=1024)) as runner:
        return runner.generate(prompt, **chosen)


def typed(monkeypatch: pytest.MonkeyPatch, text: str, terminal: bool = False) -> None:
    """Standard input holds `text`."""
    stream = io.StringIO(text)
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdin", stream)


def test_run_prints_the_answer_and_nothing_else_on_standard_output(
    turbospark: Command, model: Path
) -> None:
    result = expected(model, [{"role": "user", "content": "hi"}])
    found = turbospark("run", "tiny", "hi", *GREEDY)
    assert found.code == 0
    assert found.out == result.text + "\n" and result.text.strip()
    assert f"prompt {result.prompt_tokens} tokens" in found.err
    assert "answer 12 tokens at" in found.err and "stopped: max_tokens" in found.err
    assert turbospark("run", "tiny", "hi", *GREEDY, "--quiet").err == ""


def test_run_with_json_reports_everything(turbospark: Command, model: Path) -> None:
    result = expected(model, [{"role": "user", "content": "hi"}])
    data = json.loads(turbospark("run", "tiny", "hi", *GREEDY, "--json").out)
    assert data["text"] == result.text and data["token_ids"] == result.token_ids
    assert data["stop_reason"] == "max_tokens" and data["new_tokens"] == 12
    assert data["phases"]["calls"] == result.prompt_tokens + 11
    assert data["resolved"]["family"] == "llama" and data["memory"]["kv"] > 0


def test_a_raw_prompt_is_continued_as_it_stands(turbospark: Command, model: Path) -> None:
    found = turbospark("run", "tiny", "hi", *GREEDY, "--raw", "--json")
    assert json.loads(found.out)["token_ids"] == expected(model, "hi").token_ids


def test_token_ids_need_no_tokenizer(turbospark: Command, store: Path) -> None:
    result = expected(store / "models" / "wordless.gturbo", [3, 1, 4])
    found = turbospark("run", "wordless", "--ids", "3, 1,4", *GREEDY)
    assert found.out.split() == [str(token) for token in result.token_ids]
    assert json.loads(turbospark("run", "wordless", "--ids", "3 1 4", *GREEDY, "--json").out)[
        "prompt_tokens"
    ] == len([3, 1, 4])


def test_system_reasoning_and_date_reach_the_template(turbospark: Command, model: Path) -> None:
    words = ["--system", "be", "--system", "brief", "--reasoning", "high", "--chat-date"]
    data = json.loads(turbospark("run", "tiny", "hi", *words, "1999-01-02", *GREEDY, "--json").out)
    fed = data["kv_backed_token_ids"][: data["prompt_tokens"]]
    with Runner.open(model) as runner:
        text = runner.tokenizer.decode(fed, skip_special=False)
    assert text == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>system\nbrief<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n[high](1999)<|im_start|>assistant\n"
    )


def test_a_file_of_messages_is_a_prompt(turbospark: Command, model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}]  # fmt: skip
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(messages))
    found = turbospark("run", "tiny", "--messages-file", file, *GREEDY, "--json")
    assert json.loads(found.out)["token_ids"] == expected(model, messages).token_ids
    for wrong in ("{", '{"role": "user"}', '["a"]'):
        file.write_text(wrong)
        found = turbospark("run", "tiny", "--messages-file", file)
        assert found.code == 2 and str(file) in found.err


@pytest.mark.parametrize("words", [["-"], []])
def test_a_prompt_comes_from_standard_input(
    words: list[str], turbospark: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\ntwo")
    found = turbospark("run", "tiny", *words, *GREEDY, "--json")
    wanted = expected(model, [{"role": "user", "content": "one\ntwo"}])
    assert json.loads(found.out)["token_ids"] == wanted.token_ids


@pytest.mark.parametrize("words", [["-"], [], ["--raw"]])
def test_an_empty_standard_input_is_no_prompt(
    words: list[str], turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, " \n")
    found = turbospark("run", "tiny", *words, *GREEDY)
    assert (found.code, found.out) == (1, "") and "standard input is empty; give" in found.err


def test_sampling_follows_the_seed(turbospark: Command) -> None:
    words = ["--temperature", 1, "--max-new", 16, "--ignore-eos", "--json", "--seed"]
    first, again, other = (
        json.loads(turbospark("run", "tiny", "hi", *words, seed).out)["token_ids"]
        for seed in (5, 5, 6)
    )
    assert first == again != other


def test_a_stop_string_ends_the_answer(turbospark: Command, model: Path) -> None:
    text = expected(model, [{"role": "user", "content": "hi"}]).text
    stop = text[3:5]
    found = turbospark("run", "tiny", "hi", *GREEDY, "--stop", stop)
    assert found.out == text[: text.index(stop)] + "\n" and "stop_string" in found.err


def test_an_answer_takes_the_room_there_is_unless_told(turbospark: Command) -> None:
    words = ("--max-context", 40, "--temperature", 0, "--ignore-eos", "--raw", "--json")
    data = json.loads(turbospark("run", "tiny", "hello", *words).out)
    assert data["prompt_tokens"] + data["new_tokens"] == 40
    assert turbospark("run", "tiny", "hello", *words, "--max-new", 36).code == 1


def test_warnings_are_one_line_of_their_own(turbospark: Command, store: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = store / "models" / "tiny.gturbo" / "chat_template.jinja"
    before = template.read_text()
    template.write_text(plain)
    try:
        found = turbospark("run", "tiny", "hi", "--reasoning", "low", *GREEDY, "--quiet")
    finally:
        template.write_text(before)
    assert found.err == (
        "turbospark: warning: --reasoning 'low': the level is ignored, this model's template has "
        "no reasoning\n"
    )


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    said: list[str] = []

    def emit(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(talk, "emit", emit)
    found = turbospark("run", "tiny", "hi", *GREEDY)
    assert found.code == 130 and "stopped: cancelled" in found.err
    assert 3 <= len(said) <= 4
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_interrupts_at_once(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emit(text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(talk, "emit", emit)
    assert turbospark("run", "tiny", "hi", *GREEDY).code == 130


# --- models that think ----------------------------------------------------------------------------


@pytest.fixture
def thinking(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A model that says what the test puts in front, thoughts first; what it was asked is kept."""
    script = ["<think>\nhm, two\n</think>\n\nIt is 4."]

    def stream(self: Runner, ids: list[int], *_: Any, **__: Any) -> Any:
        assert self.tokenizer is not None
        script.append(self.tokenizer.decode(ids, skip_special=False))
        said = self.tokenizer.encode(script[0], add_special=False)
        tokens = [Token(i, id_, self.tokenizer.decode([id_])) for i, id_ in enumerate(said)]
        result = GenerationResult(said, script[0], "end_of_turn", len(ids), 0.1, 0.1)
        yield from [*tokens, Finished(result)]

    monkeypatch.setattr(Runner, "stream", stream)
    return script


def test_an_answer_is_standard_output_and_thoughts_are_standard_error(
    turbospark: Command, thinking: list[Any]
) -> None:
    found = turbospark("run", "tiny", "2+2?")
    assert found.out == "It is 4.\n"
    assert found.err.startswith("hm, two\n\nprompt ")
    quiet = turbospark("run", "tiny", "2+2?", "--quiet")
    assert (quiet.out, quiet.err) == ("It is 4.\n", "")
    data = json.loads(turbospark("run", "tiny", "2+2?", "--json").out)
    assert (data["content"], data["reasoning"]) == ("It is 4.", "hm, two")
    assert data["text"] == thinking[0]


def test_thoughts_do_not_go_into_the_next_turn(
    turbospark: Command, thinking: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "2+2?\nsure?\n")
    assert turbospark("chat", "tiny", "--quiet").out == "It is 4.\nIt is 4.\n"
    assert "<|im_start|>assistant\nIt is 4.<|im_end|>\n" in thinking[-1]
    assert "hm, two" not in thinking[-1]


def test_thoughts_without_an_answer_are_told(turbospark: Command, thinking: list[Any]) -> None:
    thinking[0] = "<think>\nhm, two"
    found = turbospark("run", "tiny", "2+2?")
    assert found.out == "\n"
    assert "the model thought and gave no answer; raise --max-new" in found.err


# --- chat -----------------------------------------------------------------------------------------


def turns(out: str) -> list[dict[str, Any]]:
    """The objects of `chat --json`, one a line."""
    return [json.loads(line) for line in out.splitlines()]


def test_a_chat_goes_on_and_reuses_what_the_cache_holds(
    turbospark: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n\n two \n/reset\none\n/quit\nnever\n")
    found = turns(turbospark("chat", "tiny", *GREEDY, "--json").out)
    assert len(found) == 3
    first = [{"role": "user", "content": "one"}]
    assert found[0]["text"] == found[2]["text"] == expected(model, first).text
    assert found[0]["reused_prefix_tokens"] == found[2]["reused_prefix_tokens"] == 0
    then = [*first, {"role": "assistant", "content": found[0]["text"]},
            {"role": "user", "content": "two"}]  # fmt: skip
    assert found[1]["token_ids"] == expected(model, then).token_ids
    assert found[1]["reused_prefix_tokens"] >= len("user\none") + 2


def test_a_chat_prints_answers_only_when_it_is_piped(
    turbospark: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n")
    found = turbospark("chat", "tiny", "--system", "be", *GREEDY)
    asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "one"}]
    assert (found.out, found.err) == (expected(model, asked).text + "\n", "")


def test_a_model_that_cannot_chat_says_so_before_a_line_is_read(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_asks(greeting: str) -> Any:
        raise AssertionError(greeting)

    monkeypatch.setattr(talk, "_lines", nobody_asks)
    found = turbospark("chat", "wordless")
    assert found.code == 1 and "needs a tokenizer" in found.err


def test_a_piped_chat_stops_at_the_first_refusal(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, f"{'x' * 100}\none\n")
    found = turbospark("chat", "tiny", *GREEDY, "--max-context", 64)
    assert (found.code, found.out) == (1, "") and "exceeds --max-context 64" in found.err


def test_a_chat_at_a_terminal_shows_refusals_and_goes_on(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["x" * 100, "/halp", "/help", "one"])

    def answer(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    typed(monkeypatch, "", terminal=True)
    monkeypatch.setattr("builtins.input", answer)
    found = turbospark("chat", "tiny", *GREEDY, "--max-context", 64)
    assert found.code == 0 and len(found.out.splitlines()) >= 1
    assert "tiny.gturbo: /reset starts again, /quit or Ctrl-D ends" in found.err
    assert "exceeds --max-context 64; shorten the prompt, lower --max-new or open" in found.err
    assert "larger --max-context; /reset starts again\n" in found.err
    assert "unknown command /halp; works: /reset" in found.err
    assert "\n/reset starts again, /quit or Ctrl-D ends" in found.err
    assert "stopped: max_tokens" in found.err


def test_ctrl_c_at_the_prompt_gives_up_the_line_and_not_the_conversation(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["one", KeyboardInterrupt, "/etc/hosts has what?", EOFError])

    def answer(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    typed(monkeypatch, "", terminal=True)
    monkeypatch.setattr("builtins.input", answer)
    found = turbospark("chat", "tiny", *GREEDY)
    assert found.code == 0 and found.err.count("stopped: max_tokens") == 2
    assert "\n/quit or Ctrl-D ends\n" in found.err and "unknown command" not in found.err
    assert " reused)" in found.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--top-p", 0.5, "--top-k", 0), "--top-p 0.5 with --temperature 0.2 needs --top-k > 0"),
        (("--max-new", 0), "--max-new 0 is not valid; works: an integer >= 1"),
        (("--reasoning", "huge"), "reasoning"),
        (("--max-context", 16, "--max-new", 99), "--max-context 16"),
    ],
    ids=["top_p", "max_new", "reasoning", "context"],
)
def test_refusals_name_the_flags_of_the_command(
    turbospark: Command, model: Path, flags: tuple[Any, ...], said: str
) -> None:
    found = turbospark("run", model, "hi", *flags)
    assert found.code != 0 and said in found.err
    assert "top_k" not in found.err and "max_context" not in found.err
