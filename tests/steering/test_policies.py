"""Policies as options: what they say, what they refuse, how they are written down."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from turbospark import OpenOptions
from turbospark.errors import OptionError
from turbospark.steering import SteeringMode, SteeringPolicy, SteeringSet, SteeringVector

RNG = np.random.default_rng(3)
ONE = SteeringSet.of({b: RNG.standard_normal(8) for b in (1, 2, 3)}, source="a.gguf")
TWO = SteeringSet.of({b: RNG.standard_normal(8) for b in (3, 4)}, declared_mode=SteeringMode.ADD)


def test_the_callers_mode_beats_the_files_and_that_beats_ablate() -> None:
    assert SteeringVector(ONE).mode is SteeringMode.ABLATE
    assert SteeringVector(TWO).mode is SteeringMode.ADD
    assert SteeringVector(TWO, "clamp").mode is SteeringMode.CLAMP
    assert SteeringVector(TWO, SteeringMode.RENORM).mode is SteeringMode.RENORM


def test_off_is_no_policy_and_strength_0_is_one() -> None:
    assert not SteeringPolicy.off().is_active and SteeringPolicy.off() == SteeringPolicy()
    assert SteeringPolicy.off().line(6) is None and SteeringPolicy.off().digest == "off"
    assert SteeringPolicy.single(ONE, alpha=0).is_active


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        (SteeringPolicy.single(ONE, alpha=0.3), "ablate@0.3 on 3 of 6 layers"),
        (SteeringPolicy.single(ONE, "add", gate=0.5), "add@1 on 3 of 6 layers, gate 0.5"),
        (
            SteeringPolicy.single(ONE, "clamp", 2, target=-1),
            "clamp@2 on 3 of 6 layers, target -1",
        ),
        (
            SteeringPolicy([SteeringVector(TWO), SteeringVector(ONE, "renorm", 0.25)], gate=2),
            "2 vectors on 4 of 6 layers: add@1 (2 layers), renorm@0.25 (3 layers), gate 2",
        ),
    ],
)
def test_the_line_says_what_is_applied_in_order(policy: SteeringPolicy, line: str) -> None:
    assert policy.line(6) == line


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SteeringVector(None), "set: None is not valid; works: a SteeringSet"),
        (lambda: SteeringVector({"directions": {"1": "?"}}), "not what a SteeringSet was written"),
        (lambda: SteeringVector(ONE, "erase"), "mode: 'erase' is not valid; works: ablate, add,"),
        (lambda: SteeringVector(ONE, alpha=math.inf), "alpha=inf is not valid; works: a finite"),
        (lambda: SteeringVector(ONE, alpha="1"), "alpha='1' is not valid; works: a finite"),
        (lambda: SteeringVector(ONE, alpah=1), "unknown option 'alpah' in SteeringVector; did"),
        (lambda: SteeringPolicy([ONE]), "vectors=.* is not valid; works: a list of"),
        (lambda: SteeringPolicy(3), "vectors=3 is not valid; works: a list of SteeringVector"),
        (lambda: SteeringPolicy(gate=-1.0), "gate=-1.0 is not valid; works: a finite number >= 0"),
        (lambda: SteeringPolicy(target=math.nan), "target=nan is not valid"),
        (lambda: SteeringPolicy(gates=1.0), "unknown option 'gates' in SteeringPolicy"),
        (lambda: OpenOptions(steering=ONE), "steering: .* is not valid; works: a SteeringPolicy"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_policy_is_written_and_read_as_part_of_the_options() -> None:
    policy = SteeringPolicy([SteeringVector(TWO), SteeringVector(ONE, "add", -0.5)], 1.5, 0.25)
    options = OpenOptions(steering=policy)
    again = OpenOptions.model_validate_json(options.model_dump_json())
    assert again == options and again.steering.digest == policy.digest
    assert again.steering.vectors[1].set.source == "a.gguf"
    assert again.steering != policy.replace(gate=0.5)
    assert options != OpenOptions(steering=SteeringPolicy.single(TWO))


def test_everything_that_changes_the_result_changes_the_digest() -> None:
    base = SteeringPolicy([SteeringVector(ONE, "add"), SteeringVector(TWO, "add")])
    changed = [
        base.replace(gate=0.5),
        base.replace(target=0.5),
        base.replace(vectors=base.vectors[::-1]),
        base.replace(vectors=base.vectors[:1]),
        SteeringPolicy([SteeringVector(ONE, "add", 0.5), SteeringVector(TWO, "add")]),
        SteeringPolicy([SteeringVector(ONE, "ablate"), SteeringVector(TWO, "add")]),
        SteeringPolicy([SteeringVector(ONE.restrict(1, 2), "add"), SteeringVector(TWO, "add")]),
    ]
    assert len({p.digest for p in [base, *changed]}) == len(changed) + 1


def test_a_vector_alone_is_taken_for_a_list_of_one() -> None:
    assert SteeringPolicy(SteeringVector(ONE)) == SteeringPolicy([SteeringVector(ONE)])
