"""Drafters that are broken, do not fit, or reach too far: refused by name, or without effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blocks
import heads
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from numpy_heads import NumpyHead, head_rows, hidden_rows
from oracle_folders import ORACLES
from toys import prompt_of

from turbospark import DraftPolicies, OpenOptions, Runner, convert
from turbospark.cli.parser import opening, parse
from turbospark.errors import (
    FileSizeError,
    NonFiniteLogitsError,
    OptionError,
    SourceError,
    SpeculationUnavailableError,
)
from turbospark.policies import MtpPolicy
from turbospark.speculation.mtp import MtpHead

CPU: dict[str, Any] = {"max_context": 160, "device": "cpu", "dtype": "float32"}
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
PROMPT = prompt_of(heads.BASE, 20)
Installed = Callable[[str], Path]


def with_head(root: Path, edit: heads.Edit) -> Path:
    """An install whose knowing head has been changed."""
    source = heads.edited(heads.checkpoint(root / "source", honest=True), edit)
    return convert(source, root / "model", progress=False)


def opened(path: Path, **drafter: Any) -> Runner:
    return Runner.open(path, OpenOptions(**CPU, speculation=DraftPolicies(**drafter)))


def times(name: str, factor: float) -> heads.Edit:
    def edit(tensors: dict[str, mx.array]) -> None:
        tensors[name] = tensors[name] * factor

    return edit


# --- weights that are no numbers, or of nothing ---------------------------------------------------


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.norm.weight"])
def test_a_head_that_is_not_finite_is_an_error_greedy_and_sampled(
    name: str, factor: float, tmp_path: Path
) -> None:
    with opened(with_head(tmp_path, times(name, factor)), mtp=3) as runner:
        with pytest.raises(NonFiniteLogitsError, match="MTP head's logits are not finite"):
            runner.generate(PROMPT, **GREEDY)
        runner.reset()
        with pytest.raises(NonFiniteLogitsError, match="logits are not finite"):
            runner.generate(PROMPT, **{**GREEDY, "temperature": 1.0})
        runner.reset()
        assert runner.generate(PROMPT, **GREEDY, draft_tokens=0).new_tokens == 20


def test_a_draft_model_that_is_not_finite_is_an_error(installed: Installed, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in (ORACLES / "llama-base").iterdir():
        if file.suffix in (".json", ".safetensors"):
            (source / file.name).write_bytes(file.read_bytes())
    heads.edited(source, times("model.norm.weight", float("nan")))
    broken = convert(source, tmp_path / "broken", progress=False)
    with (
        opened(installed("llama-base"), draft_model=broken) as runner,
        pytest.raises(NonFiniteLogitsError, match="draft model's logits are not finite"),
    ):
        runner.generate(PROMPT, **GREEDY)


def test_a_probe_of_a_head_that_is_always_wrong_fails_and_its_answers_are_right(
    tmp_path: Path,
) -> None:
    path = with_head(tmp_path, times("mtp.fc.weight", -1.0))  # what it says is least likely
    with opened(path, mtp=2) as runner:
        plain = runner.generate(PROMPT, **GREEDY, draft_tokens=0)
        assert runner.generate(PROMPT, **GREEDY).token_ids == plain.token_ids
        with pytest.raises(
            SpeculationUnavailableError, match=r"0 of 62 first proposals were accepted.* 2%"
        ):
            runner.probe_speculation(PROMPT, temperature=0, ignore_eos=True)


# --- tensors that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"][:, :40]}), r"fc.*\[32, 40\]"),
        (lambda t: t.update({"mtp.norm.weight": t["mtp.norm.weight"][:5]}), r"mtp.norm.*\[5\]"),
        (
            lambda t: t.update({"model.mtp.norm.weight": t["mtp.norm.weight"]}),
            "provided twice: mtp.norm.weight",
        ),
    ],
    ids=["columns", "width", "twice"],
)
def test_tensors_of_a_head_that_do_not_fit_are_refused(
    edit: heads.Edit, words: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=words):
        with_head(tmp_path, edit)
    assert not (tmp_path / "model").exists()


def test_a_head_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = with_head(tmp_path, lambda t: None)
    file = path / "model_weights.bin"
    stored = file.read_bytes()
    file.write_bytes(stored[:-4096])
    with pytest.raises(FileSizeError, match="truncated: expected"):
        opened(path, mtp=2)
    source = tmp_path / "source" / "model.safetensors"
    stored = source.read_bytes()
    source.unlink()
    source.write_bytes(stored[:-64])
    with pytest.raises(SourceError, match=r"model.safetensors"):
        convert(source.parent, tmp_path / "again", progress=False)


def test_a_raw_head_on_a_tree_whose_norms_have_the_one_added_is_read_as_it_is(
    tmp_path: Path,
) -> None:
    """mlx-lm adds one to its norms and turns its convolutions; a head grafted on is neither."""

    def as_mlx(tensors: dict[str, mx.array]) -> None:
        for name, value in tensors.items():
            if name.startswith("mtp."):
                continue
            if name.endswith("conv1d.weight"):
                tensors[name] = mx.contiguous(value.swapaxes(1, 2))
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                tensors[name] = value + 1

    source = heads.edited(heads.checkpoint(tmp_path / "model-source", honest=False), as_mlx)
    path = convert(source, tmp_path / "model", progress=False)
    with opened(path, mtp=2) as runner:
        runner.prefill(PROMPT)
        row = head_rows(runner, [*PROMPT, 9], 1)[0]
        runner.reset()
        hidden = hidden_rows(runner, PROMPT)
    manifest = json.loads((path / "manifest.json").read_text())["turbospark"]["config"]
    assert (manifest["norm_convention"], manifest["mtp_norm_convention"]) == ("plain", "centred")
    expected, _ = NumpyHead(path)([*PROMPT[1:], 9], hidden)
    np.testing.assert_allclose(row, expected, atol=1e-4)


def test_a_draft_model_whose_ids_spell_other_tokens_is_refused(tmp_path: Path) -> None:
    ours, theirs = (tiny_models.talking(tmp_path / name) for name in ("ours", "theirs"))
    file = theirs / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with opened(ours, draft_model=tiny_models.talking(tmp_path / "same")) as runner:
        assert runner.resolved.drafter == "draft_model"
    with pytest.raises(SpeculationUnavailableError, match="has another vocabulary than"):
        opened(ours, draft_model=theirs)


# --- widths and lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["16", "9" * 30, "9" * 5000, "0016"])
def test_a_width_past_fifteen_is_refused_however_long_it_is(text: str) -> None:
    with pytest.raises(OptionError, match=r"TURBOSPARK_MTP_DRAFT='[0-9]+.*a fixed width 1..15"):
        DraftPolicies.from_env({"TURBOSPARK_MTP_DRAFT": text})
    with pytest.raises(OptionError, match=r"--speculative [0-9]+ is not valid"):
        opening(parse(["run", "m", "--speculative", text]))


def test_variables_are_read_as_the_table_says() -> None:
    found = DraftPolicies.from_env({"TURBOSPARK_MTP_DRAFT": "000", "TURBOSPARK_DFLASH_DRAFT": "03"})
    assert (str(found.mtp), str(found.dflash)) == ("off", "fixed(3)")
    assert MtpPolicy.parse("²") == MtpPolicy.auto()
    with pytest.raises(OptionError, match="--speculative ² is not valid"):
        opening(parse(["run", "m", "--speculative", "²"]))
    with pytest.raises(OptionError, match=r"mtp=fixed.2. and dflash=fixed.2. are named together"):
        DraftPolicies.from_env({"TURBOSPARK_MTP_DRAFT": "2", "TURBOSPARK_DFLASH_DRAFT": "2"})


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An install with an MTP head and a block drafter."""
    root = tmp_path_factory.mktemp("both")
    source = heads.checkpoint(root / "source", honest=True)
    folder = blocks.drafter(root / "drafter")
    return convert(source, root / "model", drafter=folder, progress=False)


@pytest.mark.parametrize("who", ["mtp", "dflash", "draft_model", "prompt_lookup"])
@pytest.mark.parametrize("room", [21, 22, 23, 29])
def test_an_answer_to_the_end_of_the_context_is_the_sequential_one(
    both: Path, who: str, room: int
) -> None:
    drafter = {who: both if who == "draft_model" else 4}
    options = OpenOptions(**{**CPU, "max_context": room}, speculation=DraftPolicies(**drafter))
    asked = {"temperature": 0, "ignore_eos": True, "max_new_tokens": None}
    with Runner.open(both, options) as runner:
        drafted = runner.generate(PROMPT, **asked)
        plain = runner.generate(PROMPT, **asked, draft_tokens=0)
        assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == room - len(PROMPT)
        assert drafted.stop_reason == plain.stop_reason == "context"
        assert drafted.kv_backed_token_ids == plain.kv_backed_token_ids
        assert drafted.speculation is not None and drafted.speculation.drafter == who


# --- what was asked for ---------------------------------------------------------------------------


def test_the_drafter_that_is_named_is_the_one_that_opens(both: Path, tmp_path: Path) -> None:
    for asked, drafter, width in (
        ({"mtp": 3, "dflash": "auto"}, "mtp", 3),
        ({"dflash": "auto"}, "dflash", 2),
        ({"mtp": "auto", "dflash": 3}, "dflash", 3),
        ({"mtp": "auto"}, "mtp", 2),
        ({}, None, 0),
    ):
        with opened(both, **asked) as runner:
            assert (runner.resolved.drafter, runner.resolved.draft_width) == (drafter, width)
    # A number alone takes what the install carries, the head before the block drafter.
    assert opening(parse(["run", str(both), "--speculative", "3"]))["speculation"] == {"mtp": 3}
    folder = blocks.drafter(tmp_path / "drafter")
    only = convert(ORACLES / blocks.BASE, tmp_path / "only", drafter=folder, progress=False)
    assert opening(parse(["run", str(only), "--speculative", "3"]))["speculation"] == {"dflash": 3}
    with pytest.raises(SpeculationUnavailableError, match=r"mtp=fixed.3.: this install has only 5"):
        opened(only, mtp=3, dflash="auto")


@pytest.mark.parametrize("who", ["mtp", "dflash"])
def test_residuals_are_the_same_beside_a_drafter_and_leave_it_whole(both: Path, who: str) -> None:
    with opened(both) as plain, opened(both, **{who: 3}) as drafting:
        expected = np.array(plain.residuals(PROMPT))
        np.testing.assert_array_equal(np.array(drafting.residuals(PROMPT)), expected)
        answer = plain.generate(PROMPT, **GREEDY)
        assert drafting.generate(PROMPT, **GREEDY).token_ids == answer.token_ids


def test_a_prompt_primes_the_head_at_once_or_row_by_row(
    both: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    call = MtpHead.__call__

    def counted(head: MtpHead, ids: mx.array, *more: Any) -> mx.array:
        rows.append(ids.shape[1])
        return call(head, ids, *more)

    monkeypatch.setattr(MtpHead, "__call__", counted)
    with opened(both, mtp=2) as runner:
        runner.prefill(PROMPT, chunk=8)
        assert rows == [7, 8, 4]  # of the last token only its hidden row is known
        rows.clear()
        runner.reset()
        runner.toggles.mtp_batched_prime = False
        runner.prefill(PROMPT, chunk=8)
        assert rows == [1] * 19
