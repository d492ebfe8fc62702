"""The header of a GGUF file: metadata and tensor table, checked before any data is read.

Knows the container, versions 2 and 3. Survives type numbers that nobody defined. Does not know
what blocks hold.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from turbospark.conversion.ggml import CODECS, type_name
from turbospark.conversion.source import Files
from turbospark.errors import SourceError, UnsupportedError
from turbospark.install.files import printable

MAX_STRING = 64 << 20
MAX_ELEMENTS = 1 << 24  # of all metadata arrays together; the largest vocabularies have 2**18
MAX_DEPTH = 4
MAX_DIMS = 4
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table: `shape` is [rows, columns] order, `offset` absolute."""

    file: Path
    name: str
    type: int
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int | None:
        """Bytes in the file; None when the type's block size is unknown."""
        codec = CODECS.get(self.type)
        return None if codec is None else math.prod(self.shape) // codec.values * codec.nbytes


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata as plain Python values and the tensor table by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(files: Files, name: str) -> GGUFHeader:
    """The checked header of one GGUF file.

    Raises SourceError for anything truncated, lying about its sizes, duplicated or misplaced,
    UnsupportedError for a version or byte order that is not read.
    """
    file, size = files.open(name)
    with file:
        return _Reader(files.where / name, file, size).header()


class _Reader:
    """A cursor that never reads or allocates past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.at = 0
        self.elements = 0

    def header(self) -> GGUFHeader:
        tensor_count, key_count = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.bad(f"metadata key {key} appears twice")
            metadata[key] = self.value(self.u32(f"the type of {key}"), key)
        table = [self.tensor_row() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"general.alignment = {alignment!r}; expected a power of two")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in table:
            if name in tensors:
                raise self.bad(f"two tensors are named {name}")
            if offset % alignment:
                raise self.bad(f"tensor {name}: offset {offset} is not a multiple of {alignment}")
            tensors[name] = GGUFTensor(self.path, name, kind, shape, start + offset)
        self.check_extents(list(tensors.values()), start)
        return GGUFHeader(metadata, tensors)

    def _preamble(self) -> tuple[int, int]:
        magic = self.take(4, "the magic number")
        if magic != b"GGUF":
            raise self.bad(f"starts with {magic!r}; expected b'GGUF'")
        version = self.u32("the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            found = f"big-endian version {swapped}" if swapped in (1, 2, 3) else f"{version}"
            raise UnsupportedError(
                f"{self.path.name}: GGUF version {found} is not supported; "
                "supported: 2 and 3, little-endian"
            )
        tensors, keys = struct.unpack("<QQ", self.take(16, "the counts"))
        left = self.size - self.at
        if tensors * 24 > left or keys * 13 > left:  # the least that a row of each takes
            raise self.bad(f"claims {tensors} tensors and {keys} metadata keys in {left} bytes")
        return tensors, keys

    # --- primitives ---

    def bad(self, text: str) -> SourceError:
        return SourceError(f"{self.path.name}: {printable(text)}")

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.at
        if count > left:
            raise self.bad(f"truncated: {what} needs {count} bytes at {self.at}, found {left}")
        self.at += count
        return self.file.read(count)

    def u32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def string(self, what: str) -> str:
        length = self.u64(what)
        if length > MAX_STRING:
            raise self.bad(f"{what}: string of {length} bytes; expected at most {MAX_STRING}")
        # Vocabularies hold token bytes that are not UTF-8 on their own.
        return self.take(length, what).decode("utf-8", "surrogateescape")

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        dtype = np.dtype(self.scalar(kind, key))
        return np.frombuffer(self.take(dtype.itemsize, key), dtype=dtype)[0].item()

    def scalar(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self.bad(f"metadata key {key} has unknown value type {kind}")
        return _SCALARS[kind]

    def array(self, key: str, depth: int) -> list[Any]:
        kind, count = self.u32(key), self.u64(key)
        self.elements += count
        if self.elements > MAX_ELEMENTS or depth > MAX_DEPTH:
            raise self.bad(f"metadata key {key}: array of {count} entries, nested {depth} deep")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind, key, depth) for _ in range(count)]
        dtype = np.dtype(self.scalar(kind, key))
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype=dtype).tolist()

    # --- tensors ---

    def tensor_row(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self.string("a tensor name")
        what = f"tensor {name}"
        if not name or not name.isprintable():
            raise self.bad(f"{what!r}: the name is not printable")
        dims = self.u32(what)
        if not 1 <= dims <= MAX_DIMS:
            raise self.bad(f"{what}: {dims} axes; expected 1 to {MAX_DIMS}")
        sizes = struct.unpack(f"<{dims}Q", self.take(8 * dims, what))
        kind, offset = self.u32(what), self.u64(what)
        codec = CODECS.get(kind)
        if 0 in sizes or (codec is not None and sizes[0] % codec.values):
            unit = "" if codec is None else f", columns a multiple of {codec.values}"
            raise self.bad(
                f"{what} ({type_name(kind)}): shape {list(reversed(sizes))}; "
                f"expected sizes of at least 1{unit}"
            )
        return name, kind, tuple(reversed(sizes)), offset

    def check_extents(self, tensors: Sequence[GGUFTensor], start: int) -> None:
        end, last = start, ""
        for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes or 0)):
            if tensor.offset < end:
                raise self.bad(f"tensors {last} and {tensor.name} overlap at {tensor.offset}")
            end, last = tensor.offset + (tensor.nbytes or 0), tensor.name
            if end > self.size:
                raise self.bad(
                    f"truncated: tensor {last} ends at byte {end}, the file at {self.size}"
                )
