"""`packed_experts/`: routed experts as fixed-stride records, read and written one by one.

Knows where each expert lies in its layer file. Does not know routing or caching.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from turbospark.dtypes import Quant
from turbospark.errors import ExpertStrideError, ReadError, SourceError, UnsupportedError
from turbospark.install.files import PAGE, read_exactly, sync_path, write_all, write_file
from turbospark.install.layout import FOLDER, LAYOUT_CAP, LAYOUT_NAME, LayerRows, read_layout
from turbospark.install.planes import Planes
from turbospark.install.record import (
    DTYPE_NAMES,
    RECORD_ROLES,
    RecordLayout,
    RecordTensor,
    checksum,
    part_planes,
)
from turbospark.install.stored import stored_bytes

__all__ = [
    "RECORD_ROLES",
    "PackedLayer",
    "PackedLayout",
    "PackedWriter",
    "RecordLayout",
    "RecordTensor",
]


# --- reading --------------------------------------------------------------------------------------


class PackedLayer:
    """One routed layer: an open file of `count` records."""

    fd = -1

    def __init__(self, rows: LayerRows) -> None:
        self.layer = rows.layer
        self.path = rows.path
        self.record = rows.record
        self.offsets = rows.offsets
        self.checksums = rows.checksums
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as err:
            raise ReadError(f"{self.path}: cannot be opened: {err.strerror}") from err

    @property
    def stride(self) -> int:
        return self.record.stride

    @property
    def count(self) -> int:
        return len(self.offsets)

    def offset(self, expert: int) -> int:
        """File offset of a record; an id outside the layer raises ReadError, never wraps."""
        if not 0 <= expert < self.count:
            raise ReadError(
                f"{self.path}: expert {expert} was asked of layer {self.layer}, "
                f"which has experts 0..{self.count - 1}"
            )
        return self.offsets[expert]

    def tensor(self, role: str) -> RecordTensor:
        """The plane of that role, same for every expert. Raises TensorShapeError."""
        return self.record.tensor(role)

    def read_record_into(self, expert: int, buffer: Any) -> None:
        """Fill a writable uint8 buffer of `stride` bytes with one record. Raises ReadError."""
        what = f"{self.path}: expert {expert}"
        offset = self.offset(expert)
        if memoryview(buffer).nbytes != self.stride:
            found = memoryview(buffer).nbytes
            raise ReadError(f"{what}: buffer of {found} bytes; the record has {self.stride}")
        if self.fd < 0:
            raise ReadError(f"{what} was asked after the install was closed")
        read_exactly(self.fd, buffer, offset, what)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class PackedLayout:
    """All routed layers of an install, by trunk layer index; empty for a dense model."""

    def __init__(self, layers: dict[int, PackedLayer], experts_per_layer: int, stride: int) -> None:
        self.layers = layers
        self.experts_per_layer = experts_per_layer
        self.stride = stride

    @classmethod
    def read(cls, directory: Path | str) -> PackedLayout:
        """Read and check `packed_experts/` of the install `directory`; opens every layer file.

        Raises IndexCorruptError, ExpertStrideError, MissingFileError, FileSizeError,
        TensorShapeError, UnsupportedError.
        """
        rows, count, stride = read_layout(Path(directory))
        return cls({row.layer: PackedLayer(row) for row in rows}, count, stride)

    @property
    def bytes_per_slot(self) -> int:
        """Cost of one more cached expert in every layer."""
        return sum(layer.stride for layer in self.layers.values())

    def close(self) -> None:
        for layer in self.layers.values():
            layer.close()


# --- writing --------------------------------------------------------------------------------------


class PackedWriter:
    """Writes `packed_experts/` below `directory`: one file per routed layer, then layout.json.

    A dense model calls `close` alone. All layers must have the same number of experts.
    """

    def __init__(self, directory: Path | str) -> None:
        self.path = Path(directory) / FOLDER
        self.path.mkdir(exist_ok=True)
        self.count = 0
        self.stride = 0
        self._layers: list[dict[str, Any]] = []
        self._fd = -1
        self._layer = -1
        self._record: RecordLayout | None = None
        self._pending: dict[int, set[str]] = {}
        self._checksums: dict[int, int] = {}

    @property
    def num_layers(self) -> int:
        """Layer files finished so far."""
        return len(self._layers)

    def begin_layer(self, layer: int, count: int, record: RecordLayout) -> None:
        """Start the file of trunk layer `layer`. Raises SourceError, UnsupportedError."""
        if self._record is not None:
            raise SourceError(f"expert layer {layer} begun before layer {self._layer} was ended")
        if layer <= self._layer:
            raise SourceError(f"expert layer {layer} begun after layer {self._layer}")
        if count < 1 or (self._layers and count != self.count):
            raise UnsupportedError(
                f"expert layer {layer} has {count} experts; an install needs the same number, "
                f"at least 1, in every routed layer ({self.count or 'none'} so far)"
            )
        if record.stride % PAGE:
            raise ExpertStrideError(f"expert stride {record.stride} is not a multiple of {PAGE}")
        name = f"layer_{layer:02d}.bin"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(self.path / name, flags, 0o644)
        os.ftruncate(self._fd, count * record.stride)
        self.count, self._layer, self._record = count, layer, record
        self._pending = {expert: set(record.parts()) for expert in range(count)}
        self._checksums = {}

    def write(self, expert: int, parts: Mapping[str, Planes]) -> None:
        """Write some or all parts ("gate", "gate_bias", ...) of one expert, each exactly once."""
        if self._record is None:
            raise SourceError(f"expert {expert} was written outside a layer")
        shapes = self._record.parts()
        for role, planes in parts.items():
            where = f"layer {self._layer} expert {expert} {role}"
            if role not in self._pending.get(expert, ()):
                raise SourceError(f"{where} is not part of the layer or is written twice")
            data = stored_bytes(planes, *shapes[role], where)
            for name, plane in zip(part_planes(role, *shapes[role]), data, strict=True):
                offset = expert * self._record.stride + self._record.tensors[name].offset
                write_all(self._fd, plane, offset)
            self._pending[expert].discard(role)
        if expert in self._pending and not self._pending[expert]:
            self._checksums[expert] = self._checksum(expert, self._record)
            del self._pending[expert]

    def _checksum(self, expert: int, record: RecordLayout) -> int:
        """Of the whole record as it lies in the file: its parts may have come in any order."""
        data = np.empty(record.stride, np.uint8)
        read_exactly(self._fd, data, expert * record.stride, f"layer {self._layer} expert {expert}")
        return checksum(record.planes(data))

    def end_layer(self) -> None:
        """Finish the layer; SourceError names the first part that is missing."""
        if self._record is None:
            raise SourceError("end_layer without begin_layer")
        if self._pending:
            expert, missing = min(self._pending.items())
            raise SourceError(
                f"layer {self._layer}: {sum(map(len, self._pending.values()))} expert tensors were "
                f"not written, first expert {expert} {min(missing)}"
            )
        os.fsync(self._fd)
        self.abort()
        self._layers.append(_layer_json(self._layer, self._checksums, self._record))
        self.stride = max(self.stride, self._record.stride)
        self._record = None

    def close(self) -> None:
        """Write layout.json. Raises SourceError, UnsupportedError (layout too large)."""
        if self._record is not None:
            raise SourceError(f"expert layer {self._layer} was not ended")
        layout = {
            "expertStride": self.stride,
            "numLayers": len(self._layers),
            "expertsPerLayer": self.count,
            "layers": self._layers,
        }
        data = json.dumps(layout, separators=(",", ":")).encode()
        if len(data) > LAYOUT_CAP:
            raise UnsupportedError(
                f"layout.json would take {len(data)} bytes; readers accept {LAYOUT_CAP}"
            )
        write_file(self.path / LAYOUT_NAME, data)
        sync_path(self.path)

    def abort(self) -> None:
        """Close the open layer file as it is; whoever made the directory removes it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _layer_json(layer: int, checksums: dict[int, int], record: RecordLayout) -> dict[str, Any]:
    tensors = {role: _tensor_json(tensor) for role, tensor in record.tensors.items()}
    stride = record.stride
    experts = [
        {"expert": e, "offset": e * stride, "size": stride, "tensors": tensors, "crc32": crc}
        for e, crc in sorted(checksums.items())
    ]
    return {
        "layer": layer,
        "file": f"layer_{layer:02d}.bin",
        "expertStride": stride,
        "experts": experts,
    }


def _tensor_json(tensor: RecordTensor) -> dict[str, Any]:
    """The original's four keys; `mode`.. on packed words only, where they say something new."""
    entry: dict[str, Any] = {
        "offset": tensor.offset,
        "size": tensor.size,
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
    }
    if isinstance(tensor.fmt, Quant):
        fmt = tensor.fmt
        entry.update(
            bits=fmt.bits, mode=fmt.mode, groupSize=fmt.group_size, scaleDtype=fmt.scale_dtype
        )
    return entry
