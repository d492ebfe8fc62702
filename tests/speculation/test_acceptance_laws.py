"""What is committed follows the model's own law; a rule known to be wrong is told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest

from turbospark.counters import PhaseClock
from turbospark.options import GenerationOptions
from turbospark.sampling import Sampler
from turbospark.speculation.acceptance import Matching, Rejection
from turbospark.speculation.drafter import Chooser, Proposal
from turbospark.speculation.rounds import Rounds

VOCAB, DEPTH, RUNS = 4, 3, 2500
RNG = np.random.default_rng(5)
# A Markov chain to decode, and a drafter's idea of it: like it, but not it.
MODEL = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
DRAFT = MODEL + RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
PLAIN = {"top_k": 0, "top_p": 1.0, "temperature": 1.0}
SHAPES = (
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_k": 3, "top_p": 0.8, "temperature": 1.4},
    {"min_p": 0.15},
    {"presence_penalty": 1.0},
)


def law_of(shape: dict[str, float]) -> dict[tuple[int, ...], float]:
    """The probability of every text of DEPTH tokens after token 0, by the book."""
    options = {**PLAIN, **shape}

    def p(history: Sequence[int]) -> np.ndarray:
        row = MODEL[history[-1]].astype(np.float64)
        row[list(set(history[1:]))] -= options.get("presence_penalty", 0)
        mass = np.exp(row) / np.exp(row).sum()
        ranked = np.argsort(-mass)
        keep = ranked[: int(options["top_k"]) or VOCAB]
        before = np.cumsum(mass[keep]) - mass[keep]
        keep = keep[before < options["top_p"]] if options["top_p"] < 1 else keep
        keep = keep[mass[keep] >= options.get("min_p", 0) * mass[keep[0]]]
        out = np.zeros(VOCAB)
        out[keep] = mass[keep] ** (1 / options["temperature"])
        return out / out.sum()

    found = {}
    for text in product(range(VOCAB), repeat=DEPTH):
        probability, history = 1.0, [0]
        for token in text:
            probability *= p(history)[token]
            history.append(token)
        found[text] = probability
    return found


class Chain:
    """The model: logits depend on the newest token. Counts rows that were cut off."""

    max_context = 100

    def __init__(self) -> None:
        self.clock = PhaseClock()

    def step(self, token: int) -> np.ndarray:
        return MODEL[token]

    def verify(self, ids: list[int]) -> np.ndarray:
        return MODEL[ids]

    def keep(self, rows: int) -> None:
        assert rows >= 1

    def working(self) -> Any:
        return nullcontext()


class Guess:
    """A drafter with probabilities, or one that walks greedily."""

    name = "guess"
    has_probabilities = True

    def begin(self, ids: Sequence[int]) -> None:
        pass

    def propose(self, history: Sequence[int], count: int, choose: Chooser | None) -> list[Proposal]:
        proposals: list[Proposal] = []
        token = history[-1]
        for _ in range(count):
            row = DRAFT[token]
            drawn = [p.token for p in proposals]
            proposals.append(choose(row, drawn) if choose else Proposal(int(row.argmax())))
            token = proposals[-1].token
        return proposals

    def keep(self, rows: int) -> None:
        pass


Maker = Callable[[Sampler, GenerationOptions], Any]


def rejection(sampler: Sampler, options: GenerationOptions) -> Rejection:
    return Rejection(sampler, Sampler(options, VOCAB), sampler.uniforms())


def matching(sampler: Sampler, options: GenerationOptions) -> Matching:
    return Matching(sampler)


class PointMass(Rejection):
    """Rejection of a drafter's likeliest token: q is 1 there."""

    def chooser(self, history: Sequence[int], prompt_len: int) -> Any:
        return None


def point_mass(sampler: Sampler, options: GenerationOptions) -> PointMass:
    return PointMass(sampler, Sampler(options, VOCAB), sampler.uniforms())


class Argmax(Matching):
    """The known-wrong rule: accept what the model finds likeliest, else draw."""

    def take(
        self, row: Any, proposal: Proposal | None, history: Sequence[int], prompt_len: int
    ) -> tuple[int, bool]:
        if proposal is not None and int(row.argmax()) == proposal.token:
            return proposal.token, True
        return self.sampler.sample(row, history, prompt_len), False


class NoResidual(Rejection):
    """Another: a rejected proposal is replaced by a draw from p itself."""

    def take(
        self, row: Any, proposal: Proposal | None, history: Sequence[int], prompt_len: int
    ) -> tuple[int, bool]:
        token, accepted = super().take(row, proposal, history, prompt_len)
        return (token, True) if accepted else super().take(row, None, history, prompt_len)


def texts(make: Maker, shape: dict[str, float], block: int, runs: int = RUNS) -> Iterator[tuple]:
    """Texts of DEPTH tokens after 0, each under a seed of its own."""
    for seed in range(runs):
        options = GenerationOptions(**{**PLAIN, **shape}, seed=seed)
        sampler = Sampler(options, VOCAB)
        rounds = Rounds(Chain(), Guess(), make(sampler, options), block)
        history = [0]
        while len(history) <= DEPTH:
            history.append(rounds.token(history, 1, DEPTH + 1 - len(history)))
        rounds.stop()
        yield tuple(history[1:])


def distance(make: Maker, shape: dict[str, float], block: int = 2) -> tuple[float, float]:
    """(Total variation from the exact law, what a perfect sample of that size would show.)"""
    law = law_of(shape)
    counts = dict.fromkeys(law, 0)
    for text in texts(make, shape, block):
        counts[text] += 1
    p = np.array(list(law.values()))
    found = np.array(list(counts.values())) / RUNS
    noise = 0.5 * np.sqrt(2 / np.pi * p * (1 - p) / RUNS).sum()
    return 0.5 * np.abs(found - p).sum(), float(noise)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        *((rejection, shape) for shape in SHAPES),
        *((make, shape) for make in (matching, point_mass) for shape in (SHAPES[3], SHAPES[5])),
    ],
)
def test_texts_follow_the_exact_law(make: Maker, shape: dict[str, float]) -> None:
    found, noise = distance(make, shape)
    assert found < 1.6 * noise


@pytest.mark.parametrize("block", [1, 3])
def test_the_law_does_not_depend_on_the_block(block: int) -> None:
    found, noise = distance(rejection, {}, block)
    assert found < 1.6 * noise


@pytest.mark.parametrize("wrong", [Argmax, NoResidual])
def test_known_wrong_rules_are_told_apart(wrong: type) -> None:
    def make(sampler: Sampler, options: GenerationOptions) -> Any:
        if wrong is Argmax:
            return Argmax(sampler)
        return NoResidual(sampler, Sampler(options, VOCAB), sampler.uniforms())

    found, noise = distance(make, {})
    assert found > 2.5 * noise


def test_matching_gives_the_tokens_of_sequential_decoding() -> None:
    drafted = list(texts(matching, {}, 2, 200))
    assert drafted == list(texts(matching, {}, 1, 200))
    for seed, text in enumerate(drafted):
        sampler = Sampler(GenerationOptions(**PLAIN, seed=seed), VOCAB)
        history = [0]
        for _ in range(DEPTH):
            history.append(sampler.sample(MODEL[history[-1]], history, 1))
        assert tuple(history[1:]) == text


def test_drawn_proposals_are_accepted_more_often_than_matched_ones() -> None:
    shares = {}
    for make in (rejection, matching):
        options = GenerationOptions(**PLAIN, seed=1)
        sampler = Sampler(options, VOCAB)
        rounds, history = Rounds(Chain(), Guess(), make(sampler, options), 2), [0]
        while len(history) < 90:
            history.append(rounds.token(history, 1, 1000))
        shares[make] = rounds.stats().per_position_acceptance[0]
    overlap = np.minimum(softmax(MODEL), softmax(DRAFT)).sum(axis=1)
    assert overlap.min() - 0.15 < shares[rejection] < overlap.max() + 0.15
    assert shares[rejection] > shares[matching]


def softmax(rows: np.ndarray) -> np.ndarray:
    mass = np.exp(rows.astype(np.float64))
    return mass / mass.sum(axis=1, keepdims=True)


# --- edges of the rule ----------------------------------------------------------------------------


def at(u: Sequence[float], p: Sequence[float], proposal: Proposal) -> tuple[int, bool]:
    """The verdict on `proposal` where the model's law is `p` and the uniforms are `u`."""
    options = GenerationOptions(**PLAIN, seed=0)
    sampler = Sampler(options, len(p))
    law = Rejection(sampler, sampler, iter(u))
    with np.errstate(divide="ignore"):
        row = np.maximum(np.log(np.array(p, np.float32)), np.float32(-1e4))
    return law.take(row, proposal, [0], 1)


def drawn(token: int, q: Sequence[float]) -> Proposal:
    return Proposal(token, np.arange(len(q)), np.array(q))


def test_a_token_of_probability_zero_is_never_accepted() -> None:
    assert at([0.0, 0.5], [1, 0], drawn(1, [0.5, 0.5])) == (0, False)


@pytest.mark.parametrize(("u", "accepted"), [(0.49, True), (0.51, False)])
def test_a_proposal_is_accepted_below_the_ratio(u: float, accepted: bool) -> None:
    verdict = at([u, 0.3], [0.4, 0.6], drawn(0, [0.8, 0.2]))
    assert verdict == ((0, True) if accepted else (1, False))


def test_a_vanishing_residual_falls_back_to_the_law() -> None:
    # u * q < p fails by rounding alone: p and q are the same.
    token, accepted = at([1.0, 0.99], [0.5, 0.5], drawn(0, [0.5, 0.5]))
    assert (token, accepted) == (1, False)


def test_the_support_of_a_proposal_is_looked_up_by_id() -> None:
    proposal = Proposal(7, np.array([7, 2, 5]), np.array([0.5, 0.3, 0.2]))
    np.testing.assert_array_equal(
        proposal.probability(np.array([2, 3, 5, 7, 9])), [0.3, 0, 0.2, 0.5, 0]
    )
    np.testing.assert_array_equal(Proposal(7).probability(np.array([2, 7])), [0, 1])
