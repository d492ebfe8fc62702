"""GGUF files: every supported block type keeps its values exactly, hostile headers are refused.

Independent reference: the `gguf` package writes the files and decodes their blocks.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from turbospark.conversion import ggml
from turbospark.conversion.gguf import CompanionOverflow, GGUFSource, read_shards
from turbospark.conversion.gguf_header import GGUFHeader, read_header
from turbospark.conversion.source import LocalFiles
from turbospark.dtypes import Quant
from turbospark.errors import MissingDependencyError, SourceError, UnsupportedError

Type = gguf.GGMLQuantizationType
BLOCK_TYPES = [c.name for c in ggml.CODECS.values() if c.values > 1]
HALVES = {  # byte positions of the fp16 numbers in a block
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "MXFP4": [],
}  # fmt: skip


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes of that type with finite scales, [..., bytes of a row]."""
    rng = np.random.default_rng(seed)
    values, nbytes = gguf.GGML_QUANT_SIZES[Type[name]]
    count = int(np.prod(shape)) // values
    blocks = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        half = rng.standard_normal(count).astype(np.float16)
        blocks[:, at : at + 2] = half.view(np.uint8).reshape(count, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(90, 150, count)
    return blocks.reshape(*shape[:-1], shape[-1] // values * nbytes)


def write(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **metadata: Any) -> Path:
    """A GGUF file by the reference writer; values are (type, data)."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key, *value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def source(path: Path) -> GGUFSource:
    return GGUFSource(LocalFiles(path.parent), path.name, lambda meta, shapes: {}, lambda meta: {})


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_block_type_keeps_its_values_bit_for_bit(tmp_path: Path, name: str) -> None:
    data = random_blocks(name, (7, 512))
    expected = gguf.dequantize(data, Type[name])
    opened = source(write(tmp_path / "m.gguf", {"x": (name, data)}))
    assert opened.tensors["x"].shape == (7, 512) and opened.tensors["x"].stored == name
    planes = opened.read("x")
    assert planes.fmt == opened.tensors["x"].fmt
    np.testing.assert_array_equal(np.array(planes.dense(mx.float32)), expected)
    opened.close()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_experts_and_rows_are_cut_out_of_the_blocks(tmp_path: Path, name: str) -> None:
    data = random_blocks(name, (3, 5, 256))
    expected = gguf.dequantize(data, Type[name])
    opened = source(write(tmp_path / "m.gguf", {"x": (name, data)}))
    got = [
        opened.read("x", expert=2),
        opened.read("x", 1, slice(2, 4)),
        opened.read("x", rows=slice(1, 3)),
    ]
    wanted = [expected[2], expected[1, 2:4], expected[1:3]]
    for planes, values in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.array(planes.dense(mx.float32)), values)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_reference_quantizer_round_trips(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(3).standard_normal((4, 96)).astype(np.float32)
    data = gguf.quantize(values, Type[name])
    got = source(write(tmp_path / "m.gguf", {"x": (name, data)})).read("x")
    np.testing.assert_array_equal(
        np.array(got.dense(mx.float32)), gguf.dequantize(data, Type[name])
    )


def test_tensors_larger_than_one_chunk_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turbospark.conversion.gguf._CHUNK_VALUES", 256)
    for name in ("Q4_1", "Q5_K", "Q6_K", "MXFP4"):
        data = random_blocks(name, (9, 256))
        got = source(write(tmp_path / f"{name}.gguf", {"x": (name, data)})).read("x")
        expected = gguf.dequantize(data, Type[name])
        np.testing.assert_array_equal(np.array(got.dense(mx.float32)), expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_pass_unchanged(tmp_path: Path, name: str) -> None:
    values = np.random.default_rng(3).standard_normal((4, 8)).astype(np.float32)
    data = gguf.quantize(values, Type[name])
    planes = source(write(tmp_path / "m.gguf", {"x": (name, data)})).read("x")
    assert planes.fmt == ggml.CODECS[Type[name]].target
    np.testing.assert_array_equal(
        np.array(planes.dense(mx.float32)), gguf.dequantize(data, Type[name]).reshape(4, 8)
    )


def test_mxfp4_agrees_with_the_reference_at_every_exponent(tmp_path: Path) -> None:
    """The scale byte is 2**(e - 127); 255 is not a number in one reader and 2**128 in another."""
    blocks = random_blocks("MXFP4", (254, 32))
    blocks[:, 0] = np.arange(1, 255)
    planes = source(write(tmp_path / "m.gguf", {"x": ("MXFP4", blocks)})).read("x")
    expected = gguf.dequantize(blocks, Type.MXFP4)
    np.testing.assert_array_equal(np.array(planes.dense(mx.float32)), expected)


WIDE = {"Q4_0": 8200.0, "Q5_0": 4100.0, "Q8_0": 520.0}  # -8d, -16d and -128d pass 65504


@pytest.mark.parametrize("name", WIDE)
def test_scales_too_large_for_half_companions_get_float32(tmp_path: Path, name: str) -> None:
    data = random_blocks(name, (2, 64))
    data[1, :2] = np.frombuffer(np.float16(WIDE[name]).tobytes(), np.uint8)
    opened = source(write(tmp_path / "m.gguf", {"x": (name, data)}))
    with pytest.raises(CompanionOverflow) as overflow:
        opened.read("x")
    opened.widen(overflow.value.name)
    fmt = opened.tensors["x"].fmt
    assert isinstance(fmt, Quant) and fmt.scale_dtype == "float32"
    np.testing.assert_array_equal(
        np.array(opened.read("x").dense(mx.float32)), gguf.dequantize(data, Type[name])
    )


@pytest.mark.parametrize("name", [n for n in BLOCK_TYPES if n != "MXFP4"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, name: str, value: float
) -> None:
    data = random_blocks(name, (2, 256))
    at = HALVES[name][0]
    data[1, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    opened = source(write(tmp_path / "m.gguf", {"weights": (name, data)}))
    with pytest.raises(SourceError, match=f"tensor weights \\({name}\\) holds a scale"):
        opened.read("weights")


def test_an_mxfp4_scale_that_is_not_a_number_is_refused_by_name(tmp_path: Path) -> None:
    data = random_blocks("MXFP4", (2, 64))
    data[1, 17] = 255
    opened = source(write(tmp_path / "m.gguf", {"weights": ("MXFP4", data)}))
    with pytest.raises(SourceError, match=r"tensor weights \(MXFP4\) holds a scale"):
        opened.read("weights")


def test_without_the_gguf_package_only_the_types_it_decodes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(tmp_path / "a.gguf", {"x": ("Q4_1", random_blocks("Q4_1", (2, 64)))})
    k_quant = write(tmp_path / "b.gguf", {"x": ("Q6_K", random_blocks("Q6_K", (2, 256)))})
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    assert source(plain).read("x").shape == (2, 64)
    with pytest.raises(MissingDependencyError, match=r"pip install 'turbospark\[gguf\]'"):
        source(k_quant)


# --- metadata -------------------------------------------------------------------------------------


def test_metadata_arrives_as_plain_python_values(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    written = {
        "u8": (200, kinds.UINT8), "i8": (-5, kinds.INT8), "u16": (60000, kinds.UINT16),
        "i16": (-7, kinds.INT16), "u32": (1 << 31, kinds.UINT32), "i32": (-9, kinds.INT32),
        "u64": (1 << 63, kinds.UINT64), "i64": (-(1 << 40), kinds.INT64),
        "f32": (0.5, kinds.FLOAT32), "f64": (0.1, kinds.FLOAT64), "yes": (True, kinds.BOOL),
        "text": ("grüße", kinds.STRING), "ints": ([1, -2, 3], kinds.ARRAY),
        "floats": ([0.5, 2.0], kinds.ARRAY), "texts": (["a", "", "ü"], kinds.ARRAY),
    }  # fmt: skip
    write(tmp_path / "m.gguf", {}, **written)
    metadata = read_header(LocalFiles(tmp_path), "m.gguf").metadata
    for key, (value, _) in written.items():
        assert metadata[key] == value and type(metadata[key]) is type(value), key


# --- unsupported types (a file that mixes known, unknown and made-up types) -----------------------


def header_bytes(
    tensors: list[tuple[str, int, tuple[int, ...], int]], keys: bytes = b"", key_count: int = 0
) -> bytes:
    """A version 3 header by hand; shapes in GGUF's own order (columns first)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), key_count) + keys
    for name, kind, dims, offset in tensors:
        out += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        out += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    return out


def by_hand(path: Path, *args: Any, data: bytes = b"", **kwargs: Any) -> Path:
    header = header_bytes(*args, **kwargs)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def test_every_tensor_of_an_unknown_type_is_named_before_data_is_read(tmp_path: Path) -> None:
    rows = [
        ("good.mxfp4", 39, (32, 2), 0),
        ("good.q5_k", 13, (256, 1), 64),
        ("bad.made_up", 250, (32, 1), 256),
        ("bad.iq", 22, (256, 1), 288),
        ("bad.f64", 28, (4,), 320),
    ]
    path = by_hand(tmp_path / "m.gguf", rows, data=bytes(384))
    with pytest.raises(UnsupportedError) as error:
        source(path)
    for text in ("3 tensors", "bad.made_up (type 250)", "bad.iq (IQ2_S)", "bad.f64 (F64)"):
        assert text in str(error.value)
    assert "good" not in str(error.value)


def test_the_supported_types_of_that_file_load(tmp_path: Path) -> None:
    rows = [("a", 39, (32, 2), 0), ("b", 13, (256, 1), 64)]
    opened = source(by_hand(tmp_path / "m.gguf", rows, data=bytes(256)))
    assert opened.read("a").shape == (2, 32) and opened.read("b").shape == (1, 256)


def test_type_names_are_those_of_the_reference() -> None:
    for kind in Type:
        assert ggml.type_name(kind.value) == kind.name
    for code, codec in ggml.CODECS.items():
        assert (codec.values, codec.nbytes) == gguf.GGML_QUANT_SIZES[Type(code)]


# --- hostile headers ------------------------------------------------------------------------------


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


F32 = [("x", 0, (4,), 0)]
ARRAY_OF = lambda kind, count: struct.pack("<IQ", kind, count)  # noqa: E731
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "magic number needs 4 bytes at 0, found 0"),
    "other magic": (b"GGML" + bytes(40), "starts with b'GGML'"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(20), "GGUF version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(20), "big-endian version 3"),
    "lying tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), f"{1 << 60} tensors"),
    "lying key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), f"{1 << 60} metadata keys"),
    "giant string": (
        header_bytes([], key("k", 8, struct.pack("<Q", 1 << 50)), 1),
        f"k: string of {1 << 50} bytes",
    ),
    "string past the end": (
        header_bytes([], key("k", 8, struct.pack("<Q", 1000)), 1), "k needs 1000 bytes",
    ),
    "giant array": (
        header_bytes([], key("k", 9, ARRAY_OF(0, 1 << 40)), 1), f"array of {1 << 40} entries",
    ),
    "array past the end": (
        header_bytes([], key("k", 9, ARRAY_OF(10, 1000)), 1), "k needs 8000 bytes",
    ),
    "array of strings past the end": (
        header_bytes([], key("k", 9, ARRAY_OF(8, 1000)), 1), "k needs 8 bytes",
    ),
    "deep arrays": (
        header_bytes([], key("k", 9, ARRAY_OF(9, 1) * 9), 1), "nested 5 deep",
    ),
    "unknown value type": (header_bytes([], key("k", 77, bytes(8)), 1), "unknown value type 77"),
    "key twice": (
        header_bytes([], key("k", 0, b"\1") * 2, 2), "metadata key k appears twice",
    ),
    "odd alignment": (
        header_bytes([], key("general.alignment", 4, struct.pack("<I", 24)), 1),
        "general.alignment = 24; expected a power of two",
    ),
    "alignment is text": (
        header_bytes([], key("general.alignment", 8, struct.pack("<Q", 0)), 1),
        "general.alignment = ''",
    ),
    "tensor twice": (header_bytes([*F32, *F32]) + bytes(64), "two tensors are named x"),
    "no axes": (header_bytes([("x", 0, (), 0)]) + bytes(64), "tensor x: 0 axes"),
    "five axes": (header_bytes([("x", 0, (1,) * 5, 0)]) + bytes(64), "tensor x: 5 axes"),
    "zero size": (header_bytes([("x", 0, (0, 2), 0)]) + bytes(64), "shape [2, 0]"),
    "partial block": (header_bytes([("x", 2, (33,), 0)]) + bytes(64), "a multiple of 32"),
    "crooked offset": (header_bytes([("x", 0, (4,), 5)]) + bytes(64), "offset 5 is not a multiple"),
    "past the end": (header_bytes([("x", 0, (1 << 20,), 0)]) + bytes(64), "truncated: tensor x"),
    "overflowing shape": (header_bytes([("x", 0, (1 << 62,) * 4, 0)]) + bytes(64), "truncated"),
    "far offset": (header_bytes([("x", 0, (4,), 1 << 60)]) + bytes(64), "truncated: tensor x"),
    "overlap": (
        header_bytes([("x", 0, (16,), 0), ("y", 0, (16,), 32)]) + bytes(128), "overlap",
    ),
    "nameless": (header_bytes([("", 0, (4,), 0)]) + bytes(64), "name is not printable"),
    "escape codes": (header_bytes([("\x1b[2J", 0, (4,), 0)]) + bytes(64), "not printable"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_its_reason(tmp_path: Path, case: str) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises((SourceError, UnsupportedError)) as error:
        read_header(LocalFiles(path.parent), path.name)
    assert message in str(error.value)
    assert "m.gguf" in str(error.value) and "\x1b" not in str(error.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Every prefix of a good file ends in SourceError, never in another exception."""
    whole = write(
        tmp_path / "w.gguf",
        {"x": ("F32", np.ones((4, 8), np.float32))},
        n=(["a", "b"], gguf.GGUFValueType.ARRAY),
    ).read_bytes()
    path = tmp_path / "m.gguf"
    for length in range(0, len(whole) - 1, 3):
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError):
            read_header(LocalFiles(path.parent), path.name)


def test_a_file_that_shrinks_after_the_header_was_read_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"x": ("Q4_0", random_blocks("Q4_0", (64, 64)))})
    opened = source(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SourceError, match=r"tensor x: expected .* bytes"):
        opened.read("x")


def shards(path: Path) -> GGUFHeader:
    return read_shards(LocalFiles(path.parent), path.name)


# --- shards ---------------------------------------------------------------------------------------


def split(folder: Path, *groups: list[str], count: int | None = None) -> list[Path]:
    """A split model by the reference writer's naming; each group's tensors in one shard."""
    paths = []
    total = sum(map(len, groups))
    for i, names in enumerate(groups):
        path = folder / f"m-{i + 1:05d}-of-{count or len(groups):05d}.gguf"
        tensors = {n: ("F32", np.full(4, ord(n), np.float32)) for n in names}
        kinds = gguf.GGUFValueType
        keys = {
            "split.count": (len(groups), kinds.UINT16),
            "split.tensors.count": (total, kinds.INT32),
        }
        paths.append(write(path, tensors, **keys))
    return paths


def test_a_split_model_opens_from_any_of_its_shards(tmp_path: Path) -> None:
    for path in split(tmp_path, ["a", "b"], ["c"]):
        opened = source(path)
        assert sorted(opened.tensors) == ["a", "b", "c"]
        for name in "abc":
            assert opened.read(name).weight.tolist() == [ord(name)] * 4


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path, ["a"], ["b"])
    paths[1].unlink()
    with pytest.raises(SourceError, match=r"missing GGUF files: m-00002-of-00002\.gguf"):
        shards(paths[0])


def test_a_tensor_in_two_gguf_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="tensor a is in both m-00001"):
        shards(split(tmp_path, ["a"], ["a"])[0])


def test_shards_that_lack_tensors_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path, ["a"], ["b"])
    write(paths[1], {})
    with pytest.raises(SourceError, match="the shards hold 1 tensors; expected 2"):
        shards(paths[0])


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    path = split(tmp_path, ["a"], ["b"])[0].rename(tmp_path / "model.gguf")
    with pytest.raises(SourceError, match=r"model\.gguf: split.count is 2"):
        shards(path)
