"""A turn that reuses a cached prefix equals the same turn from an empty cache, to the bit.

The cold side is a runner of its own that never reuses. Reuse is checked for what it must keep, so
that a runner which always starts over could not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conversation import (
    KINDS,
    MODELS,
    Answer,
    answer,
    is_recurrent,
    open_cpu,
    same,
    tokens_of,
    vocabulary,
    window,
)
from oracle_folders import ORACLES, Oracle

from turbospark import Runner
from turbospark.engine import RUNG
from turbospark.generation import Finished, Prefill, Token

CHUNK = 32
NEW = 4


def turns(prompt: list[int], first: Answer, vocab: int) -> dict[str, tuple[list[int], int]]:
    """Second turns after `prompt` was answered: the prompt, and the tokens it shares with what
    the cache holds, the last one aside.
    """
    held = [*prompt, *first.tokens[:-1]]  # the last token of a run is never fed
    other = (held[-6] + 1) % vocab
    return {
        "extend": ([*held, first.tokens[-1], 5, 6, 7], len(held)),
        "extend by one": ([*held, first.tokens[-1]], len(held)),
        "diverge": ([*held[:-6], other, 8, 9], len(held) - 6),
        "identical": (prompt, len(prompt) - 1),
        "strict prefix": (prompt[:-10], len(prompt) - 11),
    }


def other_than(token: int) -> int:
    return 0 if token else 1


def held_by_a_recurrent(shared: int, count: int) -> int:
    """Tokens that chunk ends and the rung of a prompt of `count` let a recurrent model keep."""
    points = [*range(CHUNK, count, CHUNK), count - RUNG, count]
    return max((p for p in points if p <= shared), default=0)


@pytest.mark.parametrize("name", MODELS)
def test_reused_turns_equal_cold_ones(name: str, installed: Callable[[str], Path]) -> None:
    oracle = Oracle(ORACLES / name)
    path, warm = installed(name), {"prefix_reuse": True, "prefill_chunk": CHUNK}
    with (
        open_cpu(path) as cold,
        open_cpu(path, **warm) as single,
        open_cpu(path, session_slots=2, **warm) as pooled,
    ):
        first = answer(cold, oracle.ids, NEW)
        for kind, (prompt, shared) in turns(oracle.ids, first, vocabulary(oracle)).items():
            if is_recurrent(cold) and shared < len(oracle.ids) + NEW - 1:
                shared = held_by_a_recurrent(shared, len(oracle.ids))
            expected = answer(cold, prompt, NEW)
            for runner in (single, pooled):
                runner.reset()
                begun = answer(runner, oracle.ids, NEW)
                assert begun.kept == 0 and same(begun, first)
                if runner is pooled:  # the conversation is parked, and comes back by itself
                    assert answer(runner, [other_than(oracle.ids[0]), 1, 2], 1).kept == 0
                again = answer(runner, prompt, NEW)
                assert again.kept == shared, kind
                assert same(again, expected), kind


@pytest.mark.parametrize("name", KINDS)
def test_pooled_conversations_equal_cold_ones_and_keep_their_own(
    name: str, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    a, b = oracle.ids, tokens_of(oracle, 40, seed=1)
    with (
        open_cpu(installed(name)) as cold,
        open_cpu(installed(name), prefix_reuse=True, session_slots=2) as warm,
    ):
        for prompt in (a, b):
            first = answer(warm, prompt, NEW)
            assert first.kept == 0 and same(first, answer(cold, prompt, NEW))
            prompt += first.tokens
        for prompt in (a, b, a):
            held = len(prompt) - 1
            prompt += [3, 4, 5]
            following = answer(warm, prompt, NEW)
            assert following.kept == held
            assert same(following, answer(cold, prompt, NEW))
            prompt += following.tokens


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma4-e2b", "gpt_oss-mxfp4"])
def test_a_ring_that_turned_is_reused_within_its_slack_only(
    name: str, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    with open_cpu(installed(name)) as plain:
        narrow = window(plain)
    assert narrow is not None
    ring = {"swa_ring_capacity": narrow + 8, "prefill_chunk": CHUNK}
    with (
        open_cpu(installed(name), **ring) as cold,
        open_cpu(installed(name), prefix_reuse=True, **ring) as warm,
    ):
        turn = tokens_of(oracle, 60)
        for back, kept in ((8, 52), (9, 0), (30, 0)):
            warm.reset()
            answer(warm, turn, 1)
            prompt = [*turn[: 60 - back], (turn[60 - back] + 1) % vocabulary(oracle), 1]
            again = answer(warm, prompt, NEW)
            assert again.kept == kept
            assert same(again, answer(cold, prompt, NEW))


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma4-e2b"])
def test_going_back_twice_does_not_find_what_the_ring_lost_on_the_first_way(
    name: str, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    with open_cpu(installed(name)) as plain:
        narrow = window(plain)
    assert narrow is not None
    ring = {"swa_ring_capacity": narrow + 30}
    with (
        open_cpu(installed(name), **ring) as cold,
        open_cpu(installed(name), prefix_reuse=True, **ring) as warm,
    ):
        turn = tokens_of(oracle, 80)
        other = (turn[50] + 1) % vocabulary(oracle)
        answer(warm, turn, 1)
        assert answer(warm, [*turn[:50], other], 1).kept == 50
        # 51 - 22 is within the slack of 30, but row 79 was written where row 40 lay.
        prompt = [*turn[:22], (turn[22] + 1) % vocabulary(oracle), 1]
        again = answer(warm, prompt, NEW)
        assert again.kept == 0
        assert same(again, answer(cold, prompt, NEW))


@pytest.mark.parametrize("name", KINDS)
def test_what_a_cancelled_prompt_left_is_reused(
    name: str, installed: Callable[[str], Path]
) -> None:
    oracle = Oracle(ORACLES / name)
    prompt = tokens_of(oracle, 90)
    with (
        open_cpu(installed(name)) as cold,
        open_cpu(installed(name), prefix_reuse=True, prefill_chunk=CHUNK) as warm,
    ):
        seen: list[int] = []
        stream = warm.stream(prompt, max_new_tokens=NEW, cancel=lambda: 64 in seen)
        for event in stream:
            if isinstance(event, Prefill):
                seen.append(event.done)
        assert isinstance(event, Finished) and event.result.stop_reason == "cancelled"
        assert seen == [32, 64] and event.result.kv_position == 64
        assert event.result.kv_backed_token_ids == prompt[:64]
        again = answer(warm, prompt, NEW)
        assert again.kept == 64
        assert same(again, answer(cold, prompt, NEW))


@pytest.mark.parametrize("name", KINDS)
def test_what_a_closed_stream_left_is_reused(name: str, installed: Callable[[str], Path]) -> None:
    oracle = Oracle(ORACLES / name)
    prompt = tokens_of(oracle, 40)
    with open_cpu(installed(name)) as cold, open_cpu(installed(name), prefix_reuse=True) as warm:
        stream = warm.stream(prompt, max_new_tokens=8, temperature=0, ignore_eos=True)
        for event in stream:
            if isinstance(event, Token):
                prompt.append(event.id)
            if len(prompt) == 43:
                stream.close()
        again = answer(warm, [*prompt, 7], NEW)
        assert again.kept == len(prompt) - 1
        assert same(again, answer(cold, [*prompt, 7], NEW))


def test_progress_is_told_at_chunk_ends_and_counts_what_was_reused(
    installed: Callable[[str], Path],
) -> None:
    prompt = tokens_of(Oracle(ORACLES / "llama-base"), 90)

    def progress(runner: Runner, ids: list[int]) -> list[tuple[int, int]]:
        events = runner.stream(ids, max_new_tokens=1)
        return [(e.done, e.total) for e in events if isinstance(e, Prefill)]

    with open_cpu(installed("llama-base"), prefix_reuse=True, prefill_chunk=32) as runner:
        assert progress(runner, prompt) == [(32, 90), (64, 90), (90, 90)]
        assert progress(runner, [*prompt[:50], *prompt]) == [(82, 140), (114, 140), (140, 140)]
        runner.toggles.prefill_steel = False  # smaller passes, the same chunks
        assert progress(runner, prompt[::-1]) == [(32, 90), (64, 90), (90, 90)]
    with open_cpu(installed("llama-base"), prefill_chunk="off") as runner:
        assert progress(runner, prompt) == [(90, 90)]


def test_reuse_is_off_by_default_and_can_be_switched(installed: Callable[[str], Path]) -> None:
    with open_cpu(installed("llama-base")) as runner:
        assert runner.prefix_reuse is False
        answer(runner, [1, 2, 3, 4], 2)
        assert answer(runner, [1, 2, 3, 4], 2).kept == 0
        runner.prefix_reuse = True
        assert answer(runner, [1, 2, 3, 4], 2).kept == 3
        runner.prefix_reuse = False
        assert answer(runner, [1, 2, 3, 4], 2).kept == 0


def test_raw_passes_are_recorded_and_reused(installed: Callable[[str], Path]) -> None:
    with open_cpu(installed("llama-base"), prefix_reuse=True) as runner:
        runner.prefill([1, 2, 3])
        runner.step(4)
        assert answer(runner, [1, 2, 3, 4, 5], 1).kept == 4
        runner.score([6, 7, 8])
        assert answer(runner, [6, 7, 8, 9], 1).kept == 3


def test_results_report_what_was_reused_and_never_a_stale_count(
    installed: Callable[[str], Path],
) -> None:
    greedy = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    with open_cpu(installed("llama-base"), prefix_reuse=True) as runner:
        prompt = [1, 2, 3, 4]
        first = runner.generate(prompt, **greedy)
        assert first.reused_prefix_tokens == 0 and first.kv_position == 6
        assert first.kv_backed_token_ids == [*prompt, *first.token_ids[:2]]
        prompt += first.token_ids
        second = runner.generate(prompt, **greedy)
        assert second.reused_prefix_tokens == 6 and not second.session_slot_evicted
        *_, last = runner.stream([*prompt, 5], cancel=lambda: True, **greedy)
        assert isinstance(last, Finished)
        assert last.result.reused_prefix_tokens == 0
        stream = runner.stream([*prompt, 5], **greedy)
        next(stream)
        stream.close()
        *_, last = runner.stream([*prompt, 5], cancel=lambda: True, **greedy)
        assert isinstance(last, Finished)
        assert last.result.reused_prefix_tokens == 0


def failing_pass(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over [9] that fails in the model's head."""
    engine = runner._engine
    assert engine is not None

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "head", fail)
        with pytest.raises(KeyboardInterrupt):
            runner.step(9)


@pytest.mark.parametrize("name", KINDS)
def test_a_session_whose_pass_failed_is_not_continued_and_the_next_answer_is_a_fresh_one(
    name: str, installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(ORACLES / name)
    prompt = tokens_of(oracle, 20)
    with open_cpu(installed(name)) as cold, open_cpu(installed(name), prefix_reuse=True) as warm:
        answer(warm, prompt, 2)
        failing_pass(warm, monkeypatch)
        with pytest.raises(ValueError, match=r"the last pass on this session failed .* reset\(\)"):
            warm.step(1)
        again = answer(warm, prompt, NEW)
        assert again.kept == 0
        assert same(again, answer(cold, prompt, NEW))
        assert answer(warm, [*prompt, 1], 1).kept == len(prompt)


def test_a_failed_session_is_given_up_before_a_sound_one(
    installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"prefix_reuse": True, "session_slots": 2}
    with open_cpu(installed("llama-base"), **options) as runner:
        answer(runner, [1, 2, 3], 1)
        answer(runner, [4, 5, 6], 1)
        failing_pass(runner, monkeypatch)
        result = runner.generate([7, 8, 9], max_new_tokens=1)
        assert not result.session_slot_evicted
        assert answer(runner, [1, 2, 3, 4], 1).kept == 3
