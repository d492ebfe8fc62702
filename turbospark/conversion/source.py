"""What a checkpoint is to the converter, whatever file format it comes in.

Knows the shape of a source: named tensors with a stored format, read whole, by entry of the
leading axis or by rows. Does not know any file format or family.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from turbospark.dtypes import Format
from turbospark.errors import IndexCorruptError, ReadError, SourceError
from turbospark.install import files
from turbospark.install.files import TEMPLATES, read_exactly
from turbospark.install.planes import Planes

MAX_JSON_BYTES = 64 << 20
MAX_SIDECAR_BYTES = 512 << 20
SHOWN_NAMES = 20


@dataclass(frozen=True)
class SourceTensor:
    """One logical tensor of a checkpoint; quantized ones have their companions folded in.

    `shape` is logical (values, not packed words). `stored` is the source's own word for the
    type; `fmt` is what `read` returns, None where the type cannot be converted. `nbytes` counts
    the bytes in the source.
    """

    name: str
    shape: tuple[int, ...]
    fmt: Format | None
    stored: str
    nbytes: int


class TensorSource(Protocol):
    """A checkpoint whose headers have been read and checked; weights are read on demand."""

    kind: str
    path: Path
    config: dict[str, Any]

    @property
    def sidecars(self) -> dict[str, bytes]:
        """Tokenizer and generation files by name, read when first asked for."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor by its name in the checkpoint."""

    def read(self, name: str, expert: int | None = None, rows: slice | None = None) -> Planes:
        """Evaluated planes: all of it, entry `expert` of the leading axis, and of that `rows`.

        Raises SourceError when the file ends early or cannot be read.
        """

    def close(self) -> None:
        """Close the files."""


def read_into(fd: int, view: np.ndarray, offset: int, what: str) -> None:
    """Fill the uint8 `view` from `offset`; a short read is a SourceError naming both sizes."""
    try:
        read_exactly(fd, view, offset, what)
    except ReadError as error:
        raise SourceError(str(error)) from error


class OpenFiles:
    """Descriptors of the files that have been read from, each opened when it is first needed."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}

    def fd(self, path: Path) -> int:
        """A descriptor to read `path` with. Raises SourceError."""
        if path not in self._fds:
            try:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error
        return self._fds[path]

    def close(self) -> None:
        """Close all of them; harmless when repeated."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A strict JSON object: duplicate keys, NaN and Infinity are refused with the file's name."""
    try:
        return files.parse_json(data, what)
    except IndexCorruptError as error:
        raise SourceError(str(error)) from error


class Files(Protocol):
    """The files of one checkpoint: a local folder, or a repository seen before its download."""

    where: Path

    def names(self) -> list[str]:
        """Names of the files at the top level and in the folder of chat templates, sorted."""

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """A buffered stream from the start of a file, and the file's size. Raises SourceError."""


class LocalFiles:
    """The files of a folder; see `Files`."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def names(self) -> list[str]:
        """Names of the regular files there and in the folder of chat templates, sorted."""
        found = [*self.where.iterdir(), *self.where.glob(f"{TEMPLATES}/*")]
        return sorted(p.relative_to(self.where).as_posix() for p in found if p.is_file())

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """A file of the folder and its size. Raises SourceError."""
        try:
            file = (self.where / name).open("rb")
            return file, os.fstat(file.fileno()).st_size
        except OSError as error:
            raise SourceError(f"{self.where / name}: cannot be read: {error.strerror}") from error


def read_small(where: Files, name: str, limit: int) -> bytes:
    """The whole of a file of at most `limit` bytes."""
    file, size = where.open(name)
    with file:
        if size > limit:
            raise SourceError(f"{name}: {size} bytes; expected at most {limit}")
        return file.read(size)


def read_json(where: Files, name: str) -> dict[str, Any]:
    """The JSON object in a small file."""
    return parse_json(read_small(where, name, MAX_JSON_BYTES), name)


def listed(names: Iterable[str]) -> str:
    """Names joined for a message; a long list is cut and its rest counted."""
    names = list(names)
    shown = ", ".join(names[:SHOWN_NAMES])
    rest = len(names) - SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
