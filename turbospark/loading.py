"""Importing the rooms that need MLX, and one line for the case that MLX cannot be imported.

Knows module names and the extras of the package. Does not import anything by itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from turbospark.errors import MissingDependencyError


def load(module: str) -> ModuleType:
    """Import `module`. Raises MissingDependencyError, naming the extras, when MLX does not load.

    mlx from PyPI is complete on macOS only; elsewhere its library comes with an extra, and without
    one `import mlx.core` fails with "libmlx.so: cannot open shared object file".
    """
    try:
        return import_module(module)
    except ImportError as error:
        if not _is_mlx(error):
            raise
        raise MissingDependencyError(
            f"mlx cannot be imported ({str(error).splitlines()[0]}); {_remedy()}"
        ) from error


def _is_mlx(error: ImportError) -> bool:
    """Whether mlx itself is absent, or a library that its core links is."""
    named = (error.name or "").partition(".")[0] == "mlx"
    return named or (error.path is not None and Path(error.path).parent.name == "mlx")


def _remedy() -> str:
    if sys.platform == "darwin":
        return "reinstall it: pip install --force-reinstall mlx (Apple silicon, macOS 14 or newer)"
    return (
        "it needs one back end: pip install 'turbospark[cpu]', 'turbospark[cuda12]' or "
        "'turbospark[cuda13]', exactly one of them"
    )
