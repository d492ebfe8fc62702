"""The date that a chat template prints is the opened option's, unless a call gives another."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path

import pytest
from tiny_tokenizers import byte_level

from turbospark import OpenOptions, Runner, convert

CHECKPOINT = Path(__file__).parents[1] / "data" / "oracles" / "llama-base"


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dated")
    shutil.copytree(CHECKPOINT, folder / "source")
    byte_level().save(str(folder / "source" / "tokenizer.json"))
    (folder / "source" / "chat_template.jinja").write_text("{{ strftime_now('%d.%m.%Y') }}")
    return convert(folder / "source", folder / "model.gturbo", progress=False)


def test_the_opened_date_reaches_the_template(install: Path) -> None:
    options = OpenOptions(max_context=64, chat_date=date(2024, 2, 29))
    with Runner.open(install, options) as runner:
        said = runner.tokenizer.decode(runner.encode([{"role": "user", "content": "hi"}]))
        assert said == "29.02.2024"
        ids = runner.encode([{"role": "user", "content": "hi"}], now=date(2020, 1, 2))
        assert runner.tokenizer.decode(ids) == "02.01.2020"
