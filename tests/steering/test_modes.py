"""The edit of one row against the definitions in numpy, and what several vectors do in order."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import steered  # noqa: F401 (puts the folder of steering_cases on the path)
from steering_cases import Edits, Vector, edited_row

from turbospark.errors import OptionError
from turbospark.steering import Steering, SteeringPolicy, SteeringSet, SteeringVector

HIDDEN, LAYERS = 48, 4
ARCH: Any = SimpleNamespace(hidden_size=HIDDEN, num_layers=LAYERS)
MODES = ("ablate", "add", "clamp", "renorm")
RNG = np.random.default_rng(5)
ROWS = RNG.standard_normal((7, HIDDEN)).astype(np.float32) * 3
D = [RNG.standard_normal(HIDDEN).astype(np.float32) for _ in range(3)]


def steering(*vectors: tuple[np.ndarray, str, float], **shared: float) -> Steering:
    """Vectors that all cover layer 2 and nothing else, in float32."""
    made = [SteeringVector(SteeringSet.of({2: d}), mode, alpha) for d, mode, alpha in vectors]
    return Steering(SteeringPolicy(made, **shared), ARCH, mx.float32)


def apply(edit: Steering, rows: np.ndarray = ROWS, layer: int = 2) -> np.ndarray:
    return np.array(edit.begin()(layer, mx.array(rows[None])))[0]


@pytest.mark.parametrize("alpha", [0.3, 1.0, 1.7, -0.5])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_edited_as_defined(mode: str, alpha: float) -> None:
    edit = steering((D[0], mode, alpha), target=0.7)
    found = apply(edit)
    spec = Vector(0, mode, alpha), Edits((), target=0.7)
    expected = [edited_row(row.astype(np.float64), D[0].astype(np.float64), *spec) for row in ROWS]
    np.testing.assert_allclose(found, [row for row, _ in expected], atol=2e-5)
    edit.commit()
    (reported,) = edit.coefficients()[2]
    assert reported == pytest.approx(expected[-1][1], abs=1e-5)


def test_the_modes_are_four_functions() -> None:
    found = [apply(steering((D[0], mode, 0.3), target=0.7)) for mode in MODES]
    for i, one in enumerate(found):
        assert np.abs(one - ROWS).max() > 1e-2
        assert all(np.abs(one - other).max() > 1e-2 for other in found[:i])


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.0, 1.6])
def test_renorm_keeps_every_rows_length_and_ablate_does_not(alpha: float) -> None:
    lengths = np.linalg.norm(ROWS, axis=1)
    kept = np.linalg.norm(apply(steering((D[0], "renorm", alpha))), axis=1)
    np.testing.assert_allclose(kept / lengths, 1, atol=1e-5)
    shorter = np.linalg.norm(apply(steering((D[0], "ablate", min(alpha, 1)))), axis=1)
    assert (shorter < lengths).all()


def test_a_row_that_nothing_is_left_of_stays_finite() -> None:
    axis = np.eye(HIDDEN, dtype=np.float32)
    rows = np.stack([4 * axis[0], 0 * axis[0]])
    found = apply(steering((axis[0], "renorm", 1.0)), rows)
    assert np.array_equal(found, np.zeros_like(rows))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_strength_0_gives_the_row_back(mode: str, dtype: mx.Dtype) -> None:
    one = SteeringVector(SteeringSet.of({2: D[0]}), mode, 0.0)
    edit = Steering(SteeringPolicy([one], target=5.0, gate=0.1), ARCH, dtype)
    rows = mx.array(ROWS[None]).astype(dtype)
    out = edit.begin()(2, rows)
    assert out is not rows and out.dtype == dtype
    assert mx.array_equal(out, rows).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_sums_are_in_float32_whatever_the_stream_is(dtype: mx.Dtype) -> None:
    wide = RNG.standard_normal((3, 4096)).astype(np.float32) * 20
    arch: Any = SimpleNamespace(hidden_size=4096, num_layers=1)
    one = SteeringVector(SteeringSet.of({0: wide[0]}), "renorm", 0.6)
    edit = Steering(SteeringPolicy([one]), arch, dtype)
    rows = mx.array(wide[None]).astype(dtype)
    found = np.array(edit.begin()(0, rows).astype(mx.float32))[0]
    stored = np.array(rows.astype(mx.float32))[0].astype(np.float64)
    spec = Vector(0, "renorm", 0.6), Edits(())
    expected = np.stack([edited_row(row, stored[0], *spec)[0] for row in stored])
    step = 2.0**-10 if dtype == mx.float16 else 2.0**-7
    assert (np.abs(found - expected) <= np.abs(expected) * step + 1e-6).all()


def test_an_uncovered_layer_adds_no_node_to_the_graph() -> None:
    edit = steering((D[0], "ablate", 1.0)).begin()
    rows = mx.array(ROWS[None])
    assert all(edit(layer, rows) is rows for layer in (0, 1, 3))
    assert edit.arrays() == [] and edit(2, rows) is not rows and len(edit.arrays()) == 1


def test_rows_below_the_gate_are_left_alone_and_still_measured() -> None:
    units = D[0] / np.linalg.norm(D[0])
    c = np.abs(ROWS @ units)
    gate = float(np.sort(c)[3]) + 1e-3
    edit = steering((D[0], "ablate", 1.0), gate=gate)
    found = apply(edit)
    assert np.array_equal(found[c < gate], ROWS[c < gate])
    assert (np.abs(found - ROWS).max(axis=1)[c >= gate] > 1e-2).all()
    edit.commit()
    assert edit.coefficients()[2][0] == pytest.approx(float(ROWS[-1] @ units), abs=1e-5)


def test_rows_together_equal_rows_alone_to_the_bit() -> None:
    edit = steering((D[0], "renorm", 0.4), (D[1], "clamp", 0.8), target=1.5, gate=0.2)
    rows = np.random.default_rng(0).standard_normal((300, HIDDEN)).astype(np.float32)
    alone = np.concatenate([apply(edit, row[None]) for row in rows])
    assert np.array_equal(apply(edit, rows), alone)


def test_each_vector_reads_the_row_that_the_one_before_it_left() -> None:
    first, second = (D[0], "ablate", 1.0), (D[1], "ablate", 1.0)
    forth, back = apply(steering(first, second)), apply(steering(second, first))
    assert np.abs(forth - back).max() > 1e-2
    steps = apply(steering(second), apply(steering(first)))
    np.testing.assert_allclose(forth, steps, atol=1e-6)
    both = steering(first, second)
    apply(both)
    both.commit()
    left = apply(steering(first))[-1]
    unit = D[1] / np.linalg.norm(D[1])
    assert both.coefficients()[2][1] == pytest.approx(float(left @ unit), abs=1e-5)


def test_added_vectors_are_the_sum_that_other_engines_take() -> None:
    found = apply(steering((D[0], "add", 0.5), (D[1], "add", -2.0)))
    np.testing.assert_allclose(found, ROWS + 0.5 * D[0] - 2 * D[1], atol=1e-5)


@pytest.mark.parametrize(
    ("direction", "dtype", "found"),
    [
        (np.zeros(HIDDEN), mx.float32, "zero in float32"),
        (np.full(HIDDEN, 1e-9), mx.float16, "zero in float16"),
        (np.full(HIDDEN, 1e6), mx.float16, "not finite in float16"),
    ],
)
def test_a_direction_of_which_nothing_is_left_is_refused(
    direction: np.ndarray, dtype: mx.Dtype, found: str
) -> None:
    policy = SteeringPolicy.single(SteeringSet.of({1: D[0], 3: direction}, source="a.gguf"))
    with pytest.raises(OptionError, match=rf"the direction of block 3 in a.gguf is {found}"):
        Steering(policy, ARCH, dtype)
    Steering(SteeringPolicy.single(policy.vectors[0].set.restrict(0, 2)), ARCH, dtype)


def test_the_strength_multiplies_the_clamp_too() -> None:
    half = apply(steering((D[0], "clamp", 0.5), target=2.0))
    whole = apply(steering((D[0], "clamp", 1.0), target=2.0))
    np.testing.assert_allclose(half, (ROWS + whole) / 2, atol=1e-5)
    unit = D[0] / np.linalg.norm(D[0])
    np.testing.assert_allclose(whole @ unit, 2.0, atol=1e-5)


def test_reported_is_the_pass_that_was_committed() -> None:
    edit = steering((D[0], "ablate", 1.0))
    assert edit.coefficients() == [[None]] * LAYERS
    apply(edit)
    edit.commit()
    before = edit.coefficients()
    apply(edit, ROWS[:3])  # built and given up
    assert edit.coefficients() == before


def test_the_definitions_tell_a_swapped_gate_and_target_apart() -> None:
    """The reference itself can fail: otherwise agreement with it says nothing."""
    row, d = ROWS[0].astype(np.float64), D[0].astype(np.float64)
    edits = Edits((), target=0.7, gate=0.0)
    one, _ = edited_row(row, d, Vector(0, "clamp", 0.5), edits)
    other, _ = edited_row(row, d, Vector(0, "clamp", 0.5), replace(edits, target=0.0))
    gated, _ = edited_row(row, d, Vector(0, "clamp", 0.5), replace(edits, gate=1e9))
    assert np.abs(one - other).max() > 1e-2 and gated is row
