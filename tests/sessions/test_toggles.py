"""Switches between equal ways of feeding a prompt: same bits, different counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conversation import KINDS, answer, open_cpu, ringed, same, tokens_of
from oracle_folders import ORACLES, Oracle

from turbospark import Runner, RuntimeToggles
from turbospark.counters import PhaseCounters
from turbospark.options import LiveToggles

LENGTH = 21
EXPERTS = ("gpt_oss-mxfp4", "mixtral-base", "deepseek_v2-lite", "qwen3_5_moe-base")
ARMS = {
    "batched_gemv_prefill": (None, False),
    "prefill_steel": (True, False),
    "prefill_rows_attention": (True, False),
    "routed_batch_prefill": (True, False),
}


def prompt_of(name: str) -> list[int]:
    return tokens_of(Oracle(ORACLES / name), LENGTH)


def counted(runner: Runner, prompt: list[int]) -> PhaseCounters:
    """What feeding `prompt` counts."""
    runner.reset()
    before = runner.phase_counters
    runner.prefill(prompt)
    return runner.phase_counters - before


def attention_layers(runner: Runner) -> int:
    assert runner._engine is not None
    return sum(not hasattr(c, "conv") for c in runner._engine.states.layers)


@pytest.mark.parametrize("name", [*KINDS, "mixtral-base", "qwen3_5_moe-base"])
@pytest.mark.parametrize("toggle", ARMS)
def test_both_arms_give_the_same_tokens_and_logits(
    name: str, toggle: str, installed: Callable[[str], Path]
) -> None:
    prompt = prompt_of(name)
    with open_cpu(installed(name), **ringed(name, 11)) as runner:
        plain = answer(runner, prompt, 4)
        for value in ARMS[toggle]:
            setattr(runner.toggles, toggle, value)
            assert same(answer(runner, prompt, 4), plain), value


@pytest.mark.parametrize("name", KINDS)
def test_each_arm_shows_in_the_counters(name: str, installed: Callable[[str], Path]) -> None:
    prompt = prompt_of(name)
    with open_cpu(installed(name)) as runner:
        toggles, layers = runner.toggles, attention_layers(runner)
        plain = counted(runner, prompt)
        assert (plain.calls, plain.passes, plain.attention_calls) == (LENGTH, 1, layers)
        toggles.prefill_rows_attention = False
        rows = counted(runner, prompt)
        assert (rows.passes, rows.attention_calls) == (1, layers * LENGTH)
        toggles.prefill_rows_attention = True
        toggles.prefill_steel = False
        sliced = counted(runner, prompt)
        assert (sliced.passes, sliced.attention_calls) == (6, layers * 6)
        toggles.batched_gemv_prefill = False
        single = counted(runner, prompt)
        assert (single.passes, single.attention_calls) == (LENGTH, layers * LENGTH)
        toggles.batched_gemv_prefill = True
        assert counted(runner, prompt).passes == 6
        toggles.prefill_steel = True
        assert counted(runner, prompt).passes == 1


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("residency", ["resident", "streamed", "mapped"])
def test_routes_of_a_chunk_go_together_or_token_by_token(
    name: str, residency: str, installed: Callable[[str], Path]
) -> None:
    prompt = prompt_of(name)
    with open_cpu(installed(name), expert_residency=residency) as runner:
        assert runner.toggles.has_effect("routed_batch_prefill")
        together, plain = counted(runner, prompt), answer(runner, prompt, 3)
        runner.toggles.routed_batch_prefill = False
        apart = counted(runner, prompt)
        assert apart.routed_passes % LENGTH == 0
        assert 0 < together.routed_passes < apart.routed_passes
        assert same(answer(runner, prompt, 3), plain)


@pytest.mark.parametrize("name", KINDS)
def test_has_effect_is_true_where_the_counters_can_tell(
    name: str, installed: Callable[[str], Path]
) -> None:
    with open_cpu(installed(name)) as runner:
        routed = runner.expert_residency == "streamed" and runner.arch.num_experts > 0
        expected = {
            "batched_gemv_prefill": True,
            "prefill_steel": True,
            "prefill_rows_attention": True,
            "routed_batch_prefill": routed,
            "routed_pipeline": routed,
            "qsa_force_dense": False,
            "mtp_batched_prime": False,
        }
        found = {toggle: runner.toggles.has_effect(toggle) for toggle in expected}
        assert found == expected


def test_single_rows_leave_nothing_for_the_toggles_of_several_rows(
    installed: Callable[[str], Path],
) -> None:
    prompt = prompt_of("gpt_oss-mxfp4")
    several = ("prefill_steel", "prefill_rows_attention", "routed_batch_prefill")
    with open_cpu(installed("gpt_oss-mxfp4")) as runner:
        runner.toggles.batched_gemv_prefill = False
        plain = counted(runner, prompt)
        for toggle in several:
            assert not runner.toggles.has_effect(toggle)
            setattr(runner.toggles, toggle, False)
            now = counted(runner, prompt)
            assert (now.passes, now.attention_calls, now.routed_passes) == (
                plain.passes, plain.attention_calls, plain.routed_passes
            )  # fmt: skip
        assert runner.toggles.has_effect("batched_gemv_prefill")
        runner.toggles.batched_gemv_prefill = None
        assert all(runner.toggles.has_effect(toggle) for toggle in several)


def test_toggles_set_at_open_hold_from_the_first_prompt(installed: Callable[[str], Path]) -> None:
    toggles = RuntimeToggles(prefill_steel=False, prefill_rows_attention=False)
    with open_cpu(installed("llama-base"), toggles=toggles) as runner:
        assert isinstance(runner.toggles, LiveToggles)
        found = counted(runner, prompt_of("llama-base"))
        assert (found.passes, found.attention_calls) == (6, 2 * LENGTH)
        assert np.isfinite(np.array(runner.step(1))).all()
