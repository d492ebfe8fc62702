"""Directions from contrast prompts, against numpy on the same residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from oracle_folders import ORACLES, Oracle
from steered import open_cpu, random_set

from turbospark import Runner
from turbospark.errors import OptionError, UnsupportedError
from turbospark.steering import SteeringPolicy, SteeringSet, extract

IDS = Oracle(ORACLES / "gemma3-text").ids
UPS = [IDS[i : i + 9] for i in range(5)]
DOWNS = [IDS[::-1][i : i + 7] for i in range(5)]


@pytest.fixture(scope="module")
def runner(installed: Callable[[str], Path]) -> Iterator[Runner]:
    with open_cpu(installed("gemma3-text")) as opened:
        yield opened


def residuals(runner: Runner, prompts: list[list[int]]) -> np.ndarray:
    """float64 [prompts, layers, hidden]."""
    return np.stack([np.array(runner.residuals(p)) for p in prompts]).astype(np.float64)


def test_the_mean_difference_is_numpys(runner: Runner) -> None:
    made = extract(runner, UPS, DOWNS[:3], progress=False)
    expected = residuals(runner, UPS).mean(0) - residuals(runner, DOWNS[:3]).mean(0)
    assert made.covered_layers == tuple(range(1, runner.arch.num_layers))
    for block, row in made.directions.items():
        np.testing.assert_allclose(row, expected[block], atol=1e-5)
    assert made.declared_arch == "gemma3_text" and made.declared_mode is None


def test_pca_is_the_first_component_of_centred_pairs_towards_the_positive(runner: Runner) -> None:
    made = extract(runner, UPS, DOWNS, "pca", progress=False)
    ups, downs = residuals(runner, UPS), residuals(runner, DOWNS)
    for block, row in made.directions.items():
        middles = (ups[:, block] + downs[:, block]) / 2
        rows = np.concatenate([ups[:, block] - middles, downs[:, block] - middles])
        component = np.linalg.svd(rows)[2][0]
        cosine = float(row @ component / np.linalg.norm(row))
        assert abs(cosine) == pytest.approx(1, abs=1e-5)
        unit = row / np.linalg.norm(row)
        up, down = (ups[:, block] @ unit).mean(), (downs[:, block] @ unit).mean()
        assert up > down and np.linalg.norm(row) == pytest.approx(up - down, rel=1e-4)


@pytest.mark.parametrize("method", ["mean_difference", "pca"])
def test_exchanging_the_groups_turns_the_direction_around(runner: Runner, method: str) -> None:
    forth = extract(runner, UPS, DOWNS, method, progress=False).directions
    back = extract(runner, DOWNS, UPS, method, progress=False).directions
    for block, row in forth.items():
        np.testing.assert_allclose(back[block], -row, atol=1e-4)


def test_adding_the_direction_moves_one_group_onto_the_other(runner: Runner) -> None:
    """What the length means: at strength 1 the negative mean becomes the positive one."""
    made = extract(runner, UPS, DOWNS, progress=False)
    target = residuals(runner, UPS).mean(0)[2]
    runner.set_steering(SteeringPolicy.single(made.restrict(2, 2), "add"))
    moved = residuals(runner, DOWNS).mean(0)[2]
    runner.set_steering(None)
    np.testing.assert_allclose(moved, target, atol=1e-4)


def test_what_is_extracted_can_be_saved_and_steers(runner: Runner, tmp_path: Path) -> None:
    extract(runner, UPS, DOWNS, progress=False).save(tmp_path / "v.gguf")
    runner.set_steering(SteeringPolicy.single(SteeringSet.load(tmp_path / "v.gguf"), "add", 2.0))
    steered = np.array(runner.score(IDS))
    runner.set_steering(None)
    assert np.abs(np.array(runner.score(IDS)) - steered).max() > 1e-2


def test_prompts_may_be_texts_or_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    install = tiny_models.talking(tmp_path / "tiny.gturbo", template)
    with open_cpu(install) as runner:
        texts = extract(runner, ["good", "fine"], ["bad", "poor"], progress=False)
        ids = [runner.encode(t) for t in ("good", "fine", "bad", "poor")]
        assert texts == extract(runner, ids[:2], ids[2:], progress=False)
        chats = [[{"role": "user", "content": t}] for t in ("good", "bad")]
        capsys.readouterr()
        assert extract(runner, chats[:1], chats[1:]).covered_layers == (1,)
        assert "2/2" in capsys.readouterr().err


def test_without_progress_nothing_is_shown(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    extract(runner, UPS[:1], DOWNS[:1], progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("positive", "negative", "method", "message"),
    [
        (UPS, DOWNS, "svd", "method='svd' is not valid; works: mean_difference, pca"),
        ([], DOWNS, "pca", "0 positive and 5 negative prompts; give at least one of each"),
        (UPS, [], "pca", "5 positive and 0 negative prompts"),
        (UPS, DOWNS[:2], "pca", "pairs the prompts, but there are 5 positive and 2 negative"),
        (UPS, UPS, "pca", "groups of prompts do not differ at block 1"),
        (UPS, UPS[::-1], "mean_difference", "groups of prompts do not differ at block 1"),
    ],
)
def test_what_cannot_be_extracted_is_refused(
    runner: Runner, positive: list, negative: list, method: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        extract(runner, positive, negative, method, progress=False)


def test_a_steered_runner_is_not_read(runner: Runner) -> None:
    runner.set_steering(SteeringPolicy.single(random_set(runner, [1])))
    with pytest.raises(OptionError, match=r"steered \(ablate@1 on 1 of 4 layers\).*set_steering"):
        extract(runner, UPS, DOWNS, progress=False)
    runner.set_steering(None)


def test_an_unsupported_family_is_refused(installed: Callable[[str], Path]) -> None:
    with open_cpu(installed("deepseek_v2-lite")) as runner:
        with pytest.raises(UnsupportedError) as caught:
            extract(runner, UPS, DOWNS, progress=False)
        assert str(caught.value) == runner.steering_unsupported_reason
