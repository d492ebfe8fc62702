"""Block-sparse memory against a float64 loop: which blocks, which keys, however a prompt is cut."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from block_sparse import HEADS, INDEX_DIM, KV, Arrays, block_keys, chosen, cuts, draw, feed

from turbospark.cache.sparse import Index
from turbospark.cache.specs import SparseSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import NonFiniteScoresError, UnsupportedError

LENGTH, DIM = 61, 8


def loop(a: Arrays, ratio: int, count: int, dense: bool = False) -> np.ndarray:
    out = np.zeros((LENGTH, HEADS, DIM))
    for row in range(LENGTH):
        keys = list(range(row + 1)) if dense else chosen(a, row, ratio, count)
        for head in range(HEADS):
            kv = head // (HEADS // KV)
            scores = a["k"][keys, kv].astype(np.float64) @ a["q"][row, head] * DIM**-0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ a["v"][keys, kv]
    return out


def states(ratio: int, count: int) -> LayerStates:
    return LayerStates([SparseSpec(KV, DIM, INDEX_DIM, ratio, count)], LENGTH, mx.float32)


@pytest.mark.parametrize(("ratio", "count"), [(4, 5), (3, 7), (1, 9), (4, 100)])
def test_rows_attend_to_their_best_blocks_and_the_open_one(ratio: int, count: int) -> None:
    a = draw(LENGTH, DIM)
    whole = feed(states(ratio, count), a, [LENGTH])
    assert np.abs(whole - loop(a, ratio, count)).max() < 2e-6
    for size in (1, 4, 7, 16, 33):
        assert np.array_equal(feed(states(ratio, count), a, cuts(LENGTH, size)), whole)


def test_counters_tell_what_was_scored_chosen_and_attended() -> None:
    memory = states(4, 5)
    feed(memory, draw(LENGTH, DIM), [LENGTH])
    counts = memory.step.counts
    sparse = range(24, LENGTH + 1)  # visible positions of rows with more than five full blocks
    assert counts["qsa_rows_dense"] == 23 and counts["qsa_rows_sparse"] == len(sparse)
    assert counts["qsa_blocks_scored"] == sum(n // 4 for n in sparse)
    assert counts["qsa_blocks_selected"] == 5 * len(sparse)


def test_dense_rows_keep_the_block_keys_of_later_sparse_ones() -> None:
    a = draw(LENGTH, DIM, 1)
    sparse, dense = loop(a, 4, 5), loop(a, 4, 5, dense=True)
    assert np.array_equal(sparse[:23], dense[:23]) and np.abs(sparse - dense).max() > 0.1
    memory = states(4, 5)
    first = feed(memory, a, [30], dense=True)
    assert np.abs(first - dense[:30]).max() < 2e-6
    assert memory.step.counts == {"qsa_rows_dense": 30, "qsa_rows_sparse": 0}
    assert np.abs(feed(memory, a, [1, 30]) - sparse[30:]).max() < 2e-6


def test_equal_scores_choose_the_lower_blocks() -> None:
    a = draw(LENGTH, DIM, 2)
    a["queries"][:] = 0.0
    assert np.abs(feed(states(4, 5), a, cuts(LENGTH, 9)) - loop(a, 4, 5)).max() < 2e-6


def test_a_score_that_is_no_number_is_an_error_with_its_layer() -> None:
    a = draw(LENGTH, DIM)
    a["raw"][2, 0] = np.nan
    memory = states(4, 5)
    feed(memory, a, [23])
    with pytest.raises(NonFiniteScoresError, match="layer 5: the scores of key blocks have a NaN"):
        feed(memory, a, [1])


def test_going_back_into_a_block_needs_a_snapshot() -> None:
    a = draw(LENGTH, DIM, 3)
    want = feed(states(4, 5), a, cuts(LENGTH, 61))
    memory = states(4, 5)
    feed(memory, a, [30])
    kept = memory.snapshot()
    feed(memory, a, [20])
    assert "inside a block of 4" in str(memory.rewind_refusal(30))
    with pytest.raises(UnsupportedError, match="inside a block"):
        memory.rewind(30)
    memory.restore(kept)
    assert np.array_equal(feed(memory, a, [31]), want[30:])
    memory.rewind(44)
    assert np.array_equal(feed(memory, a, [17]), want[44:])


def test_a_taped_pass_can_be_cut_inside_a_block() -> None:
    a = draw(LENGTH, DIM, 4)
    want = feed(states(4, 5), a, [LENGTH])
    for rows in range(1, 9):
        memory = states(4, 5)
        feed(memory, a, [25])
        cache, part = memory.layers[0], slice(25, 34)
        r = {name: mx.array(array[part]) for name, array in a.items()}
        other = mx.zeros_like(r["raw"])
        raw = mx.concatenate([r["raw"][:rows], other[rows:]])
        step = memory.begin(9, tape=True)
        index = Index(0, r["queries"], raw, block_keys)
        cache.attend(r["q"], r["k"], r["v"], index, step, DIM**-0.5)
        memory.advance()
        memory.keep_rows(rows)
        rest = LENGTH - 25 - rows
        assert np.array_equal(feed(memory, a, [rest]), want[25 + rows :])


def test_what_is_written_to_a_file_comes_back() -> None:
    a = draw(LENGTH, DIM, 5)
    memory, other = states(4, 5), states(4, 5)
    feed(memory, a, [43])
    saved = memory.layers[0].written(43, 43)
    other.layers[0].refill(saved)
    other.position = other.furthest = 43
    assert np.array_equal(feed(other, a, [18]), feed(memory, a, [18]))


def test_reset_forgets_the_open_block() -> None:
    a = draw(LENGTH, DIM, 6)
    memory = states(4, 5)
    want = feed(memory, a, [LENGTH])
    memory.reset()
    assert not np.array(memory.layers[0].open).any()
    assert np.array_equal(feed(memory, a, cuts(LENGTH, 5)), want)
