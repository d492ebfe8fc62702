"""What the system is told before a read, on few cores: nothing about what memory holds already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import Store, request, uniform, write_layout

from turbospark.experts import reader


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing can be announced here")
def test_only_what_the_page_cache_lacks_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = write_layout(tmp_path, uniform(1), 8)
    ask = request(np.random.default_rng(0), 1, range(4), 4)
    expected = Store(layout, "resident").ask(0, *ask)
    announced: list[int] = []
    held = [0]
    """Bytes of each record that memory holds, as this test pretends."""
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if flags and not held[0]:
            raise BlockingIOError
        part = memoryview(buffers[0])
        return real(fd, [part[: held[0]] if flags else part], offset)

    monkeypatch.setattr(reader, "cores", lambda: 1)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, how: announced.append(size))
    stride = layout.layers[0].stride
    for held[0], sizes in ((0, [stride] * 4), (100, [stride - 100] * 4), (stride, [])):
        announced.clear()
        assert np.array_equal(Store(layout, slots=4).ask(0, *ask), expected)
        assert announced == sizes
