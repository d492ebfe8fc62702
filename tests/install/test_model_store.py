"""Names of installed models: where they live, what a name means, what removal touches."""

from __future__ import annotations

from pathlib import Path

import pytest
from handmade import Original

from turbospark.errors import InstallExistsError, ModelNotFoundError, OptionError
from turbospark.install.models import install_path, installed, models_dir, remove, resolve


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "models"


def test_the_store_is_below_the_home_of_turbospark(store: Path, monkeypatch) -> None:
    assert models_dir() == store
    monkeypatch.delenv("TURBOSPARK_HOME")
    assert models_dir() == Path.home() / ".turbospark" / "models"


def test_an_empty_store_lists_nothing_and_says_so(store: Path) -> None:
    assert installed() == []
    with pytest.raises(ModelNotFoundError, match="no model is installed"):
        resolve("qwen")


def test_installed_models_are_listed_by_name_and_others_are_not(store: Path) -> None:
    Original(store / "b.gturbo")
    Original(store / "text" / "a.gturbo")  # where the original keeps its own
    (store / "half.gturbo").mkdir()
    (store / "b.gturbo.partial-12").mkdir()
    models = installed()
    assert [m.name for m in models] == ["a", "b"]
    assert models[1].size == sum(p.stat().st_size for p in (store / "b.gturbo").rglob("*.*"))


def test_an_existing_directory_wins_over_a_name(store: Path, tmp_path: Path) -> None:
    Original(store / "m.gturbo")
    assert resolve("m") == resolve("m.gturbo") == store / "m.gturbo"
    (tmp_path / "m").mkdir()
    assert resolve("m") == Path("m")


def test_a_repository_name_finds_its_install(store: Path) -> None:
    path = install_path("someone/tiny-moe")
    assert path == store / "someone--tiny-moe.gturbo"
    Original(path)
    assert resolve("someone/tiny-moe") == resolve("someone--tiny-moe") == path
    assert [m.name for m in installed()] == ["someone/tiny-moe"]
    with pytest.raises(ModelNotFoundError, match="installed: someone/tiny-moe"):
        resolve("someone/tiny-mo")


def test_an_unknown_name_lists_near_ones(store: Path) -> None:
    for name in ("smollm2-135m", "qwen3-4b"):
        Original(store / f"{name}.gturbo")
    with pytest.raises(ModelNotFoundError, match="smollm2-135m") as caught:
        resolve("smolm2-135")
    assert "qwen3-4b" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "../x", "a/../b", "/etc", "a/b/c", "a b", ".hidden", "a\0"])
def test_names_that_could_leave_the_store_are_refused(store: Path, name: str) -> None:
    with pytest.raises(OptionError):
        install_path(name)


def test_remove_deletes_an_install_by_name_and_nothing_else(store: Path, tmp_path: Path) -> None:
    Original(store / "m.gturbo")
    outside = Original(tmp_path / "outside").path
    (store / "link.gturbo").symlink_to(outside)
    (store / "half.gturbo").mkdir()
    assert remove("m") == store / "m.gturbo" and not (store / "m.gturbo").exists()
    with pytest.raises(InstallExistsError, match="symbolic link"):
        remove("link")
    for name in ("half", "m", str(outside), "../../outside"):
        with pytest.raises(ModelNotFoundError, match="no installed model"):
            remove(name)
    assert outside.exists() and (store / "half.gturbo").exists()
