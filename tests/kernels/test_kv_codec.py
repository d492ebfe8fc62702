"""The row codec: distortion against the method's own figures, words against a numpy reader."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turbospark.kernels import kv_codec as codec

# Relative squared error of random unit vectors, cubic codebook with the search.
TABLE = {
    (64, 2): 0.1110, (64, 3): 0.0299, (64, 4): 0.0074,
    (128, 2): 0.1142, (128, 3): 0.0319, (128, 4): 0.0082,
    (256, 2): 0.1159, (256, 3): 0.0332, (256, 4): 0.0088,
}  # fmt: skip
# The best codebook for normal elements, without any search: never to be exceeded.
LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009497}


def unit(count: int, dim: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim), np.float32)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def coded(rows: np.ndarray, bits: int, seed: int = 0) -> np.ndarray:
    """Rows after the whole way: turned, packed, unpacked, turned back."""
    turned = codec.turn(mx.array(rows), seed)
    codes, scales = codec.quantize_rows(turned, bits)
    back = codec.unpack_keys(codec.pack_keys(codes, bits), bits)
    return np.array(codec.turn_back(codec.dequantize(back, scales, bits), seed))


@pytest.mark.parametrize(("dim", "bits"), TABLE)
def test_distortion_is_that_of_the_table(dim: int, bits: int) -> None:
    rows = unit(4000, dim)
    error = ((coded(rows, bits) - rows) ** 2).sum(-1)
    # The scale of unbiased inner products costs 1 / (1 - error) over that of least squares.
    unbiased = TABLE[dim, bits] / (1 - TABLE[dim, bits])
    assert abs(error.mean() / unbiased - 1) < 0.03
    # In the direction alone, as the table counts.
    cosine = (coded(rows, bits) * rows).sum(-1) / np.linalg.norm(coded(rows, bits), axis=-1)
    assert abs((1 - cosine**2).mean() / TABLE[dim, bits] - 1) < 0.03
    assert (1 - cosine**2).mean() < LLOYD_MAX[bits]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_inner_products_with_correlated_rows_are_unbiased(bits: int) -> None:
    rows, other = unit(20000, 128), unit(20000, 128, 1)
    other -= (other * rows).sum(-1, keepdims=True) * rows
    other /= np.linalg.norm(other, axis=-1, keepdims=True)
    near = 0.6 * rows + 0.8 * other
    assert abs((near * coded(rows, bits)).sum(-1).mean() - 0.6) < 1.5e-3


def test_one_hot_and_outlier_rows_are_no_bad_case() -> None:
    assert ((coded(np.eye(128, dtype=np.float32), 2) - np.eye(128)) ** 2).sum(-1).max() < 1e-5
    rows = unit(2000, 128)
    rows[:, [3, 40, 77, 90]] *= 20
    error = ((coded(rows, 4) - rows) ** 2).sum(-1) / (rows**2).sum(-1)
    assert error.mean() < LLOYD_MAX[4]


def test_a_row_of_zeros_stays_zero_and_a_huge_one_finite() -> None:
    assert not coded(np.zeros((2, 64), np.float32), 3).any()
    assert np.isfinite(coded(unit(4, 64) * np.float32(1e6), 4)).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_are_the_nearest_levels_of_the_best_width(bits: int) -> None:
    """One row at a time in float64, nothing shared with the code but the codebook."""
    table = codec.levels(bits).astype(np.float64)
    for row in unit(40, 32):
        x = row.astype(np.float64) * np.sqrt(32) / np.linalg.norm(row.astype(np.float64))
        tries = []
        for width in (0.86, 0.93, 1.0, 1.07, 1.14):
            codes = np.abs(x[:, None] / width - table).argmin(-1)
            chosen = table[codes]
            tries.append(((x @ chosen) ** 2 / (chosen @ chosen), tuple(codes), x @ chosen))
        merit, codes, along = max(tries)
        found, scale = codec.quantize_rows(mx.array(row)[None], bits)
        got = table[np.array(found)[0]]
        assert (x @ got) ** 2 / (got @ got) > merit * (1 - 1e-5)
        if tuple(np.array(found)[0]) == codes:
            norm = np.linalg.norm(row.astype(np.float64))
            assert abs(float(scale.item()) / (norm * np.sqrt(32) / along) - 1) < 1e-3


def test_the_codebook_is_odd_and_what_its_cubic_says() -> None:
    for bits, (a, b) in {
        2: (1.33934, 0.17108), 3: (1.65012, 0.49667), 4: (1.80370, 0.88498)
    }.items():  # fmt: skip
        n = 1 << bits
        t = (2 * np.arange(n) - (n - 1)) / (n - 1)
        assert np.allclose(codec.levels(bits), a * t + b * t**3, rtol=2e-3)
        assert np.array_equal(codec.levels(bits), -codec.levels(bits)[::-1])
        assert np.array_equal(codec.levels(bits), codec.levels(bits).astype(np.float16))


def read_code(words: np.ndarray, bits: int, pair: int, e: int, pairs: int) -> int:
    """One code from a row's words, by the documented places of its planes."""
    code = at = below = 0
    for plane in codec.PLANES[bits]:
        per = 16 // plane
        word = int(words[at + pair // per])
        code |= (word >> (pair % per * plane + 16 * e) & ((1 << plane) - 1)) << below
        at, below = at + pairs // per, below + plane
    return code


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_key_words_hold_neighbouring_dims_as_pairs(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64)).astype(np.uint32)
    words = np.array(codec.pack_keys(mx.array(codes), bits))
    assert words.shape == (3, 64 * bits // 32)
    for row, packed in zip(codes, words, strict=True):
        assert [read_code(packed, bits, d // 2, d % 2, 32) for d in range(64)] == row.tolist()
    assert np.array_equal(np.array(codec.unpack_keys(mx.array(words), bits)), codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_value_words_hold_a_dim_of_32_tokens(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (2, 64, 16)).astype(np.uint32)
    words = np.array(codec.pack_values(mx.array(codes), bits))
    assert words.shape == (2, 2, bits, 16)
    for head in range(2):
        for token in range(64):
            x = token % 32
            pair = x % 8 // 2 * 4 + x // 8
            for dim in (0, 7, 15):
                packed = words[head, token // 32, :, dim]
                assert read_code(packed, bits, pair, x % 2, 16) == codes[head, token, dim]
    assert np.array_equal(np.array(codec.unpack_values(mx.array(words), bits)), codes)


@pytest.mark.parametrize("dim", [16, 24, 64, 96, 192, 256, 512])
def test_a_turn_keeps_lengths_and_is_undone(dim: int) -> None:
    rows = mx.array(unit(5, dim))
    for seed in (codec.KEY_SEED, codec.VALUE_SEED):
        turned = codec.turn(rows, seed)
        assert np.allclose(np.array(turned @ turned.T), np.array(rows @ rows.T), atol=1e-5)
        assert np.allclose(np.array(codec.turn_back(turned, seed)), np.array(rows), atol=1e-5)
    assert codec.turns(dim)


def test_which_rows_can_be_turned_and_packed() -> None:
    assert [d for d in range(8, 600) if codec.turns(d)] == [
        16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512,
    ]  # fmt: skip
    assert codec.fills_words(24, 4) and not codec.fills_words(24, 2)
    assert codec.fills_words(64, 3) and not codec.fills_words(16, 3)


def test_signs_are_fixed() -> None:
    """Rows that are stored depend on them: recorded once."""
    assert "".join("+" if s > 0 else "-" for s in codec.signs(16, 0).tolist()) == SIGNS[0]
    assert "".join("+" if s > 0 else "-" for s in codec.signs(16, 1).tolist()) == SIGNS[1]
    assert 40 < sum(s > 0 for s in codec.signs(128, 0).tolist()) < 88


SIGNS = ("+++-+++-++-+++--", "++++-+---++---+-")
