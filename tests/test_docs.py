"""The documents are true: code runs, commands parse, links lead somewhere, messages exist."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from turbospark import OpenOptions, Runner
from turbospark.cli import main
from turbospark.cli.parser import COMMANDS, parse
from turbospark.errors import OptionError, UnsupportedError

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DEMO_MODEL = ".demo/SmolLM2-135M-Instruct.gturbo"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language that stand at the margin."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def commands(page: Path, program: str) -> list[list[str]]:
    """The lines of shell blocks that call `program`, as words up to a pipe."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    words = [shlex.split(line.partition(" | ")[0], comments=True) for line in lines]
    return [w for w in words if program in w[:3]]


@pytest.fixture
def demo_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory as `make demo` leaves it, with a tiny model in place of the big one."""
    (tmp_path / ".demo").mkdir()
    tiny_models.talking(tmp_path / DEMO_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    return tmp_path


# A page that adds a family has a test of its own: tests/families/test_adding_a_family.py.
WITH_PYTHON = [p for p in PAGES if blocks(p, "python") and p.name != "adding-a-family.md"]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks_run_in_the_folder_that_the_demo_leaves(
    page: Path, demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), namespace)
    assert capsys.readouterr().out.strip()


def test_the_readme_shows_the_library_in_fifteen_lines() -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 16


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_start_with_what_they_show(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) < 60
    assert ast.get_docstring(ast.parse(text))


RUNNABLE = [path for path in EXAMPLES if path.name != "demo.py"]  # `make demo` downloads a model


@pytest.mark.parametrize("script", RUNNABLE, ids=lambda path: path.name)
def test_examples_run(
    script: Path,
    demo_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    for words in commands(page, "turbospark"):
        assert parse(words[1:]).run == COMMANDS[words[1]].run


def test_the_commands_of_the_command_line_page_run(
    demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    for words in commands(ROOT / "docs" / "command-line.md", "turbospark"):
        if words[1] == "pull" or any(word.startswith("path/to/") for word in words):
            continue  # the network, and what only a reader has
        assert main(words[1:]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.strip(), words
        ran.append(words[1])
    assert len(ran) >= 12 and {"synth", "info", "check", "run", "bench", "rm"} <= set(ran)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_the_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in COMMANDS:
        assert f"turbospark {name} " in readme or f"`{name}`" in readme, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(page, "make"):
        target = next(w for w in words if "=" not in w and w != "make")
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in target or (page.parent / target).exists(), target
    for name in re.findall(r"`((?:turbospark|tests|docs|benchmarks|examples)/[\w/.-]+)`", text):
        example = name == "turbospark/families/olmo2.py"  # the family that a page invents
        assert example or (ROOT / name).exists(), name


def test_the_options_page_is_what_the_models_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_options.py"), run_name="made")["markdown"]()
    stale = "run: python docs/make_options.py > docs/options.md"
    assert made == (ROOT / "docs" / "options.md").read_text(), stale


def test_every_variable_of_the_options_page_is_read() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    names = set(re.findall(r"^\| `(TURBOSPARK_\w+)`", page, re.M)) - {"TURBOSPARK_HOME"}
    assert len(names) >= 14
    for name in names:
        with pytest.raises(OptionError, match=name):
            OpenOptions.interactive({name: "99"})


# --- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"vision_sidecar": "auto"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_readme_says_is_not_there_is_refused(
    change: dict[str, Any], demo_folder: Path
) -> None:
    (name,) = change
    missing = (ROOT / "README.md").read_text().split("Not there yet")[1]
    assert f"`{name}`" in missing
    with pytest.raises((UnsupportedError, OptionError), match=name):
        Runner.open(DEMO_MODEL, OpenOptions(**change))


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks/results/convert_memory.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert results["hardware"] in readme and results["command"].split(" --write")[0] in readme
    measured = {
        (r["case"], r["largest_tensor_mib"], r["peak_mib"], r["bound_mib"]) for r in results["rows"]
    }
    rows = re.findall(r"^\| (.+) \| (\d+) MiB \| (\d+) MiB \| (\d+) MiB \|$", readme, re.M)
    assert len(rows) >= 3
    assert {(case, *map(int, sizes)) for case, *sizes in rows} <= measured


def messages(source: str) -> list[str]:
    """Every string of the source, "…" in place of what is filled in."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
            found.append("".join(str(part) for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_quoted_messages_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^> (.+)$", page, re.M)
    assert len(quoted) >= 25
    code = {m for p in (ROOT / "turbospark").rglob("*.py") for m in messages(p.read_text())}
    assert [line for line in quoted if line not in code] == []


def test_continuous_integration_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script and "make lint" in script
    done = subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], capture_output=True)
    assert done.returncode == 0
