"""Conversations on disk: one session as a safetensors file, bound to what made it.

Knows the file and every check that makes it safe to read. Does not know runners, options or text.
A file is read and checked whole before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.cache.pool import MAX_SNAPSHOTS, Session
from turbospark.cache.state import LayerStates, Snapshot
from turbospark.errors import ModelFormatError, SessionBrokenError, SessionFileError
from turbospark.install.files import (
    discard,
    parse_json,
    printable,
    read_exactly,
    regular_size,
    sync_path,
)
from turbospark.install.planes import host_view

FORMAT = "turbospark-session-2"
HEADER_CAP = 8 << 20
_DTYPES = {
    "F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16, "I32": mx.int32, "U32": mx.uint32,
    "U16": mx.uint16, "U8": mx.uint8,
}  # fmt: skip
ABOUT = "about_"
"""Before the name of a binding: words for people about its value, which need not agree."""
_REMEDIES = {
    "install": "open the install that made it",
    "dtype": "open with that dtype",
    "kv_quant": "open with that kv_quant",
    "kv_balance": "use the tables that `turbospark calibrate` had written when it was saved",
    "drafter": "open with that drafter",
    "steering": "set that steering before loading",
}
_SHOWN = 12  # digits of a digest that tell two apart
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Saved:
    """What a file holds, read and checked; `layers` has one list per cache with memory."""

    tokens: list[int]
    furthest: int
    layers: list[list[mx.array]]
    snapshots: list[Snapshot]


def save(path: Path, session: Session, binding: Mapping[str, str]) -> None:
    """Write `session` to `path`, whole or not at all.

    `binding`: names and values that must be the same wherever the file is read, and under "about_"
    and a name what a refusal calls its value. Raises SessionFileError, SessionBrokenError.
    """
    states = session.states
    if session.record.tainted:
        raise SessionBrokenError("a session whose last pass failed cannot be saved; call reset()")
    if states.position == 0:
        raise SessionFileError(f"{path}: there is nothing to save: the live session is empty")
    if not path.parent.is_dir():
        raise SessionFileError(
            f"{path}: cannot be written: there is no folder {path.parent}; make it first"
        )
    arrays = _gather(session)
    mx.eval(arrays)
    marks = [s.position for s in session.snapshots]
    metadata = {
        "format": FORMAT,
        "position": str(states.position),
        "furthest": str(states.furthest),
        "snapshots": " ".join(map(str, marks)),
        **binding,
    }
    metadata["sha256"] = _digest(arrays, metadata)
    path = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow a link)
    partial = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
    try:
        partial.touch()  # says why a folder takes no file; MLX would not
        mx.save_safetensors(str(partial), arrays, metadata)
        sync_path(partial)
        partial.replace(path)
        sync_path(path.parent)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error).replace(str(partial), path.name)
        raise SessionFileError(f"{path}: cannot be written: {printable(reason)}") from error
    finally:
        discard(partial)


def load(path: Path, states: LayerStates, binding: Mapping[str, str], vocab_size: int) -> Saved:
    """Read a file that `save` wrote for the same `binding` into caches like `states`.

    Nothing of `states` changes. Raises SessionFileError for a file that is damaged or of another
    model, dtype or cache layout, naming what differs.
    """
    try:
        regular_size(path)
        with path.open("rb") as file:
            return _load(path, file.fileno(), states, binding, vocab_size)
    except ModelFormatError as error:  # raised by the readers that installs use too
        what = str(error).removeprefix(f"{path}: ")
        raise SessionFileError(f"{path}: {what}") from error
    except OSError as error:
        raise SessionFileError(f"{path}: cannot be read: {error.strerror}") from error


def put(saved: Saved, session: Session) -> None:
    """Make `session` what the file says."""
    session.reset()
    states = session.states
    for cache, arrays in zip(states.owned(), saved.layers, strict=True):
        cache.refill(arrays)
    mx.eval(states.arrays())
    states.position, states.furthest = len(saved.tokens), saved.furthest
    session.record.record(saved.tokens, 0)
    session.snapshots = list(saved.snapshots)
    session.loaded = True


# --- naming ---------------------------------------------------------------------------------------


def _gather(session: Session) -> Arrays:
    """Every array of a session by its name in the file."""
    states = session.states
    arrays = _named("layers", [c.written(states.position, states.furthest) for c in states.owned()])
    for index, snapshot in enumerate(session.snapshots):
        arrays |= _named(f"snapshots.{index}", [list(s or ()) for s in snapshot.layers])
    return arrays | {"tokens": mx.array(session.record.tokens, dtype=mx.int32)}


def _named(prefix: str, layers: list[list[mx.array]]) -> Arrays:
    return {
        f"{prefix}.{layer}.{part}": array
        for layer, parts in enumerate(layers)
        for part, array in enumerate(parts)
    }


def _digest(arrays: Arrays, metadata: Mapping[str, Any]) -> str:
    """SHA-256 over the metadata but its own entry, then over the arrays' names and bytes: no
    flipped bit, and no snapshot said to be elsewhere, can become a wrong answer.
    """
    said = sorted((name, value) for name, value in metadata.items() if name != "sha256")
    digest = hashlib.sha256(json.dumps(said).encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(host_view(arrays[name]).data)
    return digest.hexdigest()


# --- reading --------------------------------------------------------------------------------------


def _load(
    path: Path, fd: int, states: LayerStates, binding: Mapping[str, str], vocab_size: int
) -> Saved:
    header, start = _header(path, fd)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise SessionFileError(
            f"{path}: is not a session file of this version ({FORMAT}); save_session writes one"
        )
    for name, ours in binding.items():
        if not name.startswith(ABOUT) and metadata.get(name) != ours:
            raise SessionFileError(
                f"{path}: made with {name} {_words(name, metadata)}, but this runner has {name} "
                f"{_words(name, binding)}; {_REMEDIES[name]}"
            )
    position, furthest, marks = _numbers(path, metadata, states)
    wanted = _expected(states, position, furthest, marks)
    places = _places(path, header, wanted)
    _check_coverage(path, places, wanted, os.fstat(fd).st_size - start)
    arrays = {name: mx.zeros(a.shape, a.dtype) for name, a in wanted.items()}
    mx.eval(arrays)
    for name, array in arrays.items():
        read_exactly(fd, host_view(array), start + places[name], name)
    if _digest(arrays, metadata) != metadata.get("sha256"):
        raise SessionFileError(f"{path}: damaged: its contents do not have the recorded SHA-256")
    tokens = np.array(arrays["tokens"])
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise SessionFileError(f"{path}: token ids are outside the vocabulary 0..{vocab_size - 1}")
    caches = states.owned()
    layers = [_parts(arrays, f"layers.{i}.") for i in range(len(caches))]
    snapshots = []
    for n, mark in enumerate(marks):
        kept = [tuple(_parts(arrays, f"snapshots.{n}.{i}.")) for i in range(len(caches))]
        snapshots.append(Snapshot(mark, tuple(parts or None for parts in kept)))
    return Saved(tokens.tolist(), furthest, layers, snapshots)


def _words(name: str, values: Mapping[str, Any]) -> str:
    """A binding's value for people: what it is called, and the head of its digest."""
    value, about = printable(str(values.get(name))), values.get(ABOUT + name)
    short = value[:_SHOWN] if len(value) == 64 else value
    return short if about is None or about == short else f"'{printable(str(about))}' ({short})"


def _header(path: Path, fd: int) -> tuple[dict[str, Any], int]:
    """The header's object and where the data begins."""
    size = os.fstat(fd).st_size
    if size < 8:
        raise SessionFileError(f"{path}: is not a session file: it has {size} bytes")
    prefix = bytearray(8)
    read_exactly(fd, prefix, 0, "header length")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(HEADER_CAP, size - 8):
        raise SessionFileError(
            f"{path}: is not a session file, or cut short: it announces a header of {length} "
            f"bytes, and has {size}"
        )
    text = bytearray(length)
    read_exactly(fd, text, 8, "header")
    try:
        return parse_json(bytes(text), "header"), 8 + length
    except ModelFormatError as error:
        raise SessionFileError(
            f"{path}: is not a session file: {error} (of {length} bytes, the file has {size})"
        ) from error


def _numbers(
    path: Path, metadata: Mapping[str, Any], states: LayerStates
) -> tuple[int, int, list[int]]:
    """(position, furthest, snapshot positions), each within its bounds."""
    text = [str(metadata.get(name, "")) for name in ("position", "furthest")]
    marks = str(metadata.get("snapshots", "")).split()
    if not all(_is_count(n) for n in (*text, *marks)):
        raise SessionFileError(f"{path}: position, furthest and snapshots must be whole numbers")
    position, furthest = map(int, text)
    points = [int(mark) for mark in marks]
    if position > states.max_context:
        raise SessionFileError(
            f"{path}: holds {position} tokens, but this runner has max_context "
            f"{states.max_context}; open it with {position} or more"
        )
    rising = all(a < b for a, b in zip([0, *points], [*points, position + 1], strict=True))
    known = states.recurrent and len(points) <= MAX_SNAPSHOTS
    if not 1 <= position <= furthest or not rising or (points and not known):
        raise SessionFileError(
            f"{path}: position {position}, furthest {furthest} and snapshots {points[:9]} "
            "contradict each other"
        )
    return position, furthest, points


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _expected(states: LayerStates, position: int, furthest: int, marks: list[int]) -> Arrays:
    """Arrays of the names, shapes and dtypes that the file must have; their content is moot."""
    arrays = _named("layers", [c.written(position, furthest) for c in states.owned()])
    kept = [list(c.snapshot() or ()) for c in states.owned()]
    for index in range(len(marks)):
        arrays |= _named(f"snapshots.{index}", kept)
    return arrays | {"tokens": mx.zeros((position,), dtype=mx.int32)}


def _places(path: Path, header: Mapping[str, Any], wanted: Arrays) -> dict[str, int]:
    """Name -> offset in the data, once every tensor is what this runner's caches need."""
    for name in header.keys() ^ wanted.keys():
        what = "has an unknown" if name in header else "lacks"
        raise SessionFileError(f"{path}: {what} tensor {printable(name)}")
    places = {}
    for name, array in wanted.items():
        entry = header[name] if isinstance(header[name], dict) else {}
        found = (entry.get("dtype"), entry.get("shape"))
        ours = (_NAMES[array.dtype], list(array.shape))
        if found != ours:
            raise SessionFileError(
                f"{path}: tensor {name} is {printable(f'{found[0]} {found[1]}')}, but this runner "
                f"holds {ours[0]} {ours[1]}; open it with the same max_context and "
                "swa_ring_capacity"
            )
        offsets = entry.get("data_offsets")
        if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
            raise SessionFileError(f"{path}: tensor {name}: data_offsets is not a pair of integers")
        if offsets[1] - offsets[0] != array.nbytes:
            raise SessionFileError(
                f"{path}: tensor {name} has {offsets[1] - offsets[0]} bytes; its shape needs "
                f"{array.nbytes}"
            )
        places[name] = offsets[0]
    return places


def _check_coverage(path: Path, places: Mapping[str, int], wanted: Arrays, size: int) -> None:
    """Refuse data that overlaps, leaves gaps, is missing or left over."""
    end = 0
    for name in sorted(places, key=lambda name: places[name]):
        if places[name] != end:
            raise SessionFileError(
                f"{path}: tensor {name} at byte {places[name]} of the data; expected {end}"
            )
        end += wanted[name].nbytes
    if end != size:
        what = "truncated" if size < end else "too long"
        raise SessionFileError(f"{path}: {what}: expected {end} bytes of data, found {size}")


def _parts(arrays: Arrays, prefix: str) -> list[mx.array]:
    return [array for name, array in arrays.items() if name.startswith(prefix)]
