"""The multi-token-prediction head against a numpy head, and as a drafter of real acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heads
import numpy as np
import pytest
from numpy_heads import NumpyHead, head_rows, hidden_rows
from toys import Toy

from turbospark import DraftPolicies, OpenOptions, Runner
from turbospark.drafting import Drafting
from turbospark.errors import SessionFileError, SpeculationUnavailableError

CPU: dict[str, Any] = {"max_context": 160, "device": "cpu", "dtype": "float32"}
GREEDY: dict[str, Any] = {"max_new_tokens": 25, "temperature": 0, "ignore_eos": True}
PROMPT = [int(i) for i in np.random.default_rng(3).integers(0, 90, 37)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.install(tmp_path_factory.mktemp("honest") / "model", honest=True)


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.install(tmp_path_factory.mktemp("random") / "model", honest=False)


def opened(path: Path, width: int = 4, **options: Any) -> Runner:
    speculation = DraftPolicies(mtp=width)
    return Runner.open(path, OpenOptions(**CPU, speculation=speculation, **options))


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("chunk", [None, 5])
def test_the_head_says_what_a_numpy_head_says(
    random_head: Path, batched: bool, chunk: int | None
) -> None:
    reference = NumpyHead(random_head)
    with opened(random_head, 3) as runner:
        runner.toggles.mtp_batched_prime = batched
        assert runner.toggles.has_effect("mtp_batched_prime")
        runner.prefill(PROMPT, chunk=chunk)
        rows = head_rows(runner, [*PROMPT, 9], 3)
        runner.reset()
        normed = hidden_rows(runner, PROMPT)
    tokens, hidden = [*PROMPT[1:], 9], normed
    for depth, row in enumerate(rows):
        logits, last = reference(tokens, hidden)
        np.testing.assert_allclose(row, logits, atol=1e-4)
        tokens, hidden = [*tokens, 7 + depth], np.concatenate([hidden, last[None]])


# --- drafting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 9))
def test_a_head_that_knows_its_model_is_accepted_and_the_answer_is_the_same(
    honest: Path, width: int
) -> None:
    with opened(honest, width) as runner:
        drafted = runner.generate(PROMPT, **GREEDY)
        plain = runner.generate(PROMPT, **GREEDY, draft_tokens=0)
        assert drafted.token_ids == plain.token_ids and len(set(plain.token_ids)) > 2
        assert drafted.kv_backed_token_ids == plain.kv_backed_token_ids
        stats = drafted.speculation
        assert stats is not None and stats.drafter == "mtp"
        assert stats.per_position_acceptance == (1,) * width
        assert stats.rounds == -(-24 // (width + 1))
        sampled = runner.generate(PROMPT, **{**GREEDY, "temperature": 1.0, "seed": 2})
        assert sampled.speculation is not None
        assert sampled.speculation.per_position_acceptance[0] == 1  # p = q: always below 1


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_head_that_knows_nothing_changes_nothing(random_head: Path, width: int) -> None:
    with opened(random_head, width) as runner:
        for _ in range(2):
            drafted = runner.generate(PROMPT, **GREEDY)
            plain = runner.generate(PROMPT, **GREEDY, draft_tokens=0)
            assert drafted.token_ids == plain.token_ids
            assert drafted.speculation is not None and drafted.speculation.rollbacks > 0
        seeded = {**GREEDY, "temperature": 1.0, "seed": 8}
        assert runner._drafting is not None
        runner._drafting.acceptance = "match"
        drafted = runner.generate(PROMPT, **seeded)
        assert drafted.token_ids == runner.generate(PROMPT, **seeded, draft_tokens=0).token_ids


def rows_of(runner: Runner) -> tuple[np.ndarray, ...]:
    """The head's keys and values before its cursor, and its newest hidden row."""
    engine = runner._engine
    assert engine is not None and engine.watcher is not None
    *_, kv, newest = engine.states.layers
    cursor = engine.position - 1
    return (
        *(np.array(a[:, :, :cursor]) for a in (kv.keys, kv.values)),
        np.array(newest.saved[0]),
    )


def test_sessions_snapshots_and_files_hold_the_head_too(random_head: Path, tmp_path: Path) -> None:
    options = {"prefix_reuse": True, "session_slots": 2}
    other = PROMPT[::-1]
    with opened(random_head, 2, **options) as runner:
        first = runner.generate(PROMPT, **GREEDY)
        runner.generate(other, **GREEDY)
        follow = [*PROMPT, *first.token_ids, 5, 6]
        back = runner.generate(follow, **{**GREEDY, "max_new_tokens": 1})
        assert back.reused_prefix_tokens == len(PROMPT) + 24
        # A retry goes back to a snapshot, the head with it.
        retry = runner.generate([*follow[:-1], 8], **{**GREEDY, "max_new_tokens": 1})
        assert retry.reused_prefix_tokens > 0
        held = rows_of(runner)
        runner.save_session(tmp_path / "talk")
        runner.reset()
        runner.load_session(tmp_path / "talk")
        for a, b in zip(held, rows_of(runner), strict=True):
            np.testing.assert_array_equal(a, b)
        # Rows of accepted proposals come from the head's own chain; all others are as if fed now.
        runner.reset()
        runner.prefill([*follow[:-1], 8])
        np.testing.assert_array_equal(held[2], rows_of(runner)[2])
        np.testing.assert_array_equal(
            held[0][:, :, : len(PROMPT) - 1], rows_of(runner)[0][:, :, : len(PROMPT) - 1]
        )
    with (
        Runner.open(random_head, OpenOptions(**CPU)) as plain,
        pytest.raises(SessionFileError, match=r"made with drafter mtp, .* has drafter none"),
    ):
        plain.load_session(tmp_path / "talk")


def test_a_reset_resets_the_head(random_head: Path) -> None:
    with opened(random_head) as runner:
        runner.prefill(PROMPT)
        runner.reset()
        assert not rows_of(runner)[2].any()
        again = runner.generate(PROMPT, **GREEDY)
        assert again.token_ids == runner.generate(PROMPT, **GREEDY, draft_tokens=0).token_ids


# --- refusals -------------------------------------------------------------------------------------


def test_drafting_away_from_the_heads_cursor_is_an_error(random_head: Path) -> None:
    with opened(random_head) as runner:
        runner.prefill(PROMPT)
        engine = runner._engine
        assert engine is not None and engine.watcher is not None
        for history in (PROMPT, [*PROMPT, 1, 2]):
            with pytest.raises(SpeculationUnavailableError, match="MTP head stands at position 36"):
                engine.watcher.propose(history, 1, None)
        runner._drafting = Drafting(Toy([1] * 40), 3, "match")
        with pytest.raises(SpeculationUnavailableError, match="4 rows at position 37 is to be ver"):
            runner.generate(PROMPT, **GREEDY)


def test_half_a_head_is_refused_by_the_name_of_what_is_missing(installed: Any) -> None:
    with pytest.raises(SpeculationUnavailableError, match="has only 5 of the 15 tensors of its"):
        Runner.open(installed(heads.BASE), speculation=DraftPolicies(mtp=2))
    with Runner.open(installed(heads.BASE), speculation=DraftPolicies(mtp="auto")) as runner:
        assert runner.resolved.drafter is None
        assert "has only 5 of the 15" in str(runner.resolved.draft_note)


def test_auto_takes_the_head_that_is_there_and_off_leaves_no_trace(honest: Path) -> None:
    with Runner.open(honest, OpenOptions(**CPU, speculation=DraftPolicies(mtp="auto"))) as runner:
        assert (runner.resolved.drafter, runner.resolved.draft_width) == ("mtp", 2)
        kv, weights = runner.memory.kv, runner.memory.weights
    with Runner.open(honest, OpenOptions(**CPU)) as runner:
        engine = runner._engine
        assert engine is not None and engine.watcher is None
        assert runner.memory.kv < kv and runner.memory.weights < weights
        assert not runner.toggles.has_effect("mtp_batched_prime")
