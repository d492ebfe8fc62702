"""Block-sparse memory with packed rows against a float64 loop: chosen positions as codes or exact.

Which positions a row reads comes from the loop's own scores, how it reads each from positions
alone; codes are those of the row codec, which has tests of its own.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from block_sparse import HEADS, INDEX_DIM, KV, Arrays, block_keys, chosen, cuts, draw, feed

from turbospark.cache.packed import Balance, layer_refusal, packed_specs, unpacked
from turbospark.cache.sparse import Index, PackedRows
from turbospark.cache.specs import NgramSpec, PackedSpec, RecurrentSpec, SparseSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import NonFiniteScoresError, UnsupportedError
from turbospark.kernels import kv_codec as codec
from turbospark.sizing import kv_bytes

LENGTH, DIM, RATIO, COUNT = 230, 32, 4, 6


def states(bits: tuple[int, int] = (4, 4), balance: Balance | None = None) -> LayerStates:
    spec = SparseSpec(KV, DIM, INDEX_DIM, RATIO, COUNT, PackedSpec(KV, DIM, *bits))
    tables = None if balance is None else {0: balance}
    return LayerStates([spec], LENGTH, mx.float32, balance=tables)


def uneven() -> Balance:
    rng = np.random.default_rng(9)
    mean = rng.standard_normal((KV, DIM)).astype(np.float32)
    return Balance(mx.array(mean), mx.array(rng.uniform(0.5, 2, (KV, DIM)).astype(np.float32)))


def both_ways(rows: np.ndarray, seed: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, KV, D] as read exactly and as read from codes, float64."""
    turned = codec.half(codec.turn(mx.array(rows), seed))
    coded = codec.dequantize(*codec.quantize_rows(turned, bits), bits)
    exact, packed = (np.array(codec.turn_back(a, seed)) for a in (turned, coded))
    return exact.astype(np.float64), packed.astype(np.float64)


def loop(
    a: Arrays, bits: tuple[int, int] = (4, 4), balance: Balance | None = None, dense: int = 0
) -> np.ndarray:
    """Row by row; the first `dense` rows attend to everything they see."""
    mean, by = (0.0, 1.0) if balance is None else map(np.array, (balance.mean, balance.scale))
    keys, values = both_ways((a["k"] - mean) * by, 0, bits[0]), both_ways(a["v"], 1, bits[1])
    keys = tuple(k / by + mean for k in keys)
    out = np.zeros(a["q"].shape)
    for row in range(len(out)):
        p = np.array(range(row + 1) if row < dense else chosen(a, row, RATIO, COUNT))
        exact = ((p < 4) | (p // 32 >= row // 32 - 1))[:, None]
        for head in range(HEADS):
            kv = head // (HEADS // KV)
            k, v = (np.where(exact, e[p, kv], c[p, kv]) for e, c in (keys, values))
            scores = k @ a["q"][row, head] * DIM**-0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ v
    return out


@pytest.mark.parametrize("bits", [(4, 4), (4, 3), (3, 3), (2, 2)])
def test_chosen_positions_are_read_as_their_place_says(bits: tuple[int, int]) -> None:
    a = draw(LENGTH, DIM)
    whole = feed(states(bits), a, [LENGTH])
    assert np.abs(whole - loop(a, bits)).max() < 2e-5
    for size in (1, 7, 32, 50):
        assert np.array_equal(feed(states(bits), a, cuts(LENGTH, size)), whole)


def test_balanced_keys_give_the_same_scores_and_other_codes() -> None:
    a = draw(LENGTH, DIM, 1)
    a["k"][..., 2] += 6
    got = feed(states(balance=uneven()), a, cuts(LENGTH, 40))
    assert np.abs(got - loop(a, balance=uneven())).max() < 2e-5
    assert np.abs(got - feed(states(), a, cuts(LENGTH, 40))).max() > 1e-3


def test_dense_rows_read_codes_too() -> None:
    a = draw(LENGTH, DIM, 2)
    got = feed(states(), a, [150], dense=True)
    assert np.abs(got - loop(a, dense=150)[:150]).max() < 2e-5


def test_rows_taken_in_turns_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    a = draw(LENGTH, DIM, 3)
    whole = feed(states(), a, [LENGTH])
    monkeypatch.setattr("turbospark.kernels.packed_attention.LISTED_BYTES", 1 << 16)
    monkeypatch.setattr("turbospark.kernels.qsa.SCORE_BYTES", 1 << 12)
    assert np.array_equal(feed(states(), a, [LENGTH]), whole)


def test_a_score_that_is_no_number_is_told() -> None:
    a = draw(LENGTH, DIM)
    a["raw"][2, 0] = np.nan
    memory = states()
    feed(memory, a, [(COUNT + 1) * RATIO - 1])
    with pytest.raises(NonFiniteScoresError, match="layer 5: the scores of key blocks have a NaN"):
        feed(memory, a, [1])


def test_going_back_needs_a_block_and_rows_still_exact() -> None:
    a = draw(LENGTH, DIM, 4)
    whole = feed(states(), a, [LENGTH])
    memory = states()
    feed(memory, a, [100])
    kept = memory.snapshot()
    feed(memory, a, [30])
    memory.restore(kept)
    assert np.array_equal(feed(memory, a, [100]), whole[100:200])
    assert "inside a block of 4" in str(memory.rewind_refusal(130))
    # 128 rows are kept, of which the oldest may be gone: 73 on. Row 100 reads exactly from 64 on.
    assert memory.rewind_refusal(100) == memory.restore_refusal(kept)
    with pytest.raises(UnsupportedError, match=r"cannot restore position 100: .* keeps 128"):
        memory.restore(kept)
    memory.rewind(128)
    assert np.array_equal(feed(memory, a, [102]), whole[128:])


def test_a_taped_pass_is_cut_inside_a_block() -> None:
    a = draw(LENGTH, DIM, 5)
    whole = feed(states(), a, [LENGTH])
    memory = states()
    feed(memory, a, [121])
    part = slice(121, 130)
    r = {name: mx.array(array[part]) for name, array in a.items()}
    step = memory.begin(9, tape=True)
    index = Index(0, r["queries"], r["raw"], block_keys)
    memory.layers[0].attend(r["q"], r["k"], r["v"], index, step, DIM**-0.5)
    memory.advance()
    memory.keep_rows(6)
    assert np.array_equal(feed(memory, a, [LENGTH - 127]), whole[127:])


def test_a_cut_that_needs_rows_written_over_is_refused() -> None:
    a = draw(LENGTH, DIM, 6)
    memory = states()
    r = {name: mx.array(array) for name, array in a.items()}
    step = memory.begin(LENGTH, tape=True)
    index = Index(0, r["queries"], r["raw"], block_keys)
    memory.layers[0].attend(r["q"], r["k"], r["v"], index, step, DIM**-0.5)
    memory.advance()
    with pytest.raises(UnsupportedError, match=r"cannot keep 20 of 230 rows: .* keeps 128"):
        memory.keep_rows(20)


def test_what_is_written_to_a_file_comes_back() -> None:
    a = draw(LENGTH, DIM, 7)
    memory, other = states(), states()
    feed(memory, a, [201])
    other.layers[0].refill(memory.layers[0].written(201, 201))
    other.position = other.furthest = 201
    assert np.array_equal(feed(other, a, [29]), feed(memory, a, [29]))


def test_buffers_hold_what_the_formula_says() -> None:
    memory = states((4, 3))
    rows = -(-LENGTH // 32) * 32
    packed = KV * (rows * (DIM * 7 // 8 + 4) + 2 * (128 + 4) * DIM * 2)
    held = memory.layers[0].rows
    assert isinstance(held, PackedRows) and sum(a.nbytes for a in held.arrays()) == packed
    index = (LENGTH // RATIO + RATIO - 1) * INDEX_DIM * 4
    assert memory.nbytes == packed + index == kv_bytes(memory.specs, LENGTH, 4, None)


def test_sparse_layers_are_packed_but_for_the_last_and_index_keys() -> None:
    sparse, delta = SparseSpec(2, 64, 32, 4, 8), RecurrentSpec(2, 8, 8, 3, 16)
    specs = [delta, sparse, delta, sparse, NgramSpec(3, 16, 2, 0)]
    packed, reason = packed_specs(specs, 4, 3)
    assert reason is None
    assert packed[1] == SparseSpec(2, 64, 32, 4, 8, PackedSpec(2, 64, 4, 3))
    assert packed[3] == sparse and packed[::2] == specs[::2]
    assert [unpacked(spec) for spec in packed] == specs
    assert layer_refusal(SparseSpec(2, 80, 32, 4, 8), 4, 4) is not None
