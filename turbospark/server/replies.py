"""Events of a generation as OpenAI's API spells them: whole answers and chunks of a stream.

Knows the shapes. Does not know HTTP or models.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from turbospark.generation import Finished, Tail, Token
from turbospark.result import GenerationResult
from turbospark.text.turns import Content, Reasoning, ReleasedToolSpan, ToolCall


def usage(result: GenerationResult) -> dict[str, Any]:
    """Tokens of one answer; cached are those of the prompt that were not fed again."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.new_tokens,
        "total_tokens": result.prompt_tokens + result.new_tokens,
        "prompt_tokens_details": {"cached_tokens": result.reused_prefix_tokens},
    }


class Reply:
    """One answer under way. Feed it events; `chunks` are what a stream sends for each."""

    def __init__(self, model: str, chat: bool) -> None:
        self._chat = chat
        kind, prefix = ("chat.completion", "chatcmpl-") if chat else ("text_completion", "cmpl-")
        self._kind = kind
        self._head = {
            "id": prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.result: GenerationResult | None = None

    def take(self, event: Any) -> dict[str, Any] | None:
        """Account for an event -> the delta it makes, None for none."""
        if isinstance(event, (Content, ReleasedToolSpan, Token, Tail)):
            text = event.delta if isinstance(event, (Token, Tail)) else event.text
            self._text.append(text)
            return {"content": text} if text else None
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return {"reasoning_content": event.text}
        if isinstance(event, ToolCall):
            call = {
                "id": "call_" + secrets.token_hex(12),
                "type": "function",
                "function": {
                    "name": event.name,
                    "arguments": json.dumps(event.arguments, ensure_ascii=False),
                },
            }
            self._calls.append(call)
            return {"tool_calls": [{"index": event.index, **call}]}
        if isinstance(event, Finished):
            self.result = event.result
        return None

    @property
    def finish_reason(self) -> str:
        """tool_calls, length or stop."""
        assert self.result is not None
        if self._calls:
            return "tool_calls"
        return "length" if self.result.stop_reason in ("max_tokens", "context") else "stop"

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        assert self.result is not None
        text = "".join(self._text)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text or None}
            if not self._calls:
                message["content"] = text
            else:
                message["tool_calls"] = self._calls
            if self._reasoning:
                message["reasoning_content"] = "".join(self._reasoning)
            choice["message"] = message
        else:
            choice["text"] = text
        head = {**self._head, "object": self._kind}
        return {**head, "choices": [choice], "usage": usage(self.result)}

    def first(self) -> dict[str, Any] | None:
        """The chunk that opens a stream."""
        return self.chunk({"role": "assistant", "content": ""}) if self._chat else None

    def chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        """One chunk of a stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self._chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        kind = "chat.completion.chunk" if self._chat else self._kind
        return {**self._head, "object": kind, "choices": [choice]}

    def last(self, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The chunks that end a stream."""
        assert self.result is not None
        end = self.chunk({}, self.finish_reason)
        yield end
        if include_usage:
            yield {**end, "choices": [], "usage": usage(self.result)}
