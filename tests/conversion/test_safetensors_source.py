"""The safetensors container: what the reference library writes is read, what is damaged is named.

Independent reference: the `safetensors` package and numpy.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from turbospark.conversion.safetensors import (
    INDEX,
    SafetensorsSource,
    read_config,
    read_entries,
    read_header,
)
from turbospark.conversion.source import LocalFiles
from turbospark.dtypes import MXFP4, Quant, Raw
from turbospark.errors import SourceError, UnsupportedError

RNG = np.random.default_rng(7)


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    """A safetensors file with any header, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def folder(path: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file(tensors, path / "model.safetensors")
    return path


def source(path: Path) -> SafetensorsSource:
    return SafetensorsSource(LocalFiles(path), read_config(LocalFiles(path)))


# --- good files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_tensor_reads_as_the_reference_library_wrote_it(tmp_path: Path, dtype: str) -> None:
    values = RNG.standard_normal((5, 6, 8)).astype(dtype)
    opened = source(folder(tmp_path, {"a": np.zeros(3, dtype), "x": values, "z": values[0]}))
    assert opened.tensors["x"].fmt == Raw(dtype)
    assert opened.kind == "huggingface"
    np.testing.assert_array_equal(np.array(opened.read("x").weight), values)
    np.testing.assert_array_equal(np.array(opened.read("x", expert=3).weight), values[3])
    np.testing.assert_array_equal(np.array(opened.read("x", 2, slice(1, 4)).weight), values[2, 1:4])
    np.testing.assert_array_equal(
        np.array(opened.read("z", rows=slice(2, 9)).weight), values[0, 2:]
    )
    opened.close()


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    bits = RNG.integers(0, 1 << 16, (4, 6), dtype=np.uint16)
    (tmp_path / "config.json").write_text("{}")
    header = {"x": tensor("BF16", [4, 6], 0, bits.nbytes)}
    write_raw(tmp_path / "model.safetensors", header, bits.tobytes())
    read = source(tmp_path).read("x").weight
    assert read.dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(read.view(mx.uint16)), bits)


def test_scalars_and_empty_tensors_are_legal(tmp_path: Path) -> None:
    opened = source(
        folder(tmp_path, {"s": np.array(2.5, np.float32), "e": np.zeros((0, 4), np.float32)})
    )
    assert opened.tensors["s"].shape == ()
    assert opened.read("s").weight.item() == 2.5
    assert opened.tensors["e"].shape == (0, 4)


def test_types_without_a_format_are_listed_but_not_read(tmp_path: Path) -> None:
    opened = source(folder(tmp_path, {"i": np.zeros(2, np.int64), "d": np.zeros(2)}))
    assert opened.tensors["i"].fmt is None and opened.tensors["i"].stored == "I64"
    with pytest.raises(SourceError, match=r"tensor d: dtype F64 cannot be converted"):
        opened.read("d")


# --- hostile headers ------------------------------------------------------------------------------

BAD_HEADERS = {
    "too short": (b"\0\0\0", "3 bytes; expected at least 8"),
    "header past the end": (struct.pack("<Q", 99) + b"{}", "header of 99 bytes in a file of 10"),
    "huge header": (struct.pack("<Q", 1 << 62) + b"{}", f"header of {1 << 62} bytes"),
    "not JSON": (struct.pack("<Q", 2) + b"{x", "header: not acceptable JSON"),
    "not UTF-8": (struct.pack("<Q", 4) + b'{"\xff"', "header: not acceptable JSON"),
    "a list": (struct.pack("<Q", 2) + b"[]", "expected a JSON object"),
    "deep": (struct.pack("<Q", 200000) + b"[" * 200000, "nested too deeply"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_broken_header_is_refused(tmp_path: Path, case: str) -> None:
    data, message = BAD_HEADERS[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"m\.safetensors") as error:
        read_header(LocalFiles(path.parent), path.name)
    assert message in str(error.value)


BAD_ENTRIES = {
    "unknown dtype": (tensor("Q9", [1], 0, 4), "tensor x: unknown dtype 'Q9'"),
    "dtype is a number": (tensor(5, [1], 0, 4), "unknown dtype 5"),  # type: ignore[arg-type]
    "negative size": (tensor("F32", [-1], 0, 4), "shape is not a list"),
    "boolean size": (tensor("F32", [True], 0, 4), "shape is not a list"),
    "fractional size": (tensor("F32", [1.0], 0, 4), "shape is not a list"),  # type: ignore[list-item]
    "many axes": (tensor("F32", [1] * 9, 0, 4), "at most 8"),
    "size against shape": (tensor("F32", [2], 0, 4), "4 bytes; F32 of shape [2] needs 8"),
    "overflowing shape": (tensor("F32", [1 << 62, 1 << 62], 0, 4), "4 bytes; F32 of shape"),
    "falling offsets": (tensor("F32", [1], 4, 0), "not a pair of rising offsets"),
    "one offset": ({"dtype": "F32", "shape": [1], "data_offsets": [4]}, "not a pair"),
    "no offsets": ({"dtype": "F32", "shape": [1]}, "expected dtype, shape and data_offsets"),
    "not an object": (7, "expected dtype, shape and data_offsets"),
    "past the end": (tensor("F32", [2], 0, 8), "truncated: expected"),
    "trailing bytes": (tensor("F32", [0], 0, 0), "trailing bytes: expected"),
    "gap": (tensor("F16", [1], 2, 4), "leaves a gap after the header"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_a_lying_entry_is_refused_by_name(tmp_path: Path, case: str) -> None:
    entry, message = BAD_ENTRIES[case]
    path = write_raw(tmp_path / "m.safetensors", {"x": entry}, bytes(4))
    with pytest.raises(SourceError) as error:
        read_header(LocalFiles(path.parent), path.name)
    assert message in str(error.value)
    assert "x" in str(error.value)


def test_truncation_and_trailing_bytes_name_both_sizes(tmp_path: Path) -> None:
    path = folder(tmp_path, {"x": np.zeros(10, np.float32)}) / "model.safetensors"
    whole = path.read_bytes()
    for data in (whole[:-3], whole + b"xy"):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=f"expected {len(whole)} bytes, found {len(data)}"):
            read_header(LocalFiles(path.parent), path.name)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {"x": tensor("F32", [2], 0, 8), "y": tensor("F32", [2], 4, 12)}
    path = write_raw(tmp_path / "m.safetensors", header, bytes(12))
    with pytest.raises(SourceError, match=r"tensor y at byte .* overlaps tensor x"):
        read_header(LocalFiles(path.parent), path.name)


def test_a_name_that_appears_twice_is_refused(tmp_path: Path) -> None:
    entry = json.dumps(tensor("F32", [1], 0, 4)).encode()
    path = write_raw(
        tmp_path / "m.safetensors", b'{"x":' + entry + b',"x":' + entry + b"}", bytes(4)
    )
    with pytest.raises(SourceError, match="duplicate key 'x'"):
        read_header(LocalFiles(path.parent), path.name)


def test_a_file_that_shrinks_after_the_header_was_read_is_reported(tmp_path: Path) -> None:
    opened = source(folder(tmp_path, {"x": np.zeros(1000, np.float32)}))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"tensor x: expected 4000 bytes .* found 3900"):
        opened.read("x")


# --- shards ---------------------------------------------------------------------------------------


def shards(path: Path, weight_map: Any, **files: dict[str, np.ndarray]) -> Path:
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


ONE = np.ones(4, np.float32)


def test_tensors_are_found_over_all_shards(tmp_path: Path) -> None:
    names = {"x": "a.safetensors", "y": "b.safetensors"}
    entries = read_entries(LocalFiles(shards(tmp_path, names, a={"x": ONE}, b={"y": ONE})))
    assert {name: e.file.name for name, e in entries.items()} == names


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    names = {"x": "a.safetensors", "y": "b.safetensors"}
    with pytest.raises(SourceError, match=r"missing shards: b\.safetensors"):
        read_entries(LocalFiles(shards(tmp_path, names, a={"x": ONE})))


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    names = {"x": "a.safetensors", "y": "a.safetensors"}
    with pytest.raises(SourceError, match=r"tensor y is not in a\.safetensors"):
        read_entries(LocalFiles(shards(tmp_path, names, a={"x": ONE})))


def test_a_tensor_in_another_shard_than_the_index_says_is_named(tmp_path: Path) -> None:
    names = {"x": "b.safetensors", "y": "b.safetensors", "z": "a.safetensors"}
    with pytest.raises(SourceError, match=r"tensor x is not in b\.safetensors"):
        read_entries(LocalFiles(shards(tmp_path, names, a={"x": ONE, "z": ONE}, b={"y": ONE})))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    names = {"x": "a.safetensors", "y": "b.safetensors"}
    with pytest.raises(SourceError, match=r"tensor x is in both a\.safetensors and b\.safetensors"):
        read_entries(LocalFiles(shards(tmp_path, names, a={"x": ONE}, b={"x": ONE, "y": ONE})))


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "a.bin", ""])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, shard: str) -> None:
    with pytest.raises(SourceError, match="is not the name of a safetensors file"):
        read_entries(LocalFiles(shards(tmp_path, {"x": shard}, a={"x": ONE})))


@pytest.mark.parametrize("weight_map", [None, [], {"x": 3}, "a.safetensors"])
def test_a_malformed_index_is_refused(tmp_path: Path, weight_map: Any) -> None:
    with pytest.raises(SourceError, match="weight_map is not an object of file names"):
        read_entries(LocalFiles(shards(tmp_path, weight_map, a={"x": ONE})))


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: ONE}, tmp_path / f"{name}.safetensors")
    with pytest.raises(SourceError, match=f"a.safetensors, b.safetensors.*without {INDEX}"):
        read_entries(LocalFiles(tmp_path))


def test_a_pytorch_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"only PyTorch weights \(pytorch_model\.bin\)"):
        read_entries(LocalFiles(tmp_path))


# --- MLX quantization -----------------------------------------------------------------------------


def packed(
    shape: tuple[int, ...], mode: str = "affine", **geometry: int
) -> tuple[mx.array, dict[str, mx.array]]:
    """Dense values and the MLX tensors of one quantized module, by MLX's own quantizer."""
    values = mx.random.normal(shape)
    parts = mx.quantize(
        values.astype(mx.bfloat16) if mode == "affine" else values, mode=mode, **geometry
    )
    dense = mx.dequantize(*parts, mode=mode, **geometry)
    return dense, dict(zip(("weight", "scales", "biases"), parts, strict=False))


def mlx_folder(path: Path, modules: dict[str, dict[str, mx.array]], quantization: Any) -> Path:
    tensors = {f"{m}.{k}": a for m, parts in modules.items() for k, a in parts.items()}
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    config = {"model_type": "llama", "quantization": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path


GEOMETRIES = [(b, g) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]


@pytest.mark.parametrize(("bits", "group_size"), GEOMETRIES)
def test_affine_tensors_of_every_geometry_pass_unchanged(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    geometry = {"bits": bits, "group_size": group_size}
    _, parts = packed((3, 8, 256), **geometry)
    opened = source(mlx_folder(tmp_path, {"m": parts}, geometry))
    assert opened.kind == "mlx"
    assert list(opened.tensors) == ["m.weight"]
    assert opened.tensors["m.weight"].shape == (3, 8, 256)
    planes = opened.read("m.weight", expert=1, rows=slice(2, 7))
    assert planes.fmt == Quant("affine", bits, group_size, "bfloat16")
    for name, plane in zip(("weight", "scales", "biases"), planes.arrays(), strict=True):
        assert mx.array_equal(plane, parts[name][1, 2:7]), name


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_float_modes_pass_unchanged(tmp_path: Path, mode: str) -> None:
    dense, parts = packed((8, 64), mode)
    group = 16 if mode == "nvfp4" else 32
    bits = 8 if mode == "mxfp8" else 4
    quantization = {"bits": bits, "group_size": group, "mode": mode}
    opened = source(mlx_folder(tmp_path, {"m": parts}, quantization))
    assert mx.array_equal(opened.read("m.weight").dense(mx.float32), dense.astype(mx.float32))


def test_exceptions_by_path_override_the_default(tmp_path: Path) -> None:
    _, four = packed((8, 128), bits=4, group_size=64)
    _, eight = packed((8, 128), bits=8, group_size=32)
    plain = {"weight": mx.ones((8, 128))}
    quantization = {
        "bits": 4, "group_size": 64, "b": {"bits": 8, "group_size": 32}, "c": False,
    }  # fmt: skip
    opened = source(mlx_folder(tmp_path, {"a": four, "b": eight, "c": plain}, quantization))
    assert str(opened.tensors["a.weight"].fmt) == "affine 4-bit group 64 bfloat16"
    assert str(opened.tensors["b.weight"].fmt) == "affine 8-bit group 32 bfloat16"
    assert opened.tensors["c.weight"].fmt == Raw("float32")


def test_an_exception_without_mode_is_affine_whatever_the_default(tmp_path: Path) -> None:
    _, router = packed((8, 128), bits=8, group_size=64)
    quantization = {
        "bits": 4,
        "group_size": 32,
        "mode": "mxfp4",
        "r": {"bits": 8, "group_size": 64},
    }
    opened = source(mlx_folder(tmp_path, {"r": router}, quantization))
    assert str(opened.tensors["r.weight"].fmt) == "affine 8-bit group 64 bfloat16"


def test_companions_may_live_in_another_shard(tmp_path: Path) -> None:
    _, parts = packed((8, 64), bits=4, group_size=64)
    names = {}
    for key, array in parts.items():
        mx.save_safetensors(str(tmp_path / f"{key}.safetensors"), {f"m.{key}": array})
        names[f"m.{key}"] = f"{key}.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    config = {"quantization": {"bits": 4, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    planes = source(tmp_path).read("m.weight")
    assert all(mx.array_equal(a, b) for a, b in zip(planes.arrays(), parts.values(), strict=True))


def _without(parts: dict[str, mx.array], *names: str) -> dict[str, mx.array]:
    return {k: v for k, v in parts.items() if k not in names}


FOUR = {"bits": 4, "group_size": 64}
BAD_QUANT: dict[str, tuple[Any, Any, str]] = {
    "no section": (None, lambda p: p, "config.json says: no quantization section"),
    "said plain": ({"bits": 4, "group_size": 64, "m": False}, lambda p: p, "it is not quantized"),
    "no scales": (FOUR, lambda p: _without(p, "scales"), "m.scales is missing"),
    "no biases": (FOUR, lambda p: _without(p, "biases"), "m.biases is missing"),
    "wrong bits": ({"bits": 8, "group_size": 64}, lambda p: p, "do not fit affine 8-bit"),
    "wrong group": ({"bits": 4, "group_size": 32}, lambda p: p, "do not fit affine 4-bit group 32"),
    "odd bits": ({"bits": 7, "group_size": 64}, lambda p: p, "not executable"),
    "odd group": ({"bits": 4, "group_size": 48}, lambda p: p, "not executable"),
    "text bits": ({"bits": "4", "group_size": 64}, lambda p: p, "expected integers"),
    "unknown mode": ({"bits": 4, "group_size": 64, "mode": "q4"}, lambda p: p, "mode 'q4' is not"),
    "biases with mxfp4": (
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        lambda p: {**p, "scales": mx.zeros((8, 4), mx.uint8)},
        "which has no biases",
    ),
    "mxfp4 scales of floats": (
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        lambda p: _without(p, "biases"),
        "has dtype BF16; mxfp4 needs uint8",
    ),
    "companions of another height": (
        FOUR,
        lambda p: {k: a if k == "weight" else a[:4] for k, a in p.items()},
        "weight [8, 16] words and scales [4, 2] do not fit",
    ),
    "biases of another shape": (
        {"bits": 4, "group_size": 64},
        lambda p: {**p, "biases": p["biases"][:4]},
        "biases BF16 [4, 2] differ from scales BF16 [8, 2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_QUANT)
def test_planes_that_contradict_the_configuration_are_refused(tmp_path: Path, case: str) -> None:
    quantization, change, message = BAD_QUANT[case]
    _, parts = packed((8, 128), bits=4, group_size=64)
    path = mlx_folder(tmp_path, {"m": change(parts)}, quantization)
    with pytest.raises((SourceError, UnsupportedError)) as error:
        source(path)
    assert message in str(error.value)
    assert " m" in str(error.value)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_other_quantization_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    path = folder(tmp_path, {"x": ONE}, quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedError, match=f"quant_method = '{method}' is not supported"):
        source(path)


# --- gpt-oss --------------------------------------------------------------------------------------


def test_mxfp4_blocks_of_gpt_oss_become_one_tensor(tmp_path: Path) -> None:
    """Each byte holds two codes, low one first; the scale byte is an exponent biased by 127."""
    blocks = RNG.integers(0, 256, (2, 6, 4, 16), dtype=np.uint8)
    scales = RNG.integers(120, 134, (2, 6, 4), dtype=np.uint8)
    opened = source(folder(tmp_path, {"e_blocks": blocks, "e_scales": scales}))
    assert opened.tensors["e"].shape == (2, 6, 128) and opened.tensors["e"].fmt == MXFP4
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(2, 6, 4, 32)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    values = table[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    np.testing.assert_array_equal(
        np.array(opened.read("e", expert=1).dense(mx.float32)), values.reshape(2, 6, 128)[1]
    )


def test_mxfp4_blocks_with_other_scales_are_refused(tmp_path: Path) -> None:
    blocks, scales = np.zeros((2, 6, 4, 16), np.uint8), np.zeros((2, 6, 5), np.uint8)
    with pytest.raises(SourceError, match=r"tensor e: blocks of shape .* are not MXFP4"):
        source(folder(tmp_path, {"e_blocks": blocks, "e_scales": scales}))


def test_a_tensor_stored_plain_and_in_blocks_is_refused(tmp_path: Path) -> None:
    blocks, scales = np.zeros((2, 6, 4, 16), np.uint8), np.zeros((2, 6, 4), np.uint8)
    tensors = {"e_blocks": blocks, "e_scales": scales, "e": ONE}
    with pytest.raises(SourceError, match="tensor e is stored twice"):
        source(folder(tmp_path, tensors))
