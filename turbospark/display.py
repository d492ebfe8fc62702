"""How objects show themselves in a notebook: HTML, with their plain text beside it.

Knows HTML, not the objects: each says, beside its text, which of its figures people look for first.
What it writes is inline and complete: no script, style sheet or picture from elsewhere, every text
escaped. Text takes the page's colour, and bars take mid-tones that stand out on light and on dark
alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

PALETTE = (
    "#2f7fd1", "#c9781b", "#2a9461", "#b0559b", "#8a7bd8",
    "#d1495b", "#1f97a8", "#7d8a2e", "#8c6d5a", "#808890",
)  # fmt: skip
"""Mid-tones, at least three to one against white and against #1e1e1e."""

LINE = "rgba(128,128,128,.4)"
FAINT = "rgba(128,128,128,.18)"


class Shown:
    """What has a place in a notebook: `str()` where only text is shown, else HTML."""

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


# --- pieces ---------------------------------------------------------------------------------------


def card(title: str, note: str, *parts: str) -> str:
    """A framed box: a title, a note beside it, and parts that are HTML already."""
    head = (
        f'<div style="margin-bottom:.4em"><b>{escape(title)}</b>'
        f'<span style="opacity:.75;margin-left:.7em">{escape(note)}</span></div>'
    )
    return (
        f'<div style="border:1px solid {LINE};border-radius:6px;padding:.6em .9em;'
        f'margin:.2em 0;max-width:48em;line-height:1.45">{head}{"".join(parts)}</div>'
    )


def facts(rows: Mapping[str, Any]) -> str:
    """A name and a value per line; None and empty values are left out."""
    cells = "".join(
        f'<div style="opacity:.75">{escape(name)}</div>'
        f'<div style="overflow-wrap:anywhere">{escape(str(value))}</div>'
        for name, value in rows.items()
        if value not in (None, "")
    )
    return (
        '<div style="display:grid;grid-template-columns:max-content 1fr;gap:0 1em;'
        f'font-size:.92em">{cells}</div>'
    )


def gauge(name: str, amount: float, whole: float, words: str) -> str:
    """A bar of one neutral part, the rest empty."""
    return bar([("", 0, "")] * (len(PALETTE) - 1) + [(name, amount, words)], whole)


def bar(parts: Sequence[tuple[str, float, str]], whole: float | None = None) -> str:
    """One stacked bar of (name, amount, amount in words); a `whole` leaves the rest empty."""
    shown = [(i, *part) for i, part in enumerate(parts) if part[1] > 0]
    total = max(sum(amount for _, _, amount, _ in shown), whole or 0) or 1
    pieces = "".join(
        f'<div title="{escape(f"{name}: {words}")}" style="flex:0 1 {100 * amount / total:.3f}%;'
        f'min-width:2px;background:{PALETTE[i % len(PALETTE)]}"></div>'
        for i, name, amount, words in shown
    )
    spoken = escape(", ".join(f"{name} {words}" for _, name, _, words in shown))
    return (
        f'<div role="img" aria-label="{spoken}" style="display:flex;gap:1px;height:14px;'
        f"border-radius:3px;overflow:hidden;background:{FAINT};margin:.35em 0"
        f'">{pieces}</div>'
    )


def strip(values: Sequence[float | None], words: str) -> str:
    """A column per layer, as high as its value; the second colour is below zero, None is empty."""
    highest = max((abs(v) for v in values if v is not None), default=0) or 1
    columns = "".join(
        f'<div title="{escape(f"layer {i}: {v:.4g}")}" style="flex:1 1 0;max-width:1em;'
        f'height:{100 * abs(v) / highest:.1f}%;background:{PALETTE[v < 0]}"></div>'
        if v is not None
        else '<div style="flex:1 1 0;max-width:1em"></div>'
        for i, v in enumerate(values)
    )
    return (
        f'<div role="img" aria-label="{escape(words)}" style="display:flex;gap:1px;height:36px;'
        f'align-items:flex-end;border-bottom:1px solid {LINE};margin:.35em 0">{columns}</div>'
    )


def legend(rows: Iterable[tuple[int, Sequence[str]]]) -> str:
    """Lines of a bar's parts: (index of the colour, cells); the last cell is small print."""
    lines = []
    for index, (name, *numbers, words) in rows:
        square = (
            f'<span style="display:inline-block;width:.7em;height:.7em;border-radius:2px;'
            f'margin-right:.5em;background:{PALETTE[index % len(PALETTE)]}"></span>'
        )
        cells = "".join(
            '<td style="text-align:right;padding:0 .9em 0 0;border:0;background:none;'
            f'white-space:nowrap;font-variant-numeric:tabular-nums">{escape(number)}</td>'
            for number in numbers
        )
        lines.append(
            '<tr style="background:none"><td style="text-align:left;padding:0 .9em 0 0;border:0;'
            f'white-space:nowrap;background:none">{square}{escape(name)}</td>{cells}'
            '<td style="text-align:left;padding:0;border:0;opacity:.75;background:none">'
            f"{escape(words)}</td></tr>"
        )
    return (
        '<table style="border-collapse:collapse;border:0;margin:.2em 0;font-size:.92em;'
        f'color:inherit"><tbody>{"".join(lines)}</tbody></table>'
    )


def preformatted(text: str) -> str:
    """Plain text as it stands."""
    return f'<pre style="margin:0;color:inherit;background:none">{escape(text)}</pre>'


def quoted(text: str) -> str:
    """A text of any length, wrapped, with its line ends."""
    return (
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere;max-height:28em;overflow:auto;'
        f'border-left:3px solid {LINE};padding:.1em .8em;margin:.3em 0">{escape(text)}</div>'
    )


def size(count: float) -> str:
    """Bytes for people."""
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= divisor:
            return f"{count / divisor:.1f} {unit}"
    return f"{count:.0f} bytes"


def speed(value: float | None) -> str | None:
    """Tokens per second for people; None stays None."""
    return None if value is None else f"{value:.1f} tokens/s"


def options(rows: Mapping[str, Any], title: str) -> str:
    """Names and values of a set of options."""
    words = {name: "none" if value in (None, ()) else str(value) for name, value in rows.items()}
    return card(title, "", facts(words))


def stream(prompt: tuple[int, int], text: str, tokens: int, seconds: float) -> str:
    """A generation under way: the prompt's progress, then the text so far."""
    done, total = prompt
    if not tokens:
        note = f"prompt {done} of {total} tokens"
        return card("Answer", note, gauge("prompt", done, total, note))
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    return card("Answer", f"{tokens} tokens{rate} …", quoted(text))
