"""What no direction, set, file name or prompt list can be is refused in one line of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from steered import open_cpu

from turbospark import Runner
from turbospark.errors import (
    NonFiniteLogitsError,
    OptionError,
    SteeringFileError,
    TurbosparkError,
)
from turbospark.steering import ControlVectorInfo, SteeringPolicy, SteeringSet, extract

ROW = np.ones(4, dtype=np.float32)
ONE = SteeringSet.of({1: ROW, 2: ROW})


@pytest.mark.parametrize(
    "values",
    [
        [1, np.nan, 0, 0],
        [1, np.inf, 0, 0],
        [1e300, 0, 0, 0],
        ROW * 1j,
        ["1", "2", "3", "4"],
        "1234",
        [True, False, True, True],
        [1, None, 2, 3],
        [[1, 2], [3]],
        {1: 2},
        5,
        mx.ones(4).astype(mx.bfloat16),
    ],
    ids=str,
)
def test_rows_that_are_no_directions_are_refused(values: Any) -> None:
    for make in (lambda: SteeringSet.of({1: values}), lambda: SteeringSet((None, values))):
        with pytest.raises(OptionError, match="direction of block 1 ") as caught:
            make()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SteeringSet.of(None), "directions=None is not valid"),
        (lambda: SteeringSet.of([ROW]), "works: a mapping of blocks to rows"),
        (lambda: SteeringSet(None), "layers=None is not valid; works: a list of rows"),
        (lambda: SteeringSet(5), "layers=5 is not valid"),
        (lambda: SteeringSet((ROW,) * 4098), "more than 4097 layers; expected blocks 0..4096"),
        (lambda: SteeringSet.of({1: ROW}, mood="x"), "unknown option 'mood' in SteeringSet"),
        (lambda: SteeringSet((ROW,), mood="x"), "unknown option 'mood' in SteeringSet"),
        (lambda: SteeringSet((ROW,), declared_arch=[1]), r"declared_arch=\[1\] is not valid"),
        (lambda: SteeringSet((ROW,), declared_arch="\ud800"), "declared_arch=.* is not valid"),
        (lambda: SteeringSet((ROW,), declared_mode=[1]), r"declared_mode: \[1\] is not valid"),
        (lambda: SteeringSet((ROW,), source=5), "source=5 is not valid; works: a text"),
        (lambda: ONE.restrict(None, 3), "restrict: start=None is not valid"),
        (lambda: ONE.restrict(1, "3"), "restrict: end='3' is not valid"),
    ],
)
def test_sets_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"declared_arch": [1]}, {"source": 5}, {"declared_mode": [1]}])
def test_a_policy_whose_json_declares_something_else_is_refused(change: dict[str, Any]) -> None:
    document = json.loads(SteeringPolicy.single(ONE).model_dump_json())
    assert SteeringPolicy.model_validate(document) == SteeringPolicy.single(ONE)
    document["vectors"][0]["set"] |= change
    with pytest.raises(OptionError, match=r"declared_arch|source|not a valid SteeringMode"):
        SteeringPolicy.model_validate_json(json.dumps(document))


@pytest.mark.parametrize("name", ["a\0b", None, 3, "x" * 300])
def test_what_is_no_path_is_refused_and_nothing_is_written(name: Any, tmp_path: Path) -> None:
    path = tmp_path / name if isinstance(name, str) else name
    for use in (ONE.save, SteeringSet.load, ControlVectorInfo):
        with pytest.raises(OptionError, match="path"):
            use(path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_too_long_to_be_written_aside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SteeringFileError, match="cannot be written: File name too long"):
        ONE.save(tmp_path / ("x" * 250))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def runner(installed: Callable[[str], Path]) -> Iterator[Runner]:
    with open_cpu(installed("gemma3-text"), max_context=32) as opened:
        yield opened


@pytest.mark.parametrize("prompts", ["hello", b"hello", None, 5, {"role": "user"}])
def test_what_is_no_list_of_prompts_is_refused(runner: Runner, prompts: Any) -> None:
    for groups in ((prompts, [[1]]), ([[1]], prompts)):
        with pytest.raises(OptionError, match="is not valid; works: a list of prompts"):
            extract(runner, *groups, progress=False)


@pytest.mark.parametrize("last", [[], [1] * 33, [1 << 40], {"role": "user"}, 5, [None]])
def test_every_prompt_is_checked_before_any_is_computed(
    runner: Runner, last: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "residuals", lambda *_: pytest.fail("computed"))
    with pytest.raises(TurbosparkError):
        extract(runner, [[1, 2], [3]], [[4], last], progress=False)


def test_check_finite_reads_every_float_and_refuses_what_is_no_array(runner: Runner) -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        good = mx.array([1.0, 2.0]).astype(dtype)
        assert runner.check_finite(good) is good
        with pytest.raises(NonFiniteLogitsError, match="1 of 2 values"):
            runner.check_finite(mx.array([1.0, float("nan")]).astype(dtype))
    for value in (None, "x", [1.0], 5):
        with pytest.raises(OptionError, match="works: an array of numbers"):
            runner.check_finite(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "mode", "alpha", "target", "works"),
    [
        (1e38, "add", 1.0, 0.0, False),
        (1e10, "add", -1e6, 0.0, False),
        (1e10, "add", 1e3, 0.0, True),
        (1e38, "ablate", 1.0, 0.0, True),
        (1.0, "ablate", 1e16, 0.0, False),
        (1.0, "clamp", 1.0, 1e16, False),
        (1.0, "clamp", 1.0, 1e6, True),
    ],
)
def test_an_edit_that_norms_cannot_hold_is_refused_at_open(
    runner: Runner, length: float, mode: str, alpha: float, target: float, works: bool
) -> None:
    """Unrefused, rows become zero within the next norm, and every answer is token 0."""
    row = np.zeros(runner.arch.hidden_size)
    row[3] = length
    policy = SteeringPolicy.single(SteeringSet.of({1: row}), mode, alpha, target=target)
    if works:
        runner.set_steering(policy)
        assert np.ptp(np.array(runner.check_finite(runner.score([1, 2, 3])))) > 0
    else:
        with pytest.raises(OptionError, match=r"moves rows of block 1 by .*up to 1e\+15"):
            runner.set_steering(policy)
    runner.set_steering(None)
