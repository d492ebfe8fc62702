"""Answers taken apart: what each dialect's markers mean, however the text was cut into tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from turbospark.text import turns
from turbospark.text.tokenizer import Tokenizer
from turbospark.text.turns import Content, Reasoning, ReleasedToolSpan, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("weather", "get-time")
]
SPECIALS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma4": ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>",
               '<|"|>', "<|tool_response>"),
    "harmony": ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>",
                "<|constrain|>"),
    "muse": ("<|start|>", "<|message|>", "<|eot|>", "<|eom|>"),
    "mistral": ("<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>",
                 "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                 "<｜tool▁sep｜>", "｜DSML｜"),
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {}
    for name, specials in SPECIALS.items():
        folder: Path = tmp_path_factory.mktemp(name)
        tiny_tokenizers.write(folder, tiny_tokenizers.byte_level(specials), config={})
        tokenizer = Tokenizer.load(folder)
        assert tokenizer is not None and tokenizer.dialect.name == name
        found[name] = tokenizer
    return found


def split(tokenizer: Tokenizer, answer: str, prompt: str = "", tools: Any = TOOLS, stop=()):
    """The pieces of `answer`, one token per byte; neighbouring texts of one kind joined."""
    splitter = turns.splitter(tokenizer, prompt, tools, stop)
    pieces = [p for id_ in tokenizer.encode(answer) for p in splitter.push(id_)]
    joined: list[Any] = []
    for piece in [*pieces, *splitter.finish()]:
        if joined and type(piece) is type(joined[-1]) and isinstance(piece, (Content, Reasoning)):
            joined[-1] = type(piece)(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


KOELN = ToolCall(0, "weather", {"city": "Köln", "days": 2})
ARGS = '{"city": "Köln", "days": 2}'
JSON_CALL = '{"name": "weather", "arguments": ' + ARGS + "}"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" '
    'string="true">Köln</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
XML = (
    "<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>"
)


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        ("chatml", f"So.\n<tool_call>\n{JSON_CALL}\n</tool_call>"),
        ("chatml", f"So.\n\n<tool_call>\n{XML}\n</tool_call>\n"),
        ("chatml", f"So.<tool_call>{JSON_CALL}"),  # the end token came instead of the marker
        (
            "chatml",
            "So.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        ),
        ("gemma4", 'So.<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:2}<tool_call|>'),
        (
            "harmony",
            "<|channel|>final<|message|>So.<|end|><|start|>assistant to=functions.weather"
            f"<|channel|>commentary <|constrain|>json<|message|>{ARGS}<|call|>",
        ),
        (
            "harmony",
            "<|channel|>final<|message|>So.<|end|><|start|>assistant<|channel|>analysis "
            f"to=functions.weather code<|message|>{ARGS}",
        ),
        ("mistral", f"So.[TOOL_CALLS] [{JSON_CALL}]"),
        ("mistral", f"So.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ARGS}"),
        (
            "deepseek",
            f"So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGS}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "deepseek",
            "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            f"{ARGS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("deepseek", "So.\n\n" + DSML),
        (
            "muse",
            " to=user<|message|>So.<|eom|><|start|>assistant to=weather<|message|>"
            '<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Köln'
            '</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>',
        ),
    ],
)
def test_a_call_is_found_in_each_native_form(tokenizers, dialect, answer):
    assert split(tokenizers[dialect], answer) == [Content("So."), KOELN]


@pytest.mark.parametrize(
    ("dialect", "prompt", "answer"),
    [
        ("chatml", "", "<think>\na < b\n</think>\n\nSo."),
        ("chatml", "<|im_start|>assistant\n<think>\n", "a < b\n</think>\n\nSo."),
        ("llama3", "", "<think>a < b</think>So."),
        ("deepseek", "<｜Assistant｜><think>", "a < b</think>So."),
        ("gemma4", "", "<|channel>thought\na < b<channel|>So."),
        ("mistral", "", "[THINK]a < b[/THINK]So."),
        (
            "harmony",
            "",
            "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final"
            "<|message|>So.<|return|>",
        ),
        ("muse", "", " to=self<|message|>a < b<|eom|><|start|>assistant to=user<|message|>So."),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_reasoning_is_apart_from_the_answer(tokenizers, dialect, prompt, answer, tools):
    found = split(tokenizers[dialect], answer, prompt, tools)
    assert found == [Reasoning("a < b"), Content("So.")]


def test_a_marker_in_the_question_does_not_open_reasoning(tokenizers):
    prompt = "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert split(tokenizers["chatml"], "A tag.", prompt) == [Content("A tag.")]


def test_an_unclosed_thought_stays_a_thought(tokenizers):
    assert split(tokenizers["chatml"], "<think>\nhm </thi") == [Reasoning("hm </thi")]


def test_several_calls_are_numbered_and_the_framing_between_is_dropped(tokenizers):
    one = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
    two = one.replace("weather", "get-time")
    found = split(tokenizers["chatml"], f"{one}\n{two}")
    assert found == [KOELN, ToolCall(1, "get-time", KOELN.arguments)]


@pytest.mark.parametrize(
    "body",
    ['{"name": "rm", "arguments": {}}', '{"name": "weather", "arguments": {"city": ', "gibberish",
     '{"name": ["weather"]}', '{"name": "weather", "arguments": [1]}', "[" * 5000, ""],
)  # fmt: skip
def test_what_is_no_offered_call_is_released_as_it_was_written(tokenizers, body):
    span = f"<tool_call>{body}</tool_call>"
    assert split(tokenizers["chatml"], span + "more") == [ReleasedToolSpan(span), Content("more")]


def test_without_tools_the_markers_are_text(tokenizers):
    answer = f"See <tool_call>{JSON_CALL}</tool_call>"
    assert split(tokenizers["chatml"], answer, tools=None) == [Content(answer)]


def test_a_span_that_never_ends_is_bounded_and_the_rest_is_text(tokenizers, monkeypatch):
    monkeypatch.setattr(turns, "MAX_SPAN", 40)
    answer = "<tool_call>" + "x" * 60
    released, *rest = split(tokenizers["chatml"], answer)
    assert isinstance(released, ReleasedToolSpan) and len(released.text) == 41
    assert rest == [Content("x" * 19)] or rest == [Content("x" * 30)]
    assert released.text + rest[0].text == answer


@pytest.mark.parametrize(
    "answer",
    [
        JSON_CALL,
        f"```json\n{JSON_CALL}\n```",
        f'[{{"name": "weather", "parameters": {ARGS}}}]',
        f"functions.weather:0{ARGS}",
        f"<tool_call>{JSON_CALL}</tool_call>",
        f"<longcat_tool_call>{JSON_CALL}</longcat_tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        XML,
    ],
)
def test_calls_in_foreign_forms_are_rescued_at_the_end(tokenizers, answer):
    found = split(tokenizers["llama3"], answer)
    assert [p for p in found if isinstance(p, ToolCall)] == [KOELN]
    foreign = answer.replace("weather", "rm")
    assert split(tokenizers["llama3"], foreign) == [Content(foreign)]


def test_bare_json_that_is_a_call_is_not_shown_as_content(tokenizers):
    assert split(tokenizers["llama3"], JSON_CALL) == [KOELN]
    assert split(tokenizers["llama3"], '{"a": 1}') == [Content('{"a": 1}')]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<|channel|>mardown<|message|># Hi", [Content("# Hi")]),
        ("just text", [Content("just text")]),
        (
            "<|channel|>commentary to=functions.weather<|message|>{broken<|call|>",
            [ReleasedToolSpan("{broken")],
        ),
        ("<|channel|>commentary<|message|>I will look.<|end|>", [Content("I will look.")]),
    ],
)
def test_harmony_that_is_not_by_the_book_loses_nothing(tokenizers, answer, expected):
    assert split(tokenizers["harmony"], answer) == expected


def test_gemma_arguments_nest_and_keep_their_punctuation(tokenizers):
    answer = (
        '<|tool_call>call:weather{city:<|"|>a, {b}: "c"<|"|>,deep:{list:[1,true,<|"|>x<|"|>,{}],'
        "none:null},days:-2.5}<tool_call|>"
    )
    (call,) = split(tokenizers["gemma4"], answer)
    deep = {"list": [1, True, "x", {}], "none": None}
    assert call.arguments == {"city": 'a, {b}: "c"', "deep": deep, "days": -2.5}


def test_a_declared_string_stays_a_string(tokenizers):
    xml = XML.replace("Köln", "12")
    (call,) = split(tokenizers["chatml"], f"<tool_call>{xml}</tool_call>")
    assert call.arguments == {"city": "12", "days": 2}


def test_a_stop_string_cuts_the_pieces_where_it_cuts_the_text(tokenizers):
    found = split(tokenizers["chatml"], "<think>a</think>one STOP two", stop=("STOP",))
    assert found == [Reasoning("a"), Content("one ")]


def test_control_tokens_are_not_text_and_characters_stay_whole(tokenizers):
    assert split(tokenizers["chatml"], "K<|im_start|>öln") == [Content("Köln")]


def test_arguments_survive_line_breaks_and_become_an_object_of_json(tokenizers):
    body = '{"name": "weather", "arguments": "{\\"city\\": \\"a\\nb\\"}"}'
    (call,) = split(tokenizers["chatml"], f"<tool_call>{body}</tool_call>")
    assert json.loads(json.dumps(call.arguments)) == {"city": "a\nb"}
