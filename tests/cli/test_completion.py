"""Completion scripts, asked by the shells themselves what would follow."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turbospark.cli.parser import COMMANDS, SHELLS

Command = Callable[..., Any]
ASKED = [
    ("turbospark ch", {"check", "chat"}),
    ("turbospark run --expert-cache-p", {"--expert-cache-policy"}),
    ("turbospark run tiny --expert-residency m", {"mapped"}),
    ("turbospark run tiny --reasoning x", {"xhigh"}),
    ("turbospark convert a b --mode nv", {"nvfp4"}),
    ("turbospark info wor", {"wordless"}),
    ("turbospark completion z", {"zsh"}),
]
BASH = """
source {script}
COMP_WORDS=({line}) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_turbospark
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(turbospark: Command, tmp_path: Path) -> Callable[[str], Path]:
    def written(shell: str) -> Path:
        path = tmp_path / f"completion.{shell}"
        path.write_text(turbospark("completion", shell).out)
        return path

    return written


def shell(name: str, *words: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed here")
    done = subprocess.run([name, *words], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(("line", "expected"), ASKED)
def test_bash_completes(line: str, expected: set[str], script: Callable[[str], Path]) -> None:
    found = shell("bash", "--norc", "-c", BASH.format(script=script("bash"), line=line))
    assert set(found.split()) == expected


@pytest.mark.parametrize(("line", "expected"), ASKED)
def test_fish_completes(line: str, expected: set[str], script: Callable[[str], Path]) -> None:
    found = shell("fish", "-c", f"source {script('fish')}; complete -C '{line}'")
    assert {row.split("\t")[0] for row in found.splitlines()} == expected


def test_zsh_accepts_its_script(script: Callable[[str], Path]) -> None:
    assert shell("zsh", "-n", str(script("zsh"))) == ""


@pytest.mark.parametrize("name", SHELLS)
def test_every_command_and_flag_is_completed(name: str, turbospark: Command) -> None:
    text = json.loads(turbospark("completion", name, "--json").out)["script"]
    assert all(command in text for command in COMMANDS)
    for flag in ("max-new", "group-size", "router-skew", "mlx-lm", "messages-file"):
        assert (f"-l {flag}" if name == "fish" else f"--{flag}") in text


def test_an_empty_store_completes_nothing(
    script: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = script("bash")
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "empty"))
    assert shell("bash", "-c", BASH.format(script=written, line="turbospark info wo")).split() == []
