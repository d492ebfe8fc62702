"""The notebooks in examples/ run from top to bottom and show what they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
DEMO_MODEL = ".demo/SmolLM2-135M-Instruct.gturbo"
PACKED_HEADS = {True: 29 * 3, False: 1 * 2}  # of the demo's model, and of the tiny one
MISSING = "the notebooks did NOT run: pip install 'turbospark[notebook]' nbclient"


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that `make demo` left, as in CI; else with a tiny one."""
    folder = tmp_path_factory.mktemp("demo")
    if (ROOT / DEMO_MODEL).exists():
        shutil.copytree(ROOT / DEMO_MODEL, folder / DEMO_MODEL)
    else:
        (folder / ".demo").mkdir()
        longer = {"max_position_embeddings": 8192}
        tiny_models.talking(folder / DEMO_MODEL, head_dim=64, settings=longer)
    return folder


def executed(path: Path, folder: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook after a run in `folder`."""
    nbformat = pytest.importorskip("nbformat", reason=MISSING)
    nbclient = pytest.importorskip("nbclient", reason=MISSING)
    for needed in ("ipykernel", "matplotlib", "ipywidgets"):
        pytest.importorskip(needed, reason=MISSING)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    if "NOTEBOOK_OUTPUT" in os.environ:  # to look at the pictures
        nbformat.write(notebook, Path(os.environ["NOTEBOOK_OUTPUT"], path.name))
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[dict[str, Any]], kind: str) -> list[str]:
    """Everything of one MIME type that the cells show."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [o for o in outputs if o["output_type"] == "error"] == []
    return [o["data"][kind] for o in outputs if kind in o.get("data", {})]


def printed(cells: list[dict[str, Any]]) -> str:
    """What was printed; a notebook that was read as JSON has its text in lines."""
    return "".join("".join(o.get("text", "")) for cell in cells for o in cell["outputs"])


def test_the_quickstart_shows_a_runner_an_answer_and_memory(demo_folder: Path) -> None:
    cells = executed(ROOT / "examples/notebooks/quickstart.ipynb", demo_folder)
    displays = shown(cells, "text/html")
    for words in ("SmolLM2-135M-Instruct.gturbo", "Answer", "Resolved options", "Memory", "closed"):
        assert any(words in html for html in displays), words
    reused, prompt = map(int, re.findall(r"\d+", shown(cells, "text/plain")[-4]))
    assert 0 < reused < prompt


def test_the_counters_are_shown_and_plotted(demo_folder: Path) -> None:
    cells = executed(ROOT / "examples/notebooks/counters.ipynb", demo_folder)
    assert len([html for html in shown(cells, "text/html") if "Phases" in html]) == 3
    (picture,) = shown(cells, "image/png")
    assert len(picture) > 5000
    assert "a token of the answer:" in printed(cells)


def test_the_hit_rate_is_plotted_over_slots(demo_folder: Path) -> None:
    cells = executed(ROOT / "examples/notebooks/experts.ipynb", demo_folder)
    (picture,) = shown(cells, "image/png")
    assert len(picture) > 10000
    assert "different answers: 1\n" in printed(cells)
    assert any("streamed, 16 slots per layer" in html for html in shown(cells, "text/html"))


def test_bytes_and_errors_of_packed_caches_are_plotted(demo_folder: Path) -> None:
    cells = executed(ROOT / "examples/notebooks/long_context.ipynb", demo_folder)
    (picture,) = shown(cells, "image/png")
    assert len(picture) > 10000
    empty, filled = (html for html in shown(cells, "text/html") if "Packed caches" in html)
    assert "no row yet" in empty and "keys 0.0" in filled
    found = dict(re.findall(r"(\S+) +bits: +(\d+) bytes per token", printed(cells)))
    # all layers but the last with heads of 64: rows in half precision, or codes and two scales
    heads = int(found.pop("16")) // (64 * 2 * 2)
    assert heads == PACKED_HEADS[(ROOT / DEMO_MODEL).exists()]
    assert found == {str(b): str(int(heads * (64 * 2 * b / 8 + 4))) for b in (2, 3, 3.5, 4)}


def test_acceptance_is_plotted_by_position(demo_folder: Path) -> None:
    cells = executed(ROOT / "examples/notebooks/speculation.ipynb", demo_folder)
    (picture,) = shown(cells, "image/png")
    assert len(picture) > 5000
    assert "the same tokens: True\n" in printed(cells)
    assert len([html for html in shown(cells, "text/html") if "Speculation" in html]) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_committed_notebook_holds_no_outputs_and_is_tested(path: Path) -> None:
    content = json.loads(path.read_text())
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert content["cells"][0]["cell_type"] == "markdown"
    tests = "".join(p.read_text() for p in Path(__file__).parent.rglob("test_*.py"))
    assert f"notebooks/{path.name}" in tests


def test_the_steering_notebook_is_committed_with_small_outputs_and_runs(demo_folder: Path) -> None:
    """The one notebook whose pictures and texts are worth seeing unrun."""
    path = ROOT / "examples/steering.ipynb"
    assert path.stat().st_size < 64 << 10
    kept = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in kept)
    cells = executed(path, demo_folder)
    layers = 30 if (ROOT / DEMO_MODEL).exists() else 2
    for found, of in ((kept, 30), (cells, layers)):
        pictures = shown(found, "image/png")
        assert len(pictures) == 2 and all(len(picture) > 5000 for picture in pictures)
        lines = printed(found)
        assert f"[add@2 on {3 if of == 30 else 1} of {of} layers]" in lines
        assert "strength 0     mean 0.0000  largest 0.0000 nat\n" in lines
        means = [float(mean) for mean in re.findall(r"mean (\S+)", lines)]
        assert len(means) == 4 and means == sorted(set(means))
