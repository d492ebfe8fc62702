"""Going back in a recurrent layer: by snapshot, or inside the newest pass by its tape."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turbospark.cache.recurrent import RecurrentState
from turbospark.cache.specs import FullSpec, RecurrentSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import UnsupportedError

SPEC = RecurrentSpec(2, 4, 3, 3, 5)
FULL = FullSpec(1, 4, 4)


def marked(value: float) -> tuple[mx.array, mx.array]:
    """A state all of whose elements are `value`."""
    return mx.full((1, 2, 4, 3), value), mx.full((1, 3, 5), value)


def feed(states: LayerStates, rows: int, tape: bool = False) -> None:
    """A pass of layers whose state after n tokens is n everywhere."""
    step = states.begin(rows, tape=tape)
    for cache in states.layers:
        if isinstance(cache, RecurrentState):
            start = step.start
            cache.update(step, marked(step.end), lambda kept, start=start: marked(start + kept))
    mx.eval(states.arrays())
    states.advance()


def value(states: LayerStates, layer: int = 0) -> set[float]:
    arrays = states.layers[layer].arrays()
    return {float(v) for a in arrays for v in np.unique(np.array(a))}


def new(*specs: object) -> LayerStates:
    return LayerStates(specs or (SPEC, FULL, SPEC), 64, mx.float32)  # type: ignore[arg-type]


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_is_references_and_brings_the_state_back() -> None:
    states = new()
    feed(states, 5)
    point = states.snapshot()
    assert point.layers[0][0] is states.layers[0].state
    feed(states, 4)
    states.restore(point)
    assert states.position == 5 and value(states) == value(states, 2) == {5.0}


def test_without_a_snapshot_only_the_beginning_can_be_reached() -> None:
    states = new()
    feed(states, 5)
    with pytest.raises(UnsupportedError, match="from 5 to 3: a recurrent layer cannot go back"):
        states.rewind(3)
    states.rewind(0)
    assert states.position == 0 and value(states) == {0.0}


# --- the tape -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_taped_pass_is_cut_to_its_first_rows(rows: int) -> None:
    states = new()
    feed(states, 5)
    feed(states, 4, tape=True)
    states.keep_rows(rows)
    assert states.position == 5 + rows
    assert value(states) == value(states, 2) == {5.0 + rows}
    feed(states, 2)
    assert states.position == 7 + rows


@pytest.mark.parametrize("rows", [0, 5, -1])
def test_as_many_rows_as_the_pass_had_can_be_kept(rows: int) -> None:
    states = new()
    feed(states, 4, tape=True)
    with pytest.raises(UnsupportedError, match=f"cannot keep {rows} rows: the newest pass has 4"):
        states.keep_rows(rows)
    assert states.position == 4 and value(states) == {4.0}


def test_a_pass_without_a_tape_is_refused_and_nothing_moves() -> None:
    states = new()
    feed(states, 4, tape=True)
    feed(states, 4)
    with pytest.raises(UnsupportedError, match="not taped; begin it with tape=True"):
        states.keep_rows(2)
    assert states.position == 8 and value(states) == {8.0}


def test_a_tape_is_good_for_one_cut() -> None:
    states = new()
    feed(states, 4, tape=True)
    states.keep_rows(3)
    with pytest.raises(UnsupportedError, match="the caches stand at 3"):
        states.keep_rows(2)
    states.step.rows = 3
    with pytest.raises(UnsupportedError, match="not taped"):
        states.keep_rows(2)


def test_a_tape_of_another_pass_is_refused() -> None:
    states = new(SPEC)
    feed(states, 4, tape=True)
    states.begin(2)
    states.advance()
    with pytest.raises(UnsupportedError, match="the tape begins at position 0, the pass at 4"):
        states.keep_rows(1)


def test_reset_and_restore_drop_the_tape() -> None:
    states = new(SPEC)
    feed(states, 2)
    point = states.snapshot()
    feed(states, 3, tape=True)
    states.restore(point)
    assert states.layers[0].tape is None
    feed(states, 3, tape=True)
    states.reset()
    assert states.layers[0].tape is None


def test_layers_without_recurrence_need_no_tape() -> None:
    states = new(FULL)
    feed(states, 6)
    states.keep_rows(2)
    assert states.position == 2


def test_a_ring_that_turned_too_far_refuses_before_any_layer_moves() -> None:
    states = LayerStates((SPEC, RingSpec(1, 4, 4, 8)), 64, mx.float32, ring_override=10)
    feed(states, 20)
    feed(states, 6, tape=True)
    with pytest.raises(UnsupportedError, match="passes the ring's slack of 2"):
        states.keep_rows(2)
    assert states.position == 26 and value(states) == {26.0}
    states.keep_rows(4)
    assert value(states) == {24.0}
