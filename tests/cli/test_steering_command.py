"""--steering and its companions, and the command that looks at directions or makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from turbospark import OpenOptions, Runner
from turbospark.cli.parser import parse
from turbospark.cli.steer import METHODS, policy
from turbospark.steering import SteeringPolicy, SteeringSet, SteeringVector
from turbospark.steering.extract import METHODS as EXTRACTS

HIDDEN = tiny_models.SIZES["hidden"]
Command = Callable[..., Any]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Three control vectors; the second asks for "add"."""
    paths = [str(tmp_path / f"{name}.gguf") for name in "abc"]
    for i, path in enumerate(paths):
        rng = np.random.default_rng(i)
        rows = {b: rng.standard_normal(HIDDEN) for b in range(1, 9)}
        SteeringSet.of(rows, declared_mode="add" if i == 1 else None).save(path)
    return paths


def asked(*words: str) -> SteeringPolicy:
    return policy(parse(["run", "m", "hi", *words]))["steering"]


def sets(files: list[str]) -> list[SteeringSet]:
    return [SteeringSet.load(f) for f in files]


def test_a_file_alone_is_taken_as_it_says(files: list[str]) -> None:
    a, b, _ = sets(files)
    found = asked("--steering", files[0], "--steering", files[1])
    assert found == SteeringPolicy([SteeringVector(a, "ablate"), SteeringVector(b, "add")])


def test_short_lists_go_on_with_their_last_value(files: list[str]) -> None:
    a, b, c = sets(files)
    words = [w for f in files for w in ("--steering", f)]
    words += ["--steering-mode", "clamp", "--steering-mode", "renorm", "--steering-scale", "0.3"]
    words += ["--steering-layers", ":4", "--steering-layers", "3:5", "--steering-layers", "6:"]
    found = asked(*words, "--steering-target", "2", "--steering-gate", "0.5")
    vectors = [
        SteeringVector(a.restrict(0, 4), "clamp", 0.3),
        SteeringVector(b.restrict(3, 5), "renorm", 0.3),
        SteeringVector(c.restrict(6, 8), "renorm", 0.3),
    ]
    assert found == SteeringPolicy(vectors, target=2.0, gate=0.5)


def test_a_negative_scale_is_a_number(files: list[str]) -> None:
    assert asked("--steering", files[0], "--steering-scale", "-1.5").vectors[0].alpha == -1.5


@pytest.mark.parametrize("command", [["run", "m", "hi"], ["chat", "m"], ["bench", "m"]])
def test_the_policy_reaches_the_options(
    command: list[str],
    files: list[str],
    turbospark: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[OpenOptions] = []

    def fake(model: str, options: OpenOptions, **more: Any) -> Runner:
        seen.append(options)
        raise OSError("enough")

    monkeypatch.setattr(Runner, "open", fake)
    turbospark(*command, "--steering", files[0], "--steering-layers", "1:2")
    assert seen[0].steering == SteeringPolicy.single(sets(files)[0].restrict(1, 2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steering-mode", "add"], "--steering-mode needs a file to apply to; give --steering"),
        (["--steering-scale", "1"], "--steering-scale needs a file"),
        (["--steering-layers", "1:2"], "--steering-layers needs a file"),
        (["--steering-target", "0"], "--steering-target needs a file"),
        (["--steering-gate", "0"], "--steering-gate needs a file"),
        (
            ["--steering", "F", "--steering-scale", "1", "--steering-scale", "2"],
            "--steering-scale was given 2 times for 1 --steering; at most once each",
        ),
        (["--steering", "F", "--steering-layers", "5"], "'5' is not A:B with A <= B"),
        (["--steering", "F", "--steering-layers", "5:3"], "'5:3' is not A:B with A <= B"),
        (["--steering", "F", "--steering-layers", "x:3"], "'x:3' is not A:B"),
        (["--steering", "F", "--steering-layers", "9:"], "blocks 9..9 have no direction"),
        (["--steering", "F", "--steering-mode", "erase"], "invalid choice: 'erase'"),
        (["--steering", "F", "--steering-gate", "-1"], "gate=-1.0 is not valid"),
        (["--steering", "F", "--steering-scale", "nan"], "alpha=nan is not valid"),
        (["--steering", "F"], "has a direction for block 8, but this model's last is 1"),
    ],
)
def test_flags_that_cannot_be_are_one_line_and_exit_code_2(
    words: list[str], message: str, files: list[str], turbospark: Command
) -> None:
    given = [files[0] if word == "F" else word for word in words]
    found = turbospark("run", "tiny", "hi", *given)
    assert (found.code, found.out) == (2, "")
    assert message in found.err and found.err.count("\n") == 1


def test_a_file_that_is_none_is_one_line_and_exit_code_1(turbospark: Command) -> None:
    found = turbospark("run", "tiny", "hi", "--steering", __file__)
    assert found.code == 1 and "expected b'GGUF'" in found.err and found.err.count("\n") == 1


def test_what_is_in_force_is_said_before_the_answer(files: list[str], turbospark: Command) -> None:
    words = ("run", "tiny", "hi", "--max-new", "4", "--steering", files[0])
    found = turbospark(*words, "--steering-layers", "1:1")
    assert found.code == 0 and found.err.startswith("steering ablate@1 on 1 of 2 layers\n")
    quiet = turbospark(*words, "--steering-layers", "1:1", "--quiet")
    assert quiet.err == ""
    report = turbospark(*words, "--steering-layers", "1:1", "--json")
    assert json.loads(report.out)["resolved"]["steering"] == "ablate@1 on 1 of 2 layers"


# --- turbospark steering --------------------------------------------------------------------------


def test_info_tells_what_a_file_holds(files: list[str], turbospark: Command) -> None:
    found = turbospark("steering", "info", files[1])
    assert found.code == 0
    assert f"8 of width {HIDDEN}, for blocks 1 to 8 of a model of at least 9" in found.out
    assert "add" in found.out and "it does not say" not in found.out
    data = json.loads(turbospark("steering", "info", files[1], "--json").out)
    assert (data["hidden"], data["covered"]) == (HIDDEN, list(range(1, 9)))
    assert data["declared_mode"] == "add" and len(data["norms"]) == 8


def test_extract_makes_what_the_library_makes(
    tmp_path: Path, model: Path, turbospark: Command
) -> None:
    (tmp_path / "up.txt").write_text("so good\n\n  so fine \n")
    (tmp_path / "down.txt").write_text("so bad\nso poor\n")
    out = tmp_path / "v.gguf"
    words = ("steering", "extract", "tiny", out, "--positive", tmp_path / "up.txt")
    words = (*words, "--negative", tmp_path / "down.txt", "--raw", "--method", "pca")
    found = turbospark(*words)
    assert (found.code, found.err) == (0, "")
    assert found.out == f"{out}: directions for blocks 1 to 1, from 2 and 2 prompts\n"
    with Runner.open(model, max_context=64) as runner:
        from turbospark.steering import extract

        ups, downs = ["so good", "so fine"], ["so bad", "so poor"]
        expected = extract(runner, ups, downs, "pca", progress=False)
    assert SteeringSet.load(out) == expected
    chats = turbospark(*[w for w in words if w != "--raw"], "--json")
    assert json.loads(chats.out)["prompts"] == [2, 2]
    assert SteeringSet.load(out) != expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info"], "the following arguments are required: PATH"),
        (["look", "f"], "invalid choice: 'look'"),
        (["info", "a", "b"], "steering info got 2 paths; works: info FILE"),
        (["extract", "m"], "steering extract got 1 paths; works: extract MODEL FILE"),
        (["info", "a", "--raw"], "--raw belongs to `steering extract`, not to info"),
        (["extract", "m", "f", "--positive", "p"], "steering extract needs --negative TEXTS"),
        (["extract", "m", "f", "--method", "svd"], "invalid choice: 'svd'"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    words: list[str], message: str, turbospark: Command
) -> None:
    found = turbospark("steering", *words)
    assert (found.code, found.out) == (2, "")
    assert message in found.err and found.err.count("\n") == 1


def test_a_file_without_prompts_is_refused(tmp_path: Path, turbospark: Command) -> None:
    (tmp_path / "none.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for name, message in (("none", "holds no prompts"), ("bytes", "not UTF-8 text")):
        both = ("--positive", tmp_path / f"{name}.txt", "--negative", tmp_path / f"{name}.txt")
        found = turbospark("steering", "extract", "tiny", tmp_path / "v.gguf", *both)
        assert found.code == 2 and message in found.err


def test_the_methods_of_the_command_are_those_of_the_library() -> None:
    assert METHODS == EXTRACTS
