"""An answer taken apart as it comes: content, reasoning and tool calls.

Knows the markers of each dialect and the states between them. Does not know models or sampling:
token ids come in, pieces of the turn come out. Special tokens are recognised by id; whatever a
marker turns out not to mean is given back as text, so nothing the model wrote is lost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turbospark.errors import OptionError
from turbospark.text import calls
from turbospark.text.stops import StopMatcher
from turbospark.text.tokenizer import Tokenizer

MAX_SPAN = 1 << 18
"""Characters of one tool span at most; a longer one is given back as text."""


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """Call number `index` (from 0) of this turn; `arguments` is an object."""

    index: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ReleasedToolSpan:
    """Text between tool markers that is no call of an offered tool, as it was written."""

    text: str


Piece = Content | Reasoning | ToolCall | ReleasedToolSpan


@dataclass(frozen=True)
class _Form:
    """The markers of a dialect. `call`: (opening, closing or None for the end of the turn)."""

    think: tuple[tuple[str, str], ...] = ()
    call: tuple[tuple[str, str | None, calls.Reader], ...] = ()
    inside: tuple[str, ...] = ()  # tokens that are part of a span
    held: bool = False  # a turn that begins with a bracket may be a call as a whole


_THINK = (("<think>", "</think>"),)
_FORMS = {
    "chatml": _Form(_THINK, (("<tool_call>", "</tool_call>", calls.chatml_calls),), held=True),
    "gemma4": _Form(
        (("<|channel>thought", "<channel|>"),),
        (("<|tool_call>", "<tool_call|>", calls.gemma4_calls),),
        (calls.QUOTE, "<|channel>"),
    ),
    "mistral": _Form(
        (("[THINK]", "[/THINK]"),),
        (("[TOOL_CALLS]", None, calls.mistral_calls),),
        ("[ARGS]", "[CALL_ID]"),
    ),
    "deepseek": _Form(
        _THINK,
        (
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", calls.deepseek_calls),
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", calls.invoke_calls),
            ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", calls.invoke_calls),
        ),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜"),
    ),
}
_OTHER = _Form(_THINK, held=True)
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>")
_CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", *_ENDS)


def splitter(
    tokenizer: Tokenizer,
    prompt: str,
    tools: Sequence[Any] | None = None,
    stop: Sequence[str] = (),
    whole_call: bool = False,
) -> Splitter:
    """The splitter for an answer to `prompt`, the rendered text that the model continues.

    `tools`: those offered; without them tool markers are plain text. `stop`: the stop strings in
    force. `whole_call`: the answer is one call in JSON and nothing else.
    """
    known, name = calls.Tools(tools), tokenizer.dialect.name
    parser: _Spans | _Messages | _WholeCall
    markers: set[str]
    if whole_call:
        parser, markers = _WholeCall(known), set()
    elif name in ("harmony", "muse"):
        parser = _Messages(known, prompt)
        markers = set(_CHANNELS)
    else:
        form = _FORMS.get(name, _OTHER)
        parser = _Spans(form, known, prompt)
        pairs = [*form.think, *(pair[:2] for pair in form.call if known)]
        markers = {m for pair in pairs for m in pair if m} | set(form.inside)
    return Splitter(tokenizer, parser, markers, stop)


# What a header must go on with for the answer itself to come next.
_ANSWERS = {"harmony": "<|channel|>final<|message|>", "muse": " to=user<|message|>"}


def answer_only(prompt: str, dialect: str, option: str, reasoning: str) -> str:
    """The prompt after which nothing but the answer comes, for answers held to `option`.

    Raises OptionError where reasoning was to come first.
    """
    form = _FORMS.get(dialect, _OTHER)
    if reasoning != "off" or prompt.rstrip().endswith(tuple(o for o, _ in form.think)):
        raise OptionError(
            f"{option} holds the answer from its first token, but this prompt opens with "
            "reasoning; works: reasoning='off' and a template that heeds it"
        )
    return prompt + _ANSWERS.get(dialect, "")


class Splitter:
    """Tokens of one turn to its pieces. Feed every token, then call `finish` once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: _Spans | _Messages | _WholeCall,
        markers: set[str],
        stop: Sequence[str],
    ) -> None:
        special = tokenizer.special_tokens
        self._special = {id_: text if text in markers else "" for id_, text in special.items()}
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stop)
        self._parser = parser

    def push(self, token: int) -> list[Piece]:
        """The pieces that `token` completes."""
        marker = self._special.get(token)
        if marker is None:
            return self._parser.push(self._matcher.push(self._detokenizer.push(token)))
        before = self._matcher.push(self._detokenizer.flush())
        # What may be a stop string goes on behind a token that is not shown.
        held = self._matcher.finish() if marker else ""
        shown = "" if self._matcher.matched is not None else marker
        return self._parser.push(before + held + shown)

    def finish(self) -> list[Piece]:
        """What is still held; an open tool span is read now, as its end token stops the turn."""
        text = self._matcher.push(self._detokenizer.flush()) + self._matcher.finish()
        return self._parser.push(text) + self._parser.finish()


class _Calls:
    """Reads spans into numbered calls, or gives them back."""

    def __init__(self, tools: calls.Tools) -> None:
        self.tools = tools
        self.count = 0

    def numbered(self, found: list[calls.Call]) -> list[Piece]:
        first, self.count = self.count, self.count + len(found)
        return [ToolCall(first + i, call.name, call.arguments) for i, call in enumerate(found)]

    def read(self, reader: calls.Reader, body: str, span: str) -> list[Piece]:
        try:
            return self.numbered(reader(body, self.tools))
        except (ValueError, LookupError, TypeError):
            return [ReleasedToolSpan(span)] if span else []


class _WholeCall:
    """One call in JSON, which the answer was held to; cut short it is given back."""

    def __init__(self, tools: calls.Tools) -> None:
        self._calls = _Calls(tools)
        self._text = ""

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        return self._calls.read(calls.json_calls, self._text, self._text)


class _Spans:
    """Content with marked spans of reasoning and calls in it."""

    def __init__(self, form: _Form, tools: calls.Tools, prompt: str) -> None:
        self._calls = _Calls(tools)
        self._think = dict(form.think)
        self._call = {o: (c, r) for o, c, r in form.call} if tools else {}
        self._text = ""  # not given out yet
        self._opening = ""  # of the span we are in; "" in content
        self._raw = False
        self._blank = False  # drop line breaks until text comes
        self._whole: list[str] | None = [] if tools else None  # content, for the rescue
        self._held = form.held and bool(tools)
        opened = next((o for o in self._think if prompt.rstrip().endswith(o)), None)
        if opened is not None:
            self._opening, self._blank = opened, True

    def push(self, text: str) -> list[Piece]:
        self._text += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        text, self._text = self._text, ""
        if self._opening in self._call:
            body = text[len(self._opening) :]
            found = self._calls.read(self._call[self._opening][1], body, text)
        elif self._opening:
            found = [Reasoning(text.rstrip())] if text.strip() else []
        else:
            found = self._last(text)
        return found

    def _last(self, text: str) -> list[Piece]:
        """The content at the end, after a look for calls in unmarked form."""
        if self._blank:
            text = text.lstrip("\n")
        if self._whole is not None and self._calls.count == 0 and not self._raw:
            found = calls.rescue("".join(self._whole) + text, self._calls.tools)
            if found:
                shown = text if self._whole else ""  # a call that is the whole turn is no content
                pieces: list[Piece] = [Content(shown)] if shown else []
                return pieces + self._calls.numbered(found)
        if self._calls.count and not text.strip():
            return []
        return [Content(text)] if text else []

    def _step(self, found: list[Piece]) -> bool:
        """Consume one stretch; False when more text is needed."""
        if self._raw:
            self._give(found, self._text)
            self._text = ""
            return False
        if self._opening in self._call:
            return self._in_call(found)
        return self._in_reasoning(found) if self._opening else self._in_content(found)

    def _in_call(self, found: list[Piece]) -> bool:
        closing, reader = self._call[self._opening]
        end = self._text.find(closing, len(self._opening)) if closing else -1
        if closing is not None and end >= 0:
            span, self._text = self._text[: end + len(closing)], self._text[end + len(closing) :]
            found += self._calls.read(reader, span[len(self._opening) : end], span)
            self._opening, self._blank = "", True
            return True
        if len(self._text) > MAX_SPAN:
            found.append(ReleasedToolSpan(self._text))
            self._text, self._opening, self._raw = "", "", True
        return False

    def _in_reasoning(self, found: list[Piece]) -> bool:
        closing = self._think[self._opening]
        end = self._text.find(closing)
        text = self._text[:end] if end >= 0 else self._text
        safe = len(text) if end >= 0 else len(text) - _partial(text, (closing,))
        kept = len(text[:safe].rstrip())  # blanks before the end marker are framing
        shown = text[:kept].lstrip("\n") if self._blank else text[:kept]
        if shown:
            found.append(Reasoning(shown))
            self._blank = False
        if end < 0:
            self._text = self._text[kept:]
            return False
        self._text, self._opening, self._blank = self._text[end + len(closing) :], "", True
        return True

    def _in_content(self, found: list[Piece]) -> bool:
        if self._holds():
            if len(self._text) > MAX_SPAN:
                self._raw = True
                return True
            return False
        openings = (*self._think, *self._call)
        at, opening = min(
            ((self._text.find(o), o) for o in openings if o in self._text), default=(-1, "")
        )
        if at >= 0:
            before = self._text[:at]
            if opening in self._call:
                before = before.rstrip()
            self._give(found, before)
            self._text = self._text[at:]
            self._opening = opening
            if opening in self._think:
                self._text, self._blank = self._text[len(opening) :], True
            return True
        safe = len(self._text) - _partial(self._text, openings)
        if self._call:  # line breaks before a call are framing
            safe = len(self._text[:safe].rstrip("\n"))
        self._give(found, self._text[:safe])
        self._text = self._text[safe:]
        return False

    def _holds(self) -> bool:
        """Whether the turn so far may be a call without markers, as a whole."""
        first = self._text.lstrip()[:1]
        return self._held and not self._whole and self._calls.count == 0 and first in ("{", "[")

    def _give(self, found: list[Piece], text: str) -> None:
        if self._blank:
            text = text.lstrip("\n")
        if text:
            self._blank = False
            found.append(Content(text))
            if self._whole is not None:
                self._whole.append(text)


class _Messages:
    """Harmony and Muse: messages with headers, whose channel or recipient says what they are."""

    def __init__(self, tools: calls.Tools, prompt: str) -> None:
        self._calls = _Calls(tools)
        self._text = ""
        # The prompt ends in a header, or just behind one.
        self._in_header = not prompt.endswith("<|message|>")
        self._header = "" if self._in_header else prompt[prompt.rfind("<|start|>") :]
        self._end = re.compile("|".join(map(re.escape, (*_ENDS, "<|start|>", "<|channel|>"))))
        self._size = 0

    def push(self, text: str) -> list[Piece]:
        self._text += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def finish(self) -> list[Piece]:
        text, self._text = self._text, ""
        if not self._in_header:
            return self._closed(text)
        return [Content(text)] if text.strip() and "<|" not in text else []

    def _step(self, found: list[Piece]) -> bool:
        if self._in_header:
            header, marker, rest = self._text.partition("<|message|>")
            if not marker:
                return False
            self._header, self._text, self._in_header = header, rest, False
            return True
        end = self._end.search(self._text)
        if end is None:
            if not self._recipient():
                safe = len(self._text) - _partial(self._text, (*_ENDS, "<|start|>", "<|channel|>"))
                found += self._shown(self._text[:safe])
                self._text = self._text[safe:]
            elif len(self._text) > MAX_SPAN:
                found.append(ReleasedToolSpan(self._text))
                self._text, self._header = "", ""
            return False
        found += self._closed(self._text[: end.start()])
        opens = end[0] in ("<|start|>", "<|channel|>")
        self._text = self._text[end.start() if opens else end.end() :]
        self._in_header = True
        return True

    def _closed(self, text: str) -> list[Piece]:
        name = self._recipient()
        if not name:
            return self._shown(text)
        reader = calls.invoke_calls if "invoke" in text else self._named(name)
        return self._calls.read(reader, text, text)

    @staticmethod
    def _named(name: str) -> calls.Reader:
        return lambda text, tools: [tools.call(name, text)]

    def _recipient(self) -> str:
        """The tool a message is addressed to, wherever in the header it stands; "" for none."""
        match = re.search(r"\bto=(?:functions\.)?([^\s<]+)", self._header)
        if match is None or match[1] in ("user", "self", "assistant"):
            return ""
        return match[1] if self._calls.tools else ""

    def _shown(self, text: str) -> list[Piece]:
        if not text:
            return []
        channel = re.search(r"<\|channel\|>\s*(\w*)", self._header)
        thinks = "to=self" in self._header or (channel is not None and channel[1] == "analysis")
        return [Reasoning(text) if thinks else Content(text)]


def _partial(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that begins one of `markers`."""
    longest = max(map(len, markers), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
