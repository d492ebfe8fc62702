"""Puts this folder on the import path, so that rooms share its modules, and shares installs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from oracle_folders import ORACLES

from turbospark import convert


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Oracle name -> its install, converted on first use."""
    root = tmp_path_factory.mktemp("installs")
    done: dict[str, Path] = {}

    def install(name: str) -> Path:
        if name not in done:
            done[name] = convert(ORACLES / name, root / name, progress=False)
        return done[name]

    return install
