"""Launches as phases of one: emulated against numpy, and mistakes planted into waits and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, error, floats, normal, packed
from emulator import EmulationError, emulate
from emulator.cuda_text import compile_cuda

from turbospark.dtypes import affine
from turbospark.kernels import chain, qmv_matrix, rope_kv
from turbospark.kernels.fused import Around
from turbospark.kernels.source import Launch, Plan, recorder

HIDDEN, WIDTH, DTYPE = 256, 192, mx.bfloat16
FMT = affine(4, 64)
TUNING = qmv_matrix.Tuning(1, 4)
UP = packed((2 * WIDTH, HIDDEN), FMT, 1)
DOWN = packed((HIDDEN, WIDTH), FMT, 2)
X = normal((1, 1, HIDDEN), DTYPE, 3)
NORM = normal((HIDDEN,), DTYPE, 4)


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    chain.chained.cache_clear()
    yield
    chain.chained.cache_clear()


def product(x: Any, w: Any, around: Around, simdgroups: int) -> Any:
    tuning = replace(TUNING, simdgroups=simdgroups)
    launch = qmv_matrix.launch(x, FMT, w.weight, w.scales, w.biases, around, tuning)
    return launch.run("cuda")[0]


def mlp(last: int = 4) -> Any:
    """x + down(silu(gate norm x) * up norm x), of launches of different sizes."""
    hidden = product(X, UP, Around(NORM, 1e-5, glu="silu"), 4)
    return product(hidden, DOWN, Around(residual=X), last)


def wanted() -> np.ndarray:
    x = floats(X).reshape(-1)
    normed = x / np.sqrt(np.mean(x * x) + 1e-5) * floats(NORM)
    gate, up = np.split(UP.values @ normed, 2)
    return x + DOWN.values @ (gate / (1 + np.exp(-gate)) * up)


def as_launch(steps: Callable[[], Any], count: mx.array | None = None) -> Launch:
    """What `as_one` would launch."""
    found: list[Launch] = []

    def launch(plan: Plan, where: str, inputs: list[mx.array]) -> list[mx.array]:
        found.append(Launch(plan, inputs))
        return [X]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "launch", launch)
        chain.as_one("cuda", chain.counters() if count is None else count, steps)
    (only,) = found
    return only


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("last", [1, 3, 4, 8])
def test_launches_of_any_sizes_are_phases_of_one(last: int, seed: int) -> None:
    done = emulate(as_launch(lambda: mlp(last)), seed)
    assert error(done.outputs[0].reshape(-1), wanted()) < 3 * TOLERANCE[DTYPE]
    assert not done.updated["counters"].any()


def test_equal_phases_are_planned_once() -> None:
    first, second = as_launch(mlp), as_launch(mlp)
    assert first.plan is second.plan
    assert as_launch(lambda: mlp(3)).plan is not first.plan


def test_buffers_written_in_place_stay_so() -> None:
    heads, turn = rope_kv.Heads(2, 1, 64), rope_kv.Turn(64, mx.ones((32,)) * 3)
    keys, values = normal((1, 1, 8, 64), DTYPE, 5), normal((1, 1, 8, 64), DTYPE, 6)
    length = mx.array([5], dtype=mx.int32)
    w = packed((256, HIDDEN), FMT, 7)

    def steps() -> Any:
        qkv = product(X, w, Around(), 4)
        return rope_kv.launch_store(qkv, keys, values, length, heads, turn).run("cuda")[0]

    launch = as_launch(steps)
    done = emulate(launch)
    names = dict(zip(launch.plan.kernel.inputs, launch.inputs, strict=True))
    stored = {n: done.updated[n] for n in launch.plan.kernel.updates if names.get(n) is values}
    ((_, rows),) = stored.items()
    want = (w.values @ floats(X).reshape(-1))[192:]
    assert error(rows[0, 0, 4], want) < TOLERANCE[DTYPE]
    kept = [0, 1, 2, 3, 5, 6, 7]
    np.testing.assert_array_equal(rows[0, 0, kept], floats(values)[0, 0, kept])


def test_an_intermediate_written_in_place_is_no_argument() -> None:
    heads, turn = rope_kv.Heads(2, 1, 64), rope_kv.Turn(64, mx.ones((32,)) * 3)
    values, length = normal((1, 1, 8, 64), DTYPE, 6), mx.array([5], dtype=mx.int32)
    w, cache = packed((256, HIDDEN), FMT, 7), packed((8 * 64, HIDDEN), FMT, 8)

    def steps() -> Any:
        qkv, keys = product(X, w, Around(), 4), product(X, cache, Around(), 4)
        keys = keys.reshape((1, 1, 8, 64))
        return rope_kv.launch_store(qkv, keys, values, length, heads, turn).run("cuda")[0]

    launch = as_launch(steps)
    names = dict(zip(launch.plan.kernel.inputs, launch.inputs, strict=True))
    updated = [names[n] for n in launch.plan.kernel.updates if n != "counters"]
    assert len(updated) == 1 and updated[0] is values


def test_a_phase_that_carves_more_than_there_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = emulate(as_launch(mlp)).threadgroup_bytes
    for pool in (needed, needed - 16):
        chain.chained.cache_clear()
        monkeypatch.setattr(chain, "POOL", pool)
        launch = as_launch(mlp)
        if pool == needed:
            emulate(launch)
        else:
            with pytest.raises(EmulationError, match=f"memory {needed} bytes, limit {pool}"):
                emulate(launch)


def test_the_last_phase_signals_nothing() -> None:
    """Nobody waits for it: a signal could arrive after the last leaver has reset the counters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "_END", chain._END.replace("] = 0", "] += 0"))
        done = emulate(as_launch(mlp)).updated["counters"][:: chain.LINE]
    first = qmv_matrix.plan(FMT, 2 * WIDTH, X.shape, DTYPE, Around(NORM, glu="silu").parts, TUNING)
    assert done[2:].tolist() == [first.groups[0]] + [0] * (chain.MOST_PHASES - 2)


def test_nothing_is_recorded_behind_an_error() -> None:
    def broken() -> Any:
        mlp()
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        chain.as_one("cuda", chain.counters(), broken)
    assert recorder.get() is None


def test_the_cuda_text_compiles_without_spills() -> None:
    compiled = compile_cuda(as_launch(mlp))
    assert compiled.spilled == 0 and compiled.registers < 255


MISTAKES = {
    "nobody waits": ("HEADER", "TS_WAIT(ts_last, ts_need);", ""),
    "waits for one too many": ("HEADER", "ts_need);", "ts_need + 1);"),
    "waits for one too few": ("HEADER", "ts_need);", "ts_need - 1);"),
    "signals under a wrong phase": ("_END", "ts_count + ts_done", "ts_count + 3 * TS_LINE"),
    "signals one ticket of all": ("_END", "ts_done, ts_mine)", "ts_done, 1)"),
    "no barrier behind a ticket": ("_END", "ts_barrier_device();", ""),
    "counters stay": ("_END", "ts_count[i * TS_LINE] = 0", "ts_count[i * TS_LINE] += 0"),
    "the last leaver is the first": ("_END", "TS_GROUPS - 1", "0"),
    "short threadgroups do all": ("HEADER", "ts_barrier_of(ts_threads)", "ts_barrier_device()"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part, old, new = MISTAKES[name]
    text = getattr(chain, part)
    assert text.count(old) == 1, f"cannot be planted: {old!r}"
    monkeypatch.setattr(chain, part, text.replace(old, new))
    monkeypatch.setattr(chain, "GROUPS", 3)
    right = True
    for seed in (0, 3):
        try:
            done = emulate(as_launch(lambda: mlp(3)), seed)
        except EmulationError:
            right = False
        else:
            near = error(done.outputs[0].reshape(-1), wanted()) < 3 * TOLERANCE[DTYPE]
            right &= near and not done.updated["counters"].any()
    assert not right
