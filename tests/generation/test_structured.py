"""Answers held to a schema, an expression or a grammar, by a model that writes at random."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from turbospark import (
    Content,
    Finished,
    GenerationOptions,
    Prefill,
    ReleasedToolSpan,
    Runner,
    ToolCall,
)
from turbospark.errors import MissingDependencyError, OptionError, TokenizerMissingError
from turbospark.sampling import Sampler

pytest.importorskip("llguidance")
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"enum": ["big", "small"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                 "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "size", "ages"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = tiny_models.talking(tmp_path_factory.mktemp("m") / "m.gturbo")
    with Runner.open(path, max_context=2048) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_an_answer_follows_its_schema_and_ends_with_it(
    runner: Runner, seed: int, temperature: float
) -> None:
    settings = {"temperature": temperature, "seed": seed, "max_new_tokens": 600}
    found = runner.generate(HI, json_schema=SCHEMA, **settings)
    value = json.loads(found.text or "")
    assert set(value) == set(SCHEMA["properties"]) and len(value["name"]) <= 5
    assert value["size"] in ("big", "small") and 2 <= len(value["ages"]) <= 3
    assert all(type(age) is int and 0 <= age <= 99 for age in value["ages"])
    assert found.stop_reason == "grammar"
    again = runner.generate(HI, json_schema=json.dumps(SCHEMA), **settings)
    assert again.token_ids == found.token_ids


@pytest.mark.parametrize(
    "held", [{"regex": "(ab|cd){3}"}, {"grammar": 'start: pair~3\npair: "ab" | "cd"'}]
)
def test_expressions_and_grammars_hold_an_answer_too(runner: Runner, held: dict[str, str]) -> None:
    found = runner.generate(HI, temperature=1, seed=3, max_new_tokens=50, **held)
    assert re.fullmatch("(ab|cd){3}", found.text or "")
    assert found.stop_reason == "grammar" and found.new_tokens == 6


def test_an_open_end_is_the_models_to_choose(runner: Runner) -> None:
    found = [
        runner.generate(HI, regex="[ab]{2,}", temperature=1, top_k=0, top_p=1, seed=s)
        for s in range(6)
    ]
    assert all(re.fullmatch("[ab]{2,}", f.text or "") for f in found)
    assert {f.stop_reason for f in found} <= {"end_of_turn", "eos", "max_tokens"}
    assert any(f.stop_reason == "end_of_turn" or f.stop_reason == "eos" for f in found)


def test_a_stream_and_a_chat_are_held_as_well(runner: Runner) -> None:
    whole = runner.generate(HI, temperature=1, seed=9, json_schema=SCHEMA)
    events = list(runner.chat(HI, temperature=1, seed=9, json_schema=SCHEMA))
    assert "".join(e.text for e in events if isinstance(e, Content)) == whole.text
    assert isinstance(events[-1], Finished) and events[-1].result.token_ids == whole.token_ids


def test_speculation_does_not_change_what_is_written(tmp_path: Path) -> None:
    path = tiny_models.talking(tmp_path / "m.gturbo")
    settings = {"temperature": 0, "json_schema": SCHEMA, "max_new_tokens": 600}
    with Runner.open(path) as plain:
        expected = plain.generate(HI, **settings)
    with Runner.open(path, speculation={"prompt_lookup": 4}) as drafting:
        found = drafting.generate(HI, **settings)
    assert found.token_ids == expected.token_ids and found.stop_reason == "grammar"
    assert found.speculation is not None and found.speculation.rounds > 0


@pytest.mark.parametrize(
    ("held", "match"),
    [
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json_schema": {"enum": []}}, "Unsatisfiable schema"),
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be honoured: Invalid type"),
        ({"json_schema": {"contains": {"type": "null"}}}, "Unimplemented keys"),
        ({"json_schema": "{"}, "json_schema cannot be honoured"),
        ({"json_schema": {"x": object()}}, "json_schema: .* is not JSON"),
        ({"json_schema": 5}, "json_schema=5 is not valid; works: a JSON schema"),
        ({"regex": "("}, r"regex cannot be honoured: .*unclosed group"),
        ({"grammar": "start: x"}, "grammar cannot be honoured: .*unknown name"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar were given"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos goes past the end that regex sets"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_computed(
    runner: Runner, held: dict[str, Any], match: str
) -> None:
    before = runner.phase_counters.calls
    with pytest.raises(OptionError, match=match):
        runner.stream(HI, **held)
    assert runner.phase_counters.calls == before


CALLING = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "required": ["a", "b"], "additionalProperties": False,
        "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
        "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}}}}},
    {"type": "function", "function": {"name": "say \"hi\"", "parameters": {
        "type": "object", "required": ["word"], "additionalProperties": False,
        "properties": {"word": {"enum": ["yes", "no"]}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = tiny_models.talking(tmp_path_factory.mktemp("c") / "m.gturbo", CALLING)
    with Runner.open(path, max_context=4096) as opened:
        yield opened


def fits(call: ToolCall) -> bool:
    """Whether the arguments are what the call's own schema asks for."""
    values = call.arguments
    if call.name == "add":
        return set(values) == {"a", "b"} and all(0 <= v <= 9 for v in values.values())
    return values == {} if call.name == "now" else values in ({"word": "yes"}, {"word": "no"})


@pytest.mark.parametrize("choice", ["required", "add", 'say "hi"', "now"])
def test_a_call_that_has_to_come_comes_alone_and_keeps_to_its_schema(
    calling: Runner, choice: str
) -> None:
    names = set()
    for seed in range(12 if choice == "required" else 3):
        how = {"temperature": 1, "top_p": 1, "seed": seed, "max_new_tokens": 300}
        events = list(calling.chat(HI, tools=TOOLS, tool_choice=choice, **how))
        (call,) = (e for e in events if not isinstance(e, (Prefill, Finished)))
        assert isinstance(call, ToolCall) and fits(call)
        names.add(call.name)
        assert isinstance(events[-1], Finished) and events[-1].result.stop_reason == "grammar"
    assert names == {choice} or (choice == "required" and len(names) > 1)


def test_a_call_cut_short_comes_back_as_text(calling: Runner) -> None:
    events = list(calling.chat(HI, tools=TOOLS, tool_choice="add", max_new_tokens=9))
    assert ReleasedToolSpan('{"name": ') in events
    assert isinstance(events[-1], Finished) and events[-1].result.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"tool_choice": "sub"}, "tool_choice='sub' is not an offered tool; works: auto, requi"),
        ({"tool_choice": {"name": "add"}}, "tool_choice=.* is not an offered tool"),
        ({"tool_choice": "required", "tools": None}, "tool_choice='required' needs tools"),
        ({"tool_choice": "add", "regex": "a"}, "regex leaves no room for calls"),
        ({"tool_choice": "add", "ignore_eos": True}, "ignore_eos goes past the end"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tool 'f': parameters=5; exp"),
        (
            {"tool_choice": "f", "tools": [{"name": "f", "parameters": {"contains": {}}}]},
            "tool 'f': parameters cannot be kept to: Unimplemented keys",
        ),
    ],
    ids=["unknown", "no name", "no tools", "regex", "ignore_eos", "no schema", "contains"],
)
def test_a_call_that_cannot_be_made_to_come_is_refused(
    calling: Runner, asked: dict[str, Any], match: str
) -> None:
    with pytest.raises(OptionError, match=match):
        calling.chat(HI, **{"tools": TOOLS, **asked})
    with pytest.warns(UserWarning), pytest.raises(OptionError, match="tool_choice holds the answ"):
        calling.chat(HI, tools=TOOLS, tool_choice="add", reasoning="high")


def test_reasoning_and_tools_have_no_place_in_a_held_answer(
    runner: Runner, calling: Runner
) -> None:
    with pytest.raises(OptionError, match="json_schema leaves no room for calls"):
        calling.chat(HI, json_schema=SCHEMA, tools=TOOLS)
    with pytest.warns(UserWarning), pytest.raises(OptionError, match="opens with reasoning"):
        runner.chat(HI, json_schema=SCHEMA, reasoning="high")


def test_a_held_answer_needs_a_tokenizer_and_the_library(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Runner.open(tiny_models.wordless(tmp_path / "w.gturbo")) as silent,
        pytest.raises(TokenizerMissingError, match="regex needs a tokenizer"),
    ):
        silent.generate([1], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"regex needs llguidance; pip install"):
        runner.generate(HI, regex="a")


class Only:
    """Allows the given ids."""

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def allowed(self, generated: Any) -> np.ndarray:
        return np.isin(np.arange(64), self.ids)


def test_the_mask_comes_before_every_truncation() -> None:
    logits = np.linspace(5, -5, 64).astype(np.float32)  # the allowed ids are the least likely
    for settings in ({"top_k": 2}, {"top_k": 8, "top_p": 0.01}, {"min_p": 0.9}, {"top_k": 0,
                     "top_p": 1}):  # fmt: skip
        for seed in range(8):
            options = GenerationOptions(temperature=1, seed=seed, **settings)
            assert Sampler(options, 64, Only(62, 63)).sample(logits, [], 0) in (62, 63)
    greedy = Sampler(GenerationOptions(temperature=0), 64, Only(62, 63))
    assert greedy.sample(logits, [], 0) == 62 and not greedy.takes_likeliest
