"""How much memory there is and what fits in it: pure arithmetic, the machine's size a parameter.

Knows the policies for expert slots, residency, context and the load guard. Does not open or
allocate anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turbospark.cache.kv import RING_SLACK
from turbospark.cache.packed import packed_bytes
from turbospark.cache.specs import (
    CacheSpec,
    FullSpec,
    LatentSpec,
    NgramSpec,
    PackedSpec,
    RecurrentSpec,
    RingSpec,
    RowSpec,
    SparseSpec,
)
from turbospark.errors import OptionError
from turbospark.options import DEFAULT_MAX_CONTEXT, EXPERT_CACHE_SLOTS, LoadGuard

GIB = 1 << 30
SLOT_RESERVE = 4 * GIB
SLOT_FRACTION = 0.25
SLOT_COUNTS = (8, 16, 24, 32, 48, 64, 96, 128)
CONTEXT_STEP = 1024
CONTEXT_LIMIT = 1 << 20


@dataclass(frozen=True)
class Guard:
    """One tier of the load guard: what stays free, and which share of the rest KV may take."""

    reserve: int
    fraction: float


GUARDS = {
    LoadGuard.OFF: Guard(0, 1.0),
    LoadGuard.RELAXED: Guard(4 * GIB, 1 / 4),
    LoadGuard.BALANCED: Guard(8 * GIB, 1 / 6),
    LoadGuard.STRICT: Guard(12 * GIB, 1 / 10),
}


def physical_memory() -> int:
    """Bytes this process may use: RAM, or the smaller control-group limit; 0 when unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        total = 0
    limits = [
        _cgroup_limit(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.high")
    ]
    known = [n for n in (total, *limits) if n]
    return min(known, default=0)


def _cgroup_limit(path: Path) -> int:
    """A cgroup v2 limit; "max", garbage and absence mean none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def slot_budget(physical: int, resident: int) -> int:
    """Bytes that expert slots may take when sized automatically."""
    return int(SLOT_FRACTION * max(0, physical - (resident + SLOT_RESERVE)))


def auto_slots(physical: int, resident: int, bytes_per_slot: int) -> int:
    """Slots per layer for "auto": the largest count that fits the budget, never below the floor.

    `bytes_per_slot` is the cost of one more expert in every layer.
    """
    fitting = [
        n
        for n in SLOT_COUNTS
        if n >= EXPERT_CACHE_SLOTS and n * bytes_per_slot <= slot_budget(physical, resident)
    ]
    return max(fitting, default=EXPERT_CACHE_SLOTS) if bytes_per_slot else EXPERT_CACHE_SLOTS


def auto_residency(physical: int, resident: int, bytes_per_slot: int, zero_copy: bool) -> str:
    """ "mapped" where even the smallest cache does not fit and mapping is free, else "streamed"."""
    too_small = EXPERT_CACHE_SLOTS * bytes_per_slot > slot_budget(physical, resident)
    if physical and bytes_per_slot and too_small and zero_copy:
        return "mapped"
    return "streamed"


def kv_bytes(specs: Sequence[CacheSpec], context: int, itemsize: int, ring: int | None) -> int:
    """Bytes of one conversation's caches at `context` positions of `itemsize`-byte elements."""
    total = 0
    for spec in specs:
        if isinstance(spec, FullSpec):
            total += context * spec.kv_heads * (spec.key_dim + spec.value_dim) * itemsize
        elif isinstance(spec, PackedSpec):
            total += packed_bytes(spec, context)
        elif isinstance(spec, RingSpec):
            rows = context
            if spec.window < context:
                rows = min(context, spec.window + RING_SLACK if ring is None else ring)
            total += rows * spec.kv_heads * (spec.key_dim + spec.value_dim) * itemsize
        elif isinstance(spec, LatentSpec):
            total += context * (spec.latent_dim + spec.rope_dim) * itemsize
        elif isinstance(spec, SparseSpec):
            rows = 2 * context * spec.kv_heads * spec.head_dim * itemsize
            total += rows if spec.packed is None else packed_bytes(spec.packed, context)
            total += max(1, context // spec.ratio) * spec.index_dim * itemsize
        total += carried_bytes(spec, itemsize)
    return total


def carried_bytes(spec: CacheSpec, itemsize: int) -> int:
    """Bytes of what a snapshot keeps of one layer's memory."""
    if isinstance(spec, RecurrentSpec):
        state = spec.value_heads * spec.value_dim * spec.key_dim * 4
        return state + spec.conv_rows * spec.conv_channels * itemsize
    if isinstance(spec, RowSpec):
        return spec.width * itemsize
    if isinstance(spec, NgramSpec):
        return spec.conv_rows * spec.conv_channels * itemsize + spec.tokens * 4
    if isinstance(spec, SparseSpec):
        return max(1, spec.ratio - 1) * spec.index_dim * itemsize
    return 0


@dataclass(frozen=True)
class Load:
    """What an open must fit: bytes already committed, and caches as a function of the context."""

    physical: int
    weights: int
    experts: int
    specs: tuple[CacheSpec, ...]
    itemsize: int
    sessions: int
    ring: int | None
    snapshots: int = 0
    """States of recurrent layers that each session may keep besides its present one."""

    @property
    def committed(self) -> int:
        return self.weights + self.experts

    def kv(self, context: int) -> int:
        """Bytes of all sessions' caches at `context`."""
        kept = self.snapshots * sum(carried_bytes(s, self.itemsize) for s in self.specs)
        return self.sessions * (kv_bytes(self.specs, context, self.itemsize, self.ring) + kept)

    def available(self, reserve: int) -> int:
        """Bytes left for caches."""
        return max(0, self.physical - self.committed - reserve)

    def subtraction(self, reserve: int) -> str:
        """`available` for people."""
        return (
            f"{_mib(self.physical)} memory - {_mib(self.weights)} weights - "
            f"{_mib(self.experts)} experts - {_mib(reserve)} reserve"
        )

    def largest(self, budget: int) -> int:
        """The largest multiple of 1024 positions whose caches fit `budget`; 0 if none."""
        low, high = 0, CONTEXT_LIMIT // CONTEXT_STEP
        while low < high:
            middle = (low + high + 1) // 2
            if self.kv(middle * CONTEXT_STEP) <= budget:
                low = middle
            else:
                high = middle - 1
        return low * CONTEXT_STEP


def check_load(load: Load, context: int, guard: LoadGuard | int) -> None:
    """Refuse an explicit context that does not fit, with the subtraction. Raises OptionError.

    A guard in bytes caps expert slots + KV, which options decide; weights are what the model is,
    and count against the machine alone.
    """
    kv = load.kv(context)
    if isinstance(guard, int) and load.experts + kv > guard:
        raise OptionError(
            f"load_guard={guard} bytes caps expert slots + KV (weights beside them): "
            f"{load.experts} + {kv} = {load.experts + kv} bytes; lower max_context={context}, "
            "expert_cache_slots or session_slots"
        )
    tier = GUARDS[LoadGuard.RELAXED if isinstance(guard, int) else guard]
    if guard is LoadGuard.OFF or not load.physical:
        return
    available = load.available(tier.reserve)
    if kv > available:
        fits = load.largest(available)
        raise OptionError(
            f"max_context={context} needs {_mib(kv)} of KV for {load.sessions} session(s), but "
            f"{_mib(available)} are available: {load.subtraction(tier.reserve)}; "
            f"{f'the largest context that fits is {fits}' if fits else 'no context fits'} "
            "(load_guard='off' opens anyway)"
        )


def auto_context(
    load: Load, trained: int | None, guard: LoadGuard | int, floor: int
) -> tuple[int, str]:
    """(context for "auto", what bound it): the trained one, as far as its caches fit the guard's
    share.

    Refuses to come out below `floor` (min_auto_context), naming what bound it. Raises OptionError.
    """
    tier = GUARDS[LoadGuard.RELAXED if isinstance(guard, int) else guard]
    bound, basis = DEFAULT_MAX_CONTEXT, "undeclared: the install declares no trained context"
    if trained:
        bound, basis = min(trained, CONTEXT_LIMIT), f"trained: the model was trained to {trained}"
    if load.physical and guard is not LoadGuard.OFF:
        budget = int(tier.fraction * load.available(tier.reserve))
        if isinstance(guard, int):
            budget = min(budget, max(0, guard - load.experts))
        if load.kv(bound) > budget:
            bound = load.largest(budget)
            basis = (
                f"memory: KV may take {_mib(budget)}, {tier.fraction:.3g} of "
                f"{load.subtraction(tier.reserve)}"
            )
    if bound < max(floor, 1):
        raise OptionError(
            f"max_context='auto' comes out at {bound}, below min_auto_context={floor} ({basis}); "
            "lower min_auto_context, give max_context as a number, or relax load_guard"
        )
    return bound, basis


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
