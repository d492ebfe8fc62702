"""The table of docs/families.md, from what the families declare.

`python -m turbospark.families.table > docs/families.md` writes it; a test compares the two.
Knows the fields of `Family` and `Capabilities`. Does not know any one family.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields

from turbospark.families import families
from turbospark.families.base import NOT_BUILT, Capabilities, Family

_HEAD = """\
# Families

Made by `python -m turbospark.families.table > docs/families.md`; do not edit by hand. The source
is each family's own declaration in `turbospark/families/`, the same that refusals read.

- `model_type` is the key in config.json, `architecture` is `general.architecture` of a GGUF file,
  `family` is `arch.family` in an install's manifest.
- A feature that no family has yet has no column; an option that asks for it is refused when a model
  is opened.

[Adding a family](adding-a-family.md) tells how a row comes about.
"""
_NAMES = ("family", "`model_type`", "`architecture`", "`family`")


def markdown(listed: Sequence[Family]) -> str:
    """The whole document, a row per family and a column per feature."""
    features = [f.name for f in fields(Capabilities) if f.name not in NOT_BUILT]
    notes: list[str] = []
    rows = [
        [*_NAMES, *(name.replace("_", " ") for name in features)],
        ["---"] * (len(_NAMES) + len(features)),
    ]
    for family in listed:
        names = (family.model_types, family.gguf_architectures, family.wires)
        cells = [_cell(getattr(family.capabilities, name), notes) for name in features]
        rows.append([f"**{family.name}**", *(_code(n) for n in names), *cells])
    lines = [_HEAD, *(f"| {' | '.join(row)} |" for row in rows)]
    if notes:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _cell(value: str | tuple[str, ...] | None, notes: list[str]) -> str:
    """A cause becomes a numbered note, said once however many families share it."""
    if value is None:
        return "yes"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if value not in notes:
        notes.append(value)
    return f"no ({notes.index(value) + 1})"


if __name__ == "__main__":
    sys.stdout.write(markdown(families()))
