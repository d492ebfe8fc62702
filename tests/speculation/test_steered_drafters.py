"""MTP heads and block drafters beside steering, packed keys and values, and a steered past."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import blocks
import heads
import mlx.core as mx
import numpy as np
import pytest
from numpy_heads import NumpyHead
from test_block_drafter import NumpyDrafter, tables

from turbospark import DraftPolicies, OpenOptions, Runner, convert
from turbospark.speculation.drafter import Proposal
from turbospark.steering import SteeringPolicy, SteeringSet

CPU: dict[str, Any] = {"max_context": 160, "device": "cpu", "dtype": "float32"}
GREEDY: dict[str, Any] = {"max_new_tokens": 25, "temperature": 0, "ignore_eos": True}
PROMPT = [int(i) for i in np.random.default_rng(3).integers(4, 90, 37)]
LAYERS, HIDDEN = 3, 32
DIRECTIONS = {i: np.random.default_rng(i).standard_normal(HIDDEN) for i in range(LAYERS)}
STEERING = SteeringPolicy.single(SteeringSet.of(DIRECTIONS))
BOUNDED = ("mtp", "mixture", "dflash", "dflash, knowing")
WHO = ("mtp", "mtp, knowing", "mixture", "mixture, knowing", "dflash", "dflash, knowing")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs by the drafter they carry, each made once."""
    done: dict[str, Path] = {}

    def make(who: str, base: str = heads.BASE) -> Path:
        root = tmp_path_factory.mktemp("carried")
        knows = who.endswith("knowing")
        if who + base in done:
            return done[who + base]
        if who.startswith("dflash"):
            source = heads.checkpoint(root / "model-source", honest=knows, base=base)
            ours = {"rank": HIDDEN, "knows": source} if knows else {}
            own = {**blocks.OWN, "selector_rank": HIDDEN, "selector_top_k": 101}
            changes = {"dflash_config": own} if knows else {}
            folder = blocks.drafter(root / "drafter", **ours, **changes)
            path = convert(source, root / "model", drafter=folder, progress=False)
        else:
            base = heads.MIXTURE if who.startswith("mixture") else base
            path = heads.install(root / "model", honest=knows, base=base)
        return done.setdefault(who + base, path)

    return make


def opened(path: Path, who: str, width: int = 4, **options: Any) -> Runner:
    policy = DraftPolicies(**{"dflash" if who.startswith("dflash") else "mtp": width})
    if who.startswith("mixture"):
        options |= {"expert_residency": "streamed", "expert_cache_slots": 2}
    return Runner.open(path, OpenOptions(**{**CPU, **options}, speculation=policy))


# --- what the drafters read -----------------------------------------------------------------------


def steered_pass(runner: Runner, ids: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """(rows after the final norm, steered streams by layer) of a pass steered by hand."""
    engine, found = runner._engine, []
    assert engine is not None

    def ablated(layer: int, x: mx.array) -> mx.array:
        unit = mx.array((DIRECTIONS[layer] / np.linalg.norm(DIRECTIONS[layer])).astype(np.float32))
        x = x - (x @ unit)[..., None] * unit
        found.append(np.array(x[0], np.float64))
        return x

    engine.states.reset()
    engine.states.begin(len(ids))
    hidden = engine.model(mx.array([ids]), engine.states, ablated)
    rows = np.array(engine.model.final_norm(hidden)[0], np.float64)
    engine.states.reset()
    return rows, found


@pytest.mark.parametrize("who", ["mtp", "mixture"])
def test_a_head_reads_the_steered_stream(made: Callable[[str], Path], who: str) -> None:
    path, rows = made(who), []
    with opened(path, who, steering=STEERING) as runner:
        runner.prefill(PROMPT, chunk=9)
        engine = runner._engine
        assert engine is not None and engine.watcher is not None

        def choose(row: np.ndarray, before: Any) -> Proposal:
            rows.append(np.array(row))
            return Proposal(5)

        with engine.working():
            engine.watcher.propose([*PROMPT, 9], 1, choose)
        hidden, _ = steered_pass(runner, PROMPT)
    expected, _ = NumpyHead(path)([*PROMPT[1:], 9], hidden)
    np.testing.assert_allclose(rows[0], expected, atol=1e-4)


def test_a_block_drafter_reads_the_steered_stream(made: Callable[[str], Path]) -> None:
    path = made("dflash")
    with opened(path, "dflash", steering=STEERING) as runner:
        runner.prefill(PROMPT, chunk=9)
        engine = runner._engine
        assert engine is not None and engine.watcher is not None
        drafter: Any = engine.watcher
        with engine.working():
            found = [p.token for p in drafter.propose([*PROMPT, 11], 4, None)]
            hidden = drafter.model.block(11, len(PROMPT), drafter._caches(engine.states))
            hidden = np.array(hidden[0])
        _, streams = steered_pass(runner, PROMPT)
    taps = np.concatenate([streams[layer] for layer in (0, 2)], -1)
    expected, rows = NumpyDrafter(path.with_name("drafter"), *tables(path))(11, taps, 4)
    np.testing.assert_allclose(hidden, rows, atol=1e-4)
    assert found == expected


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "width"),
    # A block has four masks; where nothing is accepted all widths are alike.
    [(who, n) for who in WHO for n in ((1, 3, 4) if who in BOUNDED else range(1, 9))],
)
def test_steered_answers_are_those_of_steered_sequential_decoding(
    made: Callable[[str], Path], who: str, width: int
) -> None:
    with opened(made(who), who, width, steering=STEERING, prefix_reuse=True) as runner:
        drafted = runner.generate(PROMPT, **GREEDY)
        position, reported = runner.position, runner.steering_coefficients
        follow = [*PROMPT, *drafted.token_ids, 5, 6]
        again = runner.generate(follow, **GREEDY)
        assert again.reused_prefix_tokens == position == len(PROMPT) + 24
        stats, total = drafted.speculation, runner.speculation
        assert stats is not None and total == stats + again.speculation
        assert drafted.phases.passes == 2 + stats.rounds  # a prompt is fed in two
        assert stats.accepted > 0 if who.endswith("knowing") else stats.rollbacks > 0
        runner.reset()
        plain = runner.generate(PROMPT, **GREEDY, draft_tokens=0)
        assert drafted.token_ids == plain.token_ids
        assert drafted.kv_backed_token_ids == plain.kv_backed_token_ids
        assert runner.steering_coefficients == reported and None not in reported[0]
        assert again.token_ids == runner.generate(follow, **GREEDY, draft_tokens=0).token_ids
        runner.set_steering(None)
        assert runner.generate(PROMPT, **GREEDY).token_ids != plain.token_ids


def test_a_block_drafter_that_knows_its_model_is_accepted(made: Callable[[str], Path]) -> None:
    with opened(made("dflash, knowing"), "dflash") as runner:
        drafted = runner.generate(PROMPT, **GREEDY)
        plain = runner.generate(PROMPT, **GREEDY, draft_tokens=0)
        assert drafted.token_ids == plain.token_ids and len(set(plain.token_ids)) > 2
        assert drafted.speculation is not None
        assert drafted.speculation.per_position_acceptance == (1, 1, 1, 1)
        assert drafted.speculation.rounds == 5


@pytest.mark.parametrize("who", ["mtp", "mtp, knowing", "dflash", "dflash, knowing"])
def test_packed_keys_and_values_are_verified_for_both_drafters(
    made: Callable[..., Path], who: str
) -> None:
    path, prompt = made(who, "qwen3_5-irregular"), (PROMPT * 7)[:230]
    options = {"kv_quant": 4, "max_context": 400, "session_slots": 2, "prefix_reuse": True}
    with opened(path, who, 3, **options) as runner:
        assert runner.resolved.kv_quantized_layers == (1,)
        drafted = runner.generate(prompt, **GREEDY)
        other = runner.generate(prompt[::-1], **GREEDY)  # parks the first conversation
        follow = [*prompt, *drafted.token_ids, 5, 6]
        again = runner.generate(follow, **GREEDY)
        assert again.reused_prefix_tokens == len(prompt) + 24
        assert drafted.speculation is not None
        if who.endswith("knowing"):
            assert drafted.speculation.per_position_acceptance == (1, 1, 1)
        else:
            assert drafted.speculation.rollbacks > 0
        runner.reset()
        for asked, found in ((prompt, drafted), (prompt[::-1], other), (follow, again)):
            plain = runner.generate(asked, **GREEDY, draft_tokens=0)
            assert plain.token_ids == found.token_ids
            assert plain.reused_prefix_tokens == found.reused_prefix_tokens
