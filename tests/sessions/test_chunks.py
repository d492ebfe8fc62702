"""A prompt in chunks of any size is the same prompt: equal to the bit for every oracle (C15).

The rings of windowed models are opened with a slack of two, so that they turn many times and
chunks cross both the window and the wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conversation import MODELS, open_cpu, tokens_of, window
from oracle_folders import ORACLES, Oracle

from turbospark import Runner
from turbospark.errors import OptionError

CHUNKS = (1, 3, 8, 16, 64, None)


def run(runner: Runner, prompt: list[int], chunk: int | None, following: list[int]) -> np.ndarray:
    """Logits [1 + n, vocab] after the prompt and after each of the `following` tokens."""
    runner.reset()
    rows = [np.array(runner.prefill(prompt, chunk=chunk or len(prompt)))]
    rows += [np.array(runner.step(token)) for token in following]
    return np.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_every_chunk_size_gives_the_same_logits_then_and_while_decoding(
    name: str, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    with open_cpu(installed(name)) as runner:
        narrow = window(runner)
    following = [*oracle.greedy_ids, *oracle.ids][: 20 if narrow else 4]
    count = min(len(oracle.greedy_ids), len(following))
    ring = {"swa_ring_capacity": narrow + 2} if narrow else {}
    with open_cpu(installed(name), **ring) as runner:
        expected = run(runner, oracle.ids, None, following)
        # The reference attends to everything in one pass and masks by the window.
        reference = oracle.greedy_logits[:count]
        np.testing.assert_allclose(expected[:count], reference, atol=1e-3, rtol=0)
        for chunk in CHUNKS[:-1]:
            assert np.array_equal(run(runner, oracle.ids, chunk, following), expected), chunk


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma4-e2b", "gpt_oss-mxfp4"])
@pytest.mark.parametrize("slack", [0, 1, 7])
def test_a_ring_of_any_slack_does_as_one_that_never_turns(
    name: str, slack: int, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    prompt, following = tokens_of(oracle, 100), tokens_of(oracle, 20, seed=1)
    with open_cpu(installed(name)) as runner:
        plain = run(runner, prompt, None, following)
        narrow = window(runner)
    assert narrow is not None
    with open_cpu(installed(name), swa_ring_capacity=narrow + slack) as runner:
        expected = run(runner, prompt, None, following)
        # Keys lie in another order in a ring that turned, so sums round differently.
        np.testing.assert_allclose(expected, plain, atol=1e-4, rtol=0)
        for chunk in (1, 8, 37):
            assert np.array_equal(run(runner, prompt, chunk, following), expected), chunk


def test_passes_are_cut_where_a_pass_would_hold_too_many_scores(
    installed: Callable[[str], Path],
) -> None:
    oracle = Oracle(ORACLES / "llama-base")
    prompt = tokens_of(oracle, 100)
    with open_cpu(installed("llama-base")) as runner:
        expected = run(runner, prompt, None, [3])
        whole = np.array(runner.score(prompt))
        engine = runner._engine
        assert engine is not None
        before = runner.phase_counters
        run(runner, prompt, None, [])
        assert (runner.phase_counters - before).passes == 1
        engine.score_values = 600
        before = runner.phase_counters
        assert np.array_equal(run(runner, prompt, None, [3]), expected)
        assert (runner.phase_counters - before).passes > 10
        assert np.array_equal(np.array(runner.score(prompt)), whole)
        runner.reset()
        # 24 * 24 <= 600 < 25 * 25, and at position 24: 15 * (24 + 15) <= 600 < 16 * (24 + 16).
        assert engine._rows(100) == 24
        runner.prefill(prompt[:24])
        assert engine._rows(100) == 15


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_without_rows_is_refused(chunk: int, installed: Callable[[str], Path]) -> None:
    with open_cpu(installed("llama-base")) as runner:
        with pytest.raises(OptionError, match=f"chunk={chunk} is not valid"):
            runner.prefill([1, 2], chunk=chunk)
        assert runner.position == 0
