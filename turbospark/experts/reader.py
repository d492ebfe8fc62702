"""Reading expert records from layer files, in parallel, with every failure named.

Knows files, offsets, checksums and threads. Does not know which expert should be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from turbospark.counters import PhaseClock
from turbospark.errors import ReadError
from turbospark.install.files import read_exactly
from turbospark.install.packed import PackedLayer
from turbospark.install.record import checksum

WORKERS = 8
CHUNK = 840 * 1024
"""Bytes per task where cores are free to copy in parallel (measured optimum of the original)."""
MANY_CORES = 4
"""With fewer, the caller reads: what the page cache holds first, then the rest, announced to the
system. Copies would compete for the cores anyway, and announcing fills the disk's queue as well as
threads do. Records of 2.5 MiB on 2 busy cores, GB/s: 4 warm ones 3.6 against 2.6 by the best number
of threads, 8 warm ones 4.2 against 4.1; 4 cold ones 0.93 against 0.81, 8 cold ones 0.91 against
0.85."""


@dataclass(frozen=True)
class Room:
    """Memory for one record: (offset in the record, uint8 buffer) pieces that a read fills, and
    the record's planes, which lie in them.
    """

    segments: tuple[tuple[int, np.ndarray], ...]
    planes: tuple[np.ndarray, ...]


Wanted = Sequence[tuple[int, Room]]
"""(expert, where its record goes)."""
Piece = tuple[int, int, np.ndarray]
"""(expert, file offset, buffer) of one read."""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache(maxsize=1)
def workers() -> ThreadPoolExecutor:
    """The process's reading threads."""
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="turbospark-read")


class LayerFile:
    """A layer's file as it was when opened. One that changed, shrank or vanished is refused by
    name, once, and opened afresh for the next request, so that a repaired file is read again;
    its records are then held against the install's checksums, if it has them.
    """

    def __init__(self, layer: PackedLayer, verify: bool = False) -> None:
        self.layer = layer
        self.path: Path = layer.path
        self.verify = verify
        self.size = max(layer.offset(e) for e in range(layer.count)) + layer.stride
        self._fd: int | None = None
        self._stamp = (0, 0, 0)
        self._open(str(self.path))

    def fd(self, expert: int) -> int:
        """The file to read `expert` from, if it is still the one that was opened."""
        if self._fd is None:
            return self._open(self.where(expert))
        info = os.fstat(self._fd)
        if info.st_nlink and (info.st_size, info.st_mtime_ns, info.st_ino) == self._stamp:
            return self._fd
        self.drop()
        what = "changed" if info.st_nlink else "was removed"
        raise ReadError(
            f"{self.where(expert)}: the file {what} while open: expected {self._stamp[0]} bytes as "
            f"they were, found {info.st_size}; put it back or install it again"
        )

    def where(self, expert: int) -> str:
        """What a message says about a record."""
        return f"{self.path}: expert {expert} at offset {self.layer.offset(expert)}"

    def drop(self) -> None:
        """Close the file and trust it no more: the next use opens whatever is there then."""
        self.close()
        self.verify = self.layer.checksums is not None

    def check(self, expert: int, planes: Sequence[np.ndarray]) -> None:
        """Compare a record, if records are being verified, with the install's checksum."""
        if not self.verify or self.layer.checksums is None:
            return
        found, expected = checksum(planes), self.layer.checksums[expert]
        if found != expected:
            raise ReadError(
                f"{self.where(expert)}: expected checksum {expected:08x}, found {found:08x}; "
                "install it again"
            )

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def _open(self, where: str) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(
                f"{where}: expected a file of {self.size} bytes, found none that opens: "
                f"{error.strerror}; put it back or install it again"
            ) from error
        info = os.fstat(fd)
        if info.st_size < self.size:
            os.close(fd)
            raise ReadError(
                f"{where}: the file is truncated: expected {self.size} bytes, found "
                f"{info.st_size}; put it back or install it again"
            )
        self._fd = fd
        self._stamp = (info.st_size, info.st_mtime_ns, info.st_ino)
        return fd


class RecordReader:
    """Reads records of one layer straight into their rooms."""

    def __init__(self, layer: PackedLayer, verify: bool = False) -> None:
        self.file = LayerFile(layer, verify)
        self.parallel = cores() >= MANY_CORES
        self.chunk = CHUNK if self.parallel else layer.stride

    def read(self, wanted: Wanted) -> None:
        """Fill every room; returns when all records have arrived and been checked.

        Raises ReadError, after every task has ended, with the first failure.
        """
        try:
            fd = self.file.fd(wanted[0][0])
            pieces = self._pieces(wanted)
            if self.parallel:
                self._announce(fd, pieces)
                finish([workers().submit(self._read_piece, fd, *piece) for piece in pieces])
            else:
                missing = [rest for piece in pieces if (rest := self._read_cached(fd, piece))]
                if len(missing) > 1:  # one read fills the disk's queue by itself
                    self._announce(fd, missing)
                for piece in missing:
                    self._read_piece(fd, *piece)
            for expert, room in wanted:
                self.file.check(expert, room.planes)
        except ReadError:
            self.file.drop()
            raise

    def start(self, wanted: Wanted) -> list[list[Future[None]]]:
        """Begin reading in the background: the tasks of each record. See `arrived`."""
        fd = self.file.fd(wanted[0][0])
        self._announce(fd, self._pieces(wanted))
        return [
            [workers().submit(self._read_piece, fd, *piece) for piece in self._pieces([one])]
            for one in wanted
        ]

    def arrived(self, wanted: Wanted, tasks: Sequence[Sequence[Future[None]]]) -> list[int]:
        """Wait for what `start` began: indices of the records that are whole and right."""
        settle([task for record in tasks for task in record])
        good = []
        for i, ((expert, room), record) in enumerate(zip(wanted, tasks, strict=True)):
            if any(task.cancelled() for task in record):
                continue
            try:
                finish(record)
                self.file.check(expert, room.planes)
            except ReadError:
                self.file.drop()
                continue
            good.append(i)
        return good

    def close(self) -> None:
        """Drop the file."""
        self.file.close()

    def _announce(self, fd: int, pieces: Sequence[Piece]) -> None:
        """Tell the system what will be read, so that the disk sees all of it at once."""
        if hasattr(os, "posix_fadvise"):
            for _, offset, buffer in pieces:
                os.posix_fadvise(fd, offset, buffer.nbytes, os.POSIX_FADV_WILLNEED)

    def _read_cached(self, fd: int, piece: Piece) -> Piece | None:
        """Read what the page cache holds of a piece, and no more -> the rest, if any.

        Announcing costs a tenth of a read from the page cache, so it is kept for the disk.
        """
        expert, offset, buffer = piece
        try:
            got = os.preadv(fd, [buffer.data], offset, os.RWF_NOWAIT)
        except (AttributeError, OSError):  # no such call or flag here, or nothing is cached
            return piece
        return (expert, offset + got, buffer[got:]) if got < buffer.nbytes else None

    def _pieces(self, wanted: Wanted) -> list[Piece]:
        """What each task reads."""
        pieces = []
        for expert, room in wanted:
            base = self.file.layer.offset(expert)
            for offset, buffer in room.segments:
                for at in range(0, buffer.nbytes, self.chunk):
                    pieces.append((expert, base + offset + at, buffer[at : at + self.chunk]))
        return pieces

    def _read_piece(self, fd: int, expert: int, offset: int, buffer: np.ndarray) -> None:
        read_exactly(fd, buffer, offset, f"{self.file.path}: expert {expert}")


def finish(tasks: Sequence[Future[None]]) -> None:
    """Wait for every task, then raise the first failure."""
    settle(tasks)
    for task in tasks:
        task.result()


def settle(tasks: Sequence[Future[None]]) -> None:
    """Wait until no task writes any more, also when the wait is interrupted (Ctrl-C): the memory
    they fill may be given to others next.
    """
    try:
        # A cancelled task counts as pending until a thread picks it up.
        wait([task for task in tasks if not task.cancelled()])
    except BaseException:
        wait([task for task in tasks if not task.cancel()])
        raise


class DiskMeter:
    """Counts the bytes that really came from a disk, where the system tells (Linux).

    The figure is the whole process's, so it is sampled around reads alone.
    """

    PATH = Path("/proc/self/io")

    def __init__(self, clock: PhaseClock, enabled: bool) -> None:
        self.clock = clock
        self.enabled = enabled
        if enabled:  # measured from here on: a difference from before the first read is a number
            clock.count("expert_io_bytes_physical", 0)

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Count what is fetched inside, also when it fails."""
        if not self.enabled:
            yield
            return
        before = self._now()
        try:
            yield
        finally:
            self.clock.count("expert_io_bytes_physical", self._now() - before)
            self.clock.count("expert_io_samples")

    def _now(self) -> int:
        for line in self.PATH.read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
        raise ReadError(f"{self.PATH} has no read_bytes; open with expert_disk_io=False")
