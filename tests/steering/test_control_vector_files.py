"""Control-vector files: those of others are read, ours are read by others, bad ones are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from turbospark.errors import OptionError, SteeringFileError
from turbospark.steering import ControlVectorInfo, SteeringMode, SteeringSet

WIDTH = 24
ROWS = {b: np.random.default_rng(b).standard_normal(WIDTH).astype(np.float32) for b in (1, 2, 5)}
Change = Callable[[gguf.GGUFWriter], Any]


def by_package(
    path: Path,
    rows: dict[Any, np.ndarray] | None = None,
    *changes: Change,
    arch: str = "controlvector",
    hint: str | None = "llama",
) -> Path:
    """A file by the gguf package, in the order and with the keys of repeng's exporter."""
    rows = ROWS if rows is None else rows
    writer = gguf.GGUFWriter(path, arch)
    if hint is not None:
        writer.add_string(f"{arch}.model_hint", hint)
    writer.add_uint32(f"{arch}.layer_count", len(rows))
    for change in changes:
        change(writer)
    for name, row in rows.items():
        writer.add_tensor(name if isinstance(name, str) else f"direction.{name}", row)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(found: SteeringSet, rows: dict[int, np.ndarray]) -> bool:
    return set(found.directions) == set(rows) and all(
        np.array_equal(found.directions[b], row) for b, row in rows.items()
    )


# --- files of others ------------------------------------------------------------------------------


def test_a_file_of_the_gguf_package_in_repengs_layout_is_read(tmp_path: Path) -> None:
    found = SteeringSet.load(by_package(tmp_path / "v.gguf"))
    assert same(found, ROWS)
    assert found.covered_layers == (1, 2, 5) and (found.hidden, found.span) == (WIDTH, 6)
    assert found.layers[0] is None and found.layers[3] is None
    assert (found.declared_arch, found.declared_mode) == ("llama", None)


def test_a_file_of_mlx_is_read_whatever_it_is_called(tmp_path: Path) -> None:
    arrays = {f"direction.{b}": mx.array(row) for b, row in ROWS.items()}
    mx.save_gguf(str(tmp_path / "v.gguf"), arrays, {"general.architecture": "controlvector"})
    (tmp_path / "v.gguf").rename(tmp_path / "happy.vec")
    assert same(SteeringSet.load(tmp_path / "happy.vec"), ROWS)


def test_a_missing_hint_another_architecture_and_any_layer_count_are_accepted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "v.gguf"
    bare = SteeringSet.load(by_package(path, hint=None))
    assert same(bare, ROWS) and bare.declared_arch is None
    other = SteeringSet.load(by_package(path, arch="qwen35", hint=None))
    assert same(other, ROWS) and other.declared_arch == "qwen35"
    count = SteeringSet.load(by_package(path, None, lambda w: w.add_int32("x.layer_count", -7)))
    assert same(count, ROWS)


def test_what_the_file_declares_is_kept(tmp_path: Path) -> None:
    def declare(writer: gguf.GGUFWriter) -> None:
        writer.add_string("turbospark.steering_mode", "renorm")

    found = SteeringSet.load(by_package(tmp_path / "v.gguf", None, declare))
    assert found.declared_mode is SteeringMode.RENORM


@pytest.mark.parametrize(("base", "shift"), [(1, 0), (0, -1)])
def test_the_layer_base_moves_the_numbers(tmp_path: Path, base: int, shift: int) -> None:
    path = by_package(
        tmp_path / "v.gguf", None, lambda w: w.add_uint32("turbospark.layer_base", base)
    )
    assert same(SteeringSet.load(path), {b + shift: row for b, row in ROWS.items()})


# --- our files ------------------------------------------------------------------------------------


def test_what_is_saved_is_read_by_the_gguf_package_and_by_mlx(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    SteeringSet.of(ROWS, declared_arch="qwen3", declared_mode=SteeringMode.ADD).save(path)
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "controlvector"
    assert keys["controlvector.model_hint"] == "qwen3"
    assert keys["controlvector.layer_count"] == 3
    assert keys["turbospark.steering_mode"] == "add"
    assert [t.name for t in reader.tensors] == ["direction.1", "direction.2", "direction.5"]
    for tensor in reader.tensors:  # what llama.cpp asks of each
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert tensor.shape.tolist() == [WIDTH] and tensor.data_offset % 32 == 0
        assert np.array_equal(tensor.data, ROWS[int(tensor.name.split(".")[1])])
    loaded, _ = mx.load(str(path), return_metadata=True)
    assert all(np.array_equal(np.array(loaded[f"direction.{b}"]), r) for b, r in ROWS.items())


def test_saving_and_loading_gives_the_same_set(tmp_path: Path) -> None:
    made = SteeringSet.of(ROWS, declared_arch="llama", declared_mode=SteeringMode.CLAMP)
    made.save(tmp_path / "v.gguf")
    found = SteeringSet.load(tmp_path / "v.gguf")
    assert found == made and hash(found) == hash(made)
    assert found != SteeringSet.of(ROWS, declared_arch="llama")
    assert [p.name for p in tmp_path.iterdir()] == ["v.gguf"]


def test_a_hint_is_always_written(tmp_path: Path) -> None:
    """repeng's importer raises without one."""
    SteeringSet.of(ROWS).save(tmp_path / "v.gguf")
    field = gguf.GGUFReader(tmp_path / "v.gguf").get_field("controlvector.model_hint")
    assert field is not None and field.contents() == "unknown"


def test_block_0_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(SteeringFileError, match=r"block 0 cannot be stored.*restrict\(1"):
        SteeringSet.of({0: ROWS[1], 1: ROWS[2]}).save(tmp_path / "v.gguf")
    with pytest.raises(SteeringFileError, match="cannot be written: No such file"):
        SteeringSet.of(ROWS).save(tmp_path / "absent" / "v.gguf")
    with pytest.raises(SteeringFileError, match="readers accept at most"):
        SteeringSet.of({1: np.ones(5 << 20)}).save(tmp_path / "v.gguf")
    assert list(tmp_path.iterdir()) == []


def test_info_needs_no_model(tmp_path: Path) -> None:
    info = ControlVectorInfo(by_package(tmp_path / "v.gguf"))
    assert (info.hidden, info.covered, info.first, info.last) == (WIDTH, (1, 2, 5), 1, 5)
    assert (info.span, info.declared_mode, info.declared_arch) == (6, None, "llama")
    np.testing.assert_allclose(info.norms, [np.linalg.norm(r) for r in ROWS.values()], rtol=1e-6)
    assert "3 directions of width 24, blocks 1..5" in repr(info)


def test_a_set_is_restricted_to_a_range_with_both_ends(tmp_path: Path) -> None:
    found = SteeringSet.load(by_package(tmp_path / "v.gguf"))
    assert found.restrict(2, 5).covered_layers == (2, 5)
    assert found.restrict(0, 1).covered_layers == (1,)
    assert found.restrict(2, 2).declared_arch == "llama"
    for start, end in ((3, 4), (6, 9), (5, 2)):
        with pytest.raises(OptionError, match=rf"blocks {start}..{end} have no direction in .*v"):
            found.restrict(start, end)


# --- hostile files --------------------------------------------------------------------------------


def row(**changes: Any) -> dict[Any, Any]:
    return {**ROWS, **{name.replace("_", "."): value for name, value in changes.items()}}


def key(name: str, value: Any) -> Change:
    kind = {str: "add_string", float: "add_float32", int: "add_uint32", bool: "add_bool"}
    return lambda writer: getattr(writer, kind[type(value)])(name, value)


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        (row(direction_0=ROWS[1]), None, r"tensor direction\.0 is not named direction\.N with N ="),
        (row(direction_01=ROWS[1]), None, r"tensor direction\.01 is not named"),
        (row(direction_=ROWS[1]), None, "is not named direction.N"),
        (row(directions_3=ROWS[1]), None, r"tensor directions\.3 is not named"),
        (row(token_embd=ROWS[1]), None, r"tensor token\.embd is not named .* not a control vector"),
        (row(direction_4097=ROWS[1]), None, "is for block 4097; expected at most 4096"),
        (row(direction_99999999999=ROWS[1]), None, "is not named direction.N"),
        (row(direction_3=ROWS[1].astype(np.float16)), None, r"3 is F16 \[24\]; expected F32"),
        (row(direction_3=ROWS[1].astype(np.float64)), None, r"3 is F64 \[24\]; expected F32"),
        (row(direction_3=ROWS[1].reshape(2, 12)), None, r"is F32 \[2, 12\]; expected F32 with one"),
        (row(direction_3=ROWS[1][:20]), None, "block 3 has 20 values, that of block 1 has 24"),
        (row(direction_3=ROWS[1] * np.nan), None, "direction.3 holds values that are not finite"),
        ({}, None, "holds no tensors; expected direction.1"),
        (ROWS, key("turbospark.layer_base", 2), "layer_base = 2; expected 0 or 1"),
        (ROWS, key("turbospark.layer_base", 1.0), "layer_base = 1.0; expected 0 or 1"),
        (ROWS, key("turbospark.layer_base", True), "layer_base = True; expected 0 or 1"),
        (ROWS, key("turbospark.steering_mode", "erase"), "steering_mode = erase; expected one of"),
        (ROWS, key("turbospark.steering_mode", 3), "steering_mode = 3; expected a text"),
        (ROWS, key("glp.mode", "x"), "glp.mode = 'x': another kind of intervention"),
    ],
)
def test_a_file_that_is_not_a_control_vector_is_refused(
    tmp_path: Path, rows: dict[Any, Any], change: Change | None, message: str
) -> None:
    path = by_package(tmp_path / "v.gguf", rows, *([change] if change else []))
    for read in (SteeringSet.load, ControlVectorInfo):
        with pytest.raises(SteeringFileError, match=message) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_hint_that_is_not_a_text_is_refused(tmp_path: Path) -> None:
    path = by_package(tmp_path / "v.gguf", None, key("controlvector.model_hint", 4), hint=None)
    with pytest.raises(SteeringFileError, match="model_hint = 4; expected a text"):
        SteeringSet.load(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = by_package(tmp_path / "v.gguf").read_bytes()
    end = gguf.GGUFReader(tmp_path / "v.gguf").tensors[-1]
    whole = int(end.data_offset) + 4 * WIDTH
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, whole, 7), whole - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(SteeringFileError, match=r"cut\.gguf: "):
            SteeringSet.load(cut)


def test_a_file_that_cannot_be_one_is_refused_before_it_is_read(tmp_path: Path) -> None:
    big = tmp_path / "big.gguf"
    with big.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(SteeringFileError, match="16777217 bytes; a control vector has at most"):
        SteeringSet.load(big)
    with pytest.raises(SteeringFileError, match=r"absent\.gguf: No such file"):
        SteeringSet.load(tmp_path / "absent.gguf")
    with pytest.raises(SteeringFileError, match="not a regular file"):
        SteeringSet.load(tmp_path)
    (tmp_path / "text").write_text("not a GGUF file at all")
    with pytest.raises(SteeringFileError, match=r"starts with b'not '; expected b'GGUF'"):
        SteeringSet.load(tmp_path / "text")
    (tmp_path / "old").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(SteeringFileError, match="version 1 is not supported"):
        SteeringSet.load(tmp_path / "old")


def test_control_characters_of_a_file_do_not_reach_a_terminal(tmp_path: Path) -> None:
    path = by_package(tmp_path / "v.gguf", None, key("turbospark.steering_mode", "\x1b[2Jx"))
    with pytest.raises(SteeringFileError) as caught:
        SteeringSet.load(path)
    assert "\x1b" not in str(caught.value) and r"\x1b[2Jx" in str(caught.value)


# --- sets made by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directions", "message"),
    [
        ({}, "a steering set with no direction"),
        ({1: ROWS[1], 2: ROWS[2][:5]}, r"with widths \[5, 24\]"),
        ({1: "north"}, "direction of block 1 is 'north'; expected a row of real"),
        ({1: np.ones((2, 3))}, r"direction of block 1 has shape \[2, 3\]"),
        ({-1: ROWS[1]}, "block -1; expected 0..4096"),
        ({4097: ROWS[1]}, "block 4097; expected 0..4096"),
        ({True: ROWS[1]}, "block True; expected 0..4096"),
    ],
)
def test_a_set_that_cannot_be_is_refused(directions: dict[int, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SteeringSet.of(directions)


def test_a_declared_mode_is_one_of_the_four() -> None:
    assert SteeringSet.of(ROWS, declared_mode="add").declared_mode is SteeringMode.ADD
    with pytest.raises(OptionError, match="declared_mode: 'erase' is not valid; works: ablate"):
        SteeringSet.of(ROWS, declared_mode="erase")


def test_a_set_keeps_its_own_copy() -> None:
    mine = ROWS[1].copy()
    made = SteeringSet.of({1: mine})
    mine[:] = 0
    assert np.array_equal(made.directions[1], ROWS[1])
    with pytest.raises(ValueError, match="read-only"):
        made.directions[1][0] = 1
