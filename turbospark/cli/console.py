"""What commands share towards the terminal: output in two forms, sizes, interruption.

Knows standard output and signals. Does not know models.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

# What the library says of its options -> what a person at a terminal can type.
FLAGS = {
    "draft_model and prompt_lookup work": "--draft-model and --speculative-drafter lookup work",
    "starts when it is named: dflash=2":
        "starts when it is named: --speculative-drafter dflash",
    "no drafter is open; name one in speculation when opening":
        "no drafter is open; name one by --speculative-drafter or --draft-model",
    "a list of chat messages needs a tokenizer": "a text needs a tokenizer",
    "a text prompt needs a tokenizer": "a text needs a tokenizer",
    "pass token ids, or": "`turbospark run MODEL --ids 1,2,3` takes token ids, or",
    "use stop_token_ids": "use --stop-token-id",
    "without prefix_reuse allocates": "with --no-prefix-reuse allocates",
    "use prefix_reuse=True, or": "drop --no-prefix-reuse, or use",
}  # fmt: skip
# English words that mean the option where a message begins with them.
SUBJECTS = ("regex", "grammar")


def flags(text: str, typed: Mapping[str, str]) -> str:
    """What the library says in the words of the command line, whose options are `typed` (name ->
    flag): `top_k=0` becomes `--top-k 0`, and so does a bare name that is no English word, or is the
    message's subject (`regex cannot be honoured`).
    """
    for said, instead in FLAGS.items():
        text = text.replace(said, instead)

    def instead_of(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        subject = found.start() == 0 and name in SUBJECTS
        if name not in typed or not (value or "_" in name or subject):
            return found[0]
        if value in ("=True", "=False"):  # a flag without a value is given or is not
            return typed[name] if value == "=True" else f"no {typed[name]}"
        return typed[name] + (value and f" {value[1:]}")

    return re.sub(r"(?<![\w./'\"-])([a-z]\w*)\b(=True\b|=False\b|=|)(?![./])", instead_of, text)


def show(args: Namespace, data: Any, text: str) -> None:
    """Print `data` as one JSON document with --json, else `text`."""
    print(json.dumps(data, indent=1, default=str) if args.json else text)


def note(text: str) -> None:
    """A line for the person, beside the output: standard error."""
    print(text, file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """A piece of streamed output, shown at once."""
    print(text, end="", flush=True)


def think(text: str) -> None:
    """A piece of a model's thoughts: standard error, dimmed at a terminal."""
    dim = sys.stderr.isatty() and text.strip()
    print(f"\033[2m{text}\033[0m" if dim else text, end="", file=sys.stderr, flush=True)


def size(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def table(rows: Mapping[str, Any]) -> str:
    """A name and a value per line; None and empty values are left out."""
    kept = {name: value for name, value in rows.items() if value not in (None, "", [], (), {})}
    width = max(map(len, kept), default=0) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in kept.items())


def rate(value: float | None) -> str:
    """Tokens per second, or a dash when nothing was measured."""
    return "-" if value is None else f"{value:.1f} tokens/s"


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks: the yielded function says so between two tokens. A second one interrupts.

    A pass of the model that is interrupted half-way would cost the conversation its cache.
    """
    asked = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
