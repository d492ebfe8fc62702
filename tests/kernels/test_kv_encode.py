"""Packing rows: the emulated kernel against a float64 search and the plain version."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cases import floats, normal
from emulator import emulate

from turbospark.kernels import kv_codec as codec
from turbospark.kernels.kv_encode import encode_rows, encode_rows_reference, launch_encode

SHAPES = {
    "keys of four bits": (2, 64, 128, 4, True),
    "values of four bits": (2, 64, 128, 4, False),
    "keys of three bits": (1, 32, 64, 3, True),
    "values of three bits": (1, 96, 64, 3, False),
    "keys of two bits": (1, 32, 256, 2, True),
    "values of two bits": (1, 32, 256, 2, False),
    "96 dims": (1, 32, 96, 4, True),
}


def rows_of(name: str) -> mx.array:
    kv, count, dim, _, _ = SHAPES[name]
    rows = normal((kv, count, dim), mx.float32, 3) * mx.exp(normal((kv, count, 1), mx.float32, 4))
    rows[:, 7] = mx.zeros((kv, dim))
    return rows.astype(mx.float16)


def decoded(words: mx.array, scales: mx.array, bits: int, keys: bool) -> np.ndarray:
    unpack = codec.unpack_keys if keys else codec.unpack_values
    return floats(codec.dequantize(unpack(words, bits), scales, bits))


def best(row: np.ndarray, bits: int) -> float:
    """The best squared cosine with the row that any width's nearest levels reach."""
    table = codec.levels(bits).astype(np.float64)
    unit = row * np.sqrt(len(row)) / np.linalg.norm(row)
    merits = []
    for width in (0.86, 0.93, 1.0, 1.07, 1.14):
        chosen = table[np.abs(unit[:, None] / width - table).argmin(-1)]
        merits.append((unit @ chosen) ** 2 / (chosen @ chosen) / len(row))
    return max(merits)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_finds_what_a_float64_search_finds(name: str) -> None:
    _, _, _, bits, keys = SHAPES[name]
    rows = rows_of(name)
    want = floats(rows)
    for seed in (0, 1):
        words, scales = emulate(launch_encode(rows, bits, keys), seed).outputs
        got = decoded(
            mx.array(words.astype(np.uint32)), mx.array(scales.astype(np.float16)), bits, keys
        )
        for head in range(len(want)):
            assert not got[head, 7].any()
            for i in [i for i in range(want.shape[1]) if i != 7]:
                a, b = want[head, i], got[head, i]
                cosine = (a @ b) ** 2 / ((a @ a) * (b @ b))
                assert cosine > best(a, bits) - 1e-4
                assert abs(a @ b / (a @ a) - 1) < 1e-3  # unbiased


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_packs_as_the_plain_version(name: str) -> None:
    _, _, _, bits, keys = SHAPES[name]
    rows = rows_of(name)
    words, scales = (np.array(a) for a in encode_rows_reference(rows, bits, keys))
    got, got_scales = emulate(launch_encode(rows, bits, keys)).outputs
    # Sums in another order may choose another width for a row now and then.
    assert (got == words).mean() > 0.99
    assert (np.abs(got_scales - scales) <= 1e-3 * scales).mean() > 0.97
    assert np.array_equal(np.array(encode_rows(rows, bits, keys)[0]), words)
