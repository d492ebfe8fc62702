"""Counters: disjoint buckets that add up, deltas, and None for what was not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turbospark import counters
from turbospark.counters import PHASES, PhaseClock, PhaseCounters


@pytest.fixture
def ticking(monkeypatch):
    """A clock that reads 0, 1, 2, ... : every reading is one nanosecond after the last."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(counters, "perf_counter_ns", lambda: next(ticks))
    return PhaseClock()


def test_nested_phases_take_their_time_out_of_the_outer_one(ticking):
    with ticking.phase("loop"):  # 0..1 loop
        with ticking.phase("build"), ticking.phase("router"):  # 1..2, 2..3 router, 3..4 build
            pass
        with ticking.phase("sampling"):  # 4..5 loop, 5..6 sampling, 6..7 loop
            pass
    seen = ticking.snapshot()
    assert (seen.loop_ns, seen.build_ns, seen.router_ns, seen.sampling_ns) == (3, 2, 1, 1)
    assert seen.total_ns == 7 == sum(getattr(seen, f"{name}_ns") for name in PHASES)
    assert seen.forward_ns == 3


def test_time_between_phases_belongs_to_nobody(ticking):
    with ticking.phase("loop"):
        pass
    counters.perf_counter_ns()
    with ticking.phase("loop"):
        pass
    assert ticking.snapshot().total_ns == 2


def test_a_phase_closes_when_its_block_raises(ticking):
    with pytest.raises(KeyError), ticking.phase("loop"), ticking.phase("build"):
        raise KeyError
    with ticking.phase("sampling"):
        pass
    assert ticking.snapshot().total_ns == 4


def test_a_generator_that_yields_inside_a_phase_is_caught(ticking):
    def bad():
        with ticking.phase("build"):
            yield

    steps = bad()
    with pytest.raises(RuntimeError, match="must not yield"), ticking.phase("loop"):
        next(steps)


def test_an_interrupt_between_the_opening_of_a_phase_and_its_block_gets_out():
    clock = PhaseClock()
    with pytest.raises(KeyboardInterrupt), clock.phase("loop"):
        clock.phase("build").__enter__()  # its block, and so its exit, is never reached
        raise KeyboardInterrupt
    with clock.phase("loop"):
        pass
    assert clock._open == []


def test_a_delta_is_the_difference_and_none_stays_none():
    clock = PhaseClock()
    clock.count("calls", 3)
    before = clock.snapshot(expert_requests=8, expert_hits=2)
    clock.count("calls", 2)
    clock.count("passes")
    after = clock.snapshot(expert_requests=18, expert_hits=9, expert_io_bytes_physical=5)
    delta = after - before
    assert (delta.calls, delta.expert_requests, delta.expert_hits) == (2, 10, 7)
    assert "kernels" not in str(delta)
    assert "3 fused layers, 7 gated delta rows" in str(replace(delta, fused_layers=3, delta_rows=7))
    assert delta.passes == 1 and "2 tokens in 1 passes" in str(delta)
    assert delta.expert_hit_rate == 0.7
    assert delta.expert_io_bytes_physical is None, "before was not measured"
    assert delta.attention_gpu_ns is delta.routed_gpu_ns is delta.final_gpu_ns is None


def test_counters_print_a_table_and_dump_every_field():
    clock = PhaseClock()
    with clock.phase("final_wait"):
        pass
    seen = clock.snapshot(expert_requests=4, expert_hits=1)
    assert "final_wait" in str(seen) and "25.0%" in str(seen) and "router" not in str(seen)
    assert set(seen.as_dict()) == set(PhaseCounters.__dataclass_fields__)
    assert PhaseCounters().expert_hit_rate is None
