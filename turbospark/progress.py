"""Progress bars: one look in a terminal and in a notebook. Knows tqdm, and when not to flicker."""

from __future__ import annotations

from typing import Any

DELAY = 0.5
"""Seconds before a bar appears: what takes less is not worth a line."""


def bar(what: str, total: int | None, unit: str, shown: bool = True, **settings: Any) -> Any:
    """A tqdm bar, in a notebook its widget; `unit` "B" counts in powers of 1024.

    A context manager with `update(amount)`. Nothing is drawn unless `shown`.
    """
    from tqdm.auto import tqdm  # looks for a notebook when it is imported

    scaled: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    return tqdm(total=total, unit=unit, desc=what, disable=not shown, **{**scaled, **settings})
