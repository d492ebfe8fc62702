"""A generation to look at while it happens, in a notebook cell or in a terminal.

Knows IPython's display handles, where there is one. Does not know how tokens are made.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

from turbospark import display
from turbospark.cli.console import interruptible
from turbospark.generation import Event, Finished, Prefill, Tail, Token
from turbospark.options import GenerationOptions
from turbospark.result import GenerationResult
from turbospark.runner import Runner
from turbospark.text.prompts import Prompt

PERIOD = 0.1
"""Seconds between two pictures of a stream: notebooks keep up with ten a second."""


def watch(
    runner: Runner, prompt: Prompt, options: GenerationOptions | None = None, **changes: Any
) -> GenerationResult:
    """Generate, showing prompt progress and text as they come; returns the result.

    In a notebook one output is redrawn in place and ends as the result's own display; elsewhere the
    text is printed. Interrupting (the stop button, Ctrl-C) ends the answer between two tokens, with
    stop_reason "cancelled", and keeps the conversation whole. Arguments as `Runner.generate`.
    """
    with interruptible() as cancel:
        picture: _Cell | _Lines = _Cell() if in_notebook() else _Lines()
        for event in runner.stream(prompt, options, cancel=cancel, **changes):
            if isinstance(event, Finished):
                result = event.result
            else:
                picture.take(event)
    picture.end(result)
    return result


def in_notebook() -> bool:
    """Whether this code runs in a kernel that shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class _Lines:
    """A stream as printed text."""

    def take(self, event: Event) -> None:
        if isinstance(event, Token) and not event.delta:
            return
        if isinstance(event, (Token, Tail)):
            print(event.delta, end="", flush=True)

    def end(self, result: GenerationResult) -> None:
        ids = "" if result.text is not None else str(result.token_ids)
        facts = result.figures()
        print(ids + "\n" + "; ".join(f"{name} {value}" for name, value in facts.items() if value))


class _Cell:
    """A stream as one output that is drawn again and again."""

    def __init__(self) -> None:
        from IPython.display import HTML
        from IPython.display import display as show

        self._html = HTML
        self._handle: Any = show(HTML(""), display_id=True)
        self._prompt, self._text, self._tokens = (0, 0), "", 0
        self._began = self._drawn = 0.0

    def take(self, event: Event) -> None:
        if isinstance(event, Prefill):
            self._prompt = (event.done, event.total)
        elif isinstance(event, Token):
            self._began = self._began or perf_counter()
            self._tokens += 1
            self._text += event.delta
        elif isinstance(event, Tail):
            self._text += event.text
        if perf_counter() - self._drawn >= PERIOD:
            self._draw()

    def _draw(self) -> None:
        self._drawn = perf_counter()
        seconds = self._drawn - self._began if self._tokens > 1 else 0.0
        html = display.stream(self._prompt, self._text, self._tokens, seconds)
        self._handle.update(self._html(html))

    def end(self, result: GenerationResult) -> None:
        self._handle.update(result)
