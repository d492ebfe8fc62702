"""Drafters that know what the model will say, and say so, lie, or begin to lie after a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oracle_folders import ORACLES, Oracle

from turbospark import OpenOptions, Runner
from turbospark.drafting import Drafting
from turbospark.speculation.drafter import Chooser, Proposal


class Toy:
    """Proposes the `known` continuation, changed by `lie` (position in the block, token)."""

    name = "toy"
    has_probabilities = False

    def __init__(
        self, known: Sequence[int] = (), lie: Callable[[int, int], int] = lambda i, t: t
    ) -> None:
        self.known, self.lie = list(known), lie
        self.prompt = 0

    def begin(self, ids: Sequence[int]) -> None:
        self.prompt = len(ids)

    def propose(self, history: Sequence[int], count: int, choose: Chooser | None) -> list[Proposal]:
        at = len(history) - self.prompt
        ahead = self.known[at : at + count]
        return [Proposal(self.lie(i, token)) for i, token in enumerate(ahead)]

    def keep(self, rows: int) -> None:
        """Nothing to keep."""


def right(position: int, token: int) -> int:
    return token


def wrong(position: int, token: int) -> int:
    return (token + 1) % 50


def right_then_wrong(position: int, token: int) -> int:
    return token if position < 2 else wrong(position, token)


LIES = {"right": right, "wrong": wrong, "right then wrong": right_then_wrong}


def open_with(install: Path, drafter: Any, width: int, **options: Any) -> Runner:
    """The install in float32 on the CPU, drafting with `drafter`."""
    settings = {"max_context": 160, "device": "cpu", "dtype": "float32", **options}
    runner = Runner.open(install, OpenOptions(**settings))
    runner._drafting = Drafting(drafter, width, "match")
    return runner


def teach(runner: Runner, known: Sequence[int], lie: Callable[[int, int], int]) -> None:
    """What the runner's toy proposes from now on."""
    assert runner._drafting is not None
    runner._drafting.drafter = Toy(known, lie)


def prompt_of(name: str, count: int = 30) -> list[int]:
    ids = Oracle(ORACLES / name).ids
    return (ids * 9)[:count]
