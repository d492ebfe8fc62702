"""Making directions: what tells two groups of prompts apart in a model's residual stream.

Knows residuals at each prompt's last token, means and principal components. Does not know how a
model runs: it is handed an open runner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from tqdm.auto import tqdm

from turbospark.errors import OptionError
from turbospark.install.arch import ArchConfig
from turbospark.policies import short
from turbospark.steering.vectors import SteeringSet

METHODS = ("mean_difference", "pca")


class Named(Protocol):
    """What an open found, as far as its name."""

    @property
    def model_type(self) -> str:
        """As in config.json."""


class OpenModel(Protocol):
    """A runner, as far as directions are made with it."""

    arch: ArchConfig

    @property
    def resolved(self) -> Named:
        """What the open found."""

    @property
    def max_context(self) -> int:
        """Tokens that fit."""

    @property
    def steering_line(self) -> str | None:
        """The steering in force."""

    def checked(self, prompt: Any) -> list[int]:
        """Token ids of a prompt; refuses what is none."""

    def residuals(self, prompt: Any) -> mx.array:
        """float32 [layers, hidden]: the stream at the prompt's last token."""


def extract(
    runner: OpenModel,
    positive: Sequence[Any],
    negative: Sequence[Any],
    method: str = "mean_difference",
    *,
    progress: bool = True,
) -> SteeringSet:
    """A direction per block from `negative` towards `positive`, for every block but the first.

    Prompts are what `runner.encode` takes: texts, chat messages or token ids; the stream is read at
    the last token of each. "mean_difference" subtracts the groups' means. "pca" pairs the prompts
    and takes the first principal component of the pairs' differences about their midpoints, signed
    and scaled so that it, too, leads from the one mean to the other. Block 0 is left out because
    `save` cannot store it. Holds float32 [prompts, layers, hidden]; the live conversation is lost.

    Raises OptionError, and UnsupportedError for a family that is not steered.
    """
    _check_lists(positive, negative)
    positive, negative = list(positive), list(negative)
    _check(runner, positive, negative, method)
    prompts = [_ids(runner, prompt) for prompt in (*positive, *negative)]
    shown = tqdm(prompts, desc="residuals", unit="prompt", disable=not progress)
    rows = np.stack([np.array(runner.residuals(prompt)) for prompt in shown])
    ups, downs = rows[: len(positive)], rows[len(positive) :]
    directions = {}
    for block in range(1, rows.shape[1]):
        shift = ups[:, block].mean(axis=0, dtype=np.float64) - downs[:, block].mean(
            axis=0, dtype=np.float64
        )
        if method == "pca":
            shift = _along_principal(ups[:, block] - downs[:, block], shift)
        if not np.linalg.norm(shift) > 0:
            raise OptionError(
                f"extract: the two groups of prompts do not differ at block {block}; their last "
                "tokens must follow different texts"
            )
        directions[block] = shift.astype(np.float32)
    return SteeringSet.of(directions, declared_arch=runner.resolved.model_type)


def _check_lists(positive: Any, negative: Any) -> None:
    for name, prompts in (("positive", positive), ("negative", negative)):
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise OptionError(
                f"extract: {name}={short(prompts)} is not valid; works: a list of prompts"
            )


def _ids(runner: OpenModel, prompt: Any) -> list[int]:
    """A prompt's token ids, refused before any prompt is computed."""
    ids = runner.checked(prompt)
    if len(ids) > runner.max_context:
        raise OptionError(
            f"extract: prompt {short(prompt)} has {len(ids)} tokens, but this runner has "
            f"max_context {runner.max_context}; shorten it, or open with a larger one"
        )
    return ids


def _check(runner: OpenModel, positive: list[Any], negative: list[Any], method: str) -> None:
    if method not in METHODS:
        raise OptionError(f"method={short(method)} is not valid; works: {', '.join(METHODS)}")
    if not positive or not negative:
        raise OptionError(
            f"extract: {len(positive)} positive and {len(negative)} negative prompts; "
            "give at least one of each"
        )
    if method == "pca" and len(positive) != len(negative):
        raise OptionError(
            f"extract: method='pca' pairs the prompts, but there are {len(positive)} positive and "
            f"{len(negative)} negative ones; give as many, or use method='mean_difference'"
        )
    if runner.steering_line is not None:
        raise OptionError(
            f"extract: this runner is steered ({runner.steering_line}), and its stream is not the "
            "model's own; call set_steering(None) first"
        )
    if runner.arch.num_layers < 2:
        raise OptionError("extract: this model has one layer, and `save` cannot store block 0")


def _along_principal(differences: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """`shift`'s part along the first principal component of the pairs. Shapes: [pairs, hidden].

    A pair about its midpoint is +-difference / 2, of mean zero: the component is the differences'
    first right singular vector. Projecting the shift fixes the sign, which is arbitrary, and the
    length.
    """
    rows = differences.astype(np.float64)
    values, vectors = np.linalg.eigh(rows @ rows.T)  # [pairs, pairs] is the smaller side
    component = vectors[:, -1] @ rows
    length = np.linalg.norm(component)
    if not (values[-1] > 0 and length > 0):
        return np.zeros_like(shift)
    unit = component / length
    return (shift @ unit) * unit
