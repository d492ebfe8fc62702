"""Chat messages to prompt text, by the model's own Jinja template.

Knows where templates come from and what they may see. Templates are content of strangers: they
run in a sandbox that can neither reach Python's internals nor change what it is given.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import date, datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from turbospark.errors import ModelFormatError, OptionError, UnsupportedError
from turbospark.install.files import TEMPLATES
from turbospark.policies import short

REASONING_LEVELS = ("off", "low", "medium", "high", "xhigh")
MAX_CHARACTERS = 1 << 26
"""Characters of a rendered prompt at most."""
MAX_STEPS = 10_000_000
"""Rounds of loops and calls of macros in one rendering at most, some seconds of work."""
_LEVEL_NAMES = ("reasoning_effort", "reasoning_strength")
# A template that takes content apart asks each part for its type or its text.
_READS_PARTS = re.compile(r"""\[['"]text['"]\]|\.text\b|['"]text['"]\s*==|==\s*['"]text['"]""")
_INSTEAD_OF_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")

# What a template's own mistakes may raise besides jinja2's errors; the sandbox is plain Python.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

_CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Gemma has no system role before 4: instructions go in front of the first user turn.
_GEMMA = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}
{%- set ns.system = m.content | trim + '\\n\\n' %}{% continue %}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- ns.system + m.content | trim + '<end_of_turn>\\n' }}
{%- set ns.system = '' %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_GEMMA4 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}
{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""

_DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + eos_token }}
{%- else %}{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}
{%- elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}
{%- set ns.system = '' %}
{%- else %}{{ ' ' + m.content | trim + eos_token }}
{%- endif %}
{%- endfor %}"""

# Harmony and Muse are absent on purpose: their preambles and tool syntax cannot be improvised.
FALLBACKS = {
    "chatml": _CHATML,
    "llama3": _LLAMA3,
    "gemma": _GEMMA,
    "gemma4": _GEMMA4,
    "deepseek": _DEEPSEEK,
    "mistral": _MISTRAL,
}


class ChatTemplate:
    """One template and where it came from (`source`); `text` is None when there is none.

    `tool_use` is the template of prompts that offer tools, where the model has one of its own.
    """

    def __init__(self, text: str | None, source: str, tool_use: ChatTemplate | None = None) -> None:
        self.text = text
        self.source = source
        self._tool_use = tool_use
        self._compiled: tuple[jinja2.Template, set[str]] | None = None

    @classmethod
    def find(
        cls, file: str | None, configured: Any, dialect: str, tools_file: str | None = None
    ) -> ChatTemplate:
        """The first of: `chat_template.jinja`, `chat_template` of tokenizer_config.json (a string,
        or a list whose entry is named "default"), the dialect's plain fallback, none.

        `tools_file`, the text of additional_chat_templates/tool_use.jinja, goes along, or without
        a file the list's entry of that name.
        """
        named = {} if file is not None else _named(configured)
        tool_use = None
        if tools_file is not None:
            tool_use = cls(tools_file, f"{TEMPLATES}/tool_use.jinja")
        elif "tool_use" in named:
            tool_use = cls(named["tool_use"], "tokenizer_config.json, tool_use")
        if file is not None:
            return cls(file, "chat_template.jinja", tool_use)
        if isinstance(configured, str):
            return cls(configured, "tokenizer_config.json", tool_use)
        if "default" in named:
            return cls(named["default"], "tokenizer_config.json", tool_use)
        if dialect in FALLBACKS:
            return cls(FALLBACKS[dialect], f"{dialect} fallback", tool_use)
        return cls(None, f"{dialect} dialect", tool_use)

    def chosen(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """The template of a prompt that offers `tools`."""
        return self._tool_use if tools and self._tool_use is not None else self

    @property
    def reads_tools(self) -> bool:
        """Whether tools that are offered reach the prompt. Raises ModelFormatError."""
        template = self.chosen(["any"])
        return template.text is not None and "tools" in template._compile()[1]

    @property
    def reasoning_support(self) -> str:
        """ "level" (reads an effort), "toggle" (only on or off) or "none"; read off its names."""
        text = self.text or ""
        if any(name in text for name in _LEVEL_NAMES):
            return "level"
        return "toggle" if "enable_thinking" in text else "none"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: str = "off",
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
        now: date | None = None,
    ) -> str:
        """The prompt text. `now` freezes the template's clock.

        Raises UnsupportedError without a template, OptionError for messages, tools or levels that
        the template (or this function) refuses, ModelFormatError for a template that is broken.
        """
        if self.chosen(tools) is not self:
            return self.chosen(tools).render(
                messages,
                tools=tools,
                reasoning=reasoning,
                add_generation_prompt=add_generation_prompt,
                bos_token=bos_token,
                eos_token=eos_token,
                now=now,
            )
        self._check(messages, tools, reasoning)
        template, names = self._compile()
        self._check_calls(messages, tools, names)
        context: dict[str, Any] = {
            "messages": [self._spelled(m) for m in _copied(messages, "messages")],
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": reasoning != "off",
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_vision_id": False,
            "raise_exception": _raise_exception,
            "strftime_now": _clock(now),
        }
        if tools:
            context["tools"] = [_described(tool) for tool in _copied(tools, "tools")]
        if reasoning != "off":
            context.update(dict.fromkeys(_LEVEL_NAMES, reasoning))
        try:
            return _bounded(template.generate(_STEP=_Steps(), **context))
        except _TEMPLATE_FAULTS as error:
            raise OptionError(
                f"chat template ({self.source}) refused the messages: {_one_line(error)}"
            ) from None

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        reasoning: str,
    ) -> None:
        if self.text is None:
            raise UnsupportedError(
                f"chat messages were given, but the install has no chat template and there is no "
                f"fallback for the {self.source}; add chat_template.jinja or pass text or token ids"
            )
        if reasoning not in REASONING_LEVELS:
            raise OptionError(
                f"reasoning={reasoning!r} is not valid; works: {', '.join(REASONING_LEVELS)}"
            )
        if not messages:
            raise OptionError("messages is empty; give at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise OptionError(
                    f"messages[{index}] has no role; each message is a mapping with 'role' and "
                    "'content'"
                )
            _check_content(message, f"messages[{index}]")
        if tools and not (isinstance(tools, (list, tuple)) and all(map(_is_object, tools))):
            raise OptionError(f"tools={short(tools)}; expected a list of mappings")
        support = self.reasoning_support
        if (reasoning != "off" and support == "none") or (
            reasoning in ("low", "medium", "xhigh") and support == "toggle"
        ):
            able = "only turns reasoning on or off" if support == "toggle" else "has no reasoning"
            warnings.warn(
                f"reasoning={reasoning!r}: the level is ignored, this model's template {able}",
                stacklevel=4,
            )

    def _check_calls(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        names: set[str],
    ) -> None:
        """Refuse tools and calls that would never reach the prompt."""
        never = f"this model's chat template ({self.source}) never reads"
        if tools and "tools" not in names:
            raise UnsupportedError(
                f"{len(tools)} tools were given, but {never} tools; works: a system message that "
                "describes them, or a model whose template reads tools"
            )
        for index, message in enumerate(messages):
            if message.get("tool_calls") and "tool_calls" not in (self.text or ""):
                raise UnsupportedError(
                    f"messages[{index}] has tool_calls, but {never} them; works: the calls as "
                    "text in its content"
                )

    def _spelled(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as this template takes it: most know content as one string only."""
        content = message.get("content")
        if not isinstance(content, list) or not all(map(_is_text, content)):
            return dict(message)
        if _READS_PARTS.search(self.text or ""):
            return dict(message)
        return {**message, "content": "\n".join(part["text"] for part in content)}

    def _compile(self) -> tuple[jinja2.Template, set[str]]:
        """The template, and the names it reads from outside."""
        if self._compiled is None:
            try:
                environment = _environment()
                tree = environment.parse(self.text or "")
                names = meta.find_undeclared_variables(tree)
                _count_steps(tree)
                self._compiled = environment.from_string(tree), names
            except (jinja2.TemplateSyntaxError, SyntaxError) as error:
                raise ModelFormatError(
                    f"chat template ({self.source}) is broken at line {error.lineno}: "
                    f"{_one_line(error)}"
                ) from None
            except RecursionError:
                raise ModelFormatError(
                    f"chat template ({self.source}) is nested too deeply"
                ) from None
        return self._compiled


def _named(configured: Any) -> dict[str, str]:
    """Name -> text of the templates that tokenizer_config.json lists."""
    entries = [e for e in configured if isinstance(e, dict)] if isinstance(configured, list) else []
    texts = {str(entry.get("name")): entry.get("template") for entry in entries}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _bounded(pieces: Iterable[str]) -> str:
    """The rendered text, refused where no context could hold it."""
    text, size = [], 0
    for piece in pieces:
        text.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise ValueError(f"the prompt would exceed {MAX_CHARACTERS} characters")
    return "".join(text)


class _Steps:
    """Counts rounds of loops and calls of macros; a template that never ends is refused."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it did not end within {MAX_STEPS} steps")


def _count_steps(tree: nodes.Template) -> None:
    """Begin the body of every loop and macro with a step."""
    loops, macros = tree.find_all(nodes.For), tree.find_all(nodes.Macro)
    for body in [*(loop.body for loop in loops), *(macro.body for macro in macros)]:
        step = nodes.Call(nodes.Name("_STEP", "load"), [], [], None, None)
        body.insert(0, nodes.ExprStmt(step).set_lineno(1))


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks a span for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON as models were trained on it; jinja2's own filter escapes < > & for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _clock(now: date | None) -> Callable[[str], str]:
    return lambda form: (now or datetime.now()).strftime(form)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_text(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _check_content(message: Mapping[str, Any], where: str) -> None:
    """Refuse what a template would answer with a puzzle, or with the word None in the prompt."""
    content = message.get("content")
    if content is None:
        if any(message.get(name) for name in _INSTEAD_OF_CONTENT):
            return
        raise OptionError(
            f"{where} has no content; give a text, or a list of parts of type 'text' "
            "(only an assistant's message with tool calls goes without)"
        )
    if isinstance(content, str) or message["role"] == "tool":  # results may be any JSON
        return
    if not isinstance(content, list):
        raise OptionError(
            f"{where}: content={short(content)}; expected a text, or a list of parts of type 'text'"
        )
    for part in content:
        if not _is_text(part):
            raise OptionError(
                f"{where}: content has a part {short(part)}; expected {{'type': 'text', 'text': "
                "...}, as this build reads no images, sounds or files"
            )


def _copied(value: Any, what: str) -> Any:
    try:
        return deepcopy(value)
    except TypeError as error:
        raise OptionError(f"{what} holds what cannot be copied: {_one_line(error)}") from None
    except RecursionError:
        raise OptionError(f"{what} is nested too deeply; works: a few hundred levels") from None


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with a description, empty if it had none: templates concatenate it unasked."""
    described = dict(tool)
    function = described.get("function")
    if isinstance(function, dict):
        function.setdefault("description", "")
    elif "name" in described:
        described.setdefault("description", "")
    return described


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
