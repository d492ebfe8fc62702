"""Tokens and logits do not depend on where experts live: bit for bit, with counters as proof that
each path ran.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracle_folders import ORACLES

from turbospark import OpenOptions, Runner, RuntimeToggles
from turbospark.counters import PhaseCounters

FAMILIES = {
    "mixtral-base": False,
    "qwen3_moe-base": False,
    "gpt_oss-mxfp4": False,
    "gemma4-26b-a4b": True,
    "qwen3_5_moe-base": True,
    "deepseek_v2-full": True,
}
"""A model of every family with routed experts -> whether something runs beside them."""
QUANTIZED = (
    "mlx-mixtral-base-4bit",
    "mlx-qwen3_moe-base-4bit",
    "mlx-gemma4-26b-a4b-4bit",
    "mlx-qwen3_5_moe-base-4bit",
)
STEPS = 6


class Answer:
    """What a runner says about a prompt: all logits, those of a chunked prefill, then greedily."""

    def __init__(self, runner: Runner, ids: list[int]) -> None:
        before = runner.phase_counters
        runner.reset()
        rows = [np.array(runner.score(ids))]
        runner.reset()
        last = np.array(runner.prefill(ids, chunk=7))
        for _ in range(STEPS):
            rows.append(last)
            last = np.array(runner.step(int(last.argmax())))
        self.rows = rows
        self.spent = runner.phase_counters - before

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        return all(np.array_equal(a, b) for a, b in zip(self.rows, other.rows, strict=True))


class Model:
    def __init__(self, name: str, path: Path) -> None:
        with np.load(ORACLES / name / "oracle.npz") as arrays:
            self.ids = arrays["input_ids"][0].tolist()
        self.name, self.path = name, path
        with self.open(expert_residency="resident") as runner:
            self.top_k = runner.arch.top_k_experts
            self.answer = Answer(runner, self.ids)

    def open(self, **options: Any) -> Runner:
        toggles = RuntimeToggles(**options.pop("toggles", {}))
        room = len(self.ids) + STEPS + 1
        return Runner.open(self.path, OpenOptions(max_context=room, toggles=toggles, **options))


@pytest.fixture(scope="module", params=(*FAMILIES, *QUANTIZED))
def model(request: pytest.FixtureRequest, installed: Callable[[str], Path]) -> Model:
    return Model(request.param, installed(request.param))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, installed: Callable[[str], Path]) -> Model:
    return Model(request.param, installed(request.param))


def check_reads(runner: Runner, spent: PhaseCounters) -> None:
    """Bytes read are the misses' records; all layers of these models have the same stride."""
    slots, planned = runner.expert_cache_slots, runner.memory.experts
    layers = planned // slots // 16384
    assert planned == slots * layers * 16384
    misses = spent.expert_requests - spent.expert_hits
    assert spent.expert_io_bytes_requested == misses * 16384


@pytest.mark.parametrize("slots", ["top k", "one more", "all"])
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_slots_and_policies(model: Model, slots: str, policy: str) -> None:
    count = {"top k": model.top_k, "one more": model.top_k + 1, "all": 64}[slots]
    with model.open(expert_cache_slots=count, expert_cache_policy=policy) as runner:
        cold, warm = Answer(runner, model.ids), Answer(runner, model.ids)
        assert cold == model.answer and warm == model.answer
        assert cold.spent.expert_io_bytes_requested > 0
        if slots == "all":
            assert warm.spent.expert_hits == warm.spent.expert_requests > 0
            assert warm.spent.expert_io_bytes_requested == 0
        else:
            assert warm.spent.expert_hits < warm.spent.expert_requests
        check_reads(runner, cold.spent)
        assert cold.spent.prefetch_requests == 0


def test_look_ahead(model: Model) -> None:
    with model.open(expert_cache_slots=model.top_k + 1, expert_lookahead=True) as runner:
        found = Answer(runner, model.ids)
        assert found == model.answer
        check_reads(runner, found.spent)
        assert found.spent.prefetch_requests > 0
        assert found.spent.prefetch_bytes == found.spent.prefetch_requests * 16384
        assert 0 < found.spent.prefetch_hits <= found.spent.prefetch_requests


def test_mapped(model: Model) -> None:
    with model.open(expert_residency="mapped", expert_cache_slots=1) as runner:
        found = Answer(runner, model.ids)
        assert found == model.answer
        assert found.spent.expert_hits == found.spent.expert_requests > 0
        assert found.spent.expert_io_bytes_requested == 0
        assert runner.expert_residency == "mapped"
        how = "zero-copy" if mx.metal.is_available() else "copied per use"
        assert runner.resolved.expert_mapping == how
        assert runner.expert_cache_slots == model.top_k  # the scratch holds a token's experts


def test_verified_reads(model: Model) -> None:
    for residency in ("streamed", "mapped", "resident"):
        with model.open(expert_residency=residency, verify_reads=True) as runner:
            assert Answer(runner, model.ids) == model.answer


@pytest.mark.parametrize("residency", ["streamed", "mapped", "resident"])
def test_both_arms_of_every_expert_toggle(family: Model, residency: str) -> None:
    """Each arm gives the same bits, and a counter tells the arms apart exactly where
    `has_effect` says that the toggle is read.
    """
    ran = {"routed_pipeline": "routed_deferred", "shared_expert_overlap": "shared_started"}
    read = {
        "routed_pipeline": residency == "streamed",
        "shared_expert_overlap": residency != "resident" and FAMILIES[family.name],
    }
    with family.open(expert_residency=residency, expert_cache_slots=family.top_k + 1) as runner:
        passes = {}
        for name in (*ran, "routed_batch_prefill"):
            for value in (True, False):
                setattr(runner.toggles, name, value)
                found = Answer(runner, family.ids)
                assert found == family.answer
                if name in ran:
                    assert runner.toggles.has_effect(name) == read[name]
                    assert (getattr(found.spent, ran[name]) > 0) == (value and read[name])
                else:
                    passes[value] = found.spent.routed_passes
            setattr(runner.toggles, name, True)
        assert runner.toggles.has_effect("routed_batch_prefill")
        assert passes[True] < passes[False]


def test_other_toggles_while_streaming(family: Model) -> None:
    with family.open(expert_cache_slots=family.top_k + 1) as runner:
        for name in ("batched_gemv_prefill", "prefill_steel", "prefill_rows_attention"):
            setattr(runner.toggles, name, False)
            assert Answer(runner, family.ids) == family.answer
            setattr(runner.toggles, name, True)


def test_a_dense_model_has_no_effect_of_expert_toggles(installed: Callable[[str], Path]) -> None:
    with Runner.open(installed("llama-base"), OpenOptions(max_context=64)) as runner:
        for name in ("shared_expert_overlap", "routed_pipeline", "routed_batch_prefill"):
            assert not runner.toggles.has_effect(name)
        assert runner.expert_cache_slots == 0 and runner.memory.experts == 0
