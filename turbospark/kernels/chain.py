"""Several launches as one: on CUDA each launch costs the host more than the device.

Each launch becomes a phase. Threadgroups draw tickets in order, one for each threadgroup that the
phases would have had; who draws a ticket of the next phase waits until all of the last phase's have
signalled. No ticket depends on a later one, so that it ends however few threadgroups run at once.

Knows plans and their texts. Does not know what they compute. Metal is left out: its threadgroups
need not see each other's writes before a launch ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from turbospark.kernels.shorten import joined
from turbospark.kernels.source import TYPES, Kernel, Plan, ceil_div, recorder

BACKENDS = ("cuda",)

POOL = 33 << 10
"""Bytes of shared memory for the phase that takes most."""

GROUPS = 396
"""Threadgroups of a launch: three for each of an H200's 132 processors."""

ALIGNED = 64
"""Elements at whose multiples intermediates begin."""

MOST_PHASES = 14
"""The counters are enough for so many."""

LINE = 32
"""Words between two counters: who waits for one must not be in the way of another."""

HEADER = """
#undef threadgroup_position_in_grid
#define threadgroup_position_in_grid (ts_group)
#define TS_WAIT(phase, need) ts_wait_for(ts_count + (2 + phase) * TS_LINE, need, phase)
#undef ts_await
#define ts_await() \\
  if (!ts_ready) { \\
    TS_WAIT(ts_last, ts_need); \\
    ts_ready = true; \\
    if (ts_tid == 0) ts_next = ts_take(ts_count); \\
  }
#undef ts_barrier
#define ts_barrier() ts_barrier_of(ts_threads)
#undef TS_SHARED
#define TS_SHARED(T, name, n) TS_CARVED(T, name, n)
"""


def counters() -> mx.array:
    """int32 zeros: tickets, leavers, and tickets done of each phase but the last.

    Zeros again after each launch, so that launches that follow each other may share them.
    """
    return mx.array([0] * (1 + MOST_PHASES) * LINE, dtype=mx.int32)


class Pending:
    """What a launch that was recorded will compute."""

    def __init__(self, of: tuple[int, int], shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.of, self.shape, self.dtype = of, shape, dtype

    def reshape(self, shape: tuple[int, ...]) -> Pending:
        """The same elements in another shape."""
        return Pending(self.of, shape, self.dtype)


class Source(NamedTuple):
    """Where an input of a phase comes from: argument `number`, or output `number` of `phase`."""

    number: int
    phase: int = -1


class Phase(NamedTuple):
    """A plan and where its inputs come from."""

    plan: Plan
    sources: tuple[Source, ...]


class Recording:
    """Launches in order, and the arrays they read."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.arrays: list[mx.array] = []

    def add(self, plan: Plan, inputs: list[Any]) -> list[Any]:
        """What stands for the launch's outputs."""
        self.phases.append(Phase(plan, tuple(self._source(a) for a in inputs)))
        at = len(self.phases) - 1
        return [Pending((at, i), shape, dtype) for i, (shape, dtype) in enumerate(plan.outputs)]

    def _source(self, a: mx.array | Pending) -> Source:
        if isinstance(a, Pending):
            return Source(a.of[1], a.of[0])
        known = next((i for i, b in enumerate(self.arrays) if b is a), None)
        if known is None:
            known = len(self.arrays)
            self.arrays.append(a)
        return Source(known)


def as_one(backend: str, count: mx.array, steps: Callable[[], Any]) -> mx.array:
    """The array that `steps` makes of nothing but launches, these as one; `count`: `counters`."""
    recording = Recording()
    token = recorder.set(recording)
    try:
        last: Pending = steps()
    finally:
        recorder.reset(token)
    plan = chained(_Phases(recording.phases), last.of, last.shape)
    return plan.run(backend, [*recording.arrays, count])[0]


# --- the plan -------------------------------------------------------------------------------------


class _Phases(tuple[Phase, ...]):
    """Phases that are the same if their plans are the same objects."""

    def _key(self) -> tuple[Any, ...]:
        return tuple((id(p.plan), p.sources) for p in self)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Phases) and self._key() == other._key()


@lru_cache(maxsize=256)
def chained(phases: _Phases, last: tuple[int, int], shape: tuple[int, ...]) -> Plan:
    """The launches as one plan, whose first output is output `last`."""
    assert len(phases) <= MOST_PHASES
    threads = max(p.plan.threads for p in phases)
    layout = _Layout(phases, last)
    arguments = 1 + max(s.number for p in phases for s in p.sources if s.phase < 0)
    body = [_BEGIN, *(_phase(phases, i, layout) for i in range(len(phases))), _END]
    template: dict[str, Any] = {
        "TS_ITEMS": sum(math.prod(p.plan.groups) for p in phases),
        "TS_GROUPS": GROUPS,
        "TS_COUNTERS": 1 + len(phases),
        "TS_LINE": LINE,
        "TS_POOL_BYTES": POOL,
    }
    updated = {
        s.number
        for p in phases
        for s, name in zip(p.sources, p.plan.kernel.inputs, strict=True)
        if s.phase < 0 and name in p.plan.kernel.updates
    }
    kernel = Kernel(
        "chain",
        (*(f"a{i}" for i in range(arguments)), "counters"),
        ("ts_y", *layout.names),
        "".join(body),
        joined(p.plan.kernel.header for p in phases) + HEADER,
        updates=(*(f"a{i}" for i in sorted(updated)), "counters"),
        partial=layout.names,
    )
    dtype = phases[last[0]].plan.outputs[last[1]][1]
    outputs = ((shape, dtype), *layout.outputs)
    return Plan(kernel, template, (GROUPS, 1, 1), threads, outputs)


class _Layout:
    """Where intermediates lie: those of one dtype in one output."""

    def __init__(self, phases: Sequence[Phase], last: tuple[int, int]) -> None:
        self.texts: dict[tuple[int, int], str] = {last: "ts_y"}
        used: dict[mx.Dtype, int] = {}
        for i, phase in enumerate(phases):
            for j, (shape, dtype) in enumerate(phase.plan.outputs):
                if (i, j) != last:
                    at = used.get(dtype, 0)
                    self.texts[i, j] = f"{_scratch(dtype)} + {at}"
                    used[dtype] = at + ceil_div(math.prod(shape), ALIGNED) * ALIGNED
        self.names = tuple(map(_scratch, used))
        self.outputs = tuple(((size,), dtype) for dtype, size in used.items())

    def text(self, source: Source) -> str:
        """What a phase reads an input from."""
        if source.phase < 0:
            return f"a{source.number}"
        return f"ts_readable({self.texts[source.phase, source.number]})"


def _scratch(dtype: mx.Dtype) -> str:
    return f"ts_s_{TYPES[dtype]}"


# A threadgroup draws its next ticket while it works on one: not while it waits, or it would hold
# two that others could work on. So it knows where its phase ends, and signals once, for all its
# tickets of a phase. Nobody waits for the last phase, so that its signals could arrive after the
# counters are zeros again: it has none.
_BEGIN = """
  TS_POOL(TS_POOL_BYTES);
  const int ts_tid = int(thread_index_in_threadgroup);
  auto ts_count = ts_writable(counters);
  int ts_mine = 0;
  int ts_turn = 0;
  if (ts_tid == 0) ts_ticket_s[0] = ts_take(ts_count);
  ts_barrier_device();
  for (int ts_item = ts_ticket_s[0]; ts_item < TS_ITEMS; ts_item = ts_ticket_s[ts_turn]) {
    int ts_next = 0;
    int ts_end = 0;
    int ts_done = 0;
    ts_turn = 1 - ts_turn;
"""

_END = """
    if (ts_tid == 0) ts_ticket_s[ts_turn] = ts_next;
    ts_mine++;
    ts_barrier_device();
    if (ts_tid == 0 && ts_next >= ts_end && ts_end < TS_ITEMS) {
      ts_signal(ts_count + ts_done, ts_mine);
      ts_mine = 0;
    }
  }
  // Nobody counts any more when the last one leaves.
  if (ts_tid == 0 && ts_take(ts_count + TS_LINE) == TS_GROUPS - 1)
    for (int i = 0; i < TS_COUNTERS; i++) ts_count[i * TS_LINE] = 0;
"""


def _phase(phases: Sequence[Phase], i: int, layout: _Layout) -> str:
    """Phase i as text: its tickets, arguments by their own names, constants and body."""
    plan, sources = phases[i]
    kernel, (x, y, _) = plan.kernel, plan.groups
    items = [math.prod(p.plan.groups) for p in phases]
    first, end = sum(items[:i]), sum(items[: i + 1])
    named = dict(zip(kernel.inputs, sources, strict=True))
    early = max((named[name].phase for name in kernel.early), default=-1)
    arguments = {name: layout.text(source) for name, source in named.items()}
    arguments |= {name: layout.texts[i, j] for j, name in enumerate(kernel.outputs)}
    return "\n".join(
        [
            f"if (ts_item >= {first} && ts_item < {end}) {{",
            f"const int ts_at = ts_item - {first};",
            f"const uint3 ts_group = ts_u3(ts_at % {x}, ts_at / {x} % {y}, ts_at / {x * y});",
            f"constexpr int ts_last = {i - 1};",
            f"constexpr int ts_need = {items[i - 1]};",
            f"constexpr int ts_threads = {plan.threads};",
            f"bool ts_ready = {str(i == 0).lower()};",
            f"TS_PHASE({i});",
            "" if i else "if (ts_tid == 0) ts_next = ts_take(ts_count);",
            f"ts_done = {2 + i} * TS_LINE;",
            f"ts_end = {end};",
            *(f"auto {name} = {text};" for name, text in arguments.items()),
            plan.constants,
            "if (ts_tid < ts_threads) {",
            f"TS_WAIT({early}, {items[early]});" if early >= 0 else "",
            "" if "ts_await" in kernel.body else "ts_await();",
            kernel.body,
            "}}",
            "",
        ]
    )
