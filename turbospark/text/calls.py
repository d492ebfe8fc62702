"""Tool calls as models spell them: bodies of tool spans to names and arguments.

Knows the spellings. Does not know streams or tokens: a span comes in whole. Every reader returns
the calls it found or raises ValueError, and only names that were offered are ever returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turbospark.errors import OptionError
from turbospark.policies import short

QUOTE = '<|"|>'  # gemma4's quotation mark, a token of its own
_ATTRIBUTE = r"""name\s*=\s*["']([^"']+)["']"""


@dataclass(frozen=True)
class Call:
    """One call: the tool's name and its arguments, an object."""

    name: str
    arguments: dict[str, Any]


class Tools:
    """The offered tools by name: the allowlist of calls, and the types of their parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        functions = [tool.get("function", tool) for tool in tools or ()]
        self.parameters: dict[str, Mapping[str, Any]] = {
            f["name"]: _schema(f["name"], f.get("parameters"))
            for f in functions
            if isinstance(f, Mapping) and isinstance(f.get("name"), str)
        }
        """Name -> the schema of its arguments."""

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def call(self, name: Any, arguments: Any) -> Call:
        """A call, if `name` was offered and `arguments` is an object or JSON of one."""
        if name not in self.parameters:
            raise ValueError(f"{name!r} was not offered")
        if isinstance(arguments, str):
            arguments = _json(arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            raise ValueError("arguments are not an object")
        return Call(name, arguments)

    def value(self, name: str, key: str, text: str) -> Any:
        """A parameter that came as bare text: JSON where it is more than a string."""
        declared = (self.parameters.get(name, {}).get("properties") or {}).get(key)
        if isinstance(declared, Mapping) and declared.get("type") == "string":
            return text
        try:
            value = _json(text)
        except ValueError:
            return text
        return text if isinstance(value, str) else value


def _schema(name: str, parameters: Any) -> Mapping[str, Any]:
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise OptionError(
            f"tool {name!r}: parameters={short(parameters)}; expected a JSON schema, an object"
        )
    return parameters


Reader = Callable[[str, Tools], list[Call]]


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)  # models write line breaks into strings as they are
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _values(text: str) -> Iterator[Any]:
    """JSON values that follow each other, with blanks, commas or semicolons between."""
    decoder, at = json.JSONDecoder(strict=False), 0
    while at < len(text):
        if text[at] in " \t\r\n,;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        yield value


# --- JSON -----------------------------------------------------------------------------------------


def json_calls(text: str, tools: Tools) -> list[Call]:
    """{"name": N, "arguments": {...}} once, several times, or as a list."""
    found = []
    for value in _values(text.strip()):
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                raise ValueError("not a call")
            item = item["function"] if isinstance(item.get("function"), dict) else item
            arguments = item.get("arguments", item.get("parameters", {}))
            found.append(tools.call(item.get("name"), arguments))
    if not found:
        raise ValueError("no call")
    return found


def mistral_calls(text: str, tools: Tools) -> list[Call]:
    """A JSON list, or NAME[CALL_ID]ID[ARGS]{...} per call; the marker may come again."""
    found = []
    for part in filter(str.strip, text.split("[TOOL_CALLS]")):
        name, args, body = part.partition("[ARGS]")
        if args:
            found.append(tools.call(name.partition("[CALL_ID]")[0].strip(), body))
        elif part.lstrip()[0] in "[{":
            found += json_calls(part, tools)
        else:
            name, brace, body = part.partition("{")
            found.append(tools.call(name.strip(), brace + body))
    if not found:
        raise ValueError("no call")
    return found


def deepseek_calls(text: str, tools: Tools) -> list[Call]:
    """NAME<sep>{...}, or function<sep>NAME and a fenced block, between call markers."""
    found = []
    for part in text.split("<｜tool▁call▁begin｜>")[1:]:
        head, _, body = part.partition("<｜tool▁call▁end｜>")[0].partition("<｜tool▁sep｜>")
        if "```" in body:
            head, _, body = body.partition("```")
            body = body.removeprefix("json").partition("```")[0]
        found.append(tools.call(head.strip(), body))
    if not found:
        raise ValueError("no call")
    return found


# --- tags -----------------------------------------------------------------------------------------


def chatml_calls(text: str, tools: Tools) -> list[Call]:
    """What Qwen and its relatives put into <tool_call>: JSON, <function=...>, or GLM's pairs."""
    body = text.strip()
    if body.startswith(("{", "[")):
        return json_calls(body, tools)
    if "<function=" in body:
        return _tagged(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", _PARAMETER, body, tools)
    name, _, rest = body.partition("<arg_key>")
    pairs = re.findall(
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", "<arg_key>" + rest, re.S
    )
    name = name.strip()
    return [tools.call(name, {k.strip(): tools.value(name, k.strip(), v) for k, v in pairs})]


_PARAMETER = r"<parameter=([^>]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)"


def _tagged(call: str, parameter: str, text: str, tools: Tools) -> list[Call]:
    """Calls and parameters by patterns with (name, body); one line break on each side is framing.

    Text around the tags is ignored.
    """
    found = []
    for name, body in re.findall(call, text, re.S):
        arguments = {
            key.strip(): tools.value(name, key.strip(), _unframed(value))
            for key, value in re.findall(parameter, body, re.S)
        }
        found.append(tools.call(name.strip(), arguments))
    if not found:
        raise ValueError("no call")
    return found


def _unframed(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def invoke_calls(text: str, tools: Tools) -> list[Call]:
    """<invoke name="N"><parameter name="K">V</parameter></invoke>, with or without a namespace:
    MiniMax, Muse, and DeepSeek's DSML, whose string="true" says that a value is text.
    """
    plain = re.sub(r"<(/?)(?:｜DSML｜|atem:|minimax:|antml:)", r"<\1", text)
    found = []
    for name, body in re.findall(rf"<invoke\s+{_ATTRIBUTE}\s*>(.*?)(?:</invoke>|\Z)", plain, re.S):
        pairs = re.findall(rf"<parameter\s+{_ATTRIBUTE}([^>]*)>(.*?)</parameter>", body, re.S)
        arguments = {
            key: value if 'string="true"' in rest else tools.value(name, key, value)
            for key, rest, value in pairs
        }
        found.append(tools.call(name, arguments))
    if not found:
        raise ValueError("no call")
    return found


# --- gemma4 ---------------------------------------------------------------------------------------


def gemma4_calls(text: str, tools: Tools) -> list[Call]:
    """call:NAME{key:value,...} with strings in their own quotes."""
    match = re.fullmatch(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", text, re.S)
    if match is None:
        raise ValueError("not call:NAME{...}")
    value, at = _gemma_value(match[2], 0, 0)
    if at != len(match[2]):
        raise ValueError("text after the arguments")
    return [tools.call(match[1], value)]


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at `at` and where it ends."""
    if depth > 64:
        raise ValueError("nested too deeply")
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _gemma_items(text, at, depth)
    if text[at : at + 1] == '"':
        value, end = json.JSONDecoder(strict=False).raw_decode(text, at)
        return value, end
    bare = re.compile(r"[^,\]}]*").match(text, at)
    assert bare is not None
    word = bare[0].strip()
    try:
        return _json(word), bare.end()
    except ValueError:
        return word, bare.end()


def _gemma_items(text: str, at: int, depth: int) -> tuple[Any, int]:
    mapping, closing = text[at] == "{", "}" if text[at] == "{" else "]"
    keys: list[str] = []
    values: list[Any] = []
    at = _after_blanks(text, at + 1)
    while not text.startswith(closing, at):
        if mapping:
            quoted = text.startswith(QUOTE, at)
            colon = text.index(":", text.index(QUOTE, at + 1) if quoted else at)
            keys.append(text[at:colon].replace(QUOTE, "").strip().strip('"'))
            at = _after_blanks(text, colon + 1)
        value, at = _gemma_value(text, at, depth + 1)
        values.append(value)
        at = _after_blanks(text, at)
        if text.startswith(",", at):
            at = _after_blanks(text, at + 1)
        elif not text.startswith(closing, at):
            raise ValueError(f"expected , or {closing}")
    return (dict(zip(keys, values, strict=True)) if mapping else values), at + 1


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


# --- rescue ---------------------------------------------------------------------------------------


def rescue(text: str, tools: Tools) -> list[Call]:
    """Calls in the text of a completed turn whose dialect has no native form, or was not kept to:
    bare or fenced JSON, tags that are plain text, Kimi's NAME:NUMBER{...}. [] when there are none.
    """
    for reader in (_bare, _in_tags, _function_tags, invoke_calls, _kimi):
        try:
            return reader(text, tools)
        except (ValueError, LookupError, TypeError):
            continue
    return []


def _bare(text: str, tools: Tools) -> list[Call]:
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)```\s*", text, re.S)
    return json_calls(fenced[1] if fenced else text, tools)


def _in_tags(text: str, tools: Tools) -> list[Call]:
    spans = re.findall(r"<(\w*tool_call)>(.*?)(?:</\1>|\Z)", text, re.S)
    calls = [call for _, body in spans for call in chatml_calls(body, tools)]
    if not calls:
        raise ValueError("no call")
    return calls


def _function_tags(text: str, tools: Tools) -> list[Call]:
    return _tagged(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", _PARAMETER, text, tools)


def _kimi(text: str, tools: Tools) -> list[Call]:
    decoder, calls = json.JSONDecoder(strict=False), []
    for match in re.finditer(r"(?:functions\.)?([\w-]+):\d+\s*(?=\{)", text):
        arguments, _ = decoder.raw_decode(text, match.end())
        calls.append(tools.call(match[1], arguments))
    if not calls:
        raise ValueError("no call")
    return calls
