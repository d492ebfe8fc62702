"""Oracle checkpoints, opened once per test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oracle_folders import NAMES, ORACLES, Oracle

from turbospark import OpenOptions, Runner


@pytest.fixture(scope="module", params=NAMES)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    return Oracle(ORACLES / request.param)


@pytest.fixture(scope="module")
def runner(oracle: Oracle, installed: Callable[[str], Path]) -> Iterator[Runner]:
    """The oracle's model in float32 on the CPU, with room for its prompt and continuation."""
    room = len(oracle.ids) + len(oracle.greedy_ids)
    options = OpenOptions(
        expert_residency="resident", max_context=room, dtype="float32", device="cpu"
    )
    with Runner.open(installed(oracle.name), options) as opened:
        yield opened
