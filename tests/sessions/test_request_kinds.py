"""Token ids and chunks of the wrong kind are refused by the call, before any compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation import open_cpu

from turbospark import Runner
from turbospark.errors import OptionError, TokenIdError


@pytest.fixture(scope="module")
def runner(installed: Callable[[str], Path]) -> Iterator[Runner]:
    with open_cpu(installed("llama-base")) as opened:
        yield opened


@pytest.mark.parametrize("ids", [[1, [2]], [[1, 2]], [True, 1], [1, False], [1.5], ["a"]])
def test_ids_that_are_no_flat_list_of_integers_are_refused(runner: Runner, ids: Any) -> None:
    before = runner.phase_counters.passes
    for call in (runner.prefill, runner.score, runner.generate):
        with pytest.raises(TokenIdError, match="integers"):
            call(ids)
    assert runner.phase_counters.passes == before


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "a", True])
def test_a_chunk_that_is_no_count_is_refused(runner: Runner, chunk: Any) -> None:
    with pytest.raises(OptionError, match="chunk="):
        runner.prefill([1, 2, 3], chunk=chunk)


def test_numpy_integers_are_token_ids(runner: Runner) -> None:
    runner.reset()
    plain = np.array(runner.prefill([3, 4, 5]))
    runner.reset()
    np.testing.assert_array_equal(np.array(runner.prefill(np.array([3, 4, 5]))), plain)
