"""Control-vector files: GGUF with one `direction.N` per block, as llama.cpp and repeng use them.

Knows the container's names and every check that makes a file safe to use. Does not know models:
whether a file fits one is decided where both are there.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbospark.conversion.ggml import type_name
from turbospark.conversion.gguf_header import GGUFTensor, read_header
from turbospark.conversion.source import LocalFiles
from turbospark.errors import ModelFormatError, SourceError, SteeringFileError, UnsupportedError
from turbospark.install.files import (
    as_path,
    discard,
    printable,
    regular_size,
    round_up,
    sync_path,
)
from turbospark.policies import SteeringMode

MAX_BYTES = 16 << 20
MAX_BLOCK = 4096
ARCHITECTURE = "controlvector"
_F32 = 0
_ALIGNMENT = 32
_NAME = re.compile(r"direction\.([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Contents:
    """What a file says: block (from 0) -> float32 [hidden], not normalized, and its declarations.

    `mode` is the default mode the file asks for, `arch` the architecture it says it was made on.
    """

    directions: dict[int, np.ndarray]
    mode: SteeringMode | None = None
    arch: str | None = None


class ControlVectorInfo:
    """What a control-vector file holds, without a model.

    A width that fits is no proof that a file belongs to a model: checkpoints of one size share it,
    and a direction of another one is noise there. Raises SteeringFileError.
    """

    def __init__(self, path: str | Path) -> None:
        found = read(path)
        self.path = Path(path)
        self.covered = tuple(sorted(found.directions))
        """Blocks (from 0) that have a direction."""
        self.hidden = len(found.directions[self.covered[0]])
        self.first, self.last = self.covered[0], self.covered[-1]
        self.span = self.last + 1
        """Layers that a model needs at least."""
        self.declared_mode, self.declared_arch = found.mode, found.arch
        self.norms = tuple(float(np.linalg.norm(found.directions[b])) for b in self.covered)
        """Length of each direction, in the order of `covered`."""

    def __repr__(self) -> str:
        return (
            f"<ControlVectorInfo {self.path.name}: {len(self.covered)} directions of width "
            f"{self.hidden}, blocks {self.first}..{self.last}>"
        )


# --- reading --------------------------------------------------------------------------------------


def read(path: str | Path) -> Contents:
    """A checked file. Raises SteeringFileError for anything that is not one, or is damaged, and
    OptionError for what is no path.
    """
    path = as_path(path, "path")
    try:
        size = regular_size(path)
        if size > MAX_BYTES:
            raise SteeringFileError(
                f"{path}: {size} bytes; a control vector has at most {MAX_BYTES}"
            )
        header = read_header(LocalFiles(path.parent), path.name)
        data = path.read_bytes()
    except (SourceError, UnsupportedError, ModelFormatError) as error:
        message = str(error).removeprefix(f"{path}: ").removeprefix(f"{path.name}: ")
        raise SteeringFileError(f"{path}: {message}") from error
    except OSError as error:
        raise SteeringFileError(f"{path}: cannot be read: {error.strerror}") from error
    if not header.tensors:
        raise SteeringFileError(f"{path}: holds no tensors; expected direction.1, direction.2, ...")
    mode, arch, shift = _declarations(path, header.metadata)
    directions: dict[int, np.ndarray] = {}
    for tensor in header.tensors.values():
        block = _block(path, tensor.name, shift)
        directions[block] = _direction(path, tensor, data)
    _check_widths(path, directions)
    return Contents(dict(sorted(directions.items())), mode, arch)


def _declarations(
    path: Path, metadata: dict[str, Any]
) -> tuple[SteeringMode | None, str | None, int]:
    """(default mode, architecture of the model it was made on, block of direction.0)."""
    if "glp.mode" in metadata:
        raise SteeringFileError(
            f"{path}: glp.mode = {printable(repr(metadata['glp.mode']))}: another kind of "
            "intervention, not a control vector"
        )
    base = metadata.get("turbospark.layer_base", 1)
    if type(base) is not int or base not in (0, 1):
        raise SteeringFileError(
            f"{path}: turbospark.layer_base = {printable(repr(base))}; expected 0 or 1"
        )
    mode = _text(path, metadata, "turbospark.steering_mode")
    if mode is not None and mode not in [m.value for m in SteeringMode]:
        works = ", ".join(m.value for m in SteeringMode)
        raise SteeringFileError(
            f"{path}: turbospark.steering_mode = {printable(mode)}; expected one of {works}"
        )
    kind = _text(path, metadata, "general.architecture")
    hint = _text(path, metadata, f"{ARCHITECTURE}.model_hint")
    # Some writers put the model's own architecture where "controlvector" belongs.
    arch = hint or (kind if kind != ARCHITECTURE else None)
    return None if mode is None else SteeringMode(mode), arch or None, base - 1


def _text(path: Path, metadata: dict[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise SteeringFileError(f"{path}: {key} = {printable(repr(value))}; expected a text")
    return value


def _block(path: Path, name: str, shift: int) -> int:
    """The block that a tensor's name means."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise SteeringFileError(
            f"{path}: tensor {printable(name)} is not named direction.N with N = 1, 2, ...; "
            "not a control vector"
        )
    block = int(match[1]) + shift
    if block > MAX_BLOCK:
        raise SteeringFileError(
            f"{path}: tensor {name} is for block {block}; expected at most {MAX_BLOCK}"
        )
    return block


def _direction(path: Path, tensor: GGUFTensor, data: bytes) -> np.ndarray:
    if tensor.type != _F32 or len(tensor.shape) != 1:
        raise SteeringFileError(
            f"{path}: tensor {tensor.name} is {type_name(tensor.type)} {list(tensor.shape)}; "
            "expected F32 with one axis"
        )
    values = np.frombuffer(data[tensor.offset : tensor.offset + 4 * tensor.shape[0]], "<f4")
    if len(values) != tensor.shape[0]:
        raise SteeringFileError(f"{path}: truncated while it was read")
    if not np.isfinite(values).all():
        raise SteeringFileError(f"{path}: tensor {tensor.name} holds values that are not finite")
    return values.astype(np.float32)


def _check_widths(path: Path, directions: dict[int, np.ndarray]) -> None:
    first, *others = directions
    for block in others:
        if len(directions[block]) != len(directions[first]):
            raise SteeringFileError(
                f"{path}: the direction of block {block} has {len(directions[block])} values, that "
                f"of block {first} has {len(directions[first])}; expected one width"
            )


# --- writing --------------------------------------------------------------------------------------


def write(path: str | Path, contents: Contents) -> None:
    """Write a file that `read`, llama.cpp and repeng read, whole or not at all.

    Raises SteeringFileError, among others for block 0, which the format cannot name, and
    OptionError for what is no path.
    """
    path = Path(os.path.abspath(as_path(path, "path")))  # noqa: PTH100 (resolve() would follow a link)
    if 0 in contents.directions:
        raise SteeringFileError(
            f"{path}: block 0 cannot be stored: files number directions from 1, which is block 1; "
            "use restrict(1, ...)"
        )
    data = _encode(contents)
    if len(data) > MAX_BYTES:
        raise SteeringFileError(f"{path}: {len(data)} bytes; readers accept at most {MAX_BYTES}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        sync_path(partial)
        partial.replace(path)
        sync_path(path.parent)
    except OSError as error:
        raise SteeringFileError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        discard(partial)


def _encode(contents: Contents) -> bytes:
    """GGUF version 3. repeng refuses a file without a model hint, so there always is one."""
    pairs = [
        _pair("general.architecture", ARCHITECTURE),
        _pair(f"{ARCHITECTURE}.model_hint", contents.arch or "unknown"),
        _pair(f"{ARCHITECTURE}.layer_count", len(contents.directions)),
    ]
    if contents.mode is not None:
        pairs.append(_pair("turbospark.steering_mode", contents.mode.value))
    rows, body = [], b""
    for block, values in sorted(contents.directions.items()):
        shape = struct.pack("<IQIQ", 1, len(values), _F32, len(body))
        rows.append(_string(f"direction.{block}") + shape)
        body += _padded(values.astype("<f4").tobytes())
    counts = struct.pack("<IQQ", 3, len(rows), len(pairs))
    return _padded(b"GGUF" + counts + b"".join(pairs + rows)) + body


def _pair(key: str, value: str | int) -> bytes:
    """A metadata key with a string or a uint32."""
    typed = struct.pack("<II", 4, value) if isinstance(value, int) else None
    return _string(key) + (typed or struct.pack("<I", 8) + _string(str(value)))


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data.ljust(round_up(len(data), _ALIGNMENT), b"\0")
