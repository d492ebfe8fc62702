"""Every family and variant against answers that another implementation computed.

The references are transformers (float32, eager) and, for trees that mlx-lm quantized, mlx-lm;
see tests/data/oracles/README.md. The windows are wrapped several times, and the recurrent cases
cross their 64-row chunk.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracle_folders import NAMES, ORACLES, Oracle

from turbospark import Runner
from turbospark.families import families, family_for_model_type

BOUND = 1e-3
USUAL = 2e-4  # float32 rounding at these sizes; the largest seen is 6e-5
EXCEEDS_USUAL: dict[str, str] = {}
"""Case -> why it is allowed between USUAL and BOUND."""


def check_close(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    assert found.shape == expected.shape and found.dtype == np.float32
    difference = float(np.abs(found - expected).max())
    assert difference < BOUND
    assert difference < USUAL or name in EXCEEDS_USUAL


def test_score_gives_the_reference_logits(runner: Runner, oracle: Oracle) -> None:
    check_close(np.array(runner.score(oracle.ids)), oracle.logits, oracle.name)


def test_prefill_and_steps_follow_the_greedy_continuation(runner: Runner, oracle: Oracle) -> None:
    runner.reset()
    row = np.array(runner.prefill(oracle.ids))
    rows, ids = [], []
    for _ in oracle.greedy_ids:
        rows.append(row)
        ids.append(int(row.argmax()))
        row = np.array(runner.step(ids[-1]))
    assert ids == oracle.greedy_ids
    check_close(np.stack(rows), oracle.greedy_logits, oracle.name)
    assert runner.position == len(oracle.ids) + len(ids)


@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_pieces_of_any_size_equal_one_pass_to_the_bit(
    runner: Runner, oracle: Oracle, size: int
) -> None:
    ids = oracle.ids
    whole = np.array(runner.score(ids))
    runner.reset()
    starts = range(0, len(ids), size)
    rows = np.stack([np.array(runner.prefill(ids[at : at + size])) for at in starts])
    ends = [min(at + size, len(ids)) - 1 for at in starts]
    assert np.array_equal(rows, whole[ends])


def test_reset_forgets_everything(runner: Runner, oracle: Oracle) -> None:
    first = np.array(runner.score(oracle.ids))
    runner.reset()
    runner.prefill(oracle.ids[::-1])
    runner.reset()
    assert runner.position == 0
    assert np.array_equal(np.array(runner.score(oracle.ids)), first)
    runner.reset()
    assert np.array_equal(np.array(runner.prefill(oracle.ids)), first[-1])


def test_every_family_has_an_oracle() -> None:
    seen = {family_for_model_type(Oracle(ORACLES / n).config["model_type"]).name for n in NAMES}
    assert {family.name for family in families()} <= seen
