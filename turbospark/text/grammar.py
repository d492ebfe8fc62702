"""Answers held to a JSON schema, a regular expression or a grammar, token by token.

Knows llguidance, the library that says which tokens may come next. Does not know sampling: it gives
a mask, and says when nothing may follow any more. The options are checked before any compute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turbospark.errors import MissingDependencyError, OptionError, TokenizerMissingError
from turbospark.options import GenerationOptions
from turbospark.policies import short
from turbospark.text.calls import Tools
from turbospark.text.tokenizer import Tokenizer

# Blanks between JSON values; without a bound a small model may go on with them for ever.
_BLANKS = r"[\x20\x0A\x09]{1,20}"


class Constraint:
    """One generation's grammar. It follows a history that grows, or is cut and goes another way."""

    def __init__(self, matcher: Any, rows: int) -> None:
        self._matcher = matcher
        self._rows = rows
        self._taken: list[int] = []

    @classmethod
    def of(
        cls, options: GenerationOptions, tokenizer: Tokenizer | None, rows: int
    ) -> Constraint | None:
        """What `options` ask for, compiled; None when they ask for nothing.

        `rows`: token ids of the model. Raises OptionError for a schema, expression or grammar that
        is invalid or that nothing can satisfy, MissingDependencyError without llguidance.
        """
        asked = options.constraint
        if asked is None:
            return None
        name, text = asked
        if tokenizer is None:
            raise TokenizerMissingError(
                f"{name} needs a tokenizer, and the install has no tokenizer.json"
            )
        matcher = _matcher(name, text, tokenizer, rows)
        error = matcher.get_error() if matcher.is_error() else ""
        error = error or "; ".join(matcher.get_grammar_warnings())
        if error:
            raise OptionError(f"{name} cannot be honoured: {_first_line(error)}")
        return cls(matcher, rows)

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        """bool [rows]: which tokens may follow `generated`; at least one may."""
        self._follow(generated)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask: NDArray[np.bool_] = np.unpackbits(bits, bitorder="little")[: self._rows].astype(bool)
        if not mask.any():
            raise OptionError(
                "the grammar allows no token of this model's vocabulary after "
                f"{len(generated)} tokens; {_first_line(self._matcher.get_error())}"
            )
        return mask

    def ended(self, generated: Sequence[int]) -> bool:
        """Whether nothing but an end may follow `generated`."""
        self._follow(generated)
        return bool(self._matcher.is_stopped())

    def _follow(self, generated: Sequence[int]) -> None:
        same = len(self._taken)
        if list(generated[:same]) != self._taken:  # cut, or gone another way
            pairs = enumerate(zip(self._taken, generated, strict=False))
            shared = min(same, len(generated))
            same = next((at for at, (mine, theirs) in pairs if mine != theirs), shared)
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        for token in generated[same:]:
            if not self._matcher.consume_token(token):
                raise OptionError(
                    f"token {token} is outside the grammar: "
                    f"{_first_line(self._matcher.get_error())}"
                )
            self._taken.append(token)


def one_call(tools: Sequence[Mapping[str, Any]] | None, choice: str) -> str:
    """The Lark grammar of one call, {"name": N, "arguments": {...}}: of any of `tools` for
    "required", else of the one that `choice` names.

    Raises OptionError for a tool that is not there, or whose schema cannot be kept to.
    """
    offered = Tools(tools).parameters
    if not offered:
        raise OptionError(f"tool_choice={short(choice)} needs tools, and none were given")
    if choice != "required" and choice not in tuple(offered):
        raise OptionError(
            f"tool_choice={short(choice)} is not an offered tool; works: auto, required, "
            f"{', '.join(offered)}"
        )
    checked = _library("tool_choice").LLMatcher
    rules = []
    for name in offered if choice == "required" else [choice]:
        schema = {"type": "object", **offered[name], "x-guidance": {"whitespace_pattern": _BLANKS}}
        error = checked.validate_grammar(checked.grammar_from_json_schema(json.dumps(schema)))
        if error:
            raise OptionError(f"tool {name!r}: parameters cannot be kept to: {_first_line(error)}")
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'({head} %json {json.dumps(schema)} "}}")')
    return f"start: {' | '.join(rules)}"


def _matcher(name: str, text: str, tokenizer: Tokenizer, rows: int) -> Any:
    library = _library(name)
    if name == "json_schema":
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_pattern": _BLANKS}
            )
        except ValueError as error:
            raise OptionError(f"json_schema cannot be honoured: {_first_line(error)}") from None
    elif name == "regex":
        grammar = library.LLMatcher.grammar_from_regex(text)
    else:
        grammar = library.LLMatcher.grammar_from_lark(text)
    return library.LLMatcher(_vocabulary(tokenizer, rows), grammar, log_level=0)


def _library(name: str) -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise MissingDependencyError(
            f"{name} needs llguidance; pip install 'turbospark[structured]'"
        ) from None
    return llguidance


@lru_cache(maxsize=4)  # a second for a large vocabulary
def _vocabulary(tokenizer: Tokenizer, rows: int) -> Any:
    library = _library("a grammar")
    ends = [id_ for id_ in tokenizer.stop_ids if id_ < rows]
    try:
        return library.LLTokenizer(
            tokenizer.to_json(), n_vocab=max(rows, tokenizer.vocab_size), eos_token=ends or None
        )
    except Exception as error:  # the Rust side raises nothing more specific
        raise OptionError(
            f"this model's tokenizer cannot be held to a grammar: {_first_line(error)}"
        ) from None


def _first_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
