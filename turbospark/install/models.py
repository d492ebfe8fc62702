"""The store of installed models: where it is, what is in it, what a name means.

Knows directories and names. Does not open weights.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from turbospark.errors import (
    InstallExistsError,
    ModelNotFoundError,
    OptionError,
    PartialInstallError,
)
from turbospark.install.files import as_path, printable
from turbospark.install.staging import is_install

SUFFIX = ".gturbo"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/(?!.*\.(?:gguf|gturbo|safetensors)$)[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class InstalledModel:
    """One model of the store; `size` is the bytes of its files."""

    name: str
    path: Path
    size: int


def models_dir() -> Path:
    """`$TURBOSPARK_HOME/models`, by default `~/.turbospark/models`; may not exist yet."""
    home = os.environ.get("TURBOSPARK_HOME")
    return (Path(home) if home else Path.home() / ".turbospark") / "models"


def install_path(name: str) -> Path:
    """Where a model of that name is installed: "owner/repo" becomes "owner--repo.gturbo"."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise OptionError(
            f"model name '{printable(name)}' is not letters, digits, '.', '_', '-' and one '/'"
        )
    return models_dir() / (_store_name(name) + SUFFIX)


def installed() -> list[InstalledModel]:
    """Every complete install of the store, by name; the original's `text/` folder included."""
    return [
        InstalledModel(
            _shown(name), path, sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        )
        for name, path in sorted(_paths().items())
    ]


def _paths() -> dict[str, Path]:
    """Name -> directory of every complete install; of two of one name the first counts."""
    found: dict[str, Path] = {}
    for folder in (models_dir(), models_dir() / "text"):
        for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else ():
            name = path.name.removesuffix(SUFFIX)
            if name not in found and path.is_dir() and is_install(path):
                found[name] = path
    return found


def _store_name(name: str) -> str:
    """The name as the store has it: "owner/repo" is "owner--repo"."""
    return name.removesuffix(SUFFIX).replace("/", "--")


def _shown(name: str) -> str:
    """The name as it was given: "owner--repo" is "owner/repo". Commands take either."""
    given = name.replace("--", "/", 1)
    return given if _NAME.fullmatch(given) else name


def resolve(name_or_path: str | Path) -> Path:
    """The directory of a model: an existing directory wins, then the name of an installed model.

    Raises ModelNotFoundError that lists near names, PartialInstallError for a file, OptionError
    for what is no path.
    """
    path = as_path(name_or_path, "model")
    if path.is_dir():
        return path
    wanted, models = _store_name(str(name_or_path)), _paths()
    if wanted in models:
        return models[wanted]
    if path.is_file():
        raise PartialInstallError(
            f"'{printable(str(name_or_path))}' is a file; an install is a directory, "
            "`turbospark convert` makes one from a checkpoint or a GGUF file, and "
            "`turbospark steering info` looks at a control vector"
        )
    near = difflib.get_close_matches(wanted, models, n=3, cutoff=0.5) or sorted(models)[:5]
    hint = f"installed: {', '.join(map(_shown, near))}" if near else "no model is installed"
    name = str(name_or_path)
    wish = name if _REPO.fullmatch(name) else "OWNER/NAME"
    raise ModelNotFoundError(
        f"'{printable(name)}' is neither a directory nor an installed model; {hint} (in "
        f"{models_dir()}); `turbospark list` shows all, `turbospark pull {wish}` installs from "
        "the Hub"
    )


def remove(name: str) -> Path:
    """Delete an installed model of the store by name. Raises ModelNotFoundError."""
    path = _paths().get(_store_name(name))
    if path is None:
        raise ModelNotFoundError(
            f"no installed model is named '{printable(name)}'; `turbospark list` shows all"
        )
    if path.is_symlink():
        raise InstallExistsError(f"{path} is a symbolic link; remove it by hand")
    shutil.rmtree(path)
    return path
