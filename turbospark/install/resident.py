"""`model_weights.bin`: the index of resident tensors and their bytes, read and written.

Knows the binary index, its limits and the planes of each entry. Does not know families.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from turbospark.dtypes import BLOCK_TAGS, FORMATS, TAGS, Format, Quant
from turbospark.errors import (
    FileSizeError,
    IndexCorruptError,
    MissingTensorError,
    ReadError,
    SourceError,
    TensorShapeError,
    UnsupportedError,
)
from turbospark.install.files import printable, read_exactly, regular_size, round_up, write_all
from turbospark.install.planes import Planes, empty_planes, host_view
from turbospark.install.stored import stored_bytes

FILE_NAME = "model_weights.bin"
INDEX_CAP = 16 << 20  # 200,000 tensors; the largest models have a few thousand
_HEADER = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<IHBxQQ4IQQQQ")
_MAX_DIM = 2**31 - 1  # MLX dimensions are int32


@dataclass(frozen=True)
class Entry:
    """One resident tensor: logical shape and the absolute (offset, size) of its planes."""

    name: str
    fmt: Format
    shape: tuple[int, ...]
    offset: int
    size: int
    scale_offset: int = 0
    scale_size: int = 0
    bias_offset: int = 0
    bias_size: int = 0

    @property
    def planes(self) -> list[tuple[int, int]]:
        """(offset, size) of weight, scales, biases; absent ones left out."""
        spans = [
            (self.offset, self.size),
            (self.scale_offset, self.scale_size),
            (self.bias_offset, self.bias_size),
        ]
        return [span for span in spans if span[1]]


class ResidentIndex:
    """The checked index of an open weight file; reads tensors on demand."""

    def __init__(
        self, path: Path, file: int, entries: dict[str, Entry], index_size: int, resident_size: int
    ) -> None:
        self.path = path
        self.index_size = index_size
        self.resident_size = resident_size
        self._fd = file
        self._entries = entries

    @classmethod
    def open(cls, path: Path | str) -> ResidentIndex:
        """Open and check a weight file; only the index is read.

        Raises FileSizeError, IndexCorruptError, TensorShapeError, UnsupportedError, ReadError.
        """
        path = Path(path)
        regular_size(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as err:
            raise ReadError(f"{path}: cannot be opened: {err.strerror}") from err
        try:
            entries, index_size, resident_size = _read_index(fd, path)
            return cls(path, fd, entries, index_size, resident_size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Entry:
        """The entry of that name. Raises MissingTensorError."""
        if name not in self._entries:
            raise MissingTensorError(
                f"tensor {name} is not among the {len(self)} resident tensors of {self.path}"
            )
        return self._entries[name]

    def read(self, name: str) -> Planes:
        """Read one tensor from the file into fresh evaluated arrays. Raises ReadError."""
        entry = self.entry(name)
        planes = empty_planes(entry.fmt, entry.shape)
        if self._fd < 0:
            raise ReadError(f"{self.path}: tensor {name} was asked after the install was closed")
        for array, (offset, _) in zip(planes.arrays(), entry.planes, strict=True):
            read_exactly(self._fd, host_view(array), offset, f"{self.path}: tensor {name}")
        return planes

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


# --- checks ---------------------------------------------------------------------------------------


def _read_index(fd: int, path: Path) -> tuple[dict[str, Entry], int, int]:
    length = os.fstat(fd).st_size
    if length < _HEADER.size:
        raise FileSizeError(
            f"{path}: truncated: expected at least {_HEADER.size} bytes, found {length}"
        )
    head = bytearray(_HEADER.size)
    read_exactly(fd, head, 0, f"{path}: index header")
    index_size, resident_size, count = _HEADER.unpack(head)
    _check_sizes(path, length, index_size, resident_size, count)
    data = bytearray(index_size)
    read_exactly(fd, data, 0, f"{path}: index")
    entries: dict[str, Entry] = {}
    for i in range(count):
        entry = _read_entry(data, i, count, path)
        if entry.name in entries:
            raise IndexCorruptError(f"{path}: two tensors are named {entry.name}")
        _check_ranges(entry, index_size, index_size + resident_size, path)
        entries[entry.name] = entry
    _check_overlap(entries.values(), path)
    return entries, index_size, resident_size


def _check_sizes(path: Path, length: int, index_size: int, resident: int, count: int) -> None:
    if index_size < _HEADER.size or index_size > INDEX_CAP:
        raise IndexCorruptError(
            f"{path}: index_size {index_size} is outside {_HEADER.size}..{INDEX_CAP}"
        )
    expected = index_size + resident
    if length < expected:
        raise FileSizeError(
            f"{path}: truncated: expected {expected} bytes, found {length}; install it again"
        )
    if length > round_up(expected):
        raise FileSizeError(
            f"{path}: too long: expected {expected} bytes, found {length}; install it again"
        )
    table = _HEADER.size + count * _ENTRY.size
    if table > index_size:
        raise IndexCorruptError(
            f"{path}: {count} entries need {table} bytes; index_size is {index_size}"
        )


def _read_entry(data: bytearray, i: int, count: int, path: Path) -> Entry:
    at = _HEADER.size + i * _ENTRY.size
    name_at, name_len, tag, offset, size, *rest = _ENTRY.unpack_from(data, at)
    dims, spans = rest[:4], rest[4:]
    names_start = _HEADER.size + count * _ENTRY.size
    if not names_start <= name_at <= name_at + name_len <= len(data):
        raise IndexCorruptError(
            f"{path}: entry {i}: name at {name_at}+{name_len} is outside the names of the index"
        )
    try:
        name = bytes(data[name_at : name_at + name_len]).decode("utf-8")
    except UnicodeDecodeError:
        raise IndexCorruptError(f"{path}: entry {i}: name is not UTF-8") from None
    if not name or not name.isprintable():
        raise IndexCorruptError(f"{path}: entry {i}: name '{printable(name)}' is not printable")
    fmt = _format(tag, name, path)
    shape = _shape(dims, fmt, name, path)
    entry = Entry(name, fmt, shape, offset, size, *spans)
    _check_planes(entry, path)
    return entry


def _format(tag: int, name: str, path: Path) -> Format:
    if tag in BLOCK_TAGS:
        raise UnsupportedError(
            f"{path}: tensor {name} is stored as {BLOCK_TAGS[tag]} (tag {tag}), a GGUF block type "
            "without an MLX kernel; convert the checkpoint with turbospark instead"
        )
    if tag not in FORMATS:
        raise IndexCorruptError(f"{path}: tensor {name} has unknown dtype tag {tag}")
    return FORMATS[tag]


def _shape(dims: list[int], fmt: Format, name: str, path: Path) -> tuple[int, ...]:
    rank = 4
    while rank and dims[rank - 1] == 0:
        rank -= 1
    shape = tuple(dims[:rank])
    if not shape or 0 in shape or max(shape) > _MAX_DIM:
        raise TensorShapeError(f"{path}: tensor {name} has impossible shape {dims}")
    if isinstance(fmt, Quant):
        if rank != 2:
            raise TensorShapeError(f"{path}: tensor {name} is {fmt} of rank {rank}; need rank 2")
        fmt.check_columns(shape[-1], f"{path}: tensor {name}")
    return shape


def _check_planes(entry: Entry, path: Path) -> None:
    expected = entry.fmt.plane_bytes(entry.shape)
    found = (entry.size, entry.scale_size, entry.bias_size)
    if found != expected:
        raise TensorShapeError(
            f"{path}: tensor {entry.name} {list(entry.shape)} as {entry.fmt} needs "
            f"weight/scale/bias bytes {expected}; the index says {found}"
        )


def _check_ranges(entry: Entry, start: int, end: int, path: Path) -> None:
    for offset, size in entry.planes:
        if not start <= offset <= offset + size <= end:
            raise IndexCorruptError(
                f"{path}: tensor {entry.name} at {offset}+{size} is outside the resident region "
                f"{start}..{end}"
            )


def _check_overlap(entries: Iterable[Entry], path: Path) -> None:
    spans = sorted((o, o + n, e.name) for e in entries for o, n in e.planes)
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise IndexCorruptError(f"{path}: tensors {first} and {second} overlap at {start}")


# --- writing --------------------------------------------------------------------------------------


class ResidentWriter:
    """Writes a weight file in two phases: declare every tensor, then write them in any order.

    The first `write` fixes the index, since every offset follows from the declared shapes.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._declared: dict[str, tuple[Format, tuple[int, ...]]] = {}
        self._entries: dict[str, Entry] = {}
        self._pending: set[str] = set()
        self._frozen = False
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def add(self, name: str, fmt: Format, shape: tuple[int, ...]) -> None:
        """Declare a tensor of logical `shape`. Raises SourceError, UnsupportedError."""
        where = f"resident tensor {name}"
        if self._frozen:
            raise SourceError(f"{where} was declared after the first tensor had been written")
        if name in self._declared:
            raise SourceError(f"{where} is declared twice")
        if not name or not name.isprintable() or len(name.encode()) > 65535:
            raise SourceError(f"{where}: the name must be printable and at most 65535 bytes")
        rank = (2, 2) if isinstance(fmt, Quant) else (1, 4)
        if not rank[0] <= len(shape) <= rank[1] or not all(1 <= n <= _MAX_DIM for n in shape):
            raise UnsupportedError(
                f"{where} of shape {list(shape)} cannot be stored as {fmt}; "
                f"need {rank[0]} to {rank[1]} axes, each in 1..{_MAX_DIM}"
            )
        if isinstance(fmt, Quant):
            fmt.check_columns(shape[-1], where)
        if fmt not in TAGS:
            raise UnsupportedError(f"{where}: format {fmt} has no tag in a weight file")
        self._declared[name] = (fmt, tuple(shape))

    def write(self, name: str, planes: Planes) -> None:
        """Write one declared tensor. Raises SourceError, TensorShapeError."""
        self._freeze()
        if name not in self._pending:
            state = "was not declared" if name not in self._entries else "is written twice"
            raise SourceError(f"resident tensor {name} {state}")
        entry = self._entries[name]
        planes_bytes = stored_bytes(planes, entry.fmt, entry.shape, f"resident tensor {name}")
        for data, (offset, _) in zip(planes_bytes, entry.planes, strict=True):
            write_all(self._fd, data, offset)
        self._pending.discard(name)

    def close(self) -> None:
        """Finish the file; SourceError names the first tensor declared and never written."""
        try:
            self._freeze()
            if self._pending:
                first = min(self._pending)
                raise SourceError(
                    f"{len(self._pending)} resident tensors were declared and not written, "
                    f"first {first}"
                )
            os.fsync(self._fd)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the file as it is; whoever made the directory removes it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _freeze(self) -> None:
        if self._fd < 0:
            raise SourceError(f"{self.path}: written to after it was closed")
        if self._frozen:
            return
        self._frozen = True
        names = [name.encode() for name in self._declared]
        table = _HEADER.size + _ENTRY.size * len(names)
        index_size = round_up(table + sum(map(len, names)))
        if index_size > INDEX_CAP:
            raise UnsupportedError(f"{self.path}: index of {index_size} bytes exceeds {INDEX_CAP}")
        packed = bytearray(index_size)
        at, name_at = index_size, table
        for i, (name, (fmt, shape)) in enumerate(self._declared.items()):
            sizes = fmt.plane_bytes(shape)
            offsets = (at, at + sizes[0], at + sizes[0] + sizes[1])
            spans = [v for o, n in zip(offsets, sizes, strict=True) for v in (o if n else 0, n)]
            self._entries[name] = Entry(name, fmt, shape, *spans)
            dims = (*shape, 0, 0, 0, 0)[:4]
            row = (name_at, len(names[i]), TAGS[fmt], *spans[:2], *dims, *spans[2:])
            _ENTRY.pack_into(packed, _HEADER.size + i * _ENTRY.size, *row)
            packed[name_at : name_at + len(names[i])] = names[i]
            name_at += len(names[i])
            at = round_up(at + sum(sizes), 4)
        end = round_up(at)
        _HEADER.pack_into(packed, 0, index_size, end - index_size, len(names))
        os.ftruncate(self._fd, end)
        write_all(self._fd, packed, 0)
        self._pending = set(self._entries)
