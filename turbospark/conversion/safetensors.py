"""Hugging Face and MLX checkpoints: a folder with config.json and safetensors files.

Knows the safetensors container, shards, and how MLX and gpt-oss spread one quantized tensor
over several entries. Does not know families or installs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from turbospark.conversion.mlx_quant import QuantConfig, check_method
from turbospark.conversion.source import (
    MAX_SIDECAR_BYTES,
    Files,
    OpenFiles,
    SourceTensor,
    listed,
    parse_json,
    read_into,
    read_json,
    read_small,
)
from turbospark.dtypes import MXFP4, Format, Raw
from turbospark.errors import SourceError
from turbospark.families.config import normalize_config
from turbospark.install.files import TEMPLATES
from turbospark.install.planes import Planes, empty_planes, host_view

MAX_HEADER_BYTES = 100_000_000  # what the reference library allows
MAX_DIMS = 8
MAX_INTEGERS = 1 << 16
INDEX = "model.safetensors.index.json"
SIDECARS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    f"{TEMPLATES}/tool_use.jinja",
)

# Bits per value of every dtype the container defines; only the RAW ones can be converted.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
RAW = {"BF16": Raw("bfloat16"), "F16": Raw("float16"), "F32": Raw("float32")}


# --- the container --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One entry of a safetensors file: `offset` is absolute in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(files: Files, name: str) -> dict[str, Entry]:
    """The entries of one safetensors file, everything checked before a weight is read.

    Raises SourceError for a header too large, not JSON, with duplicate names, unknown dtypes,
    sizes that contradict shapes, gaps, overlaps, or data missing or left over at the end.
    """
    file, size = files.open(name)
    with file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise SourceError(f"{name}: {size} bytes; expected at least 8")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or length > size - 8:
            raise SourceError(
                f"{name}: header of {length} bytes in a file of {size}; "
                f"expected at most {min(MAX_HEADER_BYTES, size - 8)}"
            )
        fields = parse_json(file.read(length), f"{name}: header")
    path = files.where / name
    fields.pop("__metadata__", None)
    entries = {key: _entry(path, key, field, 8 + length) for key, field in fields.items()}
    _check_coverage(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, field: Any, start: int) -> Entry:
    where = f"{path.name}: tensor {name}"
    if not isinstance(field, dict) or {"dtype", "shape", "data_offsets"} - set(field):
        raise SourceError(f"{where}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise SourceError(f"{where}: unknown dtype {dtype!r}")
    if not _counts(shape) or len(shape) > MAX_DIMS:
        raise SourceError(f"{where}: shape is not a list of at most {MAX_DIMS} sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SourceError(f"{where}: data_offsets is not a pair of rising offsets")
    found = offsets[1] - offsets[0]
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != found * 8:
        raise SourceError(f"{where}: {found} bytes; {dtype} of shape {shape} needs {-(-bits // 8)}")
    return Entry(path, dtype, tuple(shape), start + offsets[0], found)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_coverage(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    end, last = start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            kind = "overlaps" if entry.offset < end else "leaves a gap after"
            raise SourceError(
                f"{path.name}: tensor {name} at byte {entry.offset} {kind} {last}; expected {end}"
            )
        end, last = end + entry.nbytes, f"tensor {name}"
    if end != size:
        what = "truncated" if end > size else "has trailing bytes"
        raise SourceError(f"{path.name}: {what}: expected {end} bytes, found {size}")


# --- shards ---------------------------------------------------------------------------------------


def weight_files(files: Files) -> tuple[list[str], dict[str, str] | None]:
    """The safetensors files of a checkpoint, and which tensor the index puts where."""
    names = files.names()
    if INDEX in names:
        places = _read_index(files)
        shards = sorted(set(places.values()))
        missing = [s for s in shards if s not in names]
        if missing:
            raise SourceError(f"{files.where}: {INDEX} names missing shards: {listed(missing)}")
        return shards, places
    found = [n for n in names if n.endswith(".safetensors")]
    if "model.safetensors" in found or len(found) == 1:
        return ["model.safetensors" if "model.safetensors" in found else found[0]], None
    if found:
        raise SourceError(
            f"{files.where}: {len(found)} safetensors files ({listed(found)}) "
            f"without {INDEX} to say which tensor is where"
        )
    other = [n for n in names if n.endswith((".bin", ".pth", ".pt"))]
    if other:
        raise SourceError(
            f"{files.where}: only PyTorch weights ({listed(other)}); expected safetensors: "
            "save the model with safe_serialization, or use a revision that has them"
        )
    raise SourceError(f"{files.where}: no safetensors file beside config.json")


def _read_index(files: Files) -> dict[str, str]:
    places = read_json(files, INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise SourceError(f"{INDEX}: weight_map is not an object of file names")
    for shard in places.values():
        if shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise SourceError(f"{INDEX}: {shard!r} is not the name of a safetensors file")
    return places


def read_entries(files: Files) -> dict[str, Entry]:
    """The entries of every shard of a checkpoint."""
    shards, places = weight_files(files)
    entries: dict[str, Entry] = {}
    for shard in shards:
        for name, entry in read_header(files, shard).items():
            if name in entries:
                raise SourceError(f"tensor {name} is in both {entries[name].file.name} and {shard}")
            entries[name] = entry
    for name, shard in (places or {}).items():
        if name not in entries or entries[name].file.name != shard:
            raise SourceError(f"{INDEX}: tensor {name} is not in {shard}, where the index puts it")
    return entries


# --- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Folded:
    """A logical tensor and the entries that hold its planes in file order."""

    tensor: SourceTensor
    entries: tuple[Entry, ...]


def fold(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> dict[str, _Folded]:
    """Logical tensors: packed weights joined with their companions, the rest as they stand."""
    quant = QuantConfig.read(config)
    folded: dict[str, _Folded] = {}
    used: set[str] = set()
    for name, entry in entries.items():
        if name.endswith(".weight") and entry.dtype == "U32":
            path = name[: -len(".weight")]
            scales, biases = entries.get(f"{path}.scales"), entries.get(f"{path}.biases")
            shape = lambda e: None if e is None else (e.dtype, e.shape)  # noqa: E731
            fmt, logical = quant.geometry(path, entry.shape, shape(scales), shape(biases))
            planes = tuple(e for e in (entry, scales, biases) if e is not None)
            used.update((f"{path}.scales", f"{path}.biases"))
            folded[name] = _joined(name, logical, fmt, planes)
        elif name.endswith("_blocks") and entry.dtype == "U8":
            base = name[: -len("_blocks")]
            scales = entries.get(f"{base}_scales")
            if base in entries:
                raise SourceError(f"tensor {base} is stored twice, plain and in MXFP4 blocks")
            if scales is not None and scales.dtype == "U8":
                logical = _mxfp4_shape(base, entry, scales)
                used.update((name, f"{base}_scales"))
                folded[base] = _joined(base, logical, MXFP4, (entry, scales))
    for name, entry in entries.items():
        if name not in folded and name not in used:
            raw = RAW.get(entry.dtype)
            tensor = SourceTensor(name, entry.shape, raw, entry.dtype, entry.nbytes)
            folded[name] = _Folded(tensor, (entry,))
    return folded


def _joined(name: str, shape: tuple[int, ...], fmt: Format, entries: tuple[Entry, ...]) -> _Folded:
    size = sum(e.nbytes for e in entries)
    return _Folded(SourceTensor(name, shape, fmt, str(fmt), size), entries)


def _mxfp4_shape(base: str, blocks: Entry, scales: Entry) -> tuple[int, ...]:
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise SourceError(
            f"tensor {base}: blocks of shape {list(blocks.shape)} and scales of shape "
            f"{list(scales.shape)} are not MXFP4; expected [..., groups, 16] and [..., groups]"
        )
    return (*blocks.shape[:-2], blocks.shape[-2] * 32)


# --- the source -----------------------------------------------------------------------------------


def read_config(files: Files) -> dict[str, Any]:
    """The normalised config.json, refused when its tensors are quantized in a way not read."""
    config = normalize_config(read_json(files, "config.json"))
    check_method(config)
    return config


class SafetensorsSource:
    """A checkpoint folder with its checked configuration; see `TensorSource`."""

    def __init__(self, files: Files, config: dict[str, Any]) -> None:
        self.path = files.where
        self.config = config
        self._folded = fold(read_entries(files), config)
        self.tensors = {name: folded.tensor for name, folded in self._folded.items()}
        packed = any(f.entries[0].dtype == "U32" for f in self._folded.values())
        self.kind = "mlx" if packed else "huggingface"
        self._files = files
        self._open = OpenFiles()

    @cached_property
    def sidecars(self) -> dict[str, bytes]:
        """See `TensorSource`."""
        names = [n for n in self._files.names() if n in SIDECARS]
        return {name: read_small(self._files, name, MAX_SIDECAR_BYTES) for name in names}

    def read(self, name: str, expert: int | None = None, rows: slice | None = None) -> Planes:
        """Evaluated planes of tensor `name`; see `TensorSource.read`. `rows` has no step."""
        folded = self._folded[name]
        fmt, shape = folded.tensor.fmt, folded.tensor.shape
        if fmt is None:
            raise SourceError(f"tensor {name}: dtype {folded.tensor.stored} cannot be converted")
        lead = 1
        first, count = 0, 1  # in units of the leading axes that are sliced away
        if expert is not None:
            lead, first, shape = shape[0], expert, shape[1:]
        if rows is not None:
            start, stop, _ = rows.indices(shape[0])
            lead, first, count = lead * shape[0], first * shape[0] + start, stop - start
            shape = (count, *shape[1:])
        planes = empty_planes(fmt, shape)
        for entry, array in zip(folded.entries, planes.arrays(), strict=True):
            unit = entry.nbytes // max(lead, 1)
            where, at = f"{entry.file.name}: tensor {name}", entry.offset + first * unit
            read_into(self._open.fd(entry.file), host_view(array), at, where)
        return planes

    def integers(self, name: str) -> list[int]:
        """The values of a small tensor of whole numbers, which installs do not hold."""
        (entry,) = self._folded[name].entries
        if entry.dtype not in ("I32", "I64") or entry.nbytes > MAX_INTEGERS * 8:
            raise SourceError(f"tensor {name}: {entry.dtype} {list(entry.shape)}; expected I64 ids")
        values = np.zeros(entry.shape, np.int32 if entry.dtype == "I32" else np.int64)
        where = f"{entry.file.name}: tensor {name}"
        read_into(self._open.fd(entry.file), values.view(np.uint8), entry.offset, where)
        return [int(v) for v in values.reshape(-1)]

    def close(self) -> None:
        """Close the shards."""
        self._open.close()
