"""The policies of tests/data/steering_cases.py as the library writes them, and open models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from turbospark import OpenOptions, Runner
from turbospark.steering import SteeringPolicy, SteeringSet, SteeringVector

DATA = Path(__file__).parents[1] / "data"
sys.path.insert(0, str(DATA))

import steering_cases  # noqa: E402 (a script's module, found where the scripts are)


def policy(name: str, edits: steering_cases.Edits, layers: int, hidden: int) -> SteeringPolicy:
    """The policy that `edits` describes on a model of these sizes."""
    vectors = []
    for v in edits.vectors:
        covered = range(layers) if v.layers is None else v.layers
        directions = {i: steering_cases.direction(name, v.seed, i, hidden) for i in covered}
        vectors.append(SteeringVector(SteeringSet.of(directions), v.mode, v.alpha))
    return SteeringPolicy(vectors, target=edits.target, gate=edits.gate)


def random_set(runner: Runner, layers: Any = None, seed: int = 0) -> SteeringSet:
    """Random directions for some (None is all) layers of an open model."""
    rng = np.random.default_rng(seed)
    covered = range(runner.arch.num_layers) if layers is None else layers
    return SteeringSet.of({i: rng.standard_normal(runner.arch.hidden_size) for i in covered})


def open_cpu(install: Path, **options: Any) -> Runner:
    """The install in float32 on the CPU, where equal work gives equal bits."""
    settings = {"max_context": 160, "device": "cpu", "dtype": "float32", **options}
    return Runner.open(install, OpenOptions(**settings))
