"""A runner opened in one thread is used from others (C24), one generation at a time."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conversation import KINDS, open_cpu

from turbospark import Runner
from turbospark.errors import RunnerBusyError, RunnerClosedError
from turbospark.generation import Token

PROMPT = [7, 3, 20, 11, 5]
GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
PATIENCE = 60  # seconds; only a deadlock takes that long


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, installed: Callable[[str], Path]) -> Iterator[Runner]:
    with open_cpu(installed(request.param)) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(runner: Runner) -> list[int]:
    """What this thread gets."""
    return runner.generate(PROMPT, **GREEDY).token_ids


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread of its own; its error is raised here."""
    box: dict[str, Any] = {}

    def target() -> None:
        try:
            box["result"] = work()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the thread is stuck"
    if "error" in box:
        raise box["error"]
    return box["result"]


def tokens(stream: Iterator[Any], count: int) -> list[int]:
    """The next `count` token ids of a stream."""
    ids: list[int] = []
    while len(ids) < count:
        event = next(stream)
        ids += [event.id] if isinstance(event, Token) else []
    return ids


def test_a_worker_thread_gets_the_same_answer(runner: Runner, expected: list[int]) -> None:
    for _ in range(2):
        assert elsewhere(lambda: runner.generate(PROMPT, **GREEDY).token_ids) == expected
    assert runner.generate(PROMPT, **GREEDY).token_ids == expected


def test_asyncio_to_thread_gets_the_same_answer(runner: Runner, expected: list[int]) -> None:
    async def both() -> list[Any]:
        calls = [asyncio.to_thread(runner.generate, PROMPT, **GREEDY) for _ in range(2)]
        return await asyncio.gather(*calls)

    assert [result.token_ids for result in asyncio.run(both())] == [expected] * 2


def test_an_open_runner_may_come_from_a_thread_that_ended(installed: Callable[[str], Path]) -> None:
    for name in KINDS:
        path = installed(name)
        with elsewhere(lambda path=path: open_cpu(path)) as opened:
            assert len(opened.generate(PROMPT, **GREEDY).token_ids) == 6


def test_threads_at_once_are_served_in_turn(runner: Runner, expected: list[int]) -> None:
    answers: list[list[int]] = []

    def work() -> None:
        answers.extend(runner.generate(PROMPT, **GREEDY).token_ids for _ in range(2))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [expected] * 6


def test_logits_made_in_one_thread_are_read_in_another(runner: Runner) -> None:
    runner.reset()
    first, then = np.array(runner.prefill(PROMPT)), np.array(runner.step(9))
    elsewhere(runner.reset)
    assert runner.position == 0
    row = elsewhere(lambda: runner.prefill(PROMPT))
    assert row.shape == (runner.vocab_size,) and row.dtype == mx.float32
    assert np.array_equal(np.array(row), first)
    assert np.array_equal(np.array(elsewhere(lambda: runner.step(9))), then)
    elsewhere(runner.reset)
    assert np.array_equal(np.array(runner.prefill(PROMPT)), first)
    whole = elsewhere(lambda: runner.score(PROMPT))
    assert np.array_equal(np.array(whole[-1:])[0], first)


def test_a_stream_begun_in_one_thread_goes_on_in_another(
    runner: Runner, expected: list[int]
) -> None:
    stream = runner.stream(PROMPT, **GREEDY)
    ids = tokens(stream, 2)
    ids += elsewhere(lambda: tokens(stream, 2))
    ids += tokens(stream, 2)
    assert ids == expected
    assert [type(event).__name__ for event in stream][-1] == "Finished"
    begun_elsewhere = elsewhere(lambda: runner.stream(PROMPT, **GREEDY))
    elsewhere(lambda: next(begun_elsewhere))
    assert tokens(begun_elsewhere, 6) == expected
    begun_elsewhere.close()


def test_a_second_stream_of_the_same_thread_is_refused(runner: Runner) -> None:
    stream = runner.stream(PROMPT, **GREEDY)
    next(stream)
    for call in (
        lambda: runner.generate(PROMPT, **GREEDY),
        lambda: runner.prefill(PROMPT),
        lambda: runner.step(1),
        lambda: runner.score(PROMPT),
        lambda: runner.save_session("nowhere"),
        runner.reset,
        runner.close,
    ):
        with pytest.raises(RunnerBusyError, match="exhaust or close the stream first"):
            call()
    stream.close()
    runner.generate(PROMPT, **GREEDY)


def test_the_thread_that_continues_a_stream_is_the_one_refused(runner: Runner) -> None:
    stream = runner.stream(PROMPT, **GREEDY)
    next(stream)

    def go_on_and_ask() -> None:
        next(stream)
        runner.generate(PROMPT, **GREEDY)

    with pytest.raises(RunnerBusyError):
        elsewhere(go_on_and_ask)
    stream.close()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_after_closing_a_stream_the_next_answer_is_a_fresh_one(
    runner: Runner, expected: list[int], count: int
) -> None:
    stream = runner.stream(PROMPT, **GREEDY)
    next(stream)
    tokens(stream, count)
    stream.close()
    assert runner.generate(PROMPT, **GREEDY).token_ids == expected


def test_an_interrupt_between_tokens_leaves_the_next_answer_fresh(
    runner: Runner, expected: list[int]
) -> None:
    asked: list[int] = []

    def interrupt() -> bool:
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        list(runner.stream(PROMPT, cancel=interrupt, **GREEDY))
    assert runner.generate(PROMPT, **GREEDY).token_ids == expected


def test_an_abandoned_stream_lets_others_in(runner: Runner, expected: list[int]) -> None:
    stream = runner.stream(PROMPT, **GREEDY)
    next(stream)
    waiting = threading.Thread(
        target=lambda: answers.append(runner.generate(PROMPT, **GREEDY).token_ids), daemon=True
    )
    answers: list[list[int]] = []
    waiting.start()
    waiting.join(0.05)
    assert answers == []
    del stream
    gc.collect()
    waiting.join(PATIENCE)
    assert answers == [expected]


def test_a_stream_never_begun_holds_nothing(runner: Runner, expected: list[int]) -> None:
    unused = runner.stream(PROMPT, **GREEDY)
    assert runner.generate(PROMPT, **GREEDY).token_ids == expected
    assert tokens(unused, 6) == expected


def test_a_closed_runner_refuses_every_thread(installed: Callable[[str], Path]) -> None:
    opened = open_cpu(installed("llama-base"))
    unused = opened.stream(PROMPT, **GREEDY)
    elsewhere(opened.close)
    with pytest.raises(RunnerClosedError):
        next(unused)
    for call in (lambda: opened.generate(PROMPT), lambda: opened.position, opened.close):
        with pytest.raises(RunnerClosedError):
            call()
        with pytest.raises(RunnerClosedError):
            elsewhere(call)


def test_leaving_the_block_of_a_runner_with_an_open_stream_does_not_hide_an_interrupt(
    installed: Callable[[str], Path],
) -> None:
    with pytest.raises(KeyboardInterrupt), open_cpu(installed("llama-base")) as opened:
        stream = opened.stream(PROMPT, **GREEDY)
        next(stream)
        raise KeyboardInterrupt
    stream.close()
    with (
        pytest.raises(RunnerBusyError, match="close the stream"),
        open_cpu(installed("llama-base")) as opened,
    ):
        stream = opened.stream(PROMPT, **GREEDY)
        next(stream)
    stream.close()
    opened.close()
