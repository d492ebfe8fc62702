"""Files pushed out of the page cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def cold() -> Callable[[Path], None]:
    """Push a file out of the page cache; skips where that, or measuring it, cannot be done."""

    def drop(path: Path) -> None:
        if not hasattr(os, "posix_fadvise") or not Path("/proc/self/io").exists():
            pytest.skip("needs posix_fadvise and /proc/self/io")
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        before = _disk_bytes()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(fd, 4096, 0)
        if _disk_bytes() == before:
            os.close(fd)
            pytest.skip("this file system keeps files in memory")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    return drop


def _disk_bytes() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("read_bytes:")[1].split()[0])
