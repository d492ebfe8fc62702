"""Files of rows: what is written comes back, mapped or in memory, and damage is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from turbospark.dtypes import MXFP4, Format, Raw, affine
from turbospark.errors import (
    FileSizeError,
    IndexCorruptError,
    MissingFileError,
    SourceError,
    TensorShapeError,
    UnsupportedError,
)
from turbospark.install.planes import Planes, quantize
from turbospark.install.row_table import RowTable, RowTableWriter, row_bytes

ROWS = 50
FORMATS = [Raw("bfloat16"), Raw("float32"), affine(4, 32), affine(3, 32, "float32"), MXFP4]


def values(columns: int = 160) -> mx.array:
    drawn = np.random.default_rng(0).standard_normal((ROWS, columns)).astype(np.float32)
    return mx.array(drawn).astype(mx.bfloat16)


def planes(fmt: Format, columns: int = 160) -> Planes:
    if isinstance(fmt, Raw):
        dtype = mx.bfloat16 if fmt.dtype == "bfloat16" else mx.float32
        return Planes(fmt, (ROWS, columns), values(columns).astype(dtype))
    return quantize(values(columns), fmt)


def write(path: Path, table: Planes) -> Path:
    writer = RowTableWriter(path, table.fmt, (ROWS, table.shape[1]))
    for at in range(0, ROWS, 16):
        writer.write(table.rows(slice(at, min(at + 16, ROWS))))
    writer.close()
    return path


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_rows_come_back_mapped_and_resident(fmt: Format, tmp_path: Path) -> None:
    whole = planes(fmt)
    table = RowTable.open(write(tmp_path / "t.bin", whole))
    want = np.array(whole.dense(mx.float32))
    ids = np.array([49, 0, 7, 7, 31])
    assert (table.fmt, table.shape) == (fmt, (ROWS, 160))
    assert np.array_equal(np.array(table.planes(ids).dense(mx.float32)), want[ids])
    table.load()
    table.mapped = np.zeros_like(table.mapped)  # the copy in memory is what is read now
    assert np.array_equal(np.array(table.planes(ids).dense(mx.float32)), want[ids])


def test_a_published_row_of_four_bits_takes_100_bytes() -> None:
    assert row_bytes(affine(4, 32), 160) == 100
    assert row_bytes(Raw("bfloat16"), 5) == 12


def patched(path: Path, at: int, layout: str, value: int) -> Path:
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, at, value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("at", "layout", "value", "error", "words"),
    [
        (0, "<Q", 0, IndexCorruptError, "not a row table"),
        (8, "<I", 2, IndexCorruptError, "not a row table of version 1"),
        (12, "<I", 9999, UnsupportedError, "format tag 9999"),
        (16, "<Q", 0, IndexCorruptError, "0 rows"),
        (16, "<Q", 1 << 40, IndexCorruptError, "out of range"),
        (16, "<Q", 1000, FileSizeError, "truncated: expected"),
        (24, "<Q", 1 << 40, IndexCorruptError, "out of range"),
        (24, "<Q", 159, UnsupportedError, "159 columns"),
        (24, "<Q", 320, IndexCorruptError, "rows of 100 bytes; 320 columns"),
        (32, "<Q", 104, IndexCorruptError, "rows of 104 bytes"),
    ],
)
def test_a_damaged_header_is_refused(
    tmp_path: Path, at: int, layout: str, value: int, error: type[Exception], words: str
) -> None:
    path = write(tmp_path / "t.bin", planes(affine(4, 32)))
    with pytest.raises(error, match=words):
        RowTable.open(patched(path, at, layout, value))


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", planes(affine(4, 32)))
    data = path.read_bytes()
    for size, words in ((100, "truncated"), (len(data) - 1, "truncated"), (len(data), None)):
        path.write_bytes(data[:size])
        if words:
            with pytest.raises(FileSizeError, match=words):
                RowTable.open(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(FileSizeError, match="too long"):
        RowTable.open(path)
    with pytest.raises(MissingFileError):
        RowTable.open(tmp_path / "none.bin")


def test_a_writer_wants_what_was_declared(tmp_path: Path) -> None:
    whole = planes(affine(4, 32))
    writer = RowTableWriter(tmp_path / "t.bin", affine(4, 32), (ROWS, 160))
    with pytest.raises(TensorShapeError, match="declared"):
        writer.write(planes(affine(8, 32)))
    writer.write(whole.rows(slice(0, 40)))
    with pytest.raises(TensorShapeError, match=r"rows 40\+50"):
        writer.write(whole)
    with pytest.raises(SourceError, match="40 of 50 rows written"):
        writer.close()
