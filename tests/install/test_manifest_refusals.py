"""Every refusal of manifest.json and of the files it lists, each by class and by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from handmade import ARCH, Original

from turbospark.errors import (
    ExpertStrideError,
    FileSizeError,
    IndexCorruptError,
    MissingFileError,
    NotAGTurboDirectoryError,
    PartialInstallError,
    TurbosparkError,
    UnknownFlagError,
    UnsupportedArchitectureError,
    UnsupportedCapabilityError,
    UnsupportedError,
    UnsupportedVersionError,
)
from turbospark.install.manifest import Manifest, peek_family
from turbospark.install.opening import Install


def edited(tmp_path: Path, *path_and_value: Any) -> Path:
    """An install whose manifest has `value` at the path (None as last key deletes nothing)."""
    *path, last, value = path_and_value

    def edit(manifest: dict) -> None:
        node = manifest
        for key in path:
            node = node[key]
        if value is DELETE:
            del node[last]
        else:
            node[last] = value

    return Original(tmp_path / "m.gturbo", edit_manifest=edit).path


DELETE = object()

REFUSALS: list[tuple[tuple, type[TurbosparkError], str]] = [
    (("magic", "GGUF"), NotAGTurboDirectoryError, "magic.*GGUF.*GTURBO"),
    (("magic", DELETE), NotAGTurboDirectoryError, "magic = None"),
    (("versionMajor", 2), UnsupportedVersionError, r"version 2\.0"),
    (("versionMajor", True), IndexCorruptError, "versionMajor"),
    (("versionMinor", 1.0), IndexCorruptError, "versionMinor"),
    (("versionMinor", -1), IndexCorruptError, "versionMinor"),
    (("flags", "streaming", True), UnknownFlagError, '"streaming"'),
    (("flags", "streamingPresent", 1), IndexCorruptError, "flags"),
    (("flags", "turboQuantKV", True), UnsupportedError, "turboQuantKV"),
    (("flags", []), IndexCorruptError, "flags"),
    (("capability", "image-generation"), UnsupportedCapabilityError, "image-generation"),
    (("modelID", 5), IndexCorruptError, "modelID = 5"),
    (("modelID", DELETE), IndexCorruptError, "modelID is missing"),
    (("sourceSnapshotHash", 5), IndexCorruptError, "sourceSnapshotHash"),
    (("arch", DELETE), IndexCorruptError, "arch must be an object"),
    (("arch", "family", "gpt5"), UnsupportedArchitectureError, "gpt5"),
    (("arch", "hiddenSize", DELETE), IndexCorruptError, r"arch\.hiddenSize is missing"),
    (("arch", "hiddenSize", 128.0), IndexCorruptError, r"hiddenSize = 128\.0"),
    (("arch", "hiddenSize", True), IndexCorruptError, "hiddenSize = True"),
    (("arch", "hiddenSize", -1), IndexCorruptError, "hiddenSize = -1"),
    (("arch", "hiddenSize", "128"), IndexCorruptError, "hiddenSize = '128'"),
    (("arch", "hiddenSize", 2**63), IndexCorruptError, "hiddenSize"),
    (("arch", "tieWordEmbeddings", 1), IndexCorruptError, "tieWordEmbeddings = 1"),
    (("arch", "ropeTheta", True), IndexCorruptError, "ropeTheta = True"),
    (("arch", "ropeTheta", "1e4"), IndexCorruptError, "ropeTheta"),
    (("arch", "fullAttentionLayerMask", [1]), IndexCorruptError, "has 1 values; numLayers is 2"),
    (("arch", "fullAttentionLayerMask", [1, 1.5]), IndexCorruptError, "fullAttentionLayerMask"),
    (("arch", "fullAttentionLayerMask", {}), IndexCorruptError, "fullAttentionLayerMask"),
    (("arch", "caCsaCompressRate", 4), IndexCorruptError, "the spelling is caCSACompressRate"),
    (("arch", "visionMropeSection", [1, 2]), IndexCorruptError, "needs 3 values"),
    (("arch", "visionDeepstackVisualIndexes", [1, 2, 3, 4]), IndexCorruptError, "at most 3"),
    (("arch", "visionDepth", 2), MissingFileError, "packed_vision/layout.json"),
    (("quant", "router", DELETE), IndexCorruptError, r"quant\.router"),
    (("quant", "embedding", "weightBits", 8), IndexCorruptError, r"quant\.embedding"),
    (("quant", "embedding", "weightBits", True), IndexCorruptError, "weightBits"),
    (("quant", "embedding", "scaleType", "fp16"), IndexCorruptError, "fp16"),
    (("quant", "routedExpert", {"scheme": "gguf", "ggmlType": "q9_z"}), IndexCorruptError, "q9_z"),
    (("quant", "routedExpert", {"scheme": "gguf"}), IndexCorruptError, "ggmlType"),
    (("quant", 4), IndexCorruptError, "quant must be an object"),
    (("expertStride", 4095), ExpertStrideError, "4095"),
    (("expertStride", 32768), IndexCorruptError, "expertStride is 32768.*16384"),
    (("expertStride", 16384.0), IndexCorruptError, "expertStride"),
    (("numLayers", 1), IndexCorruptError, "numLayers is 1.*2"),
    (("numLayers", 3), IndexCorruptError, "numLayers is 3"),
    (("numLayers", 0), IndexCorruptError, "numLayers is 0"),
    (("expertsPerLayer", 8), IndexCorruptError, "expertsPerLayer is 8; arch.numExperts is 4"),
    (("files", "model_weights.bin", DELETE), MissingFileError, "model_weights.bin"),
    (("files", "packed_experts/layout.json", DELETE), MissingFileError, "layout.json"),
    (("files", "packed_experts/layer_01.bin", DELETE), MissingFileError, "1 expert layer files"),
    (("files", []), IndexCorruptError, "files"),
    (("files", "model_weights.bin", "size", 1.0), IndexCorruptError, "size"),
    (("files", "model_weights.bin", "size", -1), IndexCorruptError, "size"),
    (("files", "model_weights.bin", "sha256", "xyz"), IndexCorruptError, "64 hex"),
    (("files", "extra.bin", {"size": 4, "sha256": "0" * 64}), MissingFileError, "extra.bin"),
    (("files", "manifest.json", {"size": 4, "sha256": "0" * 64}), IndexCorruptError, "itself"),
    (("hadamard", {"block": 3}), IndexCorruptError, "block"),
    (("hadamard", {"block": 2, "signs": [{}]}), IndexCorruptError, "signs"),
    (("turbospark", []), IndexCorruptError, "turbospark must be an object"),
    (("turbospark", {"config": []}), IndexCorruptError, r"turbospark\.config"),
]


@pytest.mark.parametrize(
    ("edit", "error", "text"), REFUSALS, ids=[f"{'.'.join(map(str, r[0][:-1]))}" for r in REFUSALS]
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, edit, error, text) -> None:
    with pytest.raises(error, match=text) as caught:
        Install.open(edited(tmp_path, *edit))
    assert caught.type is error and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "a//b",
        "./a",
        "",
        "a\\b",
        "a\0b",
        "a/",
        "\ud800",
        "é" * 200,
    ],
)
def test_a_listed_path_that_could_leave_the_install_is_refused(tmp_path: Path, name: str) -> None:
    path = edited(tmp_path, "files", name, {"size": 1, "sha256": "0" * 64})
    with pytest.raises(IndexCorruptError):
        Install.open(path)


def test_a_symbolic_link_out_of_the_install_is_refused(tmp_path: Path) -> None:
    path = Original(tmp_path / "m.gturbo").path
    for name in ("model_weights.bin", "packed_experts/layer_00.bin", "manifest.json"):
        moved = tmp_path / Path(name).name
        (path / name).rename(moved)
        (path / name).symlink_to(moved)
        with pytest.raises(IndexCorruptError, match="leads outside"):
            Install.open(path)
        (path / name).unlink()
        moved.rename(path / name)
    Install.open(path).close()


def test_a_link_inside_the_install_and_a_linked_install_are_fine(tmp_path: Path) -> None:
    path = Original(tmp_path / "m.gturbo").path
    (path / "model_weights.bin").rename(path / "w.bin")
    (path / "model_weights.bin").symlink_to("w.bin")
    (tmp_path / "alias").symlink_to(path)
    Install.open(tmp_path / "alias").close()


def test_a_fifo_or_a_folder_in_place_of_a_file_is_refused_without_hanging(tmp_path: Path) -> None:
    path = Original(tmp_path / "m.gturbo").path
    for name in ("model_weights.bin", "packed_experts/layout.json", "manifest.json"):
        (path / name).rename(path / "aside")
        os.mkfifo(path / name)
        with pytest.raises(IndexCorruptError, match="not a regular file"):
            Install.open(path)
        (path / name).unlink()
        (path / name).mkdir()
        with pytest.raises(IndexCorruptError, match="not a regular file"):
            Install.open(path)
        (path / name).rmdir()
        (path / "aside").rename(path / name)


@pytest.mark.parametrize(
    "name", ["model_weights.bin", "packed_experts/layer_01.bin", "packed_experts/layout.json"]
)
@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
def test_a_cut_or_overlong_file_is_refused_at_open_with_both_sizes(
    tmp_path: Path, name: str, change: int
) -> None:
    path = Original(tmp_path / "m.gturbo").path
    size = (path / name).stat().st_size
    change = max(change, -size)
    with (path / name).open("r+b") as file:
        file.truncate(size + change)
    with pytest.raises(FileSizeError) as caught:
        Install.open(path)
    for part in (Path(name).name, str(size), str(size + change)):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["model_weights.bin", "packed_experts/layer_00.bin"])
def test_a_removed_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = Original(tmp_path / "m.gturbo").path
    (path / name).unlink()
    with pytest.raises(MissingFileError, match=Path(name).name):
        Install.open(path)


TEXTS = {
    "empty": b"",
    "list": b"[]",
    "text": b"hello",
    "cut": b'{"magic": "GTURBO"',
    "nan": b'{"magic": NaN}',
    "infinity": b'{"magic": -Infinity}',
    "overflow": b'{"magic": 1e999}',
    "duplicate": b'{"magic": "GTURBO", "magic": "GTURBO"}',
    "digits": b'{"magic": ' + b"9" * 5000 + b"}",
    "21 digits": b'{"magic": 100000000000000000000}',
    "nested": b'{"magic": ' + b"[" * 200000 + b"]" * 200000 + b"}",
    "65 levels": b'{"magic": ' + b"[" * 64 + b"]" * 64 + b"}",
    "nested objects": b'{"a": ' * 100000 + b"1" + b"}" * 100000,
    "latin1": b'{"magic": "\xff"}',
    "utf16": '{"magic": 1}'.encode("utf-16"),
    "bom": b"\xef\xbb\xbf{}",
    "surrogate": b'{"magic": "\\ud800"}',
    "nul": b'{"magic": "GTURBO"}\0',
}


@pytest.mark.parametrize("data", TEXTS.values(), ids=TEXTS)
def test_text_that_is_not_acceptable_json_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(IndexCorruptError, match=r"manifest\.json"):
        Manifest.read(tmp_path)


def test_a_manifest_above_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(IndexCorruptError, match=r"1099511627776 bytes exceed the limit of 4194304"):
        Manifest.read(tmp_path)


def test_a_document_of_millions_of_values_is_refused(tmp_path: Path) -> None:
    path = Original(tmp_path / "m.gturbo").path
    layout = path / "packed_experts" / "layout.json"
    layout.write_bytes(b'{"layers":[' + b"[]," * (5 << 20) + b"[]]}")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["packed_experts/layout.json"]["size"] = layout.stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexCorruptError, match="values exceed the limit"):
        Install.open(path)


def test_a_directory_without_manifest_is_a_partial_install(tmp_path: Path) -> None:
    with pytest.raises(PartialInstallError, match=r"has no manifest\.json"):
        Install.open(tmp_path)
    with pytest.raises(PartialInstallError, match="not a directory"):
        Install.open(tmp_path / "nowhere")
    with pytest.raises(PartialInstallError):
        Install.open("a\0b")


def test_a_vision_sidecar_directory_is_refused_by_name(tmp_path: Path) -> None:
    path = Original(tmp_path / "m.gturbo").path
    (path / "vision_sidecar.json").write_text("{}")
    with pytest.raises(UnsupportedCapabilityError, match=r"vision_sidecar\.json"):
        Install.open(path)


def test_hadamard_folded_weights_are_refused_by_name(tmp_path: Path) -> None:
    section = {"block": 64, "signs": [{"width": 128, "offset": 0, "bytes": 512}], "folded": ["a"]}

    def edit(manifest: dict) -> None:
        manifest["hadamard"] = section
        manifest["files"]["hadamard.bin"] = {"size": 512, "sha256": "0" * 64}

    with pytest.raises(UnsupportedError, match="Hadamard"):
        Install.open(Original(tmp_path / "m", edit_manifest=edit).path)
    with pytest.raises(MissingFileError, match=r"hadamard\.bin"):
        Install.open(edited(tmp_path, "hadamard", section))


def test_a_production_architecture_needs_a_quant_block(tmp_path: Path) -> None:
    def edit(manifest: dict) -> None:
        del manifest["quant"]
        manifest["arch"] |= {
            "numLayers": 30, "hiddenSize": 2816, "fullAttentionLayerMask": [1] * 30
        }  # fmt: skip

    path = Original(tmp_path / "m", edit_manifest=edit).path
    with pytest.raises(IndexCorruptError, match=r"manifest\.quant is missing"):
        Manifest.read(path)
    # a toy may omit it
    assert Manifest.read(edited(tmp_path, "quant", DELETE)).quant is None


def test_the_first_failure_in_the_documented_order_wins(tmp_path: Path) -> None:
    """capability, magic, version, flags, arch, quant, stride, files."""
    wrong: list[tuple[str, Any, type[TurbosparkError]]] = [
        ("files", {}, MissingFileError),
        ("expertStride", 1, ExpertStrideError),
        ("quant", {}, IndexCorruptError),
        ("arch", {**ARCH, "family": "x"}, UnsupportedArchitectureError),
        ("flags", {"x": True}, UnknownFlagError),
        ("versionMajor", 9, UnsupportedVersionError),
        ("magic", "x", NotAGTurboDirectoryError),
        ("capability", "image-generation", UnsupportedCapabilityError),
    ]
    for n in range(1, len(wrong) + 1):

        def edit(manifest: dict, n: int = n) -> None:
            manifest.update({key: value for key, value, _ in wrong[:n]})

        path = Original(tmp_path / str(n), edit_manifest=edit).path
        with pytest.raises(wrong[n - 1][2]):
            Manifest.read(path)


def test_unknown_keys_and_later_minor_versions_are_accepted(tmp_path: Path) -> None:
    def edit(manifest: dict) -> None:
        manifest |= {"future": [1.5], "versionMinor": 7}
        manifest["arch"]["futureSwitch"] = 3

    Install.open(Original(tmp_path / "m", edit_manifest=edit).path).close()


def test_peek_family_reads_the_wire_string_and_defaults_to_gemma4(tmp_path: Path) -> None:
    assert peek_family(Original(tmp_path / "a").path) == "qwen3moe"
    assert peek_family(edited(tmp_path, "arch", "family", DELETE)) == "gemma4"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.json").write_text('{"arch": {"family": ["x"]}}')
    with pytest.raises(UnsupportedArchitectureError):
        peek_family(tmp_path / "b")
