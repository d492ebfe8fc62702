"""The sizing policies against hand-computed vectors; no machine is asked."""

from __future__ import annotations

import pytest

from turbospark.cache.specs import FullSpec, LatentSpec, RecurrentSpec, RingSpec, SharedSpec
from turbospark.errors import OptionError
from turbospark.options import LoadGuard
from turbospark.sizing import (
    GIB,
    Load,
    auto_context,
    auto_residency,
    auto_slots,
    check_load,
    kv_bytes,
)

GEMMA_SLOT = 30 * 3_355_443


@pytest.mark.parametrize(
    ("physical", "slots"), [(36, 48), (30, 32), (28, 24), (27, 24), (18, 16), (16, 16), (8, 16)]
)
def test_auto_slots_of_a_gemma_sized_model(physical, slots):
    assert auto_slots(physical * GIB, 13 * GIB, GEMMA_SLOT) == slots


@pytest.mark.parametrize(("physical", "slots"), [(16, 24), (24, 48), (36, 64), (48, 96)])
def test_auto_slots_with_the_real_resident_size(physical, slots):
    assert auto_slots(physical * GIB, int(1.26 * GIB), GEMMA_SLOT) == slots


def test_auto_slots_never_fall_below_the_floor():
    assert auto_slots(512 * GIB, 2 * GIB, 32 * 109 * 2**20 * 40) == 16
    assert auto_slots(128 * GIB, 47 * GIB, 48 * 2_764_800) == 128
    assert auto_slots(40 * GIB, 47 * GIB, 48 * 2_764_800) == 16
    assert auto_slots(64 * GIB, GIB, 0) == 16


@pytest.mark.parametrize(
    ("physical", "per_slot", "zero_copy", "answer"),
    [
        (36, GEMMA_SLOT, True, "streamed"),
        (16, GEMMA_SLOT, True, "mapped"),
        (16, GEMMA_SLOT, False, "streamed"),
        (0, GEMMA_SLOT, True, "streamed"),
        (16, 0, True, "streamed"),
    ],
)
def test_auto_residency(physical, per_slot, zero_copy, answer):
    assert auto_residency(physical * GIB, 13 * GIB, per_slot, zero_copy) == answer


def test_kv_bytes_of_every_kind_of_layer():
    assert kv_bytes([FullSpec(2, 64, 32)], 1000, 2, None) == 1000 * 2 * 96 * 2
    assert kv_bytes([RingSpec(2, 64, 64, 100)], 1000, 2, None) == 228 * 2 * 128 * 2
    assert kv_bytes([RingSpec(2, 64, 64, 100)], 1000, 2, 150) == 150 * 2 * 128 * 2
    assert kv_bytes([RingSpec(2, 64, 64, 100)], 64, 2, None) == 64 * 2 * 128 * 2
    assert kv_bytes([LatentSpec(512, 64)], 1000, 2, None) == 1000 * 576 * 2
    recurrent = RecurrentSpec(4, 16, 8, 3, 40)
    assert kv_bytes([recurrent], 1000, 2, None) == 4 * 16 * 8 * 4 + 3 * 40 * 2
    assert kv_bytes([SharedSpec(0)], 1000, 2, None) == 0


def load(**changes) -> Load:
    # 1 MiB of KV per 1024 positions.
    values = dict(
        physical=16 * GIB,
        weights=4 * GIB,
        experts=0,
        specs=(FullSpec(1, 256, 256),),
        itemsize=2,
        sessions=1,
        ring=None,
    )
    return Load(**{**values, **changes})


def test_auto_context_is_the_trained_one_where_memory_allows():
    trained = "trained: the model was trained to 32768"
    assert auto_context(load(), 32768, LoadGuard.RELAXED, 0) == (32768, trained)
    undeclared = "undeclared: the install declares no trained context"
    assert auto_context(load(), None, LoadGuard.RELAXED, 0) == (4096, undeclared)
    assert auto_context(load(), 1 << 24, LoadGuard.OFF, 0)[0] == 1 << 20


def test_auto_context_is_bounded_by_a_share_of_what_is_left():
    # 16 - 4 - 4 reserve = 8 GiB, a quarter of it at 1 MiB per 1024 positions and 4 sessions.
    tight = load(sessions=4, specs=(FullSpec(8, 256, 256),))
    context, basis = auto_context(tight, 1 << 20, LoadGuard.RELAXED, 0)
    assert context == 64 * 1024
    assert basis == (
        "memory: KV may take 2048 MiB, 0.25 of 16384 MiB memory - 4096 MiB weights - 0 MiB experts "
        "- 4096 MiB reserve"
    )


def test_auto_context_below_the_asked_floor_is_refused_with_its_cause():
    with pytest.raises(OptionError, match=r"below min_auto_context=8192 \(trained: the model was"):
        auto_context(load(), 4096, LoadGuard.RELAXED, 8192)
    with pytest.raises(OptionError, match="declares no trained context"):
        auto_context(load(), None, LoadGuard.RELAXED, 8192)
    with pytest.raises(OptionError, match=r"\(memory: KV may take 0 MiB, 0\.25 of 16384 MiB"):
        auto_context(load(weights=12 * GIB), 1 << 20, LoadGuard.RELAXED, 8192)


def test_sessions_and_the_snapshots_they_may_keep_are_counted():
    recurrent = RecurrentSpec(4, 16, 8, 3, 40)
    state = kv_bytes([recurrent], 1000, 2, None)
    full = kv_bytes([FullSpec(1, 256, 256)], 1000, 2, None)
    plan = load(specs=(FullSpec(1, 256, 256), recurrent), sessions=3, snapshots=4)
    assert plan.kv(1000) == 3 * (full + 5 * state)


def test_an_explicit_context_that_does_not_fit_is_refused_with_the_subtraction():
    big = load(specs=(FullSpec(64, 256, 256),))
    with pytest.raises(OptionError) as caught:
        check_load(big, 1 << 18, LoadGuard.RELAXED)
    message = str(caught.value)
    assert "max_context=262144 needs 16384 MiB of KV" in message
    assert "8192 MiB are available: 16384 MiB memory - 4096 MiB weights" in message
    assert "largest context that fits is 131072" in message
    with pytest.raises(OptionError, match=r"0 MiB are available: .*; no context fits"):
        check_load(load(weights=12 * GIB), 1, LoadGuard.RELAXED)
    check_load(big, 1 << 18, LoadGuard.OFF)
    check_load(load(physical=0), 1 << 20, LoadGuard.RELAXED)


def test_a_byte_cap_bounds_slots_and_kv_together():
    with pytest.raises(
        OptionError, match=r"load_guard=1073741824 bytes caps expert slots .*: 805306368 \+ \d+ ="
    ):
        check_load(load(experts=768 << 20), 512 * 1024, 1 << 30)
    check_load(load(experts=256 << 20), 512 * 1024, 1 << 30)
