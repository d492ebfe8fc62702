"""What the system is told before a read, on few cores: nothing about what memory holds already."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import Store, request, uniform, write_layout

from turbospark.experts import reader


def test_only_what_the_page_cache_lacks_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(reader, "cores", lambda: 1)
    layout = write_layout(tmp_path, uniform(1), 8)
    layer = layout.layers[0]
    ask = request(np.random.default_rng(0), 1, range(4), 4)
    announced: list[int] = []
    real: Any = os.posix_fadvise

    def advise(fd: int, offset: int, size: int, advice: int) -> None:
        announced.append(offset)
        real(fd, offset, size, advice)

    with layer.path.open("rb") as file:
        file.read()
        try:
            os.preadv(file.fileno(), [bytearray(64)], 0, os.RWF_NOWAIT)
        except (AttributeError, OSError):
            pytest.skip("this system does not tell what it holds in memory")
    cold(layer.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", advise)
        first = Store(layout, slots=4).ask(0, *ask)
        assert len(announced) == 4
        layer.path.read_bytes()
        announced.clear()
        assert np.array_equal(Store(layout, slots=4).ask(0, *ask), first)
        assert announced == []
