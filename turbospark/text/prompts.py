"""A prompt as callers give it: a text, chat messages or token ids.

Knows what needs a tokenizer. Does not know models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turbospark.errors import TokenIdError, TokenizerMissingError
from turbospark.policies import short
from turbospark.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def encode(
    prompt: Prompt, tokenizer: Tokenizer | None, path: Path, template: Mapping[str, Any]
) -> list[int]:
    """Token ids of a prompt for the install at `path`; `template` is what chat templates read.

    Ids come back as they are. Raises TokenIdError, TokenizerMissingError.
    """
    if isinstance(prompt, str):
        return needed(tokenizer, "a text prompt", path).encode(prompt)
    try:
        items: list[Any] = list(prompt)
    except TypeError:
        raise TokenIdError(
            f"prompt={short(prompt)}; expected a text, a list of messages or of token ids"
        ) from None
    if items and isinstance(items[0], Mapping):
        return needed(tokenizer, "a list of chat messages", path).encode_chat(items, **template)
    return items


def needed(tokenizer: Tokenizer | None, what: str, path: Path) -> Tokenizer:
    """`tokenizer`, which `what` needs. Raises TokenizerMissingError where there is none."""
    if tokenizer is None:
        raise TokenizerMissingError(
            f"{what} needs a tokenizer, and {path} has no tokenizer.json; "
            "pass token ids, or convert a checkpoint that carries its tokenizer"
        )
    return tokenizer
