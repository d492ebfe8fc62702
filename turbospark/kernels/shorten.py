"""A kernel's text without what it does not need: MLX on CUDA hashes all of it at every launch.

Knows how preludes and kernel headers are laid out: definitions begin in the first column, one after
the other, and each is named by its first `ts_` word. Does not know any kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache


# The rows of a prompt make plans of their own with one text.
@lru_cache(maxsize=512)
def shortened(definitions: str, body: str) -> tuple[str, str]:
    """Both without comments and indentation, and without definitions that nothing refers to."""
    body = bare(body)
    chunks = list(_chunks(bare(definitions)))
    kept = {i for i, chunk in enumerate(chunks) if _name(chunk) is None}
    text = body + "".join(chunks[i] for i in kept)
    grown = True
    while grown:
        words = set(re.findall(r"\w+", text))
        more = {i for i, chunk in enumerate(chunks) if _name(chunk) in words} - kept
        text += "".join(chunks[i] for i in more)
        kept |= more
        grown = bool(more)
    return "".join(chunk for i, chunk in enumerate(chunks) if i in kept), body


def joined(definitions: Iterable[str]) -> str:
    """All of them, each once."""
    chunks = dict.fromkeys(chunk for text in definitions for chunk in _chunks(bare(text)))
    return "".join(chunks)


def bare(text: str) -> str:
    """Without comments, empty lines, and spaces that separate nothing."""
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return "".join(f"{_tight(line)}\n" for line in lines if line)


def _tight(line: str) -> str:
    """Directives and strings keep their spaces; so do signs, which might meet another."""
    loose = line.startswith("#") or line.endswith("\\") or '"' in line
    return line if loose else re.sub(r" *([;,(){}=?<]) *", r"\1", line)


def _chunks(text: str) -> Iterator[str]:
    """Definitions, directives and conditional parts of a bare text, each in whole lines."""
    part: list[str] = []
    conditions = depth = 0
    for line in text.splitlines():
        part.append(f"{line}\n")
        conditions += line.startswith("#if")
        conditions -= line.startswith("#endif")
        depth += line.count("{") - line.count("}")
        ends = not line.endswith("\\") and (part[0].startswith("#") or line[-1] in "};")
        if ends and conditions == 0 and depth == 0:
            yield "".join(part)
            part = []
    if part:
        raise ValueError(f"a definition does not end: {part[0].strip()}")


def _name(chunk: str) -> str | None:
    """What others call the chunk by; None if it is always kept."""
    found = re.match(r"#define (\w+)", chunk)
    if found is None and not chunk.startswith(("#", "typedef")):
        found = re.search(r"\b(ts_\w+)", chunk)
    return found and found[1]
