"""Reading the next layer's experts before they are asked for: never a result, only time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import mlx.core as mx
import numpy as np
import pytest
from layouts import Store, request, uniform, write_layout

from turbospark.errors import ReadError
from turbospark.experts import reader
from turbospark.experts.policy import EMPTY, SlotCache

K = 4


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory):
    return write_layout(tmp_path_factory.mktemp("layout"), uniform(3), 32)


class Guesser:
    """A router that answers what the test tells it to."""

    def __init__(self, store: Store) -> None:
        self.guess: list[int] = []
        for layer in range(3):
            store.store.watch(layer, lambda x: mx.array([[self.guess]], dtype=mx.uint32))


def ahead(layout, slots: int = 8, **options) -> tuple[Store, Guesser]:
    store = Store(layout, slots=slots, lookahead=True, **options)
    return store, Guesser(store)


def ask(store: Store, layer: int, ids: list[int], seed: int = 0) -> np.ndarray:
    x, _, weights = request(np.random.default_rng(seed), 1, range(32), len(ids))
    return store.ask(layer, x, [ids], weights)


def test_a_right_guess_is_a_hit_that_reads_nothing_more(layout) -> None:
    store, guesser = ahead(layout)
    guesser.guess = [9, 4, 7, 1]
    ask(store, 0, [0, 1, 2, 3])
    before = store.counters
    guesser.guess = [0, 1, 2, 3]
    found = ask(store, 1, [4, 9, 1, 7])
    spent = store.counters - before
    assert (spent.expert_requests, spent.expert_hits, spent.expert_io_bytes_requested) == (4, 4, 0)
    seen = store.counters
    assert (seen.prefetch_requests, seen.prefetch_hits) == (8, 4)  # layers 1 and 2
    assert seen.prefetch_bytes == 8 * layout.layers[0].stride
    assert np.array_equal(found, ask(Store(layout), 1, [4, 9, 1, 7]))


def test_a_wrong_guess_costs_bytes_and_nothing_else(layout) -> None:
    store, guesser = ahead(layout)
    guesser.guess = [9, 10, 11, 12]
    ask(store, 0, [0, 1, 2, 3])
    found = ask(store, 1, [4, 5, 6, 7])
    assert np.array_equal(found, ask(Store(layout), 1, [4, 5, 6, 7]))
    seen = store.counters
    assert seen.prefetch_hits == 0
    assert seen.expert_io_bytes_requested == 8 * layout.layers[0].stride
    cache = store.store.layers[1].cache
    assert {4, 5, 6, 7} <= set(cache.held) and not cache.speculative


@pytest.mark.parametrize(("slots", "room"), [(4, 0), (5, 1), (6, 2), (8, 4), (32, 4)])
def test_a_guess_leaves_as_many_slots_as_a_request_needs(layout, slots: int, room: int) -> None:
    store, guesser = ahead(layout, slots)
    guesser.guess = [9, 10, 11, 12]
    ask(store, 0, [0, 1, 2, 3])
    assert store.counters.prefetch_requests == room
    held = store.store.nbytes
    ask(store, 1, [4, 5, 6, 7])
    assert store.store.nbytes == held == slots * layout.bytes_per_slot


def test_a_guess_that_is_held_already_is_kept_and_not_read_again(layout) -> None:
    store, guesser = ahead(layout, 8)
    ask(store, 1, [4, 5, 6, 7])
    store.store._collect(store.store.layers[2], ())
    before = store.counters
    guesser.guess = [4, 5, 10, 11]
    ask(store, 0, [0, 1, 2, 3])
    assert (store.counters - before).prefetch_requests == 2
    ask(store, 1, [4, 5, 10, 11])
    assert (store.counters - before).expert_hits == 4


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_an_unused_guess_is_the_first_to_go(policy: str) -> None:
    cache = SlotCache(4, 16, policy)
    for experts in ([0, 1, 2], [0, 1, 2]):
        cache.commit(cache.plan(experts))
    plan = cache.reserve([9], keep=1)
    cache.publish(plan, (0,))
    assert cache.plan([5]).slots == plan.slots


def test_a_reservation_spares_slots_that_hold_what_is_guessed() -> None:
    cache = SlotCache(4, 16)
    cache.commit(cache.plan([0, 1, 2, 3]))
    plan = cache.reserve([0, 1, 7, 8], keep=2)
    assert plan.experts == (7, 8) and {cache.slot_of(0), cache.slot_of(1)} == {0, 1}
    assert cache.held.count(EMPTY) == 2


@pytest.mark.parametrize("slots", [4, 5, 7, 8, 16, 32])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_results_do_not_depend_on_guesses(layout, slots: int, right: float) -> None:
    rng = np.random.default_rng(7)
    store, guesser = ahead(layout, slots)
    plain = Store(layout, "resident")
    coming = [rng.permutation(32)[:K].tolist() for _ in range(61)]
    for i, ids in enumerate(coming[:-1]):
        wrong = rng.permutation(32)[:K].tolist()
        guesser.guess = coming[i + 1] if rng.random() < right else wrong
        assert np.array_equal(ask(store, i % 3, ids, i), ask(plain, i % 3, ids, i))
        if i % 3 == 2:  # a chunk of a prompt in between
            chunk = request(rng, 9, range(32), K)
            assert np.array_equal(store.ask(1, *chunk), plain.ask(1, *chunk))
    seen = store.counters
    misses = seen.expert_requests - seen.expert_hits
    assert seen.expert_io_bytes_requested == misses * layout.layers[0].stride
    assert (seen.prefetch_requests > 0) == (slots > K)
    assert seen.prefetch_hits <= seen.prefetch_requests
    if right == 1.0 and slots >= 2 * K:
        assert seen.prefetch_hits > seen.prefetch_requests // 3


def test_a_background_read_that_fails_is_reported_by_the_request_itself(tmp_path: Path) -> None:
    layout = write_layout(tmp_path, uniform(3), 32)
    store, guesser = ahead(layout)
    path = layout.layers[1].path
    data = path.read_bytes()
    path.unlink()
    guesser.guess = [9, 10, 11, 12]
    expected = ask(Store(layout, "resident"), 0, [0, 1, 2, 3])
    assert np.array_equal(ask(store, 0, [0, 1, 2, 3]), expected)  # nothing of layer 0 is affected
    with pytest.raises(ReadError, match=r"layer_01\.bin: expert 9 at offset"):
        ask(store, 1, [9, 10, 11, 12])
    assert store.store.layers[1].cache.held == [EMPTY] * 8
    path.write_bytes(data)
    expected = ask(Store(layout, "resident"), 1, [9, 10, 11, 12])
    assert np.array_equal(ask(store, 1, [9, 10, 11, 12]), expected)


def test_closing_ends_background_reads(layout) -> None:
    store, guesser = ahead(layout)
    guesser.guess = [9, 10, 11, 12]
    ask(store, 0, [0, 1, 2, 3])
    assert store.store.layers[1].prefetch is not None
    store.store.close()


def test_only_decoding_looks_ahead(layout) -> None:
    store, guesser = ahead(layout)
    guesser.guess = [9, 10, 11, 12]
    store.ask(0, *request(np.random.default_rng(0), 5, range(32), K))
    ask(store, 2, [0, 1, 2, 3])  # the last layer has no next one
    assert store.counters.prefetch_requests == 0


def test_wrong_guesses_that_were_not_begun_are_dropped(
    layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Event()
    monkeypatch.setattr(reader, "cores", lambda: 1)
    with ThreadPoolExecutor(1) as busy:
        busy.submit(gate.wait, 5)  # the only reading thread
        monkeypatch.setattr(reader, "workers", lambda: busy)
        store, guesser = ahead(layout)
        guesser.guess = [9, 10, 11, 12]
        ask(store, 0, [0, 1, 2])  # read by the caller
        prefetch = store.store.layers[1].prefetch
        store.store._collect(store.store.layers[1], [4, 5, 6, 7])  # does not wait for the thread
        gate.set()
    assert all(task.cancelled() for record in prefetch.tasks for task in record)
    assert store.store.layers[1].cache.held == [EMPTY] * 8
