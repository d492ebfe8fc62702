"""The registry, the families' declarations and docs/families.md say the same."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from turbospark import families as registry
from turbospark.families import families
from turbospark.families.base import NOT_BUILT, Capabilities, Family
from turbospark.families.table import markdown
from turbospark.install.arch import KNOWN_WIRES

DOCS = Path(__file__).parents[2] / "docs"


def cells(document: str, name: str) -> list[str]:
    """The cells of one family's row."""
    (row,) = [line for line in document.splitlines() if line.startswith(f"| **{name}** |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_committed_table_is_the_generated_one() -> None:
    committed = (DOCS / "families.md").read_text()
    assert committed == markdown(families()), (
        "run: python -m turbospark.families.table > docs/families.md"
    )


def test_each_feature_has_a_column_and_each_family_a_row() -> None:
    document = markdown(families())
    header = next(line for line in document.splitlines() if line.startswith("| family |"))
    for field in fields(Capabilities):
        shown = f"| {field.name.replace('_', ' ')} |" in header
        assert shown == (field.name not in NOT_BUILT)
    width = header.count("|")
    for family in families():
        assert len(cells(document, family.name)) == width - 1
        assert all(f"`{name}`" in document for name in family.model_types)


def test_a_family_that_says_nothing_is_not_steered() -> None:
    assert Capabilities().steering is not None


def test_a_cause_is_told_once_below_the_table() -> None:
    base = families()[0]

    def with_cause(name: str, **causes: str) -> Family:
        return replace(base, name=name, capabilities=Capabilities(steering=None, **causes))

    document = markdown(
        [
            with_cause("one", prefix_reuse="two streams", session_pool="tails stay"),
            with_cause("two", session_pool="tails stay"),
        ]
    )
    assert cells(document, "one")[4:] == ["yes", "yes", "yes", "no (1)", "no (2)", "none"]
    assert cells(document, "two")[4:] == ["yes", "yes", "yes", "yes", "no (2)", "none"]
    assert document.endswith("\n1. two streams\n2. tails stay\n")


@pytest.mark.parametrize("row", registry._ROWS, ids=lambda row: row[0])
def test_a_row_of_the_registry_repeats_what_its_file_declares(row: tuple) -> None:
    module, model_types, wires, architectures = row
    family = registry._load(module)
    assert (family.name, family.model_types) == (module, model_types)
    assert (family.wires, family.gguf_architectures) == (wires, architectures)
    assert set(wires) <= set(KNOWN_WIRES)
    assert (family.gguf_config is None) == (family.gguf_pieces is None) == (not architectures)


def test_no_name_leads_to_two_families() -> None:
    for column in (1, 2, 3):
        names = [name for row in registry._ROWS for name in row[column]]
        assert len(names) == len(set(names))


def test_no_family_imports_another() -> None:
    folder = Path(registry.__file__).parent
    modules = {row[0] for row in registry._ROWS}
    for module in modules:
        text = (folder / f"{module}.py").read_text()
        for other in modules - {module}:
            assert f"families.{other} " not in text and f"import {other}\n" not in text
