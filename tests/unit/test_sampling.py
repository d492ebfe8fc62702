"""Sampling against a second implementation: plain Python, one element at a time."""

from __future__ import annotations

import math
import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbospark.errors import NonFiniteLogitsError, TurbosparkError
from turbospark.options import GenerationOptions
from turbospark.sampling import Sampler, top_ids, uniform

# --- the reference ----------------------------------------------------------------------------


def reference_uniform(seed: int, step: int) -> float:
    """splitmix64 as published, on seed xor step * gamma."""
    two64 = 1 << 64
    gamma = 0x9E3779B97F4A7C15
    x = (seed ^ (step * gamma % two64)) % two64
    x = (x + gamma) % two64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % two64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % two64
    x = x ^ (x >> 31)
    return (x >> 11) / (1 << 53)


def reference_sample(logits, o: GenerationOptions, history, prompt_len) -> int:
    """The documented order, with lists and math.exp."""
    z = [float(np.float32(v)) for v in logits]
    for t in set(history):
        z[t] = z[t] / o.repetition_penalty if z[t] > 0 else z[t] * o.repetition_penalty
    for t in set(history[prompt_len:]):
        z[t] -= o.presence_penalty + o.frequency_penalty * history[prompt_len:].count(t)
    if o.temperature == 0:
        return max(range(len(z)), key=lambda i: (z[i], -i))
    top = max(z)
    total = math.fsum(math.exp(v - top) for v in z)
    p = [math.exp(v - top) / total for v in z]
    ids = list(range(len(z)))
    if o.top_k:
        ids = sorted(ids, key=lambda i: (-z[i], i))[: o.top_k]
    if o.top_p < 1:
        kept, mass = [], 0.0
        for i in ids:
            if kept and mass >= o.top_p:
                break
            kept.append(i)
            mass += p[i]
        ids = kept
    if o.min_p:
        ids = [i for i in ids if p[i] >= o.min_p * max(p)]
    weights = [math.exp(math.log(p[i] / max(p)) / o.temperature) for i in ids]
    mark = reference_uniform(o.seed, len(history) - prompt_len) * math.fsum(weights)
    for i, w in zip(ids, weights, strict=True):
        mark -= w
        if mark < 0:
            return i
    return ids[-1]


def row_of(rng: random.Random, size: int, ties: bool) -> np.ndarray:
    values = [rng.choice([-2.0, 0.0, 1.5, 3.0]) if ties else rng.gauss(0, 3) for _ in range(size)]
    return np.array(values, dtype=np.float32)


# --- against it -------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (1, 0), (0, 1), (2**64 - 1, 12345), (42, 7)])
def test_the_uniform_is_splitmix64(seed, step):
    assert uniform(seed, step) == reference_uniform(seed, step)
    assert 0 <= uniform(seed, step) < 1


def test_the_uniform_of_seed_zero_is_the_published_first_value():
    # splitmix64 from state 0 begins with e220a8397b1dcdaf.
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.8]),
    st.sampled_from([1, 2, 5, 40, 256]),
    st.sampled_from([0.3, 0.8, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([(0.0, 0.0), (0.7, 0.0), (-0.5, 0.3)]),
    st.booleans(),
)
def test_every_combination_samples_what_the_reference_samples(
    seed, temperature, top_k, top_p, min_p, repetition, extra, ties
):
    rng = random.Random(seed)
    size = rng.choice([3, 50, 300])
    options = GenerationOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=extra[0],
        frequency_penalty=extra[1],
        seed=rng.randrange(2**64),
    )
    history = [rng.randrange(size) for _ in range(rng.randrange(1, 20))]
    prompt_len = rng.randrange(1, len(history) + 1)
    row = row_of(rng, size, ties)
    got = Sampler(options, size).sample(row, history, prompt_len)
    assert got == reference_sample(row, options, history, prompt_len)


def test_without_top_k_the_whole_row_is_drawn_in_id_order():
    rng = random.Random(3)
    options = GenerationOptions(temperature=1.0, top_k=0, top_p=1.0, seed=11)
    row = row_of(rng, 500, ties=False)
    sampler = Sampler(options, 500)
    history = [0]
    for _ in range(50):
        token = sampler.sample(row, history, 1)
        assert token == reference_sample(row, options, history, 1)
        history.append(token)
    assert len(set(history)) > 5


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 64, 200]), st.booleans())
def test_top_ids_rank_by_value_then_id(seed, k, ties):
    rng = random.Random(seed)
    row = row_of(rng, rng.choice([5, 64, 1000, 20_000]), ties)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert top_ids(row, k).tolist() == expected


def test_draws_follow_the_distribution():
    options = GenerationOptions(temperature=1.0, top_k=4, top_p=1.0, seed=5)
    row = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32))
    sampler = Sampler(options, 4)
    history = [0]
    for _ in range(20_000):
        history.append(sampler.sample(row, history, 1))
    shares = np.bincount(history[1:], minlength=4) / 20_000
    assert np.abs(shares - [0.5, 0.25, 0.15, 0.1]).max() < 0.012


# --- edges --------------------------------------------------------------------------------------


def test_greedy_takes_the_lower_of_equal_maxima_and_applies_penalties():
    row = np.array([1.0, 5.0, 5.0, 0.0], dtype=np.float32)
    assert Sampler(GenerationOptions(temperature=0), 4).sample(row, [0], 1) == 1
    options = GenerationOptions(temperature=0, repetition_penalty=1.5)
    assert Sampler(options, 4).sample(row, [1], 1) == 2


def test_a_repetition_penalty_lowers_negative_logits_too():
    row = np.array([-0.5, -0.6], dtype=np.float32)
    options = GenerationOptions(temperature=0, repetition_penalty=1.5)
    assert Sampler(options, 2).sample(row, [1], 1) == 0
    assert Sampler(options, 2).sample(row, [0], 1) == 1


def test_top_p_keeps_no_token_beyond_the_mass_it_names():
    sampler = Sampler(GenerationOptions(temperature=1.0, top_k=4, top_p=0.5), 4)
    ids, _ = sampler.distribution(np.zeros(4, dtype=np.float32))
    assert ids.tolist() == [0, 1]


def test_presence_and_frequency_leave_the_prompt_alone():
    row = np.array([1.0, 0.9], dtype=np.float32)
    options = GenerationOptions(temperature=0, presence_penalty=1.0, frequency_penalty=0.5)
    assert Sampler(options, 2).sample(row, [0, 0, 0], 3) == 0
    assert Sampler(options, 2).sample(row, [0, 0, 0], 2) == 1


def test_penalties_follow_a_history_that_grows_shrinks_or_changes():
    options = GenerationOptions(temperature=0, frequency_penalty=0.5)
    sampler = Sampler(options, 3)
    row = np.array([1.0, 0.8, 0.2], dtype=np.float32)
    history = [2]
    for expected in (0, 1, 0, 1, 2):
        assert sampler.sample(row, history, 1) == expected
        history.append(expected)
    del history[1:]
    assert sampler.sample(row, history, 1) == 0
    assert sampler.sample(row, [2, 0], 1) == 1
    assert sampler.sample(row, [2, 1], 1) == 0, "another list of the same length"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (GenerationOptions(top_k=1, top_p=0.8, temperature=1.0), 2),
        (GenerationOptions(top_k=256, top_p=0.95, temperature=1e-4), 2),
        (GenerationOptions(top_k=4, top_p=1e-9, temperature=2.0), 2),
        (GenerationOptions(top_k=4, top_p=1.0, min_p=0.999, temperature=5.0), 2),
        (GenerationOptions(top_k=4, top_p=1.0, temperature=1e-308), 2),
    ],
)
def test_narrow_settings_leave_the_top_token(options, expected):
    row = np.array([0.0, 1.0, 4.0, -3.0], dtype=np.float32)
    for step in range(20):
        assert Sampler(options, 4).sample(row, [0] * (1 + step), 1) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_non_finite_logits_are_an_error_naming_the_token(bad, temperature):
    row = np.zeros(10, dtype=np.float32)
    row[7] = bad
    sampler = Sampler(GenerationOptions(temperature=temperature), 10)
    with pytest.raises(NonFiniteLogitsError, match="token 7"):
        sampler.sample(row, [0], 1)


def test_a_penalty_that_overflows_is_an_error():
    options = GenerationOptions(repetition_penalty=1e-308)
    with pytest.raises(NonFiniteLogitsError, match="repetition_penalty"):
        Sampler(options, 2).sample(np.array([5.0, 1.0], dtype=np.float32), [0], 1)


def test_a_row_of_another_size_is_an_error():
    with pytest.raises(TurbosparkError, match="10 tokens"):
        Sampler(GenerationOptions(), 10).sample(np.zeros(9, dtype=np.float32), [0], 1)


def test_mlx_rows_sample_as_numpy_rows_and_global_random_state_is_untouched():
    rng = random.Random(9)
    row = row_of(rng, 300, ties=False)
    options = GenerationOptions(temperature=1.5, seed=4)
    mx.random.seed(1)
    np.random.seed(1)
    before, numpy_before = mx.random.state[0].tolist(), np.random.get_state()[1].tolist()
    device_row = mx.array(row)
    for step in range(10):
        history = [0] * (1 + step)
        a = Sampler(options, 300).sample(device_row, history, 1)
        assert a == Sampler(options, 300).sample(row, history, 1)
    assert mx.random.state[0].tolist() == before
    assert np.random.get_state()[1].tolist() == numpy_before


def test_the_same_seed_gives_the_same_tokens_and_none_takes_the_clock():
    row = row_of(random.Random(2), 300, ties=False)

    def tokens(seed):
        sampler = Sampler(GenerationOptions(temperature=2.0, seed=seed), 300)
        history = [0]
        for _ in range(20):
            history.append(sampler.sample(row, history, 1))
        return history

    assert tokens(5) == tokens(5) != tokens(6)
    assert Sampler(GenerationOptions(), 3).seed != Sampler(GenerationOptions(), 3).seed
