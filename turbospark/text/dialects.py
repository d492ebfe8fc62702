"""The one table of chat dialects: which tokens betray one, which end a turn, which start a tool.

Knows marker tokens by name. Does not know ids, templates' framing or models: ids are looked up in
the tokenizer at hand, because the same marker has another id in every vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """A way of framing turns.

    `witness`: tokens that must all be in the vocabulary. `end_of_turn`: the first present one is
    the end-of-turn token. `tool_stop`: emitted to hand a tool call over. `stops`: further ends.
    """

    name: str
    witness: tuple[str, ...]
    end_of_turn: tuple[str, ...] = ()
    tool_stop: str | None = None
    stops: tuple[str, ...] = ()


# Order matters: the first whose witnesses are all present wins. Harmony and Muse share <|start|>
# and <|message|>, and </s> alone is far too common to decide anything, so Mistral comes last.
DIALECTS = (
    Dialect(
        "deepseek",
        ("<｜User｜>", "<｜Assistant｜>"),
        ("<｜end▁of▁sentence｜>",),
    ),
    # <|end|> closes messages inside a turn and must not stop it.
    Dialect(
        "harmony",
        ("<|start|>", "<|message|>", "<|channel|>"),
        ("<|return|>",),
        tool_stop="<|call|>",
        stops=("<|endoftext|>",),
    ),
    Dialect(
        "muse",
        ("<|start|>", "<|message|>", "<|eot|>"),
        ("<|eot|>",),
        stops=("<|eom|>", "<|end_of_text|>"),
    ),
    Dialect("chatml", ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",), stops=("<|endoftext|>",)),
    Dialect(
        "llama3",
        ("<|start_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>",),
        stops=("<|eom_id|>", "<|end_of_text|>"),
    ),
    Dialect(
        "gemma4",
        ("<|turn>", "<turn|>"),
        ("<turn|>",),
        tool_stop="<|tool_response>",
        stops=("<eos>",),
    ),
    Dialect("gemma", ("<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), stops=("<eos>",)),
    Dialect("mistral", ("<s>", "</s>"), ("</s>",)),
)

PLAIN = Dialect("plain", ())


def detect(token_to_id: Callable[[str], int | None]) -> Dialect:
    """The dialect of a vocabulary, or `PLAIN` when no witness fits."""
    for dialect in DIALECTS:
        if all(token_to_id(token) is not None for token in dialect.witness):
            return dialect
    return PLAIN
