"""Dense products on the host: MLX's own bits whatever the number of rows, near exact arithmetic."""

import mlx.core as mx
import numpy as np
import pytest

from turbospark.kernels import host_product
from turbospark.layers.linear import Embedding, Linear, fuse

SHAPES = [(64, 64), (7, 65), (576, 960), (1536, 97), (33, 5000)]
same_blas = pytest.mark.skipif(not host_product.same_bits(), reason="MLX has another BLAS here")


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@same_blas
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_host_gives_the_bits_of_mlx(shape: tuple[int, int], rows: int) -> None:
    x, matrix = numbers(1, rows, shape[0]), numbers(*shape)
    got = np.array(host_product.product(mx.array(x), matrix))
    assert got.shape == (1, rows, shape[1])
    np.testing.assert_array_equal(got, np.array(mx.array(x) @ mx.array(matrix)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_host_multiplies(shape: tuple[int, int]) -> None:
    x, matrix = numbers(1, 19, shape[0]), numbers(*shape)
    exact = x.astype(np.float64) @ matrix.astype(np.float64)
    got = np.array(host_product.product(mx.array(x), matrix))
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_takes_the_host_where_it_pays_and_says_the_same(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    matrix, vector = numbers(256, 512), numbers(512) if bias else None
    calls = []
    product = host_product.product
    monkeypatch.setattr(host_product, "product", lambda *a: calls.append(a) or product(*a))
    ours = Linear(mx.array(matrix), None if vector is None else mx.array(vector), host=True)
    for rows, taken in ((1, 0), (2, 1)):
        x = numbers(1, rows, 256)
        exact = x.astype(np.float64) @ matrix + (0 if vector is None else vector)
        np.testing.assert_allclose(np.array(ours(mx.array(x))), exact, rtol=0, atol=1e-4)
        assert len(calls) == taken
    many = numbers(1, 9, 256)
    one_by_one = [np.array(ours(mx.array(many[:, i : i + 1]))) for i in range(9)]
    if host_product.same_bits():
        np.testing.assert_array_equal(np.array(ours(mx.array(many))), np.concatenate(one_by_one, 1))


def test_joined_matrices_and_tied_heads_take_the_host_too() -> None:
    one = Linear(mx.array(numbers(8, 70)), host=True)
    assert fuse([one, one], [70, 70]).parts[0].host  # type: ignore[union-attr]
    assert Embedding(one).head.host


@pytest.mark.parametrize(
    ("x", "matrix"),
    [
        (mx.zeros((1, 100, 4096)), mx.zeros((4096, 63))),
        (mx.zeros((1, 1, 511)), mx.zeros((511, 512))),
        (mx.zeros((1, 9, 512), dtype=mx.float16), mx.zeros((512, 512))),
    ],
    ids=["narrow", "small", "half"],
)
def test_what_does_not_pay_stays_with_mlx(x: mx.array, matrix: mx.array) -> None:
    assert not host_product.pays(x, matrix)


def test_another_order_of_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    einsum = np.einsum

    def backwards(what: str, x: np.ndarray, matrix: np.ndarray, out: np.ndarray) -> None:
        out[:] = einsum(what, np.asfortranarray(x[:, ::-1]), matrix[::-1])

    monkeypatch.setattr(np, "einsum", backwards)
    assert not host_product.same_bits.__wrapped__()
