"""Which expert sits in which slot, and which slot is given up: pure bookkeeping for one layer.

Knows ids, slots, uses and ticks. Does not know bytes, files or arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

EMPTY = -1

Policy = Literal["lfu", "lru"]
"""Give up the expert used least, or the one used longest ago."""


@dataclass(frozen=True)
class Plan:
    """Slots for one request, in request order, and the indices of those that must be read."""

    experts: tuple[int, ...]
    slots: tuple[int, ...]
    misses: tuple[int, ...]

    @property
    def hits(self) -> int:
        return len(self.experts) - len(self.misses)


class SlotCache:
    """`slots` places for `experts` experts.

    A use is counted per expert and survives its eviction. A planned miss leaves its slot empty
    until `commit`, so a failed read can never leave a slot that claims to hold an expert.
    """

    def __init__(self, slots: int, experts: int, policy: Policy = "lfu") -> None:
        self.policy = policy
        self.held = [EMPTY] * slots
        self.last_use = [0] * slots
        self.uses = [0] * experts
        self.speculative: set[int] = set()
        self.clock = 0

    def slot_of(self, expert: int) -> int | None:
        """The slot that holds `expert`, or None."""
        return self.held.index(expert) if expert in self.held else None

    def plan(self, experts: Sequence[int], avoiding: Collection[int] = ()) -> Plan | None:
        """Assign a slot to each of `experts`; None, with nothing changed, when too many slots are
        in use (`avoiding`: read by work not yet finished) and the caller must wait for them.

        Victims: empty slots first; then (lfu) the held expert used least, then the slot used
        longest ago; ties in slot order.
        """
        assert len(experts) <= len(self.held), "refused at open; waiting would never end"
        hits: dict[int, int] = {}
        reserved = set(self.speculative)
        for i, expert in enumerate(experts):
            slot = self.slot_of(expert)
            if slot is not None and slot not in hits.values():
                hits[i] = slot
                reserved.add(slot)
        misses = tuple(i for i in range(len(experts)) if i not in hits)
        victims = self._victims(reserved | set(avoiding))
        if len(misses) > len(victims):
            return None
        self.clock += 1
        for expert in experts:
            self.uses[expert] += 1
        assigned = dict(hits)
        for slot in hits.values():
            self.last_use[slot] = self.clock
        for i, slot in zip(misses, victims, strict=False):
            assigned[i] = slot
            self.held[slot] = EMPTY
            self.last_use[slot] = self.clock
        return Plan(tuple(experts), tuple(assigned[i] for i in range(len(experts))), misses)

    def commit(self, plan: Plan) -> None:
        """The reads of `plan` succeeded: its missed slots now hold their experts."""
        for i in plan.misses:
            self.held[plan.slots[i]] = plan.experts[i]

    def reserve(self, experts: Sequence[int], keep: int) -> Plan:
        """Slots for experts that may be asked for next, leaving at least `keep` evictable.

        Experts already held are left out and keep their slots; those beyond the room are left out
        too. The slots stay reserved until `publish`.
        """
        room = len(self._victims(self.speculative)) - keep
        wanted = [e for e in experts if self.slot_of(e) is None][: max(0, room)]
        kept = {slot for slot, held in enumerate(self.held) if held in experts}
        slots = self._victims(self.speculative | kept)[: len(wanted)]
        wanted = wanted[: len(slots)]
        for slot in slots:
            self.held[slot] = EMPTY
            self.speculative.add(slot)
        return Plan(tuple(wanted), tuple(slots), tuple(range(len(wanted))))

    def publish(self, plan: Plan, loaded: Collection[int]) -> None:
        """End a reservation: only the indices in `loaded` really arrived.

        Until it is asked for, such an expert is the oldest: a wrong guess is the first to go.
        """
        for i, (expert, slot) in enumerate(zip(plan.experts, plan.slots, strict=True)):
            self.speculative.discard(slot)
            if i in loaded:
                self.held[slot] = expert
                self.last_use[slot] = 0

    def _victims(self, reserved: Collection[int]) -> list[int]:
        free = [s for s in range(len(self.held)) if s not in reserved]
        return sorted(free, key=self._rank)

    def _rank(self, slot: int) -> tuple[int, int, int]:
        expert = self.held[slot]
        if expert == EMPTY:
            return (0, 0, 0)
        uses = self.uses[expert] if self.policy == "lfu" else 0
        return (1, uses, self.last_use[slot])
