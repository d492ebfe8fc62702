"""Careful file access below an install directory: strict JSON, contained paths, exact reads.

Knows bytes, limits and where a path may lead. Does not know what any file means.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from turbospark.errors import (
    FileSizeError,
    IndexCorruptError,
    MissingFileError,
    OptionError,
    ReadError,
)

PAGE = 16384
"""Alignment of everything that may one day be mapped: Apple's page size."""

TEMPLATES = "additional_chat_templates"
"""The folder of templates beside chat_template.jinja, in checkpoints and in installs."""

# One preadv/pwrite call: macOS refuses more than INT_MAX bytes, Linux cuts at 2 GiB - 4 KiB.
_IO_CHUNK = 1 << 30
_INT_DIGITS = 20  # 2**64 has 20: longer integers cannot be sizes and would be slow to parse
_MAX_VALUES = 8 << 20  # a document of "[],[],..." takes 20 times its length in memory
_MAX_DEPTH = 64  # what json accepts can be too deep for repr, == or a validator
_UNPRINTABLE = re.compile(r"[^ -~]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

Pairs = list[tuple[str, Any]]


def round_up(n: int, unit: int = PAGE) -> int:
    """The smallest multiple of `unit` that is >= n."""
    return -(-n // unit) * unit


# --- JSON -----------------------------------------------------------------------------------------


class _BadJSON(ValueError):
    """Raised inside the parser's hooks; never leaves this module."""


def _constant(text: str) -> Any:
    raise _BadJSON(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > _INT_DIGITS:
        raise _BadJSON(f"integer of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _BadJSON("number out of range")
    return value


def _no_duplicates(pairs: Pairs) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadJSON(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) in (dict, list)
        ]
        if not level:
            return
    raise _BadJSON(f"nested deeper than {_MAX_DEPTH}")


def parse_json(
    data: bytes, what: str, check: Callable[[dict[str, Any]], str | None] | None = None
) -> dict[str, Any]:
    """Parse a JSON object, refusing duplicate keys, NaN, Infinity, absurd integers and bad UTF-8.

    `check(object)` sees every object of the document and returns a complaint or None.
    Raises IndexCorruptError.
    """

    def hook(pairs: Pairs) -> dict[str, Any]:
        found = _no_duplicates(pairs)
        complaint = check(found) if check else None
        if complaint:
            raise _BadJSON(complaint)
        return found

    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MAX_VALUES:
        raise IndexCorruptError(f"{what}: {values} values exceed the limit of {_MAX_VALUES}")
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=hook,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
        if isinstance(value, dict):
            _check_depth(value)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise IndexCorruptError(f"{what}: JSON nested too deeply") from None
    except ValueError as err:  # JSONDecodeError, UnicodeError and _BadJSON
        raise IndexCorruptError(f"{what}: not acceptable JSON: {printable(str(err))}") from None
    if not isinstance(value, dict):
        raise IndexCorruptError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json(
    path: Path,
    cap: int,
    check: Callable[[dict[str, Any]], str | None] | None = None,
) -> dict[str, Any]:
    """`parse_json` of a file of at most `cap` bytes. Raises IndexCorruptError, MissingFileError."""
    return parse_json(read_capped(path, cap), path.name, check)


def read_capped(path: Path, cap: int) -> bytes:
    """All bytes of a regular file, refused above `cap` before anything is allocated."""
    size = regular_size(path)
    if size > cap:
        raise IndexCorruptError(f"{path}: {size} bytes exceed the limit of {cap} for this file")
    try:
        with path.open("rb") as file:
            data = file.read(cap + 1)
    except OSError as err:
        raise ReadError(f"{path}: cannot be read: {err.strerror}") from err
    if len(data) > cap:
        raise IndexCorruptError(f"{path}: grew past the limit of {cap} bytes while being read")
    return data


def printable(text: str) -> str:
    """Text that any terminal accepts, at most 200 characters: file contents end up in messages.

    Controls are escaped with the rest: a terminal would obey them.
    """
    return _UNPRINTABLE.sub(
        lambda found: found[0].encode("unicode_escape").decode("ascii"),
        text[:200].replace("\n", " "),
    )


# --- paths ----------------------------------------------------------------------------------------


def as_path(value: Any, what: str) -> Path:
    """The path a caller gave as option `what`, ~ expanded; nothing need exist there.

    Raises OptionError for what is no path and for what no file system takes.
    """
    try:
        path = Path(value).expanduser()
    except (TypeError, RuntimeError) as err:  # RuntimeError: ~ of an unknown user
        raise OptionError(f"{what}={printable(repr(value))} is not a path: {err}") from None
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as err:
        raise OptionError(f"{what} '{printable(str(path))}': {err.strerror}") from None
    except ValueError as err:  # a NUL, a lone surrogate
        raise OptionError(f"{what}={printable(repr(value))} is not a path: {err}") from None
    return path


def mode(path: Path) -> int:
    """st_mode of what `path` leads to, 0 if nothing can be seen there; never raises."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return 0


def is_dir(path: Path) -> bool:
    """Path.is_dir without exceptions for unreadable parents."""
    return stat.S_ISDIR(mode(path))


def is_file(path: Path) -> bool:
    """Path.is_file without exceptions for unreadable parents."""
    return stat.S_ISREG(mode(path))


def regular_size(path: Path) -> int:
    """Size of a regular file by stat alone. Raises MissingFileError, IndexCorruptError."""
    try:
        info = path.stat()
    except OSError as err:
        raise MissingFileError(f"{path}: {err.strerror or 'missing'}") from None
    if not stat.S_ISREG(info.st_mode):
        raise IndexCorruptError(f"{path}: not a regular file")
    return info.st_size


def check_relative(name: str, what: str) -> None:
    """Refuse a relative path that could lead out of its directory or out of ASCII sanity."""
    parts = name.split("/")
    bad = (
        not name
        or len(name) > 1024
        or "\\" in name
        or not name.isprintable()
        or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    )
    if bad:
        raise IndexCorruptError(
            f"{what}: path '{printable(name)}' must be relative and stay inside the install"
        )


def contained(root: Path, name: str, what: str) -> Path:
    """`root / name`, refused if the text or a symbolic link leads outside `root`.

    The file itself need not exist. Raises IndexCorruptError.
    """
    check_relative(name, what)
    path = root / name
    try:
        inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links is RuntimeError before Python 3.13
        inside = False
    if not inside:
        raise IndexCorruptError(f"{what}: '{printable(name)}' leads outside the install {root}")
    return path


def check_size(path: Path, expected: int) -> None:
    """Compare a file's size with the declared one, by stat alone. Raises FileSizeError."""
    actual = regular_size(path)
    if actual != expected:
        how = "truncated" if actual < expected else "too long"
        raise FileSizeError(
            f"{path}: {how}: expected {expected} bytes, found {actual}; install it again"
        )


# --- reading and writing at offsets ---------------------------------------------------------------


def read_exactly(fd: int, buffer: Any, offset: int, what: str) -> None:
    """Fill a writable uint8 buffer from `offset`. Raises ReadError on an error or a short file."""
    view = memoryview(buffer).cast("B")
    done = 0
    while done < len(view):
        part = view[done : done + _IO_CHUNK]
        try:
            if hasattr(os, "preadv"):
                got = os.preadv(fd, [part], offset + done)
            else:  # macOS before 11
                data = os.pread(fd, len(part), offset + done)
                got = len(data)
                part[:got] = data
        except OSError as err:
            raise ReadError(
                f"{what}: expected {len(view)} bytes at offset {offset}, found {done}: "
                f"{err.strerror}"
            ) from err
        if got == 0:
            raise ReadError(
                f"{what}: expected {len(view)} bytes at offset {offset}, found {done}; "
                "the file changed or was cut short after it was opened"
            )
        done += got


def write_all(fd: int, buffer: Any, offset: int) -> None:
    """Write a whole uint8 buffer at `offset`; OSError (disk full) goes to the caller."""
    view = memoryview(buffer).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _IO_CHUNK], offset + done)


def sync_path(path: Path) -> None:
    """fsync a file or a directory, so that a crash after the rename cannot lose it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def discard(path: Path) -> None:
    """Remove a half-written file, if there is one; never raises, for a better error is under way.

    A name that is too long for the file system cannot be removed either.
    """
    with suppress(OSError, ValueError):
        path.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a new small file and fsync it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
