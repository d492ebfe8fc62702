"""Sampled answers of an open model that drafts with its head: the law, and a rule known wrong."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import heads
import mlx.core as mx
import numpy as np
import pytest
from planting import plant

from turbospark import DraftPolicies, OpenOptions, Runner, convert
from turbospark.speculation.acceptance import Rejection

TOP, DEPTH, RUNS = 3, 3, 600
PROMPT = [5, 9, 31]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": TOP, "top_p": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose newest token alone decides, with a head that knows it in part."""
    path = heads.checkpoint(tmp_path_factory.mktemp("sampled") / "source", honest=True)
    tensors = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(list(tensors.values()))
    fc = tensors["mtp.fc.weight"]
    noise = np.random.default_rng(4).normal(size=fc.shape).astype(np.float32) * 0.05
    tensors["mtp.fc.weight"] = fc + mx.array(noise).astype(fc.dtype)
    (path / "model.safetensors").unlink()
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    return path


@pytest.fixture(scope="module")
def install(source: Path) -> Path:
    return convert(source, source.with_name("model"), progress=False)


def law(source: Path) -> dict[tuple[int, ...], float]:
    """The probability of every answer of DEPTH tokens, in numpy."""
    tensors = mx.load(str(source / "model.safetensors"))
    named = {
        k.rsplit("language_model.", 1)[-1].removeprefix("model."): v for k, v in tensors.items()
    }
    embed, norm, out = (
        np.array(named[f"{name}.weight"].astype(mx.float32), np.float64)
        for name in ("embed_tokens", "norm", "lm_head")
    )
    eps = heads.json.loads((source / "config.json").read_text())
    eps = eps.get("text_config", eps)["rms_norm_eps"]

    def following(token: int) -> dict[int, float]:
        x = embed[token]
        logits = out @ (x / np.sqrt((x * x).mean() + eps) * (1 + norm))
        best = np.argsort(-logits)[:TOP]
        mass = np.exp(logits[best] - logits[best].max())
        return dict(zip(best.tolist(), (mass / mass.sum()).tolist(), strict=True))

    found = {(PROMPT[-1],): 1.0}
    for _ in range(DEPTH):
        found = {
            (*text, token): p * q
            for text, p in found.items()
            for token, q in following(text[-1]).items()
        }
    return {text[1:]: p for text, p in found.items()}


def distance(install: Path, expected: dict[tuple[int, ...], float], acceptance: str) -> float:
    """Total variation from the law over what a perfect sample of that size would show."""
    drafting = DraftPolicies(mtp=2)
    options = OpenOptions(
        max_context=32, device="cpu", dtype="float32", prefix_reuse=True, speculation=drafting,
        acceptance=acceptance,
    )  # fmt: skip
    counts: Counter[tuple[int, ...]] = Counter()
    with Runner.open(install, options) as runner:
        for seed in range(RUNS):
            # One token more, so that the round proposes two.
            answer = runner.generate(PROMPT, max_new_tokens=DEPTH + 1, seed=seed, **SAMPLED)
            counts[tuple(answer.token_ids[:DEPTH])] += 1
        stats = runner.speculation
        assert stats is not None and 0.2 < stats.per_position_acceptance[0] < 0.95
        assert stats.offered[1] > RUNS / 10
    assert set(counts) <= set(expected)
    p = np.array(list(expected.values()))
    found = np.array([counts[text] / RUNS for text in expected])
    noise = 0.5 * np.sqrt(2 / np.pi * p * (1 - p) / RUNS).sum()
    return float(0.5 * np.abs(found - p).sum() / noise)


@pytest.mark.parametrize("acceptance", ["rejection", "match"])
def test_answers_drafted_by_a_head_follow_the_models_own_law(
    source: Path, install: Path, acceptance: str
) -> None:
    expected = law(source)
    assert len(expected) == len(list(product(range(TOP), repeat=DEPTH)))
    assert distance(install, expected, acceptance) < 1.6


def test_a_rule_that_is_known_wrong_is_told_apart(
    source: Path, install: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Rejection, "take", "p - proposal.probability(ids)", "p")
    assert distance(install, law(source), "rejection") > 2.2
