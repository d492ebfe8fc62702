"""docs/errors.md has every class of error and every text that the code can raise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from turbospark import errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
CLASSES = [
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.TurbosparkError)
]


def test_the_page_is_what_the_code_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_errors.py"), run_name="made")["markdown"]()
    assert made == PAGE.read_text(), "run: python docs/make_errors.py > docs/errors.md"


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_described(name: str) -> None:
    section = PAGE.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert getattr(errors, name).__doc__.strip() in section


def test_texts_are_found_with_what_varies_left_open() -> None:
    section = PAGE.read_text().split("\n## ContextOverflowError\n")[1].split("\n## ")[0]
    assert "… tokens + … new tokens = … exceeds max_context …; shorten the prompt" in section
    assert "max_context='auto' comes out at …, below min_auto_context=…" in PAGE.read_text()
