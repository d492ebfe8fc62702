"""Whole decode steps as CUDA would run them, every launch emulated, against ordinary layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator import emulate
from packed_models import FUSED, PLAIN, Side, config_of

from turbospark.cache.packed import PackedKV, packed_specs
from turbospark.cache.state import LayerStates
from turbospark.kernels import (
    decode_attention,
    expert_mlp,
    kv_encode,
    likeliest,
    packed_decode,
    packed_turn,
    qmv,
    rope_kv,
    router_topk,
)
from turbospark.kernels.source import Launch, Plan
from turbospark.layers import fused_decode

SIZES = dict(
    hidden_size=128,
    intermediate_size=96,
    moe_intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    num_hidden_layers=2,
)
INTEGERS = {mx.int32: np.int32, mx.uint32: np.uint32}
DENSE = ["qmv", "rope_kv", "attention_partial", "attention_combine", "qmv", "qmv", "qmv"]
PACKED = ["qmv", "rope", "packed_turn", "packed_partial", "packed_combine", "qmv", "qmv", "qmv"]
ROUTED = [*DENSE[:5], "qmv", "router_topk", "expert_gate_up", "expert_down"]
CASES = {
    "llama-bias": (mx.float32, DENSE, 2e-5),
    "mistral-sliding": (mx.bfloat16, DENSE, 2e-2),
    "qwen3_moe-base": (mx.float32, ROUTED, 2e-5),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was launched, in order, once the device claims to be a GPU of CUDA."""
    names: list[str] = []

    def run(plan: Plan, where: str, inputs: list[mx.array]) -> list[mx.array]:
        assert where == "cuda"
        names.append(plan.kernel.name)
        done = emulate(Launch(plan, inputs))
        given: dict[str, Any] = dict(zip(plan.kernel.inputs, inputs, strict=True))
        for name, values in done.updated.items():
            given[name][:] = mx.array(values.astype(np.float32)).astype(given[name].dtype)
        return [
            mx.array(values.astype(INTEGERS.get(dtype, np.float32))).astype(dtype)
            for values, (_, dtype) in zip(done.outputs, plan.outputs, strict=True)
        ]

    monkeypatch.setattr(Plan, "launch", run)
    modules = (decode_attention, expert_mlp, likeliest, qmv, rope_kv, router_topk, fused_decode)
    modules += (kv_encode, packed_decode, packed_turn)
    for module in modules:
        monkeypatch.setattr(module, "backend", lambda device: "cuda")
    return names


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_launches_gives_what_ordinary_layers_give(name: str, launched: list[str]) -> None:
    dtype, per_layer, tolerance = CASES[name]
    config = {**config_of(name), **SIZES}
    # A CPU's own products in 16 bits are too inexact to compare with.
    sides = [
        Side(config, PLAIN),
        Side(config, replace(FUSED, fused_rows=1), dtype=dtype),
    ]
    random = np.random.default_rng(7)
    # A prompt by ordinary layers where those are exact; then rows that turn the ring of 12 slots.
    for rows in (9, 1, 1, 1, 1, 1) if dtype == mx.float32 else [1] * 14:
        ids = random.integers(0, 100, rows).tolist()
        launched.clear()
        plain, fused = (side.feed(ids) for side in sides)
        assert float(np.abs(fused - plain).max()) < tolerance * float(np.abs(plain).max())
        expected = [*per_layer * 2, "qmv"] if rows == 1 else []
        kinds = [n.removesuffix("_matrix").removesuffix("_scalar") for n in launched]
        assert kinds == expected
    found = likeliest.likeliest(mx.array(fused[0]))
    assert found.tolist() == [int(fused[0].argmax())]
    assert launched[-2:] == ["likeliest_share", "likeliest_best"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, dtype) for name, (dtype, _, _) in CASES.items()), ("qwen3_moe-base", mx.bfloat16)],
    ids=[*CASES, "qwen3_moe-base in bfloat16"],
)
def test_a_layer_as_one_launch_gives_what_its_launches_give(
    name: str, dtype: mx.Dtype, launched: list[str]
) -> None:
    config = {**config_of(name), **SIZES}
    kernels = replace(FUSED, fused_rows=1)
    sides = [Side(config, k, dtype=dtype) for k in (kernels, replace(kernels, chained=True))]
    random = np.random.default_rng(7)
    for rows in (9, 1, 1, 1, 1, 1) if dtype == mx.float32 else [1] * 14:
        ids = random.integers(0, 100, rows).tolist()
        apart = sides[0].feed(ids)
        launched.clear()
        together = sides[1].feed(ids)
        np.testing.assert_array_equal(together, apart)
        kinds = [n.removesuffix("_matrix").removesuffix("_scalar") for n in launched]
        assert kinds == (["chain", "chain", "qmv"] if rows == 1 else [])


@pytest.mark.parametrize("dense", ["", "mlp.gate"])
@pytest.mark.parametrize(("rows", "most"), [(1, 512), (1, 3), (2, 512)])
def test_layers_are_one_launch_only_where_nothing_else_is_in_them(
    dense: str, rows: int, most: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_topk, "MAX_EXPERTS", most)
    config = {**config_of("qwen3_moe-base"), **SIZES}
    chained = replace(FUSED, fused_rows=2, chained=True)
    plain, fused = (Side(config, kernels, dense) for kernels in (PLAIN, chained))
    for ids in ([3] * 9, [5, 7][:rows]):
        launched.clear()
        want, got = plain.feed(ids), fused.feed(ids)
    assert float(np.abs(got - want).max()) < 2e-5 * float(np.abs(want).max())
    one = rows == 1 and most == 512 and not dense
    assert [n for n in launched if n == "chain"] == ["chain"] * 2 * one
    assert ("attention_partial" in launched) != one


def test_layers_over_caches_of_another_dtype_stay_apart(launched: list[str]) -> None:
    config = {**config_of("llama-bias"), **SIZES}
    sides = [Side(config, PLAIN), Side(config, replace(FUSED, fused_rows=1, chained=True))]
    for side in sides:
        side.states = LayerStates(side.model.cache_specs, 48, mx.float16, 12)
    for ids in ([3] * 9, [5], [7]):
        launched.clear()
        want, got = (side.feed(ids) for side in sides)
        assert float(np.abs(got - want).max()) < 5e-3 * float(np.abs(want).max())
    assert "chain" not in launched and "attention_partial" in launched


@pytest.mark.parametrize("bits", [(4, 4), (3, 3)])
def test_fused_layers_over_packed_caches_give_what_ordinary_layers_give(
    bits: tuple[int, int], launched: list[str]
) -> None:
    config = {**config_of("llama-bias"), **SIZES, "num_hidden_layers": 3}
    sides = [Side(config, PLAIN), Side(config, replace(FUSED, fused_rows=1))]
    specs = packed_specs(sides[0].model.cache_specs, *bits)[0]
    random = np.random.default_rng(7)
    for side, rows in zip(sides, (None, 8), strict=True):
        states = LayerStates(specs, 160, mx.float32)
        states.layers[:2] = [PackedKV(spec, 160, None, rows) for spec in specs[:2]]
        side.states = states
    for rows in (9, 60, *[1] * 30):
        ids = random.integers(0, 100, rows).tolist()
        launched.clear()
        plain, fused = (side.feed(ids) for side in sides)
        assert float(np.abs(fused - plain).max()) < 1e-2 * float(np.abs(plain).max())
        kinds = [n.removesuffix("_matrix").removesuffix("_scalar") for n in launched]
        kinds = [n for n in kinds if n != "kv_encode"]
        assert kinds == ([*PACKED * 2, *DENSE, "qmv"] if rows == 1 else [])
