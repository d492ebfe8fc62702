"""layout.json: every refusal by class and name, and round trips with mixed geometry."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from handmade import EXPERTS, PAGE, Original

from turbospark.dtypes import MXFP4, NVFP4, Quant, Raw, affine
from turbospark.errors import (
    ExpertStrideError,
    FileSizeError,
    IndexCorruptError,
    SourceError,
    TensorShapeError,
    TurbosparkError,
    UnsupportedError,
)
from turbospark.install.opening import Install
from turbospark.install.packed import PackedLayout, PackedWriter, RecordLayout
from turbospark.install.planes import Planes, host_view, quantize

Layout = dict[str, Any]


def all_records(layout: Layout, role: str, change: dict[str, Any]) -> None:
    """The same change in every record of layer 0, so that only the change itself is wrong."""
    for expert in layout["layers"][0]["experts"]:
        expert["tensors"][role].update(change)


def record_edit(role: str, **change: Any) -> Callable[[Layout], None]:
    return lambda layout: all_records(layout, role, change)


def at(*path_and_value: Any) -> Callable[[Layout], None]:
    *path, last, value = path_and_value

    def edit(node: Any) -> None:
        for key in path:
            node = node[key]
        if value is DELETE:
            del node[last]
        else:
            node[last] = value

    return edit


def rename_role(old: str, new: str | None) -> Callable[[Layout], None]:
    def edit(layout: Layout) -> None:
        for expert in layout["layers"][0]["experts"]:
            row = expert["tensors"].pop(old)
            if new:
                expert["tensors"][new] = row

    return edit


def block(layout: Layout) -> None:
    """A GGUF record: three tensors, no companions."""
    row = {"size": 4352, "dtype": "q4_k", "shape": [64, 128]}
    tensors = {
        "gate": {"offset": 0, **row},
        "up": {"offset": 4352, **row},
        "down": {"offset": 8704, **row},
    }
    for expert in layout["layers"][0]["experts"]:
        expert["tensors"] = tensors


def no_scales(layout: Layout) -> None:
    """What tells a planar record from a block record is gate_scales, not the dtype."""
    for expert in layout["layers"][0]["experts"]:
        for role in [r for r in expert["tensors"] if r.endswith("_scales")]:
            del expert["tensors"][role]
        for role in ("gate", "up", "down"):
            expert["tensors"][role]["dtype"] = "bf16"


def halve(layout: Layout) -> None:
    """Half-width misread: everything claims 2 bits and half the bytes."""
    for expert in layout["layers"][0]["experts"]:
        expert["tensors"]["gate"]["bits"] = 2


DELETE = object()
X = ("layers", 0, "experts")
IC, TS, US, ES = IndexCorruptError, TensorShapeError, UnsupportedError, ExpertStrideError

REFUSALS: list[tuple[str, Callable[[Layout], None], type[TurbosparkError], str]] = [
    ("no stride", at("expertStride", DELETE), IC, "expertStride is missing"),
    ("no layers", at("layers", DELETE), IC, "layers is missing"),
    ("no count", at("numLayers", DELETE), IC, "numLayers is missing"),
    ("null stride", at("expertStride", None), IC, "expertStride"),
    ("float count", at("expertsPerLayer", 4.0), IC, r"expertsPerLayer = 4\.0"),
    ("bool layer", at("layers", 0, "layer", False), IC, "layer = False"),
    ("negative", at(*X, 1, "offset", -16384), IC, "offset = -16384"),
    ("string size", at(*X, 1, "size", "16384"), IC, "size = '16384'"),
    ("count of layers", at("numLayers", 3), IC, r"numLayers is 3; layers\[\] has 2"),
    ("huge expert count", at("expertsPerLayer", 2**40), IC, "expertsPerLayer is 1099511627776"),
    ("stride unit", at("expertStride", 16385), ES, "16385"),
    ("layer stride unit", at("layers", 0, "expertStride", 8191), ES, "8191"),
    ("layer stride above top", at("layers", 0, "expertStride", 32768), IC, r"outside 1\.\.16384"),
    ("layer stride zero", at("layers", 0, "expertStride", 0), IC, r"outside 1\.\.16384"),
    ("top stride above all", at("expertStride", 32768), IC, "widest|stride is 32768|size"),
    ("layer not object", at("layers", 0, 5), IC, r"layers\[0\] must be an object"),
    ("no file", at("layers", 0, "file", DELETE), IC, "file is missing"),
    ("file with folder", at("layers", 0, "file", "x/layer_00.bin"), IC, "plain file name"),
    ("file up", at("layers", 0, "file", "../model_weights.bin"), IC, "stay inside"),
    ("file absolute", at("layers", 0, "file", "/etc/passwd"), IC, "stay inside"),
    ("file twice", at("layers", 1, "file", "layer_00.bin"), IC, "belongs to an earlier layer"),
    ("layer twice", at("layers", 1, "layer", 0), IC, "must ascend"),
    ("layers descend", lambda v: v["layers"].reverse(), IC, "must ascend"),
    ("layer past the trunk", at("layers", 1, "layer", 2), IC, "has layer 2"),
    ("expert missing", lambda v: v["layers"][0]["experts"].pop(), IC, "lists 3 experts"),
    ("expert not object", at(*X, 2, 7), IC, r"experts\[2\] must be an object"),
    ("expert twice", at(*X, 2, "expert", 1), IC, "appears twice"),
    ("expert out of range", at(*X, 2, "expert", 4), IC, "expert 4.* 4 experts"),
    ("rank out of range", at(*X, 2, "physicalRank", 4), IC, "physicalRank 4"),
    ("rank twice", at(*X, 2, "physicalRank", 1), IC, "appears twice"),
    ("size is not stride", at(*X, 2, "size", 12288), IC, "size is 12288; the layer's stride"),
    ("records overlap", at(*X, 2, "offset", PAGE + 4096), IC, "overlap"),
    ("record misaligned", at(*X, 2, "offset", 2 * PAGE + 4), IC, "multiple of 4096"),
    ("record past the end", at(*X, 3, "offset", 64 * PAGE), FileSizeError, "expected 1064960"),
    ("offset overflow", at(*X, 3, "offset", 2**63), IC, "offset = 92"),
    ("no tensors", at(*X, 2, "tensors", DELETE), IC, "tensors is missing"),
    ("records differ", at(*X, 2, "tensors", "up", "offset", 0), IC, "must be identical"),
    ("tensor not object", at(*X, 0, "tensors", "up", 5), IC, "differ|must be an object"),
    ("no dtype", record_edit("gate", dtype=None), IC, "gate.dtype"),
    ("no shape", record_edit("gate", shape=None), IC, "gate.shape"),
    ("float in shape", record_edit("gate", shape=[64.0, 128]), TS, "gate.shape"),
    ("bool in shape", record_edit("gate", shape=[True, 128]), TS, "gate.shape"),
    ("zero in shape", record_edit("gate", shape=[0, 128]), TS, "gate.shape"),
    ("rank 3", record_edit("gate", shape=[64, 128, 1]), TS, "gate.shape"),
    ("huge shape", record_edit("gate", shape=[2**31, 128]), TS, "gate.shape"),
    ("shape transposed", record_edit("gate", shape=[128, 64]), TS, "gate"),
    ("size zero", record_edit("gate", size=0), IC, "impossible"),
    ("size half", record_edit("gate", size=2048), TS, "gate: 2048 bytes leave a gap"),
    ("companion half", record_edit("gate_scales", size=128), TS, "gate_scales: 128 bytes"),
    ("companion dtype", record_edit("gate_biases", dtype="fp16"), TS, "gate_biases is fp16"),
    ("companion wide", record_edit("gate_scales", dtype="fp32"), TS, "gate_(scales|biases)"),
    ("past the stride", record_edit("down_biases", offset=16300), IC, "ends at 16556; the stride"),
    ("offset past u32", record_edit("down_biases", offset=2**32), IC, "impossible"),
    ("planes overlap", record_edit("up", offset=4096), IC, "overlap"),
    ("plane misaligned", record_edit("down_biases", offset=15001), IC, "misaligned"),
    ("unknown dtype", record_edit("gate", dtype="q4_k"), US, "gate is stored as q4_k"),
    ("unknown role", rename_role("down", "sideways"), IC, "unknown roles.*sideways.*down"),
    ("role missing", rename_role("up_biases", None), TS, "up as affine .* needs planes"),
    ("scales missing", rename_role("up_scales", None), TS, "up_scales"),
    ("block record", block, US, "gate is stored as q4_k"),
    ("all scales missing", no_scales, US, "block records"),
    ("declared bits", halve, TS, "bits is 2; size and shape imply 4"),
    ("unknown mode", record_edit("gate", mode="int4"), US, "mode 'int4'"),
    ("mode of wrong kind", record_edit("gate", mode=["affine"]), US, "mode"),
    ("mode without group", record_edit("gate", mode="affine"), US, "groupSize None"),
    ("no layer at all", at("layers", []), IC, r"layers\[\] has 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "error", "text"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_a_wrong_layout_is_refused_by_name(tmp_path: Path, edit, error, text) -> None:
    path = Original(tmp_path / "m.gturbo", edit_layout=edit).path
    with pytest.raises(error, match=text) as caught:
        Install.open(path)
    assert caught.type is error and "\n" not in str(caught.value)


def test_manifest_and_layout_must_agree(tmp_path: Path) -> None:
    def shrink(layout: Layout) -> None:
        layout["numLayers"] = 1
        del layout["layers"][1]

    with pytest.raises(
        IndexCorruptError, match=r"manifest\.numLayers is 2; layout\.json implies 1"
    ):
        Install.open(Original(tmp_path / "a", edit_layout=shrink).path)

    def more(manifest: dict) -> None:
        manifest["expertsPerLayer"] = manifest["arch"]["numExperts"] = 8

    with pytest.raises(IndexCorruptError, match=r"expertsPerLayer is 8; layout\.json implies 4"):
        Install.open(Original(tmp_path / "b", edit_manifest=more).path)

    def wider(manifest: dict) -> None:
        manifest["expertStride"] = 32768

    with pytest.raises(IndexCorruptError, match=r"expertStride is 32768; .* implies 16384"):
        Install.open(Original(tmp_path / "c", edit_manifest=wider).path)


def test_a_layer_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    path = Original(tmp_path / "m", edit_layout=at("layers", 1, "file", "other.bin")).path
    data = (path / "packed_experts" / "layer_01.bin").read_bytes()
    (path / "packed_experts" / "other.bin").write_bytes(data)
    with pytest.raises(IndexCorruptError, match=r"uses other\.bin"):
        Install.open(path)


def test_a_layer_file_that_is_a_link_out_of_the_install_is_refused(tmp_path: Path) -> None:
    path = Original(tmp_path / "m").path
    layer = path / "packed_experts" / "layer_01.bin"
    layer.rename(tmp_path / "x.bin")
    layer.symlink_to(tmp_path / "x.bin")
    with pytest.raises(IndexCorruptError, match="leads outside"):
        PackedLayout.read(path)


def test_layer_files_follow_trunk_indices_after_a_dense_lead(tmp_path: Path) -> None:
    """numLayers counts files; names and `layer` are trunk indices."""

    def lead(layout: Layout) -> None:
        layout["layers"][1]["layer"] = 2
        layout["layers"][1]["file"] = "layer_02.bin"

    def manifest(value: dict) -> None:
        value["arch"] |= {"numLayers": 3, "fullAttentionLayerMask": [1, 1, 1]}
        value["files"]["packed_experts/layer_02.bin"] = value["files"].pop(
            "packed_experts/layer_01.bin"
        )

    path = Original(tmp_path / "m", edit_layout=lead, edit_manifest=manifest).path
    folder = path / "packed_experts"
    (folder / "layer_01.bin").rename(folder / "layer_02.bin")
    with Install.open(path) as install:
        assert list(install.experts.layers) == [0, 2]
        assert install.manifest.num_layers == 2


# --- our writer -----------------------------------------------------------------------------------

F, H = 64, 256
MIXED = [
    {r: (affine(4, 64), s) for r, s in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F)))},
    {
        "gate": (affine(3, 32, "float16"), (F, H)),
        "up": (affine(8, 128, "float32"), (F, H)),
        "down": (affine(8, 32), (H, F)),
    },
    {
        "gate": (MXFP4, (F, H)),
        "gate_bias": (Raw("bfloat16"), (F,)),
        "up": (NVFP4, (F, H)),
        "up_bias": (Raw("float32"), (F,)),
        "down": (MXFP4, (H, F)),
        "down_bias": (Raw("float16"), (H,)),
    },
    {r: (Raw("bfloat16"), s) for r, s in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F)))},
]  # fmt: skip


def random_planes(fmt: Any, shape: tuple[int, ...]) -> Planes:
    values = mx.random.normal(shape)
    if isinstance(fmt, Quant):
        return quantize(values, fmt)
    array = values.astype(getattr(mx, fmt.dtype))
    mx.eval(array)
    return Planes(fmt, shape, array)


def write_mixed(path: Path) -> list[list[dict[str, Planes]]]:
    mx.random.seed(11)
    writer = PackedWriter(path)
    written = []
    for layer, parts in enumerate(MIXED):
        writer.begin_layer(layer + 1, EXPERTS, RecordLayout.build(parts))
        experts = [{r: random_planes(*p) for r, p in parts.items()} for _ in range(EXPERTS)]
        for e in (2, 0, 3, 1):
            for role, planes in reversed(list(experts[e].items())):
                writer.write(e, {role: planes})
        writer.end_layer()
        written.append(experts)
    writer.close()
    return written


def write_and_read(path: Path) -> PackedLayout:
    (path / "again").mkdir()
    write_mixed(path)
    return PackedLayout.read(path)


def test_layers_and_projections_of_different_geometry_round_trip_bit_for_bit(
    tmp_path: Path,
) -> None:
    written = write_mixed(tmp_path)
    layout = PackedLayout.read(tmp_path)
    assert list(layout.layers) == [1, 2, 3, 4]
    for layer, parts, experts in zip(layout.layers.values(), MIXED, written, strict=True):
        assert layer.record.parts() == parts
        for e in range(EXPERTS):
            buffer = np.zeros(layer.stride, np.uint8)
            layer.read_record_into(e, buffer)
            for role, planes in experts[e].items():
                for suffix, array in zip(("", "_scales", "_biases"), planes.arrays(), strict=False):
                    plane = layer.tensor(role + suffix)
                    assert getattr(mx, plane.dtype) == array.dtype
                    assert plane.plane_shape == tuple(array.shape)
                    found = buffer[plane.offset : plane.offset + plane.size]
                    assert bytes(found) == bytes(host_view(array))


def test_every_record_has_the_checksum_of_its_planes(tmp_path: Path) -> None:
    for layer, experts in zip(
        write_and_read(tmp_path).layers.values(), write_mixed(tmp_path / "again"), strict=True
    ):
        for e, parts in enumerate(experts):
            planes = [a for role in layer.record.parts() for a in parts[role].arrays()]
            assert layer.checksums[e] == zlib.crc32(b"".join(bytes(host_view(a)) for a in planes))


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (at(*X, 0, "crc32", 5), "1 of 4 experts have a crc32"),
        (at(*X, 0, "crc32", "5"), "crc32 = '5'"),
        (at(*X, 0, "crc32", None), "crc32 = None"),
        (lambda v: [e.update(crc32=2**32) for e in v["layers"][0]["experts"]], "need 32 bits"),
    ],
)
def test_wrong_checksum_entries_are_refused(tmp_path: Path, edit, text) -> None:
    with pytest.raises(IndexCorruptError, match=text):
        Install.open(Original(tmp_path / "m.gturbo", edit_layout=edit).path)


def test_an_install_of_the_original_has_no_checksums(tmp_path: Path) -> None:
    with Install.open(Original(tmp_path / "m.gturbo").path) as install:
        assert install.experts.layers[0].checksums is None


def test_layers_are_not_padded_to_the_widest(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    layout = PackedLayout.read(tmp_path)
    strides = [layer.stride for layer in layout.layers.values()]
    used = [layer.record.used for layer in layout.layers.values()]
    assert strides == [-(-n // PAGE) * PAGE for n in used]
    assert len(set(strides)) > 1 and max(strides) == layout.stride
    for layer in layout.layers.values():
        assert layer.path.stat().st_size == EXPERTS * layer.stride
    assert layout.bytes_per_slot == sum(strides)


def test_an_int4_layer_is_written_as_the_original_documents_it(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    layout = json.loads((tmp_path / "packed_experts" / "layout.json").read_text())
    row = layout["layers"][0]
    assert (row["layer"], row["file"]) == (1, "layer_01.bin")
    assert row["expertStride"] % PAGE == 0
    names, at_byte = ["gate", "up", "down"], 0
    for expert in row["experts"]:
        assert expert["offset"] == expert["expert"] * row["expertStride"]
        assert expert["size"] == row["expertStride"]
        assert list(expert["tensors"]) == [n + s for n in names for s in ("", "_scales", "_biases")]
    for role, tensor in row["experts"][0]["tensors"].items():
        rows, columns = (H, F) if role.startswith("down") else (F, H)
        companion = "_" in role
        assert tensor["offset"] == at_byte
        assert tensor["dtype"] == ("bf16" if companion else "u32")
        assert tensor["shape"] == [rows, columns // 64 if companion else columns]
        assert tensor["size"] == (rows * columns // 64 * 2 if companion else rows * columns // 2)
        at_byte += tensor["size"]


def test_a_written_layout_without_our_keys_means_the_same(tmp_path: Path) -> None:
    """Affine geometry follows from dtype, shape and sizes alone, as in an original install."""
    write_mixed(tmp_path)
    path = tmp_path / "packed_experts" / "layout.json"
    layout = json.loads(path.read_text())
    layout["layers"] = layout["layers"][:2]
    layout["numLayers"] = 2
    layout["expertStride"] = max(row["expertStride"] for row in layout["layers"])
    for row in layout["layers"]:
        for expert in row["experts"]:
            for tensor in expert["tensors"].values():
                for key in ("mode", "bits", "groupSize", "scaleDtype"):
                    tensor.pop(key, None)
    path.write_text(json.dumps(layout))
    found = PackedLayout.read(tmp_path)
    assert [layer.record.parts() for layer in found.layers.values()] == MIXED[:2]


def test_a_dense_model_has_an_empty_layout(tmp_path: Path) -> None:
    PackedWriter(tmp_path).close()
    data = json.loads((tmp_path / "packed_experts" / "layout.json").read_text())
    assert data == {"expertStride": 0, "numLayers": 0, "expertsPerLayer": 0, "layers": []}
    assert PackedLayout.read(tmp_path).layers == {}


def test_misuse_of_the_writer_is_refused_by_name(tmp_path: Path) -> None:
    writer = PackedWriter(tmp_path)
    record = RecordLayout.build(MIXED[0])
    planes = random_planes(*MIXED[0]["gate"])
    with pytest.raises(SourceError, match="outside a layer"):
        writer.write(0, {"gate": planes})
    with pytest.raises(SourceError, match="without begin_layer"):
        writer.end_layer()
    writer.begin_layer(3, 1, record)
    with pytest.raises(SourceError, match="before layer 3 was ended"):
        writer.begin_layer(4, 1, record)
    with pytest.raises(TensorShapeError, match="layer 3 expert 0 down: declared"):
        writer.write(0, {"down": planes})
    with pytest.raises(SourceError, match="expert 1 gate is not part"):
        writer.write(1, {"gate": planes})
    writer.write(0, {"gate": planes})
    with pytest.raises(SourceError, match="written twice"):
        writer.write(0, {"gate": planes})
    with pytest.raises(SourceError, match="2 expert tensors were not written, first expert 0 down"):
        writer.end_layer()
    with pytest.raises(SourceError, match="layer 3 was not ended"):
        writer.close()
    writer.write(0, {r: random_planes(*MIXED[0][r]) for r in ("up", "down")})
    writer.end_layer()
    with pytest.raises(SourceError, match="layer 3 begun after layer 3"):
        writer.begin_layer(3, 1, record)
    with pytest.raises(UnsupportedError, match="layer 4 has 2 experts"):
        writer.begin_layer(4, 2, record)


def test_records_that_cannot_be_laid_out_are_refused_by_name() -> None:
    good = MIXED[0]
    with pytest.raises(UnsupportedError, match=r"missing parts \['down'\]"):
        RecordLayout.build({r: good[r] for r in ("gate", "up")})
    with pytest.raises(UnsupportedError, match=r"unknown parts \['gate_scales'\]"):
        RecordLayout.build({**good, "gate_scales": (Raw("bfloat16"), (F, 4))})
    with pytest.raises(UnsupportedError, match="expert down: 65 columns"):
        RecordLayout.build({**good, "down": (affine(4, 64), (H, 65))})
    with pytest.raises(UnsupportedError, match="cannot be quantized"):
        RecordLayout.build({**good, "down_bias": (affine(4, 64), (H,))})
    with pytest.raises(UnsupportedError, match="needs 2 axes"):
        RecordLayout.build({**good, "down": (Raw("bfloat16"), (H,))})


def test_planes_follow_each_other_at_the_next_multiple_of_four() -> None:
    fmt, plain = affine(4, 64), Raw("bfloat16")
    record = RecordLayout.build(
        {"gate": (fmt, (3, 64)), "up": (fmt, (3, 64)), "down": (plain, (64, 3))}
    )
    # 3 rows: 96 bytes of words, then 6 of scales and 6 of biases, each padded to 8
    assert [(role, tensor.offset) for role, tensor in record.tensors.items()] == [
        ("gate", 0), ("gate_scales", 96), ("gate_biases", 104),
        ("up", 112), ("up_scales", 208), ("up_biases", 216), ("down", 224),
    ]  # fmt: skip
    assert record.used == 224 + 64 * 3 * 2


def test_published_record_sizes_are_reproduced() -> None:
    """used and stride of the models in the format's documentation."""

    def sizes(hidden: int, width: int) -> tuple[int, int]:
        fmt = affine(4, 64)
        record = RecordLayout.build(
            {
                "gate": (fmt, (width, hidden)),
                "up": (fmt, (width, hidden)),
                "down": (fmt, (hidden, width)),
            }
        )
        return record.used, record.stride

    assert sizes(2816, 704) == (3_345_408, 3_358_720)  # gemma4
    assert sizes(2048, 512) == (1_769_472, 1_769_472)  # qwen36
    assert sizes(2560, 640) == (2_764_800, 2_768_896)  # qwen4exp
    assert sizes(3072, 1536) == (7_962_624, 7_962_624)  # minimax_m2
