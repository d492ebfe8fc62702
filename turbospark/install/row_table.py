"""Tables too big to hold: one file of fixed-size rows, read row by row from a mapping.

Knows a header and rows of packed words with their companions behind them. Does not know what the
rows mean. A row is contiguous, so that a look-up touches one page.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark.dtypes import FORMATS, TAGS, Format, Quant
from turbospark.errors import (
    FileSizeError,
    IndexCorruptError,
    ReadError,
    SourceError,
    TensorShapeError,
    UnsupportedError,
)
from turbospark.install.files import PAGE, read_exactly, regular_size, round_up, write_all
from turbospark.install.planes import Planes, host_view, plane_shapes

FOLDER = "packed_rows"
_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, format tag, rows, columns, bytes per row
_MAGIC, _VERSION = b"TSROWS\0\0", 1
_MAX_ROWS = 2**31 - 1
_MAX_COLUMNS = 1 << 20


def file_name(layer: int) -> str:
    """Path of layer `layer`'s table below an install."""
    return f"{FOLDER}/layer_{layer:02d}.bin"


def row_bytes(fmt: Format, columns: int) -> int:
    """Bytes of one stored row: weight, scales, biases, padded to whole words."""
    return round_up(sum(fmt.plane_bytes((1, columns))), 4)


@dataclass
class RowTable:
    """An open table of logical shape [rows, columns]; `words` is set once it is held in memory."""

    path: Path
    fmt: Format
    shape: tuple[int, int]
    mapped: np.ndarray
    """uint32 [rows, words per row], read-only, backed by the file."""
    words: mx.array | None = field(default=None)

    @classmethod
    def open(cls, path: Path) -> RowTable:
        """Map a table; only its header is read.

        Raises MissingFileError, FileSizeError, IndexCorruptError, UnsupportedError, ReadError.
        """
        size = regular_size(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as err:
            raise ReadError(f"{path}: cannot be opened: {err.strerror}") from err
        try:
            fmt, shape = _read_header(fd, path, size)
            data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        if hasattr(data, "madvise"):
            data.madvise(mmap.MADV_RANDOM)  # rows are hashed: what follows one is not read next
        count = row_bytes(fmt, shape[1]) // 4
        words = np.frombuffer(data, np.uint32, shape[0] * count, PAGE).reshape(shape[0], count)
        return cls(path, fmt, shape, words)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.mapped.nbytes

    def load(self) -> None:
        """Read the whole table into memory; later look-ups happen on the device."""
        self.words = mx.array(self.mapped)
        mx.eval(self.words)

    def planes(self, ids: np.ndarray) -> Planes:
        """Rows `ids` [n] as planes of logical shape [n, columns]."""
        if self.words is None:
            words = mx.array(self.mapped[ids])
        else:
            words = mx.take(self.words, mx.array(ids.astype(np.int32)), axis=0)
        return _unpacked(words, self.fmt, (len(ids), self.shape[1]))


def _read_header(fd: int, path: Path, size: int) -> tuple[Format, tuple[int, int]]:
    if size < PAGE:
        raise FileSizeError(f"{path}: truncated: expected at least {PAGE} bytes, found {size}")
    head = bytearray(_HEADER.size)
    read_exactly(fd, head, 0, f"{path}: header")
    magic, version, tag, rows, columns, stride = _HEADER.unpack(head)
    if magic != _MAGIC or version != _VERSION:
        raise IndexCorruptError(f"{path}: not a row table of version {_VERSION}")
    if tag not in FORMATS:
        raise UnsupportedError(f"{path}: format tag {tag} is not supported by this build")
    fmt = FORMATS[tag]
    if not 1 <= rows <= _MAX_ROWS or not 1 <= columns <= _MAX_COLUMNS:
        raise IndexCorruptError(f"{path}: {rows} rows of {columns} columns are out of range")
    if isinstance(fmt, Quant):
        fmt.check_columns(columns, str(path))
    if stride != row_bytes(fmt, columns):
        raise IndexCorruptError(
            f"{path}: rows of {stride} bytes; {columns} columns of {fmt} take "
            f"{row_bytes(fmt, columns)}"
        )
    expected = PAGE + round_up(rows * stride)
    if size != expected:
        how = "truncated" if size < expected else "too long"
        raise FileSizeError(f"{path}: {how}: expected {expected} bytes, found {size}")
    return fmt, (rows, columns)


def _unpacked(words: mx.array, fmt: Format, shape: tuple[int, int]) -> Planes:
    """Stored rows uint32 [n, words] as planes."""
    data, at, planes = words.view(mx.uint8), 0, []
    for (rows, width), dtype in plane_shapes(fmt, shape):
        count = width * dtype.size
        part = mx.contiguous(data[:, at : at + count])
        planes.append(part.view(dtype).reshape(rows, width))
        at += count
    return Planes(fmt, shape, *planes)


class RowTableWriter:
    """Writes a table from its first row to its last, in blocks."""

    def __init__(self, path: Path, fmt: Format, shape: tuple[int, int]) -> None:
        rows, columns = shape
        if fmt not in TAGS or not 1 <= rows <= _MAX_ROWS or not 1 <= columns <= _MAX_COLUMNS:
            raise UnsupportedError(f"{path.name}: a table of {list(shape)} in {fmt} has no file")
        self.path, self.fmt, self.shape = path, fmt, shape
        self.stride = row_bytes(fmt, columns)
        self.done = 0
        path.parent.mkdir(exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, PAGE + round_up(rows * self.stride))
        header = _HEADER.pack(_MAGIC, _VERSION, TAGS[fmt], rows, columns, self.stride)
        write_all(self._fd, header, 0)

    def write(self, planes: Planes) -> None:
        """Append rows. Raises TensorShapeError when they are not of the declared format."""
        rows, columns = planes.shape
        if planes.fmt != self.fmt or columns != self.shape[1] or self.done + rows > self.shape[0]:
            raise TensorShapeError(
                f"{self.path.name}: rows {self.done}+{rows} of {columns} columns in {planes.fmt}; "
                f"declared {list(self.shape)} in {self.fmt}"
            )
        block = np.zeros((rows, self.stride), np.uint8)
        at = 0
        for array in planes.arrays():
            part = mx.contiguous(array)
            mx.eval(part)
            width = part.nbytes // rows
            block[:, at : at + width] = host_view(part).reshape(rows, width)
            at += width
        write_all(self._fd, block, PAGE + self.done * self.stride)
        self.done += rows

    def close(self) -> None:
        """Finish the file; SourceError when rows are missing."""
        try:
            if self.done != self.shape[0]:
                raise SourceError(f"{self.path.name}: {self.done} of {self.shape[0]} rows written")
            os.fsync(self._fd)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the file as it is; whoever made the directory removes it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
