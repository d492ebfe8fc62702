"""One expert record: its planes, their order, offsets and stride.

Knows roles, formats and byte counts. Does not know files, experts or layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from turbospark.dtypes import SCALE_BYTES, Format, Quant, Raw
from turbospark.errors import TensorShapeError, UnsupportedError
from turbospark.install.files import round_up

PROJECTIONS = ("gate", "up", "down")
RECORD_ROLES = tuple(
    role for p in PROJECTIONS for role in (p, f"{p}_scales", f"{p}_biases", f"{p}_bias")
)
"""File order of a record: a projection, its quantization planes, its linear bias if it has one."""

DTYPE_NAMES = {
    "uint32": "u32",
    "uint8": "u8",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
"""MLX dtype -> the string that layout.json uses."""

ITEM_BYTES = {**SCALE_BYTES, "uint32": 4}


@dataclass(frozen=True)
class RecordTensor:
    """One plane of an expert record.

    `fmt` and `shape` are the logical tensor's: for `gate` the projection's own, for `gate_scales`
    Raw(companion dtype). `plane_shape` and `dtype` say how the bytes lie (uint32 words, ...).
    """

    offset: int
    size: int
    fmt: Format
    shape: tuple[int, ...]
    dtype: str
    plane_shape: tuple[int, ...]


@dataclass(frozen=True)
class RecordLayout:
    """Planes of one expert record; every expert of a layer has the same.

    `used` bytes carry data, `stride` is what one record occupies.
    """

    tensors: dict[str, RecordTensor]
    used: int
    stride: int

    @classmethod
    def build(cls, parts: Mapping[str, tuple[Format, tuple[int, ...]]]) -> RecordLayout:
        """Lay out projections ("gate", "up", "down") and linear biases ("gate_bias", ...).

        Planes lie back to back, each start rounded up to 4 bytes (a no-op for every format of the
        original). Raises UnsupportedError.
        """
        unknown = set(parts) - {r for p in PROJECTIONS for r in (p, f"{p}_bias")}
        missing = set(PROJECTIONS) - set(parts)
        if unknown or missing:
            raise UnsupportedError(
                f"expert record: unknown parts {sorted(unknown)}, missing parts {sorted(missing)}"
            )
        tensors: dict[str, RecordTensor] = {}
        at = 0
        for role in (r for p in PROJECTIONS for r in (p, f"{p}_bias") if r in parts):
            fmt, shape = parts[role]
            _check_part(role, fmt, shape)
            for name, plane in part_planes(role, fmt, shape).items():
                at = round_up(at, 4)
                tensors[name] = replace(plane, offset=at)
                at += plane.size
        return cls(tensors, at, round_up(at))

    def tensor(self, role: str) -> RecordTensor:
        """The plane of that role. Raises TensorShapeError."""
        if role not in self.tensors:
            raise TensorShapeError(f"expert record has no {role}; it has {', '.join(self.tensors)}")
        return self.tensors[role]

    def planes(self, record: Any) -> list[Any]:
        """The bytes of each plane of a whole record (uint8, `stride` long), in role order."""
        return [record[t.offset : t.offset + t.size] for t in self.tensors.values()]

    def parts(self) -> dict[str, tuple[Format, tuple[int, ...]]]:
        """(format, logical shape) of each projection and linear bias: the inverse of `build`."""
        roles = [r for p in PROJECTIONS for r in (p, f"{p}_bias") if r in self.tensors]
        return {r: (self.tensors[r].fmt, self.tensors[r].shape) for r in roles}


def checksum(planes: Iterable[Any]) -> int:
    """CRC-32 of a record: its planes' bytes in role order, padding left out."""
    crc = 0
    for plane in planes:
        crc = zlib.crc32(plane, crc)
    return crc


def part_planes(role: str, fmt: Format, shape: tuple[int, ...]) -> dict[str, RecordTensor]:
    """The planes of one part in file order, by role, all at offset 0."""
    sizes = fmt.plane_bytes(shape)
    if isinstance(fmt, Raw):
        return {role: RecordTensor(0, sizes[0], fmt, shape, fmt.dtype, shape)}
    words = (*shape[:-1], fmt.words(shape[-1]))
    groups = (*shape[:-1], shape[-1] // fmt.group_size)
    raw = Raw(fmt.scale_dtype)
    planes = {
        role: RecordTensor(0, sizes[0], fmt, shape, "uint32", words),
        f"{role}_scales": RecordTensor(0, sizes[1], raw, groups, raw.dtype, groups),
    }
    if fmt.has_biases:
        planes[f"{role}_biases"] = RecordTensor(0, sizes[2], raw, groups, raw.dtype, groups)
    return planes


def _check_part(role: str, fmt: Format, shape: tuple[int, ...]) -> None:
    rank = 1 if role.endswith("_bias") else 2
    if len(shape) != rank or not all(1 <= n < 2**31 for n in shape):
        raise UnsupportedError(f"expert {role}: shape {list(shape)} needs {rank} axes, each >= 1")
    if isinstance(fmt, Quant):
        if rank == 1:
            raise UnsupportedError(f"expert {role}: a linear bias cannot be quantized ({fmt})")
        fmt.check_columns(shape[-1], f"expert {role}")
