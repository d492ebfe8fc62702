"""Prefix records and the session pool, on bookkeeping alone: no model runs here."""

from __future__ import annotations

import mlx.core as mx
import pytest

from turbospark.cache.pool import SessionPool
from turbospark.cache.prefix import PrefixRecord
from turbospark.cache.specs import FullSpec, RecurrentSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import UnsupportedError

FULL = FullSpec(1, 4, 4)


def states(*specs, context: int = 600) -> LayerStates:
    return LayerStates(specs or (FULL,), context, mx.float32)


def feed(session, tokens: list[int]) -> None:
    """What a pass does to a session, without a model."""
    position = session.states.position
    session.states.begin(len(tokens))
    session.states.advance()
    session.record.record(tokens, position)


def test_a_record_appends_truncates_and_taints_on_a_gap():
    record = PrefixRecord()
    record.record([1, 2, 3], 0)
    record.record([9], 2)
    assert record.tokens == [1, 2, 9]
    record.record([4], 7)
    assert record.tainted
    assert record.common_prefix([1, 2, 9, 4]) == 0
    record.clear()
    record.record([1, 2], 0)
    assert record.common_prefix([1, 2, 3]) == 2


def test_the_last_prompt_token_is_always_fed_anew():
    record = PrefixRecord()
    record.record([1, 2, 3], 0)
    assert record.common_prefix([1, 2, 3]) == 2
    assert record.common_prefix([1]) == 0
    assert record.common_prefix([2, 2, 3]) == 0


def test_a_continuation_keeps_everything_and_a_divergence_rewinds():
    pool = SessionPool(1, states)
    feed(pool.live, [1, 2, 3, 4, 5])
    assert pool.try_reuse([1, 2, 3, 4, 5, 6]) == 5
    assert pool.live.states.position == 5
    assert pool.try_reuse([1, 2, 9]) == 2
    assert pool.live.states.position == 2
    assert pool.live.record.tokens == [1, 2]


def test_a_record_of_more_than_the_cache_holds_vouches_for_nothing():
    pool = SessionPool(1, states)
    feed(pool.live, [1, 2, 3, 4, 5])
    pool.live.states.rewind(2)
    assert pool.try_reuse([1, 2, 3, 4, 9]) == 0


def test_the_snapshots_kept_are_the_two_newest_and_others_far_apart():
    pool = SessionPool(1, lambda: states(FULL, RecurrentSpec(1, 4, 4, 3, 8)))
    for count in (10, 10, 10, 5, 5, 60, 4, 4):
        feed(pool.live, [0] * count)
        pool.live.keep_snapshot()
    assert [s.position for s in pool.live.snapshots] == [40, 100, 104, 108]


def test_a_ring_allows_going_back_within_its_slack_only():
    pool = SessionPool(1, lambda: states(RingSpec(1, 4, 4, 8)))
    feed(pool.live, list(range(300)))
    assert pool.try_reuse([*range(300 - 129), -1, -1]) == 0
    assert pool.try_reuse([*range(300 - 128), -1, -1]) == 172


def test_a_reset_ring_does_not_remember_how_far_it_once_went():
    pool = SessionPool(1, lambda: states(RingSpec(1, 4, 4, 8)))
    feed(pool.live, list(range(300)))
    pool.live.reset()
    feed(pool.live, list(range(200)))
    assert pool.try_reuse([*range(80), -1]) == 80


def test_what_a_ring_lost_on_its_way_does_not_come_back_with_the_position():
    pool = SessionPool(1, lambda: states(RingSpec(1, 4, 4, 8)))
    feed(pool.live, list(range(300)))
    assert pool.try_reuse([*range(180), -1]) == 180
    assert pool.try_reuse([*range(171), -1]) == 0
    assert pool.try_reuse([*range(172), -1]) == 172


def test_a_ring_that_never_turned_goes_back_anywhere():
    pool = SessionPool(1, lambda: states(RingSpec(1, 4, 4, 8)))
    feed(pool.live, list(range(136)))
    assert pool.try_reuse([0, 1, -1]) == 2


def test_a_recurrent_session_goes_back_to_a_snapshot_not_between():
    spec = RecurrentSpec(1, 4, 4, 3, 8)
    pool = SessionPool(1, lambda: states(FULL, spec))
    feed(pool.live, [1, 2, 3])
    pool.live.keep_snapshot()
    marked = pool.live.states.layers[1].state
    feed(pool.live, [4, 5])
    memory = pool.live.states.layers[1]
    memory.saved = (marked + 1.0, memory.conv)
    assert pool.try_reuse([1, 2, 9, 9]) == 0
    assert pool.try_reuse([1, 2, 3, 4, 9, 9]) == 3
    assert pool.live.states.position == 3
    assert mx.array_equal(pool.live.states.layers[1].state, marked)


def test_a_recurrent_rewind_without_a_snapshot_is_refused_by_reason():
    live = states(FULL, RecurrentSpec(1, 4, 4, 3, 8))
    live.begin(5)
    live.advance()
    with pytest.raises(UnsupportedError, match="cannot rewind from 5 to 3: a recurrent layer"):
        live.rewind(3)


def test_the_better_parked_session_is_swapped_in_and_ties_keep_the_live_one():
    pool = SessionPool(2, states)
    first = pool.live
    feed(pool.live, [1, 2, 3, 4])
    assert pool.start() is False
    second = pool.live
    assert second is not first
    feed(pool.live, [1, 7, 8])
    assert pool.try_reuse([1, 9]) == 0
    assert pool.live is second
    assert pool.try_reuse([1, 2, 3, 4, 5]) == 4
    assert pool.live is first


def test_a_shallow_match_does_not_destroy_the_live_conversation():
    pool = SessionPool(2, states)
    feed(pool.live, list(range(20)))
    assert pool.try_reuse([0, 1, 99]) == 0
    assert pool.live.states.position == 20


def test_the_least_recently_parked_session_is_evicted_and_reported():
    pool = SessionPool(3, states)
    a = pool.live
    feed(a, [1])
    assert pool.start() is False
    feed(pool.live, [2])
    assert pool.start() is False
    feed(pool.live, [3])
    assert pool.start() is True
    assert pool.live is a
    assert pool.live.states.position == 0


def test_sessions_are_allocated_at_once():
    pool = SessionPool(3, states)
    assert pool.nbytes == 3 * pool.live.states.nbytes
    assert pool.live.states.nbytes == 600 * 4 * 2 * 4


def test_a_ring_below_its_window_is_refused():
    with pytest.raises(UnsupportedError, match=r"swa_ring_capacity 4 is below .* window 8"):
        LayerStates([RingSpec(1, 4, 4, 8)], 600, mx.float32, 4)
