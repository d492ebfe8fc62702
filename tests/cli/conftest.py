"""A tiny model in a store of its own, and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_models

from turbospark.cli import main

NAME = "tiny"
TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if enable_thinking %}{{ '[' + reasoning_effort + ']' }}{% endif %}
{{- '(' + strftime_now('%Y') + ')' }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TURBOSPARK_HOME with one model that has a tokenizer and one that has none."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").mkdir()
    tiny_models.talking(home / "models" / f"{NAME}.gturbo", TEMPLATE)
    tiny_models.wordless(home / "models" / "wordless.gturbo")
    return home


@pytest.fixture(autouse=True)
def _environment(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSPARK_HOME", str(store))


@pytest.fixture
def model(store: Path) -> Path:
    return store / "models" / f"{NAME}.gturbo"


@pytest.fixture
def turbospark(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command: `turbospark("info", "tiny")`."""

    def command(*argv: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Outcome(code, *capsys.readouterr())

    return command
