"""Which slot is given up: hand-written traces, and a naive model of the rules beside the code."""

from __future__ import annotations

import numpy as np
import pytest

from turbospark.experts.policy import EMPTY, SlotCache


def ask(cache: SlotCache, *experts: int, avoiding: tuple[int, ...] = ()):
    plan = cache.plan(list(experts), avoiding)
    if plan is not None:
        cache.commit(plan)
    return plan


def test_a_cold_cache_fills_slots_in_order():
    plan = ask(SlotCache(4, 10), 7, 2, 9)
    assert (plan.slots, plan.misses, plan.hits) == ((0, 1, 2), (0, 1, 2), 0)


def test_hits_keep_their_slot_and_request_order():
    cache = SlotCache(4, 10)
    ask(cache, 7, 2, 9)
    plan = ask(cache, 9, 5, 7)
    assert plan.slots == (2, 3, 0)
    assert plan.misses == (1,)


def test_lfu_gives_up_the_expert_used_least_then_the_oldest_then_the_first_slot():
    cache = SlotCache(3, 10, "lfu")
    ask(cache, 0, 1, 2)
    ask(cache, 0, 2)
    assert ask(cache, 5).slots == (1,)  # expert 1 was used once, the others twice
    ask(cache, 5)
    # 0 and 2 both have two uses and the same last use: the lower slot goes first.
    assert ask(cache, 6).slots == (0,)


def test_lfu_counts_survive_eviction():
    cache = SlotCache(1, 4, "lfu")
    for _ in range(3):
        ask(cache, 0)
    ask(cache, 1)
    assert cache.uses[:2] == [3, 1]


def test_lru_gives_up_the_slot_used_longest_ago():
    cache = SlotCache(3, 10, "lru")
    ask(cache, 0, 1, 2)
    for _ in range(5):
        ask(cache, 0)
    ask(cache, 1)
    assert ask(cache, 7).slots == (2,)
    assert ask(cache, 8).slots == (0,)  # used most often, and longest ago


def test_a_failed_read_leaves_the_slot_empty_and_first_in_line():
    cache = SlotCache(2, 10)
    ask(cache, 0, 1)
    plan = cache.plan([5])  # never committed: the read failed
    assert cache.held[plan.slots[0]] == EMPTY
    assert cache.slot_of(5) is None
    assert ask(cache, 6).slots == plan.slots


def test_slots_in_use_are_avoided_or_the_plan_waits_with_nothing_changed():
    cache = SlotCache(3, 10)
    ask(cache, 0, 1, 2)
    before = (list(cache.held), list(cache.uses), list(cache.last_use), cache.clock)
    assert cache.plan([5, 6], avoiding=(0, 1)) is None
    assert (cache.held, cache.uses, cache.last_use, cache.clock) == before
    assert ask(cache, 5, avoiding=(0, 1)).slots == (2,)


def test_an_avoided_slot_still_serves_hits():
    cache = SlotCache(2, 10)
    ask(cache, 0, 1)
    assert ask(cache, 1, 0, avoiding=(0, 1)).hits == 2


def test_a_repeated_id_takes_a_second_slot():
    plan = ask(SlotCache(4, 10), 3, 3)
    assert plan.slots == (0, 1)
    assert plan.misses == (0, 1)


def test_reserved_slots_are_nobodys_until_published():
    cache = SlotCache(4, 10)
    ask(cache, 0, 1)
    plan = cache.reserve([0, 7, 8, 9], keep=2)  # 0 is held; room for two of the rest
    assert plan.experts == (7, 8)
    assert ask(cache, 5).slots not in [(s,) for s in plan.slots]
    cache.publish(plan, loaded=(0,))
    assert cache.slot_of(7) == plan.slots[0]
    assert cache.slot_of(8) is None
    assert not cache.speculative


class NaiveLfu:
    """The rules as sentences: a list of slots, sorted afresh at every miss."""

    def __init__(self, slots: int) -> None:
        self.slots = [{"expert": None, "when": 0} for _ in range(slots)]
        self.uses: dict[int, int] = {}
        self.now = 0

    def ask(self, experts: list[int]) -> list[int]:
        held = {s["expert"]: i for i, s in enumerate(self.slots) if s["expert"] is not None}
        keep = {held[e] for e in experts if e in held}
        order = [i for i in range(len(self.slots)) if i not in keep]
        order.sort(
            key=lambda i: (
                self.slots[i]["expert"] is not None,
                self.uses.get(self.slots[i]["expert"], 0),
                self.slots[i]["when"] if self.slots[i]["expert"] is not None else 0,
            )
        )
        self.now += 1
        answer = []
        for expert in experts:
            self.uses[expert] = self.uses.get(expert, 0) + 1
            slot = held[expert] if expert in held else order.pop(0)
            self.slots[slot] = {"expert": expert, "when": self.now}
            answer.append(slot)
        return answer


@pytest.mark.parametrize("slots", [4, 6, 9])
def test_lfu_agrees_with_the_naive_rules_over_a_long_random_trace(slots):
    rng = np.random.default_rng(slots)
    cache, naive = SlotCache(slots, 24, "lfu"), NaiveLfu(slots)
    for _ in range(400):
        experts = rng.choice(24, size=4, replace=False, p=_zipf(24)).tolist()
        assert list(ask(cache, *experts).slots) == naive.ask(experts)


def _zipf(n: int) -> np.ndarray:
    weight = 1 / np.arange(1, n + 1)
    return weight / weight.sum()
