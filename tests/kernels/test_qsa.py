"""Block-sparse kernels: emulated, plain version, and float64 or integer loops."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, error, floats, normal
from emulator import EmulationError, emulate

from turbospark.kernels import qsa_attend, qsa_score, qsa_select
from turbospark.kernels.qsa import Rule, choose_and_attend


def at(position: int) -> mx.array:
    return mx.array([position], dtype=mx.int32)


# --- scores ---------------------------------------------------------------------------------------

SCORES = {  # heads, dim, rows, start, capacity, ratio, dtype
    "published": (4, 128, 1, 1000, 300, 4, mx.bfloat16),
    "three rows that end a block": (4, 128, 3, 61, 40, 4, mx.float32),
    "three heads of 64": (3, 64, 2, 97, 50, 3, mx.float32),
    "one head of 256": (1, 256, 2, 40, 50, 1, mx.float16),
    "four heads of 32": (4, 32, 1, 250, 64, 4, mx.float32),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_a_float64_loop(name: str) -> None:
    heads, dim, rows, start, capacity, ratio, dtype = SCORES[name]
    queries, keys = normal((rows, heads, dim), dtype, 0), normal((capacity, dim), dtype, 1)
    q, k = floats(queries), floats(keys)
    plain = floats(qsa_score.block_scores_reference(queries, keys, start, ratio))
    for seed in (0, 1):
        (got,) = emulate(qsa_score.launch(queries, keys, at(start), ratio), seed).outputs
        for row in range(rows):
            full = (start + row + 1) // ratio
            want = [sum(max(h @ k[b], 0.0) for h in q[row]) / dim**0.5 for b in range(full)]
            assert error(got[row, :full], np.array(want)) < 3e-6
            assert error(plain[row, :full], np.array(want)) < 3e-6
            assert (plain[row, full:] == -1).all()


def test_heads_that_are_not_computed_and_a_nan_that_passes() -> None:
    assert qsa_score.takes(mx.zeros((1, 4, 128)))
    assert not qsa_score.takes(mx.zeros((1, 4, 96))) and not qsa_score.takes(mx.zeros((1, 5, 32)))
    queries, keys = normal((1, 4, 128), mx.float32, 0), normal((20, 128), mx.float32, 1)
    keys[3, 5] = mx.nan
    (got,) = emulate(qsa_score.launch(queries, keys, at(79), 4), 0).outputs
    assert np.isnan(got[0, 3]) and np.isfinite(np.delete(got[0], 3)).all()


# --- selection ------------------------------------------------------------------------------------


def ranked(row: np.ndarray, k: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda b: (-row[b], b))[:k])


def drawn(kind: str, blocks: int) -> np.ndarray:
    rng = np.random.default_rng(blocks)
    row = np.maximum(rng.standard_normal(blocks), 0).astype(np.float32)
    if kind == "ties":
        row = np.round(row * 2) / 2
    elif kind == "equal":
        row[:] = 1.5
    elif kind == "zeros of both signs":
        row[rng.random(blocks) < 0.99] = -0.0
        row[rng.random(blocks) < 0.5] *= 1.0
    elif kind == "extremes":
        row[::7], row[3::11] = np.inf, 1e-42
    return row.astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "zeros of both signs", "extremes"])
@pytest.mark.parametrize(("blocks", "k"), [(513, 512), (700, 512), (33, 5), (9, 8)])
def test_the_best_are_listed_in_order_and_lower_first(kind: str, blocks: int, k: int) -> None:
    row = drawn(kind, blocks)
    want = ranked(row, k)
    padded = mx.array(np.concatenate([row, np.full(40, 9.0, np.float32)])[None])
    run = qsa_select.launch(padded, at(4 * blocks + 1), k, 4, at(0), simdgroups=2)
    ids, status = emulate(run, 0).outputs
    assert ids[0].tolist() == want and status.tolist() == [0]
    plain, bad = qsa_select.select_blocks_reference(mx.array(row[None]), k)
    assert np.array(plain)[0].tolist() == want and not np.array(bad).any()


@pytest.mark.parametrize("blocks", [8192, 65536])
def test_long_lists_are_chosen_from_too(blocks: int) -> None:
    row = drawn("ties", blocks)
    run = qsa_select.launch(mx.array(row[None]), at(4 * blocks - 1), 512, 4, at(0))
    ids, _ = emulate(run, 0).outputs
    want = ranked(row, 512)
    assert ids[0].tolist() == want
    plain, _ = qsa_select.select_blocks_reference(mx.array(row[None]), 512)
    assert np.array(plain)[0].tolist() == want


def test_each_row_has_its_own_number_of_blocks_and_a_nan_is_told() -> None:
    rows = np.stack([drawn("ties", 40) for _ in range(3)])
    rows[1, 30] = np.nan
    fault = mx.array([3, 0, 0], dtype=mx.int32)
    run = qsa_select.launch(mx.array(rows), at(4 * 38 - 2), 6, 4, fault, 8, 2)
    ids, status = emulate(run, 0).outputs
    assert status.tolist() == [3, 8, 0]
    assert ids[0].tolist() == ranked(rows[0, :37], 6) and ids[2].tolist() == ranked(rows[2, :38], 6)
    _, bad = qsa_select.select_blocks_reference(mx.array(rows), 6)
    assert np.array(bad).tolist() == [False, True, False]


# --- attention ------------------------------------------------------------------------------------

ATTENDED = {  # kv, group, dim, rows, start, k, ratio, splits, dtype
    "published": (2, 12, 256, 1, 301, 20, 4, 3, mx.float32),
    "rows through a block": (2, 2, 64, 4, 157, 9, 4, 2, mx.float32),
    "blocks of three": (1, 3, 128, 3, 200, 7, 3, 4, mx.float32),
    "blocks of one": (2, 1, 64, 2, 99, 11, 1, 2, mx.float32),
    "more splits than keys": (1, 2, 64, 1, 50, 2, 4, 9, mx.float32),
    "bfloat16": (2, 4, 128, 2, 130, 9, 4, 3, mx.bfloat16),
    "float16": (1, 5, 64, 1, 131, 9, 4, 3, mx.float16),
}


@pytest.mark.parametrize("name", ATTENDED)
def test_attention_over_a_list_equals_a_float64_loop(name: str) -> None:
    kv, group, dim, rows, start, k, ratio, splits, dtype = ATTENDED[name]
    q = normal((rows, kv * group, dim), dtype, 1)
    keys, values = (normal((start + rows + 9, kv, dim), dtype, s) for s in (2, 3))
    rng = np.random.default_rng(0)
    lists = [np.sort(rng.permutation((start + r + 1) // ratio)[:k]) for r in range(rows)]
    ids = mx.array(np.stack(lists).astype(np.int32))
    want = np.zeros(q.shape)
    for row, blocks in enumerate(lists):
        seen = start + row + 1
        tail = range(seen // ratio * ratio, seen)
        spots = [int(b) * ratio + i for b in blocks for i in range(ratio)] + list(tail)
        for head in range(kv * group):
            scores = floats(keys)[spots, head // group] @ floats(q)[row, head] * dim**-0.5
            share = np.exp(scores - scores.max())
            want[row, head] = share / share.sum() @ floats(values)[spots, head // group]
    plain = qsa_attend.attend_blocks_reference(q, keys, values, ids, start, ratio, dim**-0.5)
    assert error(floats(plain), want) < 2 * TOLERANCE[dtype]
    for seed in (0, 1):
        first = qsa_attend.launch_partial(q, keys, values, ids, at(start), ratio, dim**-0.5, splits)
        o, ml = (mx.array(a.astype(np.float32)) for a in emulate(first, seed).outputs)
        (got,) = emulate(qsa_attend.launch_combine(q, o, ml, splits), seed).outputs
        assert error(got.reshape(q.shape), want) < TOLERANCE[dtype]


def test_a_list_of_everything_equals_another_list_of_everything_to_the_bit() -> None:
    """Splits and order are all that sums depend on: blocks of four or of two, same positions."""
    q = normal((1, 4, 64), mx.float32, 1)
    keys, values = (normal((64, 2, 64), mx.float32, s) for s in (2, 3))
    outputs = []
    for ratio in (4, 2, 1):
        ids = mx.arange(64 // ratio, dtype=mx.int32)[None]
        run = qsa_attend.launch_partial(q, keys, values, ids, at(63), ratio, 0.125, 3)
        outputs.append(emulate(run, 0).outputs[1])
    assert np.array_equal(outputs[0], outputs[1]) and np.array_equal(outputs[0], outputs[2])


def test_long_passes_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    q, queries = normal((9, 4, 16), mx.float32, 0), normal((9, 2, 16), mx.float32, 1)
    keys, values = (normal((80, 2, 16), mx.float32, s) for s in (2, 3))
    blocks = normal((20, 16), mx.float32, 4)
    args = (q, keys, values, queries, blocks, 60, Rule(4, 5, 0.25))
    whole = choose_and_attend(*args)
    monkeypatch.setattr("turbospark.kernels.qsa.SCORE_BYTES", 400)
    parts = choose_and_attend(*args)
    assert all(mx.array_equal(a, b).item() for a, b in zip(whole, parts, strict=True))


# --- planted bugs ---------------------------------------------------------------------------------


def score_trial(body: str) -> bool:
    queries, keys = normal((2, 3, 64), mx.float32, 0), normal((50, 64), mx.float32, 1)
    run = qsa_score.launch(queries, keys, at(97), 3)
    want = floats(qsa_score.block_scores_reference(queries, keys, 97, 3))
    got = emulate(patched(run, body), 0).outputs[0]
    return all(error(got[r, :n], want[r, :n]) < 1e-5 for r, n in ((0, 32), (1, 33)))


def select_trial(body: str) -> bool:
    row = drawn("ties", 300)
    run = qsa_select.launch(mx.array(row[None]), at(1199), 70, 4, at(0), simdgroups=2)
    return bool(emulate(patched(run, body), 0).outputs[0][0].tolist() == ranked(row, 70))


def attend_trial(body: str) -> bool:
    q = normal((2, 6, 64), mx.float32, 1)
    keys, values = (normal((60, 2, 64), mx.float32, s) for s in (2, 3))
    ids = mx.array([[0, 3, 7, 9], [1, 2, 8, 10]], dtype=mx.int32)
    run = qsa_attend.launch_partial(q, keys, values, ids, at(50), 4, 0.125, 2)
    o, ml = (mx.array(a.astype(np.float32)) for a in emulate(patched(run, body), 0).outputs)
    (got,) = emulate(qsa_attend.launch_combine(q, o, ml, 2), 0).outputs
    want = qsa_attend.attend_blocks_reference(q, keys, values, ids, 50, 4, 0.125)
    return error(got.reshape(q.shape), floats(want)) < 1e-5


def patched(run, body):  # type: ignore[no-untyped-def]
    import dataclasses

    from turbospark.kernels.source import Launch

    kernel = dataclasses.replace(run.plan.kernel, body=body)
    return Launch(dataclasses.replace(run.plan, kernel=kernel, _calls={}), run.inputs)


BUGS = {
    "relu after the sum": (score_trial, qsa_score.BODY, "|| product <= 0.0f ?", "?"),
    "a block too many": (
        score_trial, qsa_score.BODY, "start[0] + row + 1) / RATIO", "start[0] + row) / RATIO",
    ),
    "the higher index wins": (
        select_trial, qsa_select.BODY, "bits == cut && equal_before < room",
        "bits == cut && equal - equal_before < room",
    ),
    "no barrier between counts": (
        select_trial, qsa_select.BODY, "    ts_barrier();\n    if (tid < 8)", "    if (tid < 8)",
    ),
    "three bits alone": (select_trial, qsa_select.BODY, "shift > -3;", "shift > 25;"),
    "no tail": (attend_trial, qsa_attend.PARTIAL, "K * RATIO + seen - open", "K * RATIO"),
    "another row's list": (attend_trial, qsa_attend.PARTIAL, "ids[row * K +", "ids[0 * K +"),
    "the last row's tail": (attend_trial, qsa_attend.PARTIAL, "start[0] + row + 1", "start[0] + 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_in_sparse_attention_is_found(name: str) -> None:
    trial, body, old, new = BUGS[name]
    assert trial(body) and body.count(old) == 1
    try:
        assert not trial(body.replace(old, new))
    except EmulationError:
        return
