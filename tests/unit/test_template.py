"""Chat templates: where they come from, what they see, what they may not do."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from datetime import datetime

import pytest
import tiny_tokenizers

from turbospark.errors import ModelFormatError, OptionError, UnsupportedError
from turbospark.text import template as template_module
from turbospark.text.template import FALLBACKS, ChatTemplate
from turbospark.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


def render(text, messages=HI, **kwargs):
    return ChatTemplate(text, "test").render(messages, **kwargs)


# --- sources --------------------------------------------------------------------------------------


def test_the_jinja_file_beats_the_configuration_which_beats_the_fallback():
    assert ChatTemplate.find("F", "C", "chatml").text == "F"
    assert ChatTemplate.find(None, "C", "chatml").text == "C"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert ChatTemplate.find(None, named, "chatml").text == "D"
    assert ChatTemplate.find(None, named[:1], "chatml").source == "chatml fallback"
    assert ChatTemplate.find(None, [{"name": "default"}], "plain").text is None
    assert ChatTemplate.find(None, None, "chatml").text == FALLBACKS["chatml"]


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("beside", [False, True], ids=["", "beside"])
@pytest.mark.parametrize(
    "file", [None, "F{{ messages[0].content }}{% if tools %}t{% endif %}"], ids=["", "file"]
)
def test_prompts_with_tools_take_the_template_that_transformers_takes(
    tmp_path, tools, beside, file
):
    transformers = pytest.importorskip("transformers")
    named = [
        {"name": "default", "template": "D {{ bos_token }}{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T {{ messages[0].content }} {{ tools | tojson }}"},
        {"name": "rag", "template": "R"},
    ]
    config = {"chat_template": named, "tokenizer_class": "PreTrainedTokenizerFast"}
    config["bos_token"] = "<|endoftext|>"
    tiny_tokenizers.write(tmp_path, config=config, template=file)
    if beside:
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            text = f"{name} {{{{ messages[0].content }}}}{{{{ tools | tojson }}}}"
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    if beside and not file and not tools:
        # transformers then has no template for a plain prompt; ours is still the list's.
        assert Tokenizer.load(tmp_path).render(HI) == f"D <|endoftext|>{HI[0]['content']}"
        return
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert ours.template.reads_tools
    want = theirs.apply_chat_template(HI, tools=tools, tokenize=False, add_generation_prompt=True)
    assert ours.render(HI, tools=tools) == want


def test_a_list_without_a_default_still_has_its_template_for_tools():
    named = [{"name": "tool_use", "template": "T{{ tools[0].function.name }}"}]
    assert ChatTemplate.find(None, named, "plain").render(HI, tools=TOOLS) == "Tf"
    with pytest.raises(UnsupportedError, match="no chat template"):
        ChatTemplate.find(None, named, "plain").render(HI)
    assert not ChatTemplate("{{ messages }}", "test").reads_tools
    assert not ChatTemplate(None, "test").reads_tools


@pytest.mark.parametrize("dialect", ["harmony", "muse", "plain"])
def test_dialects_that_cannot_be_improvised_refuse_messages_by_name(dialect):
    template = ChatTemplate.find(None, None, dialect)
    with pytest.raises(UnsupportedError, match=f"{dialect} dialect"):
        template.render(HI)


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
            "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "B<|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\ntwo<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nthree<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            "B<start_of_turn>user\nbe brief\n\none<end_of_turn>\n"
            "<start_of_turn>model\ntwo<end_of_turn>\n<start_of_turn>user\nthree<end_of_turn>\n"
            "<start_of_turn>model\n",
        ),
        (
            "gemma4",
            "B<|turn>system\nbe brief<turn|>\n<|turn>user\none<turn|>\n<|turn>model\ntwo<turn|>\n"
            "<|turn>user\nthree<turn|>\n<|turn>model\n",
        ),
        (
            "deepseek",
            "Bbe brief<｜User｜>one<｜Assistant｜>twoE<｜User｜>three<｜Assistant｜>",
        ),
        ("mistral", "B[INST] be brief\n\none [/INST] twoE[INST] three [/INST]"),
    ],
)
def test_fallbacks_frame_turns_as_the_dialect_does(dialect, expected):
    template = ChatTemplate.find(None, None, dialect)
    assert template.render(TALK, bos_token="B", eos_token="E") == expected


# --- context --------------------------------------------------------------------------------------


def test_the_context_holds_what_templates_expect():
    text = (
        "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}|{{ add_generation_prompt }}|"
        "{{ enable_thinking }}|{{ add_vision_id }}|{{ tools is defined }}|"
        "{{ reasoning_effort is defined }}|{{ strftime_now('%d %b %Y') }}"
    )
    got = render(text, bos_token="<s>", eos_token="</s>", now=datetime(2025, 2, 3))
    assert got == "<s>|</s>|hi|True|False|False|False|False|03 Feb 2025"


def test_reasoning_levels_reach_the_template_under_both_names():
    text = "{{ enable_thinking }} {{ reasoning_effort }} {{ reasoning_strength }}"
    assert render(text, reasoning="high") == "True high high"
    assert render(text) == "False  "
    with pytest.raises(OptionError, match="reasoning='max' is not valid"):
        render(text, reasoning="max")


@pytest.mark.parametrize(
    ("text", "support", "ignored"),
    [
        ("{{ messages[0].content }}", "none", ["low", "high"]),
        ("{{ enable_thinking }}", "toggle", ["low", "medium", "xhigh"]),
        ("{{ reasoning_effort }}", "level", []),
    ],
)
def test_a_level_that_the_template_ignores_is_warned_about(text, support, ignored):
    assert ChatTemplate(text, "test").reasoning_support == support
    for level in ("off", "low", "medium", "high", "xhigh"):
        if level in ignored:
            with pytest.warns(UserWarning, match=f"reasoning='{level}'"):
                render(text, reasoning=level)
        elif support != "none" or level == "off":
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                render(text, reasoning=level)


def test_tojson_writes_plain_json():
    value = [{"role": "tool", "content": {"b": "<é&'>", "a": [1, None, True]}}]
    assert render("{{ messages[0].content | tojson }}", value) == (
        """{"b": "<é&'>", "a": [1, null, true]}"""
    )
    assert render("{{ messages[0].content | tojson(indent=1) }}", value).startswith('{\n "b"')


def test_blocks_leave_no_blank_lines_and_loops_can_break():
    text = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n  {% break %}\n  {% endif %}\n"
        "{{ m.content }}\n{% endfor %}"
    )
    assert render(text, HI * 3) == "hi\n"


def test_generation_spans_are_plain_text():
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_a_tool_without_a_description_gets_an_empty_one():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = "{% for t in tools %}{{ '// ' + t.function.description + t.function.name }}{% endfor %}"
    assert render(text, tools=tools) == "// f"
    assert "description" not in tools[0]["function"], "the caller's tools are left alone"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALLED = [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]


@pytest.mark.parametrize("text", [*FALLBACKS.values(), "{# tools #}{% set tools = 1 %}{{ tools }}"])
def test_tools_that_a_template_never_reads_are_refused(text):
    with pytest.raises(
        UnsupportedError, match=r"2 tools were given, .* \(test\) never reads tools"
    ):
        render(text, tools=[TOOL, TOOL])
    with pytest.raises(
        UnsupportedError, match=r"messages\[1\] has tool_calls, .* never reads them"
    ):
        render(text, CALLED)
    assert render(text, tools=[]) == render(text)


@pytest.mark.parametrize(
    "text",
    ["{% for t in tools %}f{% endfor %}",
     "{% macro shown() %}{{ tools[0].function.name }}{% endmacro %}{{ shown() }}",
     "{% if more %}{% set tools = more %}{% endif %}{{ tools[0].function.name }}"],
    ids=["loop", "macro", "replaced in a branch"],
)  # fmt: skip
def test_tools_reach_a_template_however_it_reads_them(text):
    assert render(text, tools=[TOOL]) == "f"


# --- refusals and the sandbox -----------------------------------------------------------------


def test_what_the_template_raises_is_passed_on_in_one_line():
    text = "{{ raise_exception('roles must\n alternate') }}"
    with pytest.raises(OptionError, match="refused the messages: roles must alternate"):
        render(text)


@pytest.mark.parametrize(
    "text",
    ["{{ 'a' + 1 }}", "{{ 1 / 0 }}", "{{ missing.x.y }}", "{{ messages[9].content.z }}",
     "{{ range(999999999) | list }}", "{{ messages | no_such }}"],
)  # fmt: skip
def test_a_templates_own_mistakes_are_typed_errors(text):
    with pytest.raises((OptionError, ModelFormatError), match="chat template"):
        render(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ strftime_now.__globals__ }}",
        "{{ raise_exception.__code__ }}",
    ],
)
def test_a_template_can_neither_reach_python_nor_change_its_input(text):
    messages = [dict(HI[0])]
    with suppress(OptionError):  # refused, or undefined and therefore empty
        assert render(text, messages) == ""
    assert messages == HI


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(999) %}{% for j in range(999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "macros"],
)
def test_a_template_that_does_not_end_is_refused(text, monkeypatch):
    monkeypatch.setattr(template_module, "MAX_STEPS", 1000)
    with pytest.raises(OptionError, match="did not end within 1000 steps"):
        render(text)
    assert render("{% for i in range(999) %}{{ loop.last or '' }}{% endfor %}") == "True"


def test_a_template_that_writes_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(template_module, "MAX_CHARACTERS", 1000)
    with pytest.raises(OptionError, match="would exceed 1000 characters"):
        render("{% for i in range(99) %}{{ 'x' * 100 }}{% endfor %}")
    assert len(render("{{ 'x' * 1000 }}")) == 1000


def test_messages_nested_beyond_reading_are_refused():
    deep = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(OptionError, match="messages is nested too deeply"):
        render("x", [{**HI[0], "x": deep}])


def test_a_broken_template_names_its_source_and_line():
    with pytest.raises(ModelFormatError, match=r"chat template \(test\) is broken at line 2"):
        render("ok\n{% for %}")


@pytest.mark.parametrize(
    ("messages", "match"),
    [([], "messages is empty"), ([{"content": "x"}], r"messages\[0\] has no role"),
     ([HI[0], "x"], r"messages\[1\] has no role")],
)  # fmt: skip
def test_malformed_messages_are_refused(messages, match):
    with pytest.raises(OptionError, match=match):
        render("x", messages)


def test_rendering_equals_transformers(tmp_path):
    """The same template and messages through the library most templates are written for."""
    chat = pytest.importorskip("transformers.utils.chat_template_utils")
    text = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {%- if message.role == 'user' and loop.first %}\n"
        "        {{- message.content | trim | tojson }}\n"
        "    {% else %}\n"
        "{{ message['content'] }}\n"
        "    {% endif %}\n"
        "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    messages = [{"role": "user", "content": " <é> "}, {"role": "assistant", "content": "ok\n"}]
    rendered, _ = chat.render_jinja_template(
        conversations=[messages], chat_template=text, add_generation_prompt=True, bos_token="B"
    )
    assert render(text, messages, bos_token="B") == rendered[0]


@pytest.mark.parametrize("text", ["{% break %}", "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}"])
def test_a_template_that_python_cannot_compile_is_broken_too(text):
    with pytest.raises(ModelFormatError, match=r"chat template \(chat_template.jinja\) is"):
        ChatTemplate(text, "chat_template.jinja").render([{"role": "user", "content": "hi"}])


def test_tools_and_contents_of_the_wrong_kind_are_refused():
    template = ChatTemplate("{{ messages }}{{ tools }}", "chat_template.jinja")
    said = {"role": "user", "content": "hi"}
    for tools in (5, "x", [5]):
        with pytest.raises(OptionError, match="tools="):
            template.render([said], tools=tools)
    with pytest.raises(OptionError, match="messages holds what cannot be copied"):
        template.render([said | {"name": threading.Lock()}])


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"role": "user"}, r"messages\[0\] has no content; give a text, or a list of parts"),
        ({"role": "user", "content": None}, r"messages\[0\] has no content"),
        ({"role": "assistant", "tool_calls": []}, r"messages\[0\] has no content"),
        ({"role": "user", "content": 7}, r"messages\[0\]: content=7; expected a text, or a list"),
        ({"role": "user", "content": ["hi"]}, r"messages\[0\]: content has a part 'hi'; expected"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"content has a part .*image_url.*; expected .*'type': 'text'.* no images",
        ),
    ],
    ids=["absent", "null", "no calls", "number", "bare part", "image"],
)
def test_a_message_that_says_nothing_readable_is_refused_by_number(message, match):
    with pytest.raises(OptionError, match=match):
        render(FALLBACKS["chatml"], [message])


def test_an_assistant_that_only_called_a_tool_needs_no_content():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert render("{{ messages[0].tool_calls[0].function.name }}", [call]) == "f"
    text = "{% if messages[0].tool_calls %}{{ messages[0].content is none }}{% endif %}"
    assert render(text, [{**call, "content": None}]) == "True"


PARTS = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}]


def test_parts_of_text_reach_every_template_as_it_takes_them():
    said = [{"role": "user", "content": "one\ntwo"}]
    for text in FALLBACKS.values():
        assert render(text, PARTS) == render(text, said)
    loop = "{% for p in messages[0].content %}<{{ p['text'] }}>{% endfor %}"
    assert render(loop, PARTS) == "<one><two>"
    assert isinstance(PARTS[0]["content"], list)  # what the caller gave is left alone
