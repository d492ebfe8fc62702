"""`manifest.json`: what an install is, which files it has, what its architecture is.

Knows the documented keys, limits and the order of checks. Does not look into any other file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turbospark.errors import (
    ExpertStrideError,
    IndexCorruptError,
    MissingFileError,
    NotAGTurboDirectoryError,
    PartialInstallError,
    SourceError,
    UnknownFlagError,
    UnsupportedArchitectureError,
    UnsupportedCapabilityError,
    UnsupportedError,
    UnsupportedVersionError,
)
from turbospark.install.arch import (
    KNOWN_WIRES,
    PRODUCTION_PAIRS,
    ArchConfig,
    check_match,
    validation_error,
)
from turbospark.install.files import (
    check_relative,
    contained,
    is_dir,
    mode,
    parse_json,
    printable,
    read_capped,
)
from turbospark.install.layout import FOLDER, LAYOUT_NAME, STRIDE_UNIT
from turbospark.install.quant import check_quant
from turbospark.install.resident import FILE_NAME

MANIFEST_NAME = "manifest.json"
MANIFEST_CAP = 4 << 20
MAGIC = "GTURBO"
FLAGS = ("streamingPresent", "turboQuantKV", "aneSharedExpert")
EXTENSION = "turbospark"
"""Our own key in a manifest; original readers ignore unknown keys."""

_LAYER_FILE = re.compile(rf"{FOLDER}/layer_(\d{{1,6}})\.bin")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

Size = Annotated[int, Field(ge=0, le=2**63 - 1)]


class FileEntry(BaseModel):
    """Declared size and SHA-256 of one file."""

    model_config = ConfigDict(frozen=True, strict=True)

    size: Size
    sha256: str


class Manifest(BaseModel):
    """A checked manifest. Attribute names are the manifest's keys in snake case."""

    model_config = ConfigDict(frozen=True, strict=True, populate_by_name=True)

    version_major: Size = Field(alias="versionMajor")
    version_minor: Size = Field(alias="versionMinor")
    flags: dict[str, bool]
    model_id: str = Field(alias="modelID")
    source_snapshot_hash: str | None = Field(default=None, alias="sourceSnapshotHash")
    arch: ArchConfig
    quant: dict[str, Any] | None = None
    files: dict[str, FileEntry]
    experts_per_layer: Size = Field(alias="expertsPerLayer")
    num_layers: Size = Field(alias="numLayers")
    expert_stride: Size = Field(alias="expertStride")
    hadamard: dict[str, Any] | None = None
    extension: dict[str, Any] = Field(default_factory=dict, alias="turbospark")
    sha256: str = ""
    """Hash of manifest.json itself, as it was read."""

    @classmethod
    def read(cls, directory: Path | str, expecting: ArchConfig | None = None) -> Manifest:
        """Read and check `directory/manifest.json`; the first failure wins.

        Raises ModelFormatError subclasses and UnsupportedError subclasses by name.
        """
        data = read_manifest_bytes(Path(directory))
        raw = parse_json(data, MANIFEST_NAME)
        arch = _check_head(raw, expecting)
        extension = raw.get(EXTENSION, {})
        if not isinstance(extension, dict):
            raise IndexCorruptError(f"manifest.{EXTENSION} must be an object")
        _check_quant(raw, arch, extension)
        known = {f.alias or name for name, f in cls.model_fields.items()} - {"arch", "sha256"}
        fields = {key: value for key, value in raw.items() if key in known}
        try:
            manifest = cls.model_validate(
                {**fields, "arch": arch, "sha256": hashlib.sha256(data).hexdigest()}
            )
        except ValidationError as err:
            raise validation_error("manifest", err) from None
        _check_stride(manifest)
        _check_files(manifest)
        _check_hadamard(manifest)
        return manifest


def read_manifest_bytes(directory: Path) -> bytes:
    """The bytes of manifest.json. Raises PartialInstallError, IndexCorruptError, ReadError."""
    path = directory / MANIFEST_NAME
    if not mode(path):
        kind = "directory" if is_dir(directory) else "path"
        raise PartialInstallError(
            f"{kind} {directory} has no {MANIFEST_NAME}: not an install, or never completed; "
            "a checkpoint is opened after `turbospark convert`"
        )
    return read_capped(contained(directory, MANIFEST_NAME, "install"), MANIFEST_CAP)


def peek_family(directory: Path | str) -> str:
    """The family's wire string; an absent one means gemma4."""
    raw = parse_json(read_manifest_bytes(Path(directory)), MANIFEST_NAME)
    arch = raw.get("arch")
    family = arch.get("family", "gemma4") if isinstance(arch, dict) else None
    if family not in KNOWN_WIRES:
        raise UnsupportedArchitectureError(
            f"manifest.arch.family = {printable(repr(family))}; "
            f"this build knows {', '.join(KNOWN_WIRES)}"
        )
    return str(family)


# --- the documented order -------------------------------------------------------------------------


def _check_head(raw: dict[str, Any], expecting: ArchConfig | None) -> ArchConfig:
    """capability, magic, version, flags, arch."""
    capability = raw.get("capability")
    if capability == "image-generation":
        raise UnsupportedCapabilityError(
            f'manifest.capability = "{capability}": an install of another product'
        )
    if raw.get("magic") != MAGIC:
        raise NotAGTurboDirectoryError(
            f'manifest.magic = {printable(repr(raw.get("magic")))}; expected "{MAGIC}"'
        )
    major, minor = raw.get("versionMajor"), raw.get("versionMinor")
    if type(major) is not int or type(minor) is not int:
        raise IndexCorruptError("manifest.versionMajor and versionMinor must be integers")
    if major != 1:
        raise UnsupportedVersionError(f"manifest version {major}.{minor}; this build reads 1.x")
    flags = raw.get("flags")
    if not isinstance(flags, dict) or not all(type(v) is bool for v in flags.values()):
        raise IndexCorruptError("manifest.flags must be an object of booleans")
    for name in flags:
        if name not in FLAGS:
            raise UnknownFlagError(
                f'manifest.flags has unknown key "{printable(name)}"; known: {", ".join(FLAGS)}'
            )
    if flags.get("turboQuantKV"):
        raise UnsupportedError(
            "manifest.flags.turboQuantKV = true; KV quantization is an option of opening, "
            "not a property of an install"
        )
    arch = ArchConfig.from_manifest(raw.get("arch"))
    if expecting is not None:
        check_match(expecting, arch)
    return arch


def _check_quant(raw: dict[str, Any], arch: ArchConfig, extension: dict[str, Any]) -> None:
    if raw.get("quant") is not None:
        check_quant(raw["quant"])
    elif (arch.num_layers, arch.hidden_size) in PRODUCTION_PAIRS and "quant" not in extension:
        raise IndexCorruptError(
            f"manifest.quant is missing; an install with numLayers {arch.num_layers} and "
            f"hiddenSize {arch.hidden_size} must describe its quantization"
        )


def _check_stride(manifest: Manifest) -> None:
    stride, layers, experts = (
        manifest.expert_stride,
        manifest.num_layers,
        manifest.experts_per_layer,
    )
    if stride % STRIDE_UNIT:
        raise ExpertStrideError(
            f"manifest.expertStride {stride} is not a multiple of {STRIDE_UNIT}"
        )
    if experts != manifest.arch.num_experts:
        raise IndexCorruptError(
            f"manifest.expertsPerLayer is {experts}; arch.numExperts is {manifest.arch.num_experts}"
        )
    if not experts and stride:
        raise IndexCorruptError(f"manifest.expertStride is {stride} in a model without experts")
    if experts and not 0 < layers <= manifest.arch.num_layers:
        raise IndexCorruptError(
            f"manifest.numLayers is {layers}; a routed model of {manifest.arch.num_layers} layers "
            "has between 1 and that many layer files"
        )


def _check_files(manifest: Manifest) -> None:
    """Safe names, good hashes, and every required file listed."""
    for name, entry in manifest.files.items():
        check_relative(name, "manifest.files")
        if name == MANIFEST_NAME:
            raise IndexCorruptError(f"manifest.files lists {MANIFEST_NAME} itself")
        if not _SHA256.fullmatch(entry.sha256):
            raise IndexCorruptError(f"manifest.files[{name}].sha256 is not 64 hex digits")
    _require(manifest, FILE_NAME, f"{FOLDER}/{LAYOUT_NAME}")
    indices = [int(m[1]) for name in manifest.files if (m := _LAYER_FILE.fullmatch(name))]
    expected = manifest.num_layers if manifest.experts_per_layer else 0
    if len(indices) < expected or len(set(indices)) != len(indices):
        raise MissingFileError(
            f"manifest.files lists {len(set(indices))} expert layer files "
            f"({FOLDER}/layer_NN.bin); numLayers is {expected}"
        )
    if manifest.arch.has_vision:
        _require(manifest, "packed_vision/layout.json", "packed_vision/blobs.bin")


def _require(manifest: Manifest, *names: str) -> None:
    for name in names:
        if name not in manifest.files:
            raise MissingFileError(f"manifest.files lacks required file {name}")


def _check_hadamard(manifest: Manifest) -> None:
    section = manifest.hadamard
    if section is None:
        return
    block = section.get("block")
    if type(block) is not int or not 0 < block <= 4096 or block & (block - 1):
        raise IndexCorruptError("manifest.hadamard.block must be a power of two in 1..4096")
    signs = section.get("signs")
    if not isinstance(signs, list):
        raise IndexCorruptError("manifest.hadamard.signs must be a list")
    for sign in signs:
        keys = ("width", "offset", "bytes")
        values = [sign.get(key) for key in keys] if isinstance(sign, dict) else [None]
        if not all(type(v) is int and v >= 0 for v in values):
            raise IndexCorruptError("manifest.hadamard.signs needs integers width, offset, bytes")
        width, _, count = values
        if not width or width % block or count != 4 * width:
            raise IndexCorruptError(
                f"manifest.hadamard.signs: width {width} must be a multiple of block {block} "
                f"and bytes {count} four times width"
            )
    folded, inverse = section.get("folded", []), section.get("inverse", [])
    if not isinstance(folded, list) or not isinstance(inverse, list) or not (folded or inverse):
        raise IndexCorruptError("manifest.hadamard needs folded or inverse tensor names")
    _require(manifest, "hadamard.bin")


# --- writing --------------------------------------------------------------------------------------


def manifest_bytes(
    *,
    arch: ArchConfig,
    model_id: str,
    files: Mapping[str, tuple[int, str]],
    num_layers: int,
    experts_per_layer: int,
    expert_stride: int,
    quant: dict[str, Any] | None = None,
    extension: Mapping[str, Any] | None = None,
    source_snapshot_hash: str | None = None,
) -> bytes:
    """The text of a manifest. `files` maps relative paths to (size, sha256)."""
    manifest: dict[str, Any] = {
        "magic": MAGIC,
        "versionMajor": 1,
        "versionMinor": 0,
        "flags": dict.fromkeys(FLAGS, False) | {"streamingPresent": num_layers > 0},
        "modelID": model_id,
        "sourceSnapshotHash": source_snapshot_hash,
        "arch": arch.to_manifest(),
        "quant": quant,
        "files": {name: {"size": size, "sha256": sha} for name, (size, sha) in files.items()},
        "expertsPerLayer": experts_per_layer,
        "numLayers": num_layers,
        "expertStride": expert_stride,
    }
    if extension is not None:
        manifest[EXTENSION] = dict(extension)
    try:
        data = json.dumps(manifest, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as err:
        raise SourceError(f"{MANIFEST_NAME} cannot hold this configuration: {err}") from None
    if len(data) > MANIFEST_CAP:
        raise UnsupportedError(
            f"{MANIFEST_NAME} would take {len(data)} bytes; readers accept {MANIFEST_CAP}"
        )
    return data
