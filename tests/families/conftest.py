"""Oracle checkpoints, converted once per session and opened once per test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oracle_folders import NAMES, ORACLES, Oracle

from turbospark import OpenOptions, Runner, convert


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Oracle name -> its install, converted on first use."""
    root = tmp_path_factory.mktemp("installs")
    done: dict[str, Path] = {}

    def install(name: str) -> Path:
        if name not in done:
            done[name] = convert(ORACLES / name, root / name, progress=False)
        return done[name]

    return install


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
