"""Several conversations in one runner: who is kept, who is given up, and what memory they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from conversation import KINDS, answer, is_recurrent, open_cpu, same, tokens_of
from oracle_folders import ORACLES, Oracle

from turbospark.cache.pool import MAX_SNAPSHOTS

GREEDY = {"temperature": 0, "ignore_eos": True}


def conversations(name: str, count: int) -> list[list[int]]:
    """Prompts whose first tokens differ."""
    oracle = Oracle(ORACLES / name)
    return [[i, *tokens_of(oracle, 20, seed=i)] for i in range(count)]


@pytest.mark.parametrize("name", KINDS)
def test_the_least_recently_used_conversation_is_given_up_and_the_result_says_so(
    name: str, installed: Callable[[str], Path]
) -> None:
    a, b, c, d = conversations(name, 4)
    with open_cpu(installed(name), prefix_reuse=True, session_slots=3) as runner:

        def turn(prompt: list[int]) -> tuple[int, bool]:
            result = runner.generate(prompt, max_new_tokens=2, **GREEDY)
            prompt += [*result.token_ids, 9]
            return result.reused_prefix_tokens, result.session_slot_evicted

        assert runner.session_slots == 3
        assert [turn(p) for p in (a, b, c)] == [(0, False)] * 3
        assert turn(a) == (22, False)
        assert turn(d) == (0, True)  # b was parked longest ago
        assert turn(c) == (22, False)
        assert turn(a) == (25, False)
        assert turn(b) == (0, True)  # d


def test_one_slot_forgets_without_calling_it_an_eviction(
    installed: Callable[[str], Path],
) -> None:
    a, b = conversations("llama-base", 2)
    with open_cpu(installed("llama-base"), prefix_reuse=True) as runner:
        for prompt in (a, b, a):
            result = runner.generate(prompt, max_new_tokens=2, **GREEDY)
            assert (result.reused_prefix_tokens, result.session_slot_evicted) == (0, False)


def test_reset_forgets_every_conversation(installed: Callable[[str], Path]) -> None:
    for name in KINDS:
        prompts = conversations(name, 2)
        options = {"prefix_reuse": True, "session_slots": 2}
        with open_cpu(installed(name), **options) as runner, open_cpu(installed(name)) as cold:
            for prompt in prompts:
                answer(runner, prompt, 2)
            memory = runner.memory.kv
            runner.reset()
            assert runner.position == 0
            for prompt in prompts:
                again = answer(runner, prompt, 2)
                assert again.kept == 0 and same(again, answer(cold, prompt, 2))
            assert runner.memory.kv == memory


def test_slots_that_no_prompt_finds_again_are_warned_about(
    installed: Callable[[str], Path],
) -> None:
    with (
        pytest.warns(UserWarning, match="session_slots=3 without prefix_reuse allocates"),
        open_cpu(installed("llama-base"), session_slots=3),
    ):
        pass


@pytest.mark.parametrize("name", KINDS)
def test_sessions_are_allocated_at_open(name: str, installed: Callable[[str], Path]) -> None:
    with open_cpu(installed(name), max_context=2000) as runner:
        one, buffers = runner.memory.kv, runner.buffer_allocations
    before = mx.get_active_memory()
    with open_cpu(installed(name), prefix_reuse=True, max_context=2000, session_slots=4) as runner:
        assert runner.memory.kv == 4 * one
        assert runner.memory.active - before >= 4 * one
        states = runner._engine.states.buffers if runner._engine else 0
        assert runner.buffer_allocations == buffers + 3 * states


@pytest.mark.parametrize("name", KINDS)
def test_decoding_allocates_nothing(name: str, installed: Callable[[str], Path]) -> None:
    with open_cpu(installed(name), max_context=300) as runner:
        buffers, memory = runner.buffer_allocations, runner.memory
        runner.prefill(tokens_of(Oracle(ORACLES / name), 20))
        active = []
        for i in range(200):
            runner.step(i % 50)
            mx.synchronize()
            active.append(mx.get_active_memory())
        # Small arrays may sit in larger recycled buffers. A cache that grew by 100 rows, or one
        # that was copied and kept, would be 20 KB and more.
        assert max(active[150:]) - max(active[50:100]) <= 1024
        assert max(active[50:]) - min(active[50:]) <= 1 << 13
        assert runner.buffer_allocations == buffers
        assert (runner.memory.kv, runner.memory.weights) == (memory.kv, memory.weights)


@pytest.mark.parametrize("name", ["llama-base", "gemma4-e2b", "deepseek_v2-lite"])
def test_a_write_to_a_cache_does_not_copy_it(name: str, installed: Callable[[str], Path]) -> None:
    prompt = tokens_of(Oracle(ORACLES / name), 100)
    options = {"max_context": 60_000, "prefix_reuse": True, "load_guard": "off"}
    with pytest.warns(UserWarning), open_cpu(installed(name), **options) as runner:
        largest = max(a.nbytes for a in runner._engine.states.arrays()) if runner._engine else 0
        for _ in range(2):
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            runner.generate(prompt, max_new_tokens=8, **GREEDY)
            assert mx.get_peak_memory() - before < largest


def test_snapshots_of_a_recurrent_model_are_bounded_and_counted(
    installed: Callable[[str], Path],
) -> None:
    prompt = tokens_of(Oracle(ORACLES / "qwen3_5-base"), 150)
    options = {"prefix_reuse": True, "prefill_chunk": 32, "max_context": 200}
    with open_cpu(installed("qwen3_5-base"), **options) as runner:
        empty = runner.memory.kv
        answer(runner, prompt, 2)
        assert runner._engine is not None
        kept = runner._engine.pool.live.snapshots
        # Chunks end at 32, 64, 96, 128 and 150; the rung is at 134.
        assert [s.position for s in kept] == [64, 96, 134, 150] and len(kept) == MAX_SNAPSHOTS
        assert runner.memory.kv == empty + 4 * kept[0].nbytes
        assert "of up to 200 tokens, 4 states kept to go back to" in str(runner.memory)
        runner.reset()
        assert runner.memory.kv == empty


def test_without_reuse_nothing_is_kept(installed: Callable[[str], Path]) -> None:
    with open_cpu(installed("qwen3_5-base"), prefill_chunk=32) as runner:
        empty = runner.memory.kv
        assert is_recurrent(runner)
        runner.generate(tokens_of(Oracle(ORACLES / "qwen3_5-base"), 100), max_new_tokens=2)
        assert runner.memory.kv == empty
