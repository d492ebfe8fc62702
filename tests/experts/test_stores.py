"""Streamed, mapped and resident experts against numpy and each other, with counters."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from layouts import Q4, F, H, Store, dense_experts, reference, request, uniform, write_layout

from turbospark.dtypes import Raw, affine
from turbospark.experts.policy import SlotCache
from turbospark.experts.slots import SlotPool
from turbospark.install.planes import host_view
from turbospark.layers.moe import swiglu

MIXED = {
    0: {"gate": Q4, "up": Q4, "down": Q4},
    2: {"gate": affine(3, 64), "up": affine(8, 32, "float16"), "down": affine(8, 128, "float32")},
    3: {"gate": Raw("bfloat16"), "up": Raw("bfloat16"), "down": Raw("bfloat16")},
    7: {"gate": Q4, "up": affine(6, 64), "down": Raw("float16")},
}
"""Widths, group sizes and companions that differ per layer and per projection."""

STORES = {
    "resident": {"residency": "resident"},
    "streamed, few slots": {"slots": 4},
    "streamed, an odd number of slots": {"slots": 5},
    "streamed, a slot for every expert": {"slots": 12},
    "streamed, least recently used": {"slots": 4, "policy": "lru"},
    "streamed, an array per plane": {"slots": 4, "strided": False},
    "streamed, no pipeline": {"slots": 4, "toggles": {"routed_pipeline": False}},
    "streamed, token by token": {"slots": 4, "toggles": {"routed_batch_prefill": False}},
    "streamed, verified": {"slots": 4, "verify_reads": True},
    "mapped": {"residency": "mapped", "slots": 4},
    "mapped, token by token": {
        "residency": "mapped", "slots": 4, "toggles": {"routed_batch_prefill": False},
    },
    "mapped, an array per plane": {"residency": "mapped", "slots": 4, "strided": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory):
    return write_layout(tmp_path_factory.mktemp("mixed"), MIXED, 12)


@pytest.mark.parametrize("name", STORES)
def test_experts_of_different_widths_compute_what_numpy_computes(mixed, name: str) -> None:
    store, plain = Store(mixed, **STORES[name]), Store(mixed, "resident")
    dense, rng = dense_experts(mixed), np.random.default_rng(3)
    for tokens in (1, 1, 30, 1, 7, 2):
        for layer in MIXED:
            x, ids, weights = request(rng, tokens, range(12), 4)
            found = store.ask(layer, x, ids, weights)
            np.testing.assert_allclose(
                found, reference(dense, layer, x, ids, weights), rtol=0, atol=2e-5
            )
            assert np.array_equal(found, plain.ask(layer, x, ids, weights))


def test_layers_keep_strides_of_their_own(mixed) -> None:
    strides = {layer.stride for layer in mixed.layers.values()}
    assert len(strides) > 1
    store = Store(mixed, slots=4).store
    assert store.nbytes == 4 * sum(layer.stride for layer in mixed.layers.values())
    assert store.formula == f"4 slots x {mixed.bytes_per_slot} bytes (one record in 4 layers)"


# --- counters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory):
    """64 experts in 2 layers."""
    return write_layout(tmp_path_factory.mktemp("wide"), uniform(2), 64)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_the_cap_holds_when_the_working_set_changes(wide, policy: str) -> None:
    """Prompt A needs experts 0-15, prompt B 48-63; 8 slots, top 4."""
    store, rng = Store(wide, slots=8, policy=policy), np.random.default_rng(0)
    stride, before = wide.layers[0].stride, store.counters
    cap = 8 * 2 * stride
    allocated = None
    for experts in (range(16), range(48, 64), range(16)):
        for tokens in (24, 1, 1, 1, 1, 24, 1):
            for layer in (0, 1):
                store.ask(layer, *request(rng, tokens, experts, 4))
                now = store.counters
                misses = now.expert_requests - now.expert_hits
                assert now.expert_io_bytes_requested == misses * stride
                assert all(
                    (new or 0) >= (old or 0)
                    for new, old in zip(
                        now.as_dict().values(), before.as_dict().values(), strict=True
                    )
                )
                assert store.store.nbytes <= cap and store.store.buffers == 2
                held = [e for e in store.store.layers[layer].cache.held if e >= 0]
                assert len(held) == len(set(held)) <= 8
                before = now
        if allocated is None:
            allocated = mx.get_active_memory()
    assert mx.get_active_memory() <= allocated + stride


@pytest.mark.parametrize("slots", [4, 6, 20])
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_decoding_evicts_exactly_what_the_policy_says(wide, slots: int, policy: str) -> None:
    """Finished work of an earlier token keeps no slot out of the policy's reach."""
    store, rng = Store(wide, slots=slots, policy=policy), np.random.default_rng(2)
    alone = SlotCache(slots, 64, policy)
    for _ in range(60):
        x, ids, weights = request(rng, 1, rng.permutation(64)[:12].tolist(), 4)
        store.ask(0, x, ids, weights)
        alone.commit(alone.plan(ids[0].tolist()))
        assert store.store.layers[0].cache.held == alone.held


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("slots", [4, 5, 9, 16, 64])
def test_a_chunk_reads_each_needed_expert_at_most_once(wide, slots: int, pipeline: bool) -> None:
    store = Store(wide, slots=slots, toggles={"routed_pipeline": pipeline})
    rng = np.random.default_rng(1)
    for _ in range(3):
        x, ids, weights = request(rng, 50, range(64), 4)
        cached = {e for e in store.store.layers[0].cache.held if e >= 0}
        needed = set(ids.flatten().tolist())
        before = store.counters
        store.ask(0, x, ids, weights)
        spent = store.counters - before
        assert spent.expert_requests == len(needed) > slots // 2
        assert spent.expert_hits == len(needed & cached)  # none was evicted before its turn
        misses = len(needed - cached)
        assert spent.expert_io_bytes_requested == misses * wide.layers[0].stride


def test_mapped_experts_hit_always_and_read_nothing(wide) -> None:
    store, rng = Store(wide, "mapped", slots=4), np.random.default_rng(1)
    for tokens in (1, 40):
        store.ask(0, *request(rng, tokens, range(64), 4))
    seen = store.counters
    assert seen.expert_requests == seen.expert_hits > 4
    assert seen.expert_io_bytes_requested == 0
    assert store.store.nbytes == 4 * wide.layers[0].stride  # the scratch, for both layers
    assert "copied per use" in store.store.formula


def test_disk_bytes_are_none_until_they_are_measured(wide) -> None:
    rng = np.random.default_rng(1)
    store = Store(wide)
    store.ask(0, *request(rng, 1, range(64), 4))
    assert store.counters.expert_io_bytes_physical is None
    assert store.counters.expert_io_samples == 0


def test_disk_bytes_are_zero_when_warm_and_real_when_cold(wide, cold) -> None:
    x, ids, weights = request(np.random.default_rng(1), 1, range(64), 4)
    for residency in ("streamed", "mapped"):
        store = Store(wide, residency, measure_disk=True)
        cold(wide.layers[0].path)
        store.ask(0, x, ids, weights)
        seen = store.counters
        assert seen.expert_io_bytes_physical >= 4 * wide.layers[0].stride
        assert seen.expert_io_samples == 1
        if residency == "streamed":
            store.store.layers[0].cache.held = [-1] * 4
        store.ask(0, x, ids, weights)
        assert (store.counters - seen).expert_io_bytes_physical == 0
        assert store.counters.expert_io_samples == 2


# --- slot memory ----------------------------------------------------------------------------------


def test_pools_stay_where_they_are_over_many_tokens(wide) -> None:
    """Host writes go to the memory that the views see: MLX must not have moved it."""
    store, rng = Store(wide, slots=5), np.random.default_rng(4)
    pools = [layer.pool for layer in store.store.layers.values()]
    places = [[row.ctypes.data for room in p.rooms for row in room.planes] for p in pools]
    for _ in range(100):
        for layer in (0, 1):
            store.ask(layer, *request(rng, 1, range(64), 4))
    for pool, addresses in zip(pools, places, strict=True):
        whole = host_view(pool._pools[0])
        assert [row.ctypes.data for room in pool.rooms for row in room.planes] == addresses
        assert whole.ctypes.data <= addresses[0] < whole.ctypes.data + whole.nbytes


@pytest.mark.parametrize("strided", [True, False])
def test_work_begun_before_a_slot_is_refilled_keeps_its_bytes(wide, strided: bool) -> None:
    """A lazy graph evaluated after its slot was overwritten would see the new bytes."""
    pool = SlotPool(wide.layers[0].record, 1, swiglu, strided)
    record = np.random.default_rng(0).integers(0, 60, wide.layers[0].stride, dtype=np.uint8)
    room = pool.rooms[0]
    for offset, buffer in room.segments:
        buffer[:] = record[offset : offset + buffer.nbytes]
    x, which = mx.ones((1, H)), mx.array([[0]], dtype=mx.uint32)
    expected = np.array(pool.mlp.routes(x, which))
    y = pool.mlp.routes(x, which)
    pool.hold([0], y)
    assert pool.busy == {0}
    pool.release()
    assert pool.busy == set()
    for _, buffer in room.segments:
        buffer[:] = 1
    assert np.array_equal(np.array(y), expected)
    assert not np.array_equal(np.array(pool.mlp.routes(x, which)), expected)


def test_slots_that_unfinished_work_reads_are_not_given_up(wide) -> None:
    store = Store(wide, slots=4)
    layer = store.store.layers[0]
    store.store._admit(layer, [0, 1])
    y = mx.ones((1,)) * 2
    layer.pool.hold([0, 1], y)
    assert store.store._admit(layer, [2, 3]) == (2, 3)
    assert layer.pool.busy == {0, 1}  # nothing had to be waited for
    assert set(store.store._admit(layer, [4, 5, 6])) >= {0}
    assert layer.pool.busy == set()


def test_unquantized_experts_are_cast_a_few_at_a_time(tmp_path: Path) -> None:
    """bf16 weights are multiplied in float32 on a CPU; a cast of the whole pool would not do."""
    raw = {r: Raw("bfloat16") for r in ("gate", "up", "down")}
    layout = write_layout(tmp_path, {0: raw}, 64)
    store = Store(layout, slots=64)
    x, ids, weights = request(np.random.default_rng(1), 1, range(64), 2)
    store.ask(0, x, ids, weights)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    store.ask(0, x, ids, weights)
    assert mx.get_peak_memory() - before < 10 * 2 * F * H * 4


def test_closing_gives_the_memory_back(wide) -> None:
    before = mx.get_active_memory()
    for residency in ("streamed", "mapped", "resident"):
        store = Store(wide, residency, slots=32)
        store.ask(0, *request(np.random.default_rng(1), 1, range(64), 4))
        assert mx.get_active_memory() > before + 2**17
        store.store.close()
        assert mx.get_active_memory() < before + 2**16
