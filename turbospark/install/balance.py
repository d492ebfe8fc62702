"""Tables that make keys easier to pack, as a file of an install: means and scales of channels.

Knows the file, what binds it to its install and every check that makes it safe to use. Does not
know how tables are measured or applied.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.errors import IndexCorruptError
from turbospark.install.files import parse_json, printable, read_capped, sync_path
from turbospark.install.opening import Install

NAME = "kv_balance.safetensors"
FORMAT = "turbospark-kv-balance-1"
CAP = 64 << 20
LARGEST = 1e6
"""Of scales, their reciprocals and means; measured ones stay far below."""

Tables = dict[int, tuple[np.ndarray, np.ndarray]]
"""Layer -> mean and scale, float32 [KV, dim]."""


def digest(install: Install) -> str | None:
    """SHA-256 of the install's tables; None when it has none."""
    path = install.sidecar(NAME)
    return None if path is None else hashlib.sha256(read_capped(path, CAP)).hexdigest()


def provenance(install: Install) -> dict[str, str] | None:
    """What the tables were measured on; None when the install has none."""
    path = install.sidecar(NAME)
    return None if path is None else _header(path, read_capped(path, CAP))[1]


def read(install: Install, shapes: Mapping[int, tuple[int, int]]) -> Tables | None:
    """The tables of the layers in `shapes` ([KV, dim] each); None when the install has none.

    Raises IndexCorruptError for a file that is damaged, lacks a layer or belongs to other weights.
    """
    path = install.sidecar(NAME)
    if path is None:
        return None
    data = read_capped(path, CAP)
    entries, metadata, start = _header(path, data)
    if metadata.get("install") != install.manifest.sha256:
        raise IndexCorruptError(
            f"{path}: measured on other weights ({printable(metadata.get('install', '?'))});"
            " run `turbospark calibrate` again, or delete the file"
        )
    tables: Tables = {}
    for layer, shape in shapes.items():
        mean, scale = (
            _array(path, data, start, entries, f"layers.{layer}.{part}", shape)
            for part in ("mean", "scale")
        )
        low, high, off = scale.min(), scale.max(), np.abs(mean).max()
        if low < 1 / LARGEST or max(high, off) > LARGEST:
            raise IndexCorruptError(
                f"{path}: layer {layer} has scales {low:.3g} to {high:.3g} and means up to "
                f"{off:.3g}; works: scales 1e-06 to 1e+06, means up to 1e+06"
            )
        tables[layer] = (mean, scale)
    return tables


def write(install: Install, tables: Tables, source: Mapping[str, str]) -> Path:
    """Store tables with what they were measured on, whole or not at all -> the file."""
    path = install.path / NAME
    arrays = {
        f"layers.{layer}.{part}": mx.array(values)
        for layer, pair in tables.items()
        for part, values in zip(("mean", "scale"), pair, strict=True)
    }
    metadata = {"format": FORMAT, "install": install.manifest.sha256, **source}
    partial = path.with_name(f".{NAME}.{os.getpid()}.safetensors")
    try:
        mx.save_safetensors(str(partial), arrays, metadata)
        sync_path(partial)
        partial.replace(path)
        sync_path(path.parent)
    except (OSError, RuntimeError) as error:
        raise IndexCorruptError(f"{path}: cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _header(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, str], int]:
    """Entries by name, the metadata, and where the data begins."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else len(data)
    if length > len(data) - 8:
        raise IndexCorruptError(f"{path}: a header of {length} bytes in a file of {len(data)}")
    entries = parse_json(data[8 : 8 + length], NAME)
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise IndexCorruptError(f"{path}: not balance tables of this version ({FORMAT})")
    return entries, {k: str(v) for k, v in metadata.items()}, 8 + length


def _array(
    path: Path,
    data: bytes,
    start: int,
    entries: Mapping[str, Any],
    name: str,
    shape: tuple[int, int],
) -> np.ndarray:
    entry = entries.get(name)
    size = 4 * shape[0] * shape[1]
    found = entry if isinstance(entry, dict) else {}
    offsets = found.get("data_offsets")
    if found.get("dtype") != "F32" or found.get("shape") != list(shape):
        raise IndexCorruptError(
            f"{path}: {name} is {printable(str(entry))}; this model needs F32 {list(shape)}"
        )
    if (
        not isinstance(offsets, list)
        or [type(n) for n in offsets] != [int, int]
        or not 0 <= offsets[0] <= offsets[1] <= len(data) - start
        or offsets[1] - offsets[0] != size
    ):
        raise IndexCorruptError(f"{path}: {name}: data_offsets do not lead to its {size} bytes")
    values = np.frombuffer(data, np.float32, size // 4, start + offsets[0]).reshape(shape)
    if not np.isfinite(values).all():
        raise IndexCorruptError(f"{path}: {name} has a value that is not a number")
    return values
