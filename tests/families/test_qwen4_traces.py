"""qwen4_exp on the way to its logits: streams, n-gram rows, positions attended, as transformers has
them (tests/data/make_qwen4_traces.py), however a prompt is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from qwen4_trace import NAMES, ROOM, WAYS, Trace, expected, faults

from turbospark import OpenOptions, Runner


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def trace(name: str, installed: Callable[[str], Path]) -> Iterator[Trace]:
    with (
        Runner.open(installed(name), OpenOptions(**ROOM)) as runner,
        pytest.MonkeyPatch.context() as patch,
    ):
        yield Trace(runner, patch)


@pytest.mark.parametrize("way", WAYS)
def test_everything_on_the_way_is_the_reference_s(trace: Trace, name: str, way: str) -> None:
    assert faults(trace, expected(name), way) == []


def test_force_dense_gives_the_reference_s_dense_logits(trace: Trace, name: str) -> None:
    want = expected(name)
    toggles = trace.runner.toggles
    try:
        toggles.qsa_force_dense = True
        for way in WAYS:
            found = trace.run(WAYS[way](want["ids"].tolist()))
            assert np.abs(found - want["dense"]).max() < 1e-4
    finally:
        toggles.qsa_force_dense = False


def test_the_prompts_have_what_is_easily_got_wrong() -> None:
    """Texts that end, one after another too; rows that do not attend to themselves."""
    for name in NAMES:
        want = expected(name)
        ends = np.flatnonzero(want["ids"] == 7)
        assert (np.diff(ends) == 1).any() and len(ends) >= 4
        for layer in (1, 3):
            sees = want[f"sees/{layer}"]
            assert not sees.diagonal().all() and np.array_equal(sees, np.tril(sees))
