"""model_weights.bin: hostile indices built with struct, and round trips through the writer."""

from __future__ import annotations

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from handmade import PAGE, Int4, weight_file

from turbospark.dtypes import BLOCK_TAGS, FORMATS, MXFP4, MXFP8, NVFP4, Raw, affine
from turbospark.errors import (
    FileSizeError,
    IndexCorruptError,
    MissingFileError,
    SourceError,
    TensorShapeError,
    TurbosparkError,
    UnsupportedError,
)
from turbospark.install.planes import Planes, host_view, quantize
from turbospark.install.resident import ResidentIndex, ResidentWriter

# byte position inside an entry of the index -> struct code, as documented
FIELD = {
    "name_offset": (0, "<I"), "name_len": (4, "<H"), "dtype": (6, "<B"),
    "offset": (8, "<Q"), "size": (16, "<Q"), "shape0": (24, "<I"), "shape1": (28, "<I"),
    "shape2": (32, "<I"), "shape3": (36, "<I"), "scale_offset": (40, "<Q"),
    "scale_size": (48, "<Q"), "bias_offset": (56, "<Q"), "bias_size": (64, "<Q"),
}  # fmt: skip
HEADER = {"index_size": (0, "<Q"), "resident_size": (8, "<Q"), "entry_count": (16, "<Q")}


def good() -> bytearray:
    """Entry 0: int4 [4, 64]; entry 1: bf16 [8]; entry 2: fp32 [2, 3]."""
    matrix = Int4(4, 64, np.random.default_rng(1))
    return bytearray(
        weight_file(
            [
                ("q", 4, (4, 64), matrix.planes()),
                ("n", 1, (8,), [bytes(16)]),
                ("f", 3, (2, 3), [bytes(24)]),
            ]
        )
    )


def put(data: bytearray, entry: int | None, field: str, value: int) -> bytearray:
    at, code = HEADER[field] if entry is None else FIELD[field]
    struct.pack_into(code, data, at + (0 if entry is None else 24 + 72 * entry), value)
    return data


def refuse(tmp_path: Path, data: bytes, error: type[TurbosparkError], text: str) -> None:
    path = tmp_path / "model_weights.bin"
    path.write_bytes(data)
    with pytest.raises(error, match=text) as caught:
        ResidentIndex.open(path)
    assert caught.type is error
    assert "model_weights.bin" in str(caught.value)


def test_the_handmade_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model_weights.bin"
    path.write_bytes(good())
    index = ResidentIndex.open(path)
    assert index.names == ("q", "n", "f")
    assert index.entry("f").fmt == Raw("float32") and index.entry("f").shape == (2, 3)
    assert index.resident_size == len(good()) - PAGE


@pytest.mark.parametrize(
    ("entry", "field", "value", "error", "text"),
    [
        (None, "index_size", 23, IndexCorruptError, "index_size 23"),
        (None, "index_size", 2**64 - 1, IndexCorruptError, "index_size"),
        (None, "index_size", 200, FileSizeError, "too long"),
        (None, "resident_size", 2**64 - 1, FileSizeError, "truncated: expected"),
        (None, "resident_size", 10**6, FileSizeError, r"expected 1016384 bytes, found 16568"),
        (None, "entry_count", 2**64 - 1, IndexCorruptError, "entries need"),
        (None, "entry_count", 2**61, IndexCorruptError, "entries need"),  # 72 * 2**61 wraps to 0
        (None, "entry_count", 228, IndexCorruptError, "228 entries need 16440 bytes"),
        (0, "name_offset", 0, IndexCorruptError, "entry 0: name at 0"),
        (0, "name_offset", PAGE, IndexCorruptError, "outside the names"),
        (0, "name_offset", 2**32 - 1, IndexCorruptError, "outside the names"),
        (0, "name_len", 65535, IndexCorruptError, "outside the names"),
        (0, "name_len", 0, IndexCorruptError, "not printable"),
        (0, "name_len", 4, IndexCorruptError, "not printable"),
        (0, "dtype", 0, IndexCorruptError, "q has unknown dtype tag 0"),
        (0, "dtype", 255, IndexCorruptError, "tag 255"),
        (0, "dtype", 5, TensorShapeError, "8-bit"),
        (1, "dtype", 3, TensorShapeError, r"n \[8\] as float32"),
        (0, "size", 127, TensorShapeError, r"needs weight/scale/bias bytes \(128, 8, 8\)"),
        (0, "scale_size", 4, TensorShapeError, "bytes"),
        (0, "bias_size", 0, TensorShapeError, "bytes"),
        (1, "scale_size", 8, TensorShapeError, "bytes"),
        (0, "shape0", 0, TensorShapeError, "impossible shape"),
        (0, "shape0", 2**31, TensorShapeError, "impossible shape"),
        (0, "shape1", 65, UnsupportedError, "q: 65 columns"),
        (0, "shape2", 1, TensorShapeError, "rank 3"),
        (1, "shape0", 9, TensorShapeError, r"n \[9\]"),
        (1, "shape3", 1, TensorShapeError, "impossible shape"),
        (0, "offset", 0, IndexCorruptError, "q at 0.128 is outside"),
        (0, "offset", 2**64 - 64, IndexCorruptError, "outside the resident region"),
        (0, "scale_offset", PAGE - 4, IndexCorruptError, "outside"),
        (0, "bias_offset", 2**63, IndexCorruptError, "outside"),
        (2, "offset", 16568 - 8, IndexCorruptError, "f at .* is outside"),
        (1, "offset", PAGE + 128, IndexCorruptError, "overlap"),
    ],
)
def test_a_wrong_field_of_the_index_is_refused(
    tmp_path: Path, entry, field, value, error, text
) -> None:
    refuse(tmp_path, put(good(), entry, field, value), error, text)


def test_sizes_that_only_agree_modulo_two_to_the_64_are_refused(tmp_path: Path) -> None:
    """offset + size wraps to a place inside the region in 64-bit arithmetic; not in ours."""
    data = put(put(good(), 1, "offset", 2**64 - 8), 1, "size", 16)
    refuse(tmp_path, data, IndexCorruptError, "n at .* outside")
    data = put(put(good(), None, "index_size", PAGE), None, "resident_size", 2**64 - PAGE + 8)
    refuse(tmp_path, data, FileSizeError, "truncated")


def test_huge_shapes_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    data = put(put(good(), 2, "shape0", 2**31 - 1), 2, "shape1", 2**31 - 1)
    refuse(tmp_path, data, TensorShapeError, "f ")


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    data = good()
    at = struct.unpack_from("<I", data, 24)[0]
    refuse(tmp_path, put(data, 1, "name_offset", at), IndexCorruptError, "two tensors are named q")


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    data = good()
    data[struct.unpack_from("<I", data, 24)[0]] = 0xFF
    refuse(tmp_path, data, IndexCorruptError, "not UTF-8")


@pytest.mark.parametrize("tag", BLOCK_TAGS)
def test_block_tags_are_refused_by_tensor_name_and_tag(tmp_path: Path, tag: int) -> None:
    refuse(
        tmp_path,
        put(good(), 0, "dtype", tag),
        UnsupportedError,
        rf"q .*{BLOCK_TAGS[tag]} \(tag {tag}\)",
    )


@pytest.mark.parametrize("length", [0, 1, 23])
def test_a_file_shorter_than_the_header_is_refused(tmp_path: Path, length: int) -> None:
    refuse(tmp_path, good()[:length], FileSizeError, f"at least 24 bytes, found {length}")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        ResidentIndex.open(tmp_path / "none")


def test_a_file_cut_or_grown_after_writing_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, good()[:-1], FileSizeError, "truncated: expected 16568 bytes, found 16567")
    refuse(tmp_path, good() + bytes(3 * PAGE), FileSizeError, "too long: expected 16568 bytes")


# --- the writer -----------------------------------------------------------------------------------


def raw(values: mx.array, dtype: str) -> Planes:
    array = values.astype(getattr(mx, dtype))
    mx.eval(array)
    return Planes(Raw(dtype), tuple(values.shape), array)


def samples() -> dict[str, Planes]:
    mx.random.seed(3)
    matrix = mx.random.normal((6, 384))
    found = {
        "vector": raw(mx.random.normal((5,)), "bfloat16"),
        "conv": raw(mx.random.normal((3, 2, 5, 7)), "float16"),
        "odd": raw(mx.random.normal((1, 3)), "bfloat16"),
        "float": raw(mx.random.normal((4, 4)), "float32"),
        "mxfp4": quantize(matrix, MXFP4),
        "mxfp8": quantize(matrix, MXFP8),
        "nvfp4": quantize(matrix, NVFP4),
    }
    for fmt in set(FORMATS.values()):
        if str(fmt).startswith("affine") and fmt.scale_dtype != "float32":
            found[f"a {fmt}"] = quantize(matrix, fmt)
    return found


def test_every_format_round_trips_bit_for_bit_in_any_order_of_writing(tmp_path: Path) -> None:
    tensors = samples()
    writer = ResidentWriter(tmp_path / "w.bin")
    for name, planes in tensors.items():
        writer.add(name, planes.fmt, planes.shape)
    for name in reversed(list(tensors)):
        writer.write(name, tensors[name])
    writer.close()
    assert (tmp_path / "w.bin").stat().st_size % PAGE == 0
    index = ResidentIndex.open(tmp_path / "w.bin")
    assert index.names == tuple(tensors)
    assert index.index_size % PAGE == 0 and index.resident_size % PAGE == 0
    for name, planes in tensors.items():
        found = index.read(name)
        assert (found.fmt, found.shape) == (planes.fmt, planes.shape)
        assert index.entry(name).offset % 4 == 0
        for a, b in zip(found.arrays(), planes.arrays(), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert bytes(host_view(a)) == bytes(host_view(b))


def test_the_written_bytes_follow_the_documented_layout(tmp_path: Path) -> None:
    """Read back with struct alone."""
    rng = np.random.default_rng(5)
    matrix = Int4(4, 128, rng)
    planes = Planes(
        affine(4, 64),
        (4, 128),
        mx.array(np.frombuffer(matrix.packed(), "<u4").reshape(4, 16)),
        mx.array(matrix.scales).view(mx.bfloat16),
        mx.array(matrix.biases).view(mx.bfloat16),
    )
    writer = ResidentWriter(tmp_path / "w.bin")
    writer.add("odd", Raw("bfloat16"), (3,))
    writer.add("model.q", affine(4, 64), (4, 128))
    writer.write("model.q", planes)
    writer.write("odd", raw(mx.ones((3,)), "bfloat16"))
    writer.close()
    data = (tmp_path / "w.bin").read_bytes()
    index_size, resident_size, count = struct.unpack_from("<QQQ", data)
    assert (index_size, count) == (PAGE, 2) and index_size + resident_size == len(data)
    entry = struct.unpack_from("<IHBBQQ4IQQQQ", data, 24 + 72)
    name_at, name_len, tag, reserved, offset, size, *rest = entry
    assert data[name_at : name_at + name_len] == b"model.q" and (tag, reserved) == (4, 0)
    assert rest == [4, 128, 0, 0, offset + 256, 16, offset + 272, 16] and size == 256
    assert offset == PAGE + 8  # 6 bytes of "odd", rounded up to 4
    assert data[offset : offset + 288] == b"".join(matrix.planes())
    assert not any(data[offset + 288 :])
    assert struct.unpack_from("<IHBBQQ4IQQQQ", data, 24)[6:] == (3, 0, 0, 0, 0, 0, 0, 0)


def test_an_unfinished_or_contradictory_file_is_refused_by_name(tmp_path: Path) -> None:
    writer = ResidentWriter(tmp_path / "w.bin")
    writer.add("a", Raw("float32"), (2,))
    writer.add("b", Raw("float32"), (2,))
    with pytest.raises(SourceError, match="a is declared twice"):
        writer.add("a", Raw("float32"), (2,))
    with pytest.raises(SourceError, match="c was not declared"):
        writer.write("c", raw(mx.ones((2,)), "float32"))
    with pytest.raises(TensorShapeError, match=r"declared as float32 \[2\]; got float32 \[3\]"):
        writer.write("a", raw(mx.ones((3,)), "float32"))
    with pytest.raises(TensorShapeError, match="got float16"):
        writer.write("a", raw(mx.ones((2,)), "float16"))
    with pytest.raises(TensorShapeError, match="planes"):
        writer.write("a", Planes(Raw("float32"), (2,), mx.ones((3,))))
    writer.write("a", raw(mx.ones((2,)), "float32"))
    with pytest.raises(SourceError, match="a is written twice"):
        writer.write("a", raw(mx.ones((2,)), "float32"))
    with pytest.raises(SourceError, match="d was declared after"):
        writer.add("d", Raw("float32"), (2,))
    with pytest.raises(SourceError, match=r"1 resident tensors were declared and not written.* b"):
        writer.close()
    with pytest.raises(SourceError, match="after it was closed"):
        writer.write("b", raw(mx.ones((2,)), "float32"))


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        (affine(4, 64), (2, 4, 64)),
        (affine(4, 64), (4, 65)),
        (Raw("bfloat16"), (1, 1, 1, 1, 1)),
        (Raw("bfloat16"), ()),
        (Raw("bfloat16"), (0, 4)),
        (Raw("uint8"), (4,)),
    ],
)
def test_shapes_and_formats_the_file_cannot_hold_are_refused_by_name(
    tmp_path: Path, fmt, shape
) -> None:
    with pytest.raises(UnsupportedError, match="resident tensor t"):
        ResidentWriter(tmp_path / "w.bin").add("t", fmt, shape)


def test_a_strided_view_is_stored_row_major(tmp_path: Path) -> None:
    base = mx.arange(12, dtype=mx.float32).reshape(3, 4)
    writer = ResidentWriter(tmp_path / "w.bin")
    writer.add("t", Raw("float32"), (4, 3))
    writer.write("t", Planes(Raw("float32"), (4, 3), base.T))
    writer.close()
    found = ResidentIndex.open(tmp_path / "w.bin").read("t").weight
    np.testing.assert_array_equal(np.array(found), np.arange(12).reshape(3, 4).T)


def test_a_weight_file_without_tensors_is_legal(tmp_path: Path) -> None:
    ResidentWriter(tmp_path / "w.bin").close()
    assert len(ResidentIndex.open(tmp_path / "w.bin")) == 0
