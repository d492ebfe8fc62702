"""A tiny model behind the server, in this process, and the official client."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from turbospark import GenerationOptions, Runner

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
LOAD = Path(__file__).parents[2] / "benchmarks" / "server_load.py"


@pytest.fixture(scope="session")
def bench() -> dict[str, Any]:
    """The names of the load benchmark, which starts servers."""
    return runpy.run_path(str(LOAD), run_name="bench")


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = tiny_models.talking(tmp_path_factory.mktemp("served") / "m.gturbo")
    with Runner.open(path, max_context=2048, prefix_reuse=True, session_slots=3) as opened:
        yield opened


@pytest.fixture(scope="session")
def url(bench: dict[str, Any], runner: Runner) -> Iterator[str]:
    with bench["serving"](
        runner, queue_limit=2, defaults=GenerationOptions(ignore_eos=True)
    ) as found:
        yield found


@pytest.fixture(scope="session")
def calling(bench: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a model whose template shows tools."""
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"
    path = tiny_models.talking(tmp_path_factory.mktemp("calling") / "m.gturbo", template)
    with Runner.open(path, max_context=2048) as opened, bench["serving"](opened) as found:
        yield openai.OpenAI(base_url=found, api_key="x", max_retries=0, timeout=60)


@pytest.fixture
def client(url: str) -> Any:
    return openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=60)
