"""What clients ask for, checked: bodies of OpenAI's API to messages and options of ours.

Knows the fields of the API: those that are honoured, those that change nothing here, and those that
would change the answer and are refused by name. Does not know HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from turbospark.errors import OptionError
from turbospark.options import GenerationOptions
from turbospark.policies import short

LEVELS = {"none": "off", "minimal": "low"}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed",
)  # fmt: skip
_COMMON = {"model", "stream", "stream_options", "stop", "max_tokens", *_SAMPLING}
_CHAT = {
    *_COMMON, "messages", "max_completion_tokens", "tools", "tool_choice", "reasoning_effort",
    "parallel_tool_calls", "response_format",
}  # fmt: skip
_COMPLETION = {*_COMMON, "prompt"}
# Book-keeping of the hosted service: no answer depends on it.
_NEUTRAL = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
# Honoured at these values, which ask for nothing.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "logit_bias": ({},), "suffix": ("",), "modalities": (["text"],),
}  # fmt: skip
_CHOICES = ("auto", "none", "required")
_NONE_CONTENT = re.compile(r"""content['"]?\]?\s+is\s+(?:not\s+)?none""")


class Asked:
    """One request. `field(name)` is None where it is absent or null."""

    def __init__(self, body: Any, chat: bool, defaults: GenerationOptions) -> None:
        if not isinstance(body, dict):
            raise OptionError(f"the body is {short(body)}; expected a JSON object")
        self._body = {name: value for name, value in body.items() if value is not None}
        known = _CHAT if chat else _COMPLETION
        for name, value in self._body.items():
            if name in known or name in _NEUTRAL:
                continue
            if name not in _ONLY:
                raise OptionError(f"unknown field {name!r}; known: {', '.join(sorted(known))}")
            works = _ONLY[name]
            if not any(type(value) is type(one) and value == one for one in works):
                raise OptionError(
                    f"{name}={short(value)} is not supported; works: {short(works[0])}, or leave "
                    "it out"
                )
        self.stream = self._typed("stream", bool, False)
        streaming = self._typed("stream_options", dict, {})
        self.include_usage = bool(streaming.get("include_usage"))
        self.options = self._options(defaults)

    def field(self, name: str) -> Any:
        return self._body.get(name)

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self._body.get(name, default)
        if not isinstance(value, kind):
            raise OptionError(f"{name}={short(value)} is not valid; works: a {kind.__name__}")
        return value

    def _options(self, defaults: GenerationOptions) -> GenerationOptions:
        changes = {name: self._body[name] for name in _SAMPLING if name in self._body}
        heat = changes.get("temperature")
        if isinstance(heat, (int, float)) and heat > 2:
            raise OptionError(f"temperature={short(heat)} is not valid; works: 0..2")
        for name, value in changes.items():
            if type(value) is int and name not in ("seed", "top_k"):
                with suppress(OverflowError):  # the option refuses what is no float
                    changes[name] = float(value)
        limit = self._body.get("max_completion_tokens", self._body.get("max_tokens"))
        changes["max_new_tokens"] = limit
        if "stop" in self._body:
            stop = self._body["stop"]
            changes["stop"] = tuple(stop) if isinstance(stop, list) else stop
        held = self._held()
        if held or self.tool_choice not in ("auto", "none"):
            changes["ignore_eos"] = False  # the form sets the end
        return defaults.replace(**changes, **held)

    # --- chats ------------------------------------------------------------------------------------

    @property
    def reasoning(self) -> str:
        """The reasoning level in our words."""
        level = self._body.get("reasoning_effort", "none")
        return LEVELS.get(level, level) if isinstance(level, str) else level

    @property
    def tool_choice(self) -> str:
        """auto, none, required, or the name of the tool that has to be called."""
        choice = self._body.get("tool_choice", "auto")
        if isinstance(choice, dict) and choice.get("type") == "function":
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if isinstance(name, str) and name not in _CHOICES:
                return name
        if not isinstance(choice, str) or choice not in _CHOICES:
            raise OptionError(
                f"tool_choice={short(choice)} is not supported; works: {', '.join(_CHOICES)}, or "
                "{'type': 'function', 'function': {'name': ...}}"
            )
        return choice

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that may be called: none with tool_choice "none"."""
        tools = self._typed("tools", list, [])
        for index, tool in enumerate(tools):
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise OptionError(
                    f"tools[{index}] is {short(tool)}; expected {{'type': 'function', 'function': "
                    "{'name': ..., 'parameters': ...}}"
                )
        one = self._typed("parallel_tool_calls", bool, True) is False
        if tools and one and self.tool_choice == "auto":
            raise OptionError(
                "parallel_tool_calls=False is not supported with tool_choice 'auto'; works: leave "
                "it out, or tool_choice 'required', which makes one call"
            )
        return tools if tools and self.tool_choice != "none" else None

    def _held(self) -> dict[str, Any]:
        """The schema that response_format asks for, as an option."""
        form = self._typed("response_format", dict, {"type": "text"})
        if form.get("type") == "text":
            return {}
        if form.get("type") == "json_object":
            return {"json_schema": {"type": "object"}}
        named = form.get("json_schema")
        if form.get("type") == "json_schema" and isinstance(named, dict):
            return {"json_schema": named.get("schema", {})}
        raise OptionError(
            f"response_format={short(form)} is not valid; works: type text, json_object, or "
            "json_schema with a schema"
        )

    def messages(self, template: str) -> list[dict[str, Any]]:
        """The messages as templates take them: arguments as objects, a developer as the system
        where the template knows no other, no content as an empty one where it does not ask.
        """
        messages = self._body.get("messages")
        if not isinstance(messages, list):
            raise OptionError(f"messages={short(messages)} is not valid; works: a list of messages")
        return [self._message(m, template) if isinstance(m, dict) else m for m in messages]

    @staticmethod
    def _message(message: Mapping[str, Any], template: str) -> dict[str, Any]:
        found = {name: value for name, value in message.items() if value is not None}
        if found.get("role") == "developer" and "developer" not in template:
            found["role"] = "system"
        if isinstance(found.get("tool_calls"), list):
            found["tool_calls"] = [_call(call) for call in found["tool_calls"]]
            if found["tool_calls"]:
                found.setdefault("content", None if _NONE_CONTENT.search(template) else "")
        return found


def _call(call: Any) -> Any:
    """A tool call of the history with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def prompt_of(asked: Asked) -> str | list[int]:
    """The prompt of a completion: a text, token ids, or a list of one of them."""
    prompt = asked.field("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise OptionError(
            f"prompt={short(prompt)} is not valid; works: one text or one list of ids"
        )
    return prompt
