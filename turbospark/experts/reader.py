"""Reading expert records from layer files, in parallel, with every failure named.

Knows files, offsets, checksums and threads. Does not know which expert should be read.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

from turbospark.errors import ReadError
from turbospark.install.files import read_exactly
from turbospark.install.packed import PackedLayer

WORKERS = 8
CHUNK = 840 * 1024
"""Bytes per task where cores are free to copy in parallel (measured optimum of the original)."""

Segment = tuple[int, np.ndarray]
"""(offset inside the record, uint8 buffer): where a piece of a record goes."""


@lru_cache(maxsize=1)
def workers() -> ThreadPoolExecutor:
    """The process's reading threads."""
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="turbospark-read")


class RecordReader:
    """Reads records of one layer. A file that changed, shrank or vanished is refused by name and
    opened afresh for the next request, so that a repaired file is read again.
    """

    def __init__(self, layer: PackedLayer) -> None:
        self.layer = layer
        self.path: Path = layer.path
        self.split = (os.cpu_count() or 1) >= 4
        self._fd: int | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._open()

    def read(self, wanted: Sequence[tuple[int, Sequence[Segment]]]) -> None:
        """Fill the segments of each (expert, segments); returns when all have arrived.

        Raises ReadError, after every task has ended, with the first failure.
        """
        if wanted:
            self.join(self.start(wanted))

    def start(
        self, wanted: Sequence[tuple[int, Sequence[Segment]]], inline: bool = True
    ) -> list[Future[None]]:
        """Begin reading in the background; `join` the result. A lone piece may be read `inline`."""
        fd = self._check()
        pieces = [p for expert, segments in wanted for p in self._pieces(expert, segments)]
        if inline and len(pieces) == 1:
            done: Future[None] = Future()
            try:
                self._read_piece(fd, *pieces[0])
                done.set_result(None)
            except ReadError as error:
                done.set_exception(error)
            return [done]
        return [workers().submit(self._read_piece, fd, *piece) for piece in pieces]

    def join(self, tasks: Sequence[Future[None]]) -> None:
        """Wait for every task; raise the first failure, having dropped the file."""
        errors = [e for e in (task.exception() for task in tasks) if e is not None]
        if errors:
            self.close()
            raise errors[0]

    def verify(self, expert: int, planes: Sequence[np.ndarray]) -> None:
        """Compare a record's planes, in file order, with the install's checksum."""
        crc = 0
        for plane in planes:
            crc = zlib.crc32(plane.data, crc)
        expected = self.layer.checksums[expert]
        if crc != expected:
            raise ReadError(
                f"{self.path}: expert {expert} at offset {self.layer.offset(expert)} has checksum "
                f"{crc:08x}; the install recorded {expected:08x}; install it again"
            )

    def close(self) -> None:
        """Drop the file; the next read opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ReadError(
                f"{self.path}: cannot be opened: {error.strerror}; put the file back or install "
                "it again"
            ) from error
        need = self.layer.stride * self.layer.count
        info = os.fstat(fd)
        if info.st_size < need:
            os.close(fd)
            raise ReadError(
                f"{self.path}: truncated: expected {need} bytes, found {info.st_size}; "
                "install it again"
            )
        self._fd = fd
        self._stamp = (info.st_size, info.st_mtime_ns, info.st_ino)
        return fd

    def _check(self) -> int:
        """The open file, if it is still the one that was opened."""
        if self._fd is None:
            return self._open()
        info = os.fstat(self._fd)
        stamp = (info.st_size, info.st_mtime_ns, info.st_ino)
        if stamp != self._stamp or info.st_nlink == 0:
            old = self._stamp
            self.close()
            what = "was removed" if info.st_nlink == 0 else "changed"
            raise ReadError(
                f"{self.path}: {what} while open: expected {old[0] if old else 0} bytes, found "
                f"{info.st_size}; put the file back or install it again"
            )
        return self._fd

    def _pieces(
        self, expert: int, segments: Sequence[Segment]
    ) -> list[tuple[int, int, np.ndarray]]:
        base = self.layer.offset(expert)
        pieces = []
        for offset, buffer in segments:
            size = CHUNK if self.split else buffer.nbytes
            for at in range(0, buffer.nbytes, size):
                pieces.append((expert, base + offset + at, buffer[at : at + size]))
        return pieces

    def _read_piece(self, fd: int, expert: int, offset: int, buffer: np.ndarray) -> None:
        read_exactly(fd, buffer, offset, f"{self.path}: expert {expert}")


class DiskBytes:
    """Bytes this process really fetched from disk, where the system tells (Linux)."""

    PATH = Path("/proc/self/io")

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled and self.PATH.exists()

    def now(self) -> int | None:
        """Cumulative physical bytes read, or None when not measured."""
        if not self.enabled:
            return None
        for line in self.PATH.read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
        return None
