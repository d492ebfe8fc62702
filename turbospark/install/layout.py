"""Reading `packed_experts/layout.json`: every refusal of the documented format and of its gaps.

Knows the JSON of the layout and how to derive a format from plane sizes. Does not read records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from turbospark.dtypes import MODES, Format, Quant, Raw, affine
from turbospark.errors import (
    ExpertStrideError,
    IndexCorruptError,
    TensorShapeError,
    UnsupportedError,
)
from turbospark.install.files import check_relative, check_size, contained, printable, read_json
from turbospark.install.record import (
    ITEM_BYTES,
    PROJECTIONS,
    RECORD_ROLES,
    RecordLayout,
    RecordTensor,
    part_planes,
)

FOLDER = "packed_experts"
LAYOUT_NAME = "layout.json"
LAYOUT_CAP = 64 << 20
STRIDE_UNIT = 4096
"""What readers check; writers use 16384."""

_DTYPES = {
    "u32": "uint32",
    "u8": "uint8",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
}
_INT_KEYS = frozenset(
    {"offset", "size", "bits", "groupSize", "expert", "physicalRank", "layer", "expertStride"}
    | {"numLayers", "expertsPerLayer", "crc32"}
)
_OPTIONAL = frozenset({"bits", "groupSize", "expert", "physicalRank", "expertStride"})


@dataclass(frozen=True)
class LayerRows:
    """One checked layer of the layout: its file, its record and where each expert starts.

    `checksums` by expert id, or None: only our own installs carry them (see `record.checksum`).
    """

    layer: int
    path: Path
    record: RecordLayout
    offsets: tuple[int, ...]
    checksums: tuple[int, ...] | None


def read_layout(install: Path) -> tuple[list[LayerRows], int, int]:
    """(layers by ascending trunk index, experts per layer, largest stride); only stats files."""
    path = contained(install, f"{FOLDER}/{LAYOUT_NAME}", "layout")
    layout = read_json(path, LAYOUT_CAP, _check_object)
    stride, num_layers, count = (
        _get(layout, key, int, LAYOUT_NAME)
        for key in ("expertStride", "numLayers", "expertsPerLayer")
    )
    rows = _get(layout, "layers", list, LAYOUT_NAME)
    if len(rows) != num_layers:
        _corrupt(f"numLayers is {num_layers}; layers[] has {len(rows)}")
    if not rows and (stride or count):
        _corrupt(f"no layers, but expertStride is {stride} and expertsPerLayer {count}")
    if stride % STRIDE_UNIT:
        raise ExpertStrideError(f"{path}: expertStride {stride} is not a multiple of {STRIDE_UNIT}")
    layers: list[LayerRows] = []
    files: set[str] = set()
    for i, row in enumerate(rows):
        layer = _read_layer(install, row, f"layers[{i}]", stride, count)
        if layers and layer.layer <= layers[-1].layer:
            _corrupt(f"layers[{i}] is layer {layer.layer}; layers must ascend")
        if layer.path.name in files:
            _corrupt(f"layers[{i}]: file {layer.path.name} belongs to an earlier layer")
        files.add(layer.path.name)
        layers.append(layer)
    widest = max((layer.record.stride for layer in layers), default=0)
    if widest != stride:
        _corrupt(f"expertStride is {stride}; the widest layer has {widest}")
    return layers, count, stride


def _corrupt(detail: str) -> NoReturn:
    raise IndexCorruptError(f"{LAYOUT_NAME}: {detail}")


def _check_object(found: dict[str, Any]) -> str | None:
    """Integers must be integers wherever they stand: no booleans, floats, strings, negatives."""
    for key in _INT_KEYS & found.keys():
        value = found[key]
        if value is None and key in _OPTIONAL:
            continue
        if type(value) is not int or not 0 <= value < 2**63:
            return f"{key} = {value!r:.60} must be an integer >= 0"
    return None


def _get(row: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(row, dict):
        _corrupt(f"{where} must be an object")
    if type(row.get(key)) is not kind:
        _corrupt(f"{where}.{key} is missing or not of type {kind.__name__}")
    return row[key]


def _optional(row: dict[str, Any], key: str, default: int) -> int:
    value = row.get(key)
    return default if value is None else value


# --- one layer ------------------------------------------------------------------------------------


def _read_layer(install: Path, row: Any, where: str, top: int, count: int) -> LayerRows:
    index = _get(row, "layer", int, where)
    name = _get(row, "file", str, where)
    experts = _get(row, "experts", list, where)
    check_relative(name, f"{LAYOUT_NAME}: {where}.file")
    if "/" in name:
        _corrupt(f"{where}.file '{printable(name)}' must be a plain file name")
    stride = _optional(row, "expertStride", top)
    if not 0 < stride <= top:
        _corrupt(f"{where}.expertStride {stride} is outside 1..{top}, the model's expertStride")
    if stride % STRIDE_UNIT:
        raise ExpertStrideError(
            f"{LAYOUT_NAME}: {where}.expertStride {stride} is not a multiple of {STRIDE_UNIT}"
        )
    if len(experts) != count or not count:
        _corrupt(f"{where} lists {len(experts)} experts; expertsPerLayer is {count}")
    offsets = _expert_offsets(experts, where, stride)
    record = _read_record(experts[0]["tensors"], f"{where}.experts[0]", stride)
    path = contained(install, f"{FOLDER}/{name}", LAYOUT_NAME)
    check_size(path, max(offsets) + stride)
    return LayerRows(index, path, record, offsets, _checksums(experts, where))


def _expert_offsets(experts: list[Any], where: str, stride: int) -> tuple[int, ...]:
    """File offset by expert id, after the checks that need all experts of the layer."""
    count = len(experts)
    offsets: dict[int, int] = {}
    ranks: set[int] = set()
    first = _get(experts[0], "tensors", dict, f"{where}.experts[0]")
    for i, expert in enumerate(experts):
        at = f"{where}.experts[{i}]"
        tensors = _get(expert, "tensors", dict, at)
        offset, size = _get(expert, "offset", int, at), _get(expert, "size", int, at)
        ident, rank = _optional(expert, "expert", i), _optional(expert, "physicalRank", i)
        if ident >= count or rank >= count:
            _corrupt(f"{at}: expert {ident}, physicalRank {rank}; the layer has {count} experts")
        if ident in offsets or rank in ranks:
            _corrupt(f"{at}: expert {ident} or physicalRank {rank} appears twice")
        if size != stride:
            _corrupt(f"{at}.size is {size}; the layer's stride is {stride}")
        if offset % STRIDE_UNIT:
            _corrupt(f"{at}.offset {offset} is not a multiple of {STRIDE_UNIT}")
        if tensors != first:
            _corrupt(f"{at}.tensors differ from those of experts[0]; records must be identical")
        offsets[ident] = offset
        ranks.add(rank)
    ordered = sorted(offsets.values())
    for low, high in pairwise(ordered):
        if high < low + stride:
            _corrupt(f"{where}: records at {low} and {high} overlap; the stride is {stride}")
    return tuple(offsets[e] for e in range(count))


def _checksums(experts: list[Any], where: str) -> tuple[int, ...] | None:
    """CRC-32 by expert id; all experts of a layer have one, or none has."""
    found = {_optional(e, "expert", i): e["crc32"] for i, e in enumerate(experts) if "crc32" in e}
    if not found:
        return None
    if len(found) != len(experts) or max(found.values()) >= 2**32:
        _corrupt(f"{where}: {len(found)} of {len(experts)} experts have a crc32; all need 32 bits")
    return tuple(found[e] for e in range(len(experts)))


# --- one record -----------------------------------------------------------------------------------


def _read_record(tensors: dict[str, Any], where: str, stride: int) -> RecordLayout:
    where = f"{LAYOUT_NAME}: {where}.tensors"
    unknown = [printable(role) for role in tensors if role not in RECORD_ROLES]
    missing = [role for role in PROJECTIONS if role not in tensors]
    if unknown or missing:
        raise IndexCorruptError(f"{where}: unknown roles {unknown}, missing roles {missing}")
    planes = {role: _read_plane(tensors[role], f"{where}.{role}") for role in tensors}
    spans = sorted((p["offset"], p["offset"] + p["size"], role) for role, p in planes.items())
    for (_, end, one), (start, _, two) in pairwise(spans):
        if start < end:
            raise IndexCorruptError(f"{where}: {one} and {two} overlap at {start}")
    used = spans[-1][1]
    if used > stride:
        raise IndexCorruptError(f"{where}: {spans[-1][2]} ends at {used}; the stride is {stride}")
    found: dict[str, RecordTensor] = {}
    if "gate_biases" in planes and "gate_scales" not in planes:
        _refuse_block(planes, where)
    for role in (r for r in planes if not r.endswith(("_scales", "_biases"))):
        group = [role + s for s in ("", "_scales", "_biases") if role + s in planes]
        fmt = _projection_format(planes, role, where)
        found.update(_plane_tensors(planes, role, group, fmt, where))
    if set(found) != set(planes):
        raise IndexCorruptError(f"{where}: {sorted(set(planes) - set(found))} have no projection")
    _check_geometry(found, where)
    return RecordLayout({r: found[r] for r in RECORD_ROLES if r in found}, used, stride)


def _read_plane(row: Any, where: str) -> dict[str, Any]:
    """Check the four mandatory keys of one tensor and bound them."""
    if not isinstance(row, dict):
        raise IndexCorruptError(f"{where} must be an object")
    for key, kind in (("offset", int), ("size", int), ("dtype", str), ("shape", list)):
        if type(row.get(key)) is not kind:
            raise IndexCorruptError(f"{where}.{key} is missing or not of type {kind.__name__}")
    shape = row["shape"]
    if not 1 <= len(shape) <= 2 or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise TensorShapeError(f"{where}.shape {shape[:8]!r:.80} needs 1 or 2 sizes in 1..2^31-1")
    if row["size"] < 1 or row["offset"] + row["size"] >= 2**32:
        raise IndexCorruptError(f"{where}: {row['size']} bytes at {row['offset']} are impossible")
    return row


def _dtype(row: dict[str, Any], where: str) -> str:
    name = row["dtype"].lower()
    if name not in _DTYPES:
        raise UnsupportedError(
            f"{where} is stored as {printable(name)}, which has no MLX kernel; "
            "convert the checkpoint with turbospark instead"
        )
    return _DTYPES[name]


def _refuse_block(planes: dict[str, Any], where: str) -> NoReturn:
    dtype = printable(planes["gate"]["dtype"])
    raise UnsupportedError(
        f"{where}: block records (gate is {dtype}, no gate_scales) have no MLX kernel; "
        "convert the checkpoint with turbospark instead"
    )


def _projection_format(planes: dict[str, Any], role: str, where: str) -> Format:
    """The format our keys name, or the one the original's dtype, shape and sizes imply."""
    row = planes[role]
    dtype = _dtype(row, f"{where}.{role}")
    if dtype != "uint32":
        if dtype == "uint8":
            _refuse_block(planes, where)
        return Raw(dtype)
    scales = planes.get(f"{role}_scales")
    if scales is None or len(row["shape"]) != 2 or len(scales["shape"]) != 2:
        raise TensorShapeError(f"{where}.{role}: packed words need 2 axes and {role}_scales")
    if "mode" in row:
        return _named_format(row, f"{where}.{role}")
    return _derived_format(row, scales, f"{where}.{role}")


def _named_format(row: dict[str, Any], where: str) -> Quant:
    mode, scale = row["mode"], row.get("scaleDtype")
    bits, group = row.get("bits"), row.get("groupSize")
    known = MODES.get(mode) if isinstance(mode, str) else None
    if known is not None and (bits, group, scale) == (known.bits, known.group_size, "uint8"):
        return known
    if mode == "affine" and scale in ("bfloat16", "float16", "float32") and bits and group:
        return affine(bits, group, scale)
    raise UnsupportedError(
        f"{where}: mode {mode!r:.40} with bits {bits!r:.20}, groupSize {group!r:.20}, "
        f"scaleDtype {scale!r:.20} is not a format of this build"
    )


def _derived_format(row: dict[str, Any], scales: dict[str, Any], where: str) -> Quant:
    rows, columns = row["shape"]
    groups = scales["shape"][1]
    if scales["offset"] != row["offset"] + row["size"]:
        raise TensorShapeError(  # a size that is wrong by a factor would look like another width
            f"{where}: {row['size']} bytes leave a gap before {where}_scales at {scales['offset']}"
        )
    bits, rest = divmod(row["size"] * 8, rows * columns)
    if rest or columns % groups:
        raise TensorShapeError(
            f"{where}: {row['size']} bytes for shape {row['shape']} with {groups} groups per row "
            "are no whole number of bits and columns"
        )
    declared = row.get("bits")
    if declared is not None and declared != bits:
        raise TensorShapeError(f"{where}: bits is {declared}; size and shape imply {bits}")
    return affine(bits, columns // groups, _dtype(scales, f"{where}_scales"))


def _plane_tensors(
    planes: dict[str, Any], role: str, group: list[str], fmt: Format, where: str
) -> dict[str, RecordTensor]:
    """Compare the declared planes of one part with what its format implies, byte for byte."""
    row = planes[role]
    shape = tuple(row["shape"])
    if isinstance(fmt, Quant):
        fmt.check_columns(shape[1], f"{where}.{role}")
    wanted = part_planes(role, fmt, shape)
    if set(wanted) != set(group):
        raise TensorShapeError(f"{where}.{role} as {fmt} needs planes {list(wanted)}; has {group}")
    for name, plane in wanted.items():
        found = planes[name]
        at = f"{where}.{name}"
        if _dtype(found, at) != plane.dtype or tuple(found["shape"]) != plane.shape:
            raise TensorShapeError(
                f"{at} is {printable(found['dtype'])} {found['shape']}; "
                f"{fmt} needs {plane.dtype} {list(plane.shape)}"
            )
        if found["size"] != plane.size:
            raise TensorShapeError(f"{at}: {found['size']} bytes; {fmt} needs {plane.size}")
        if found["offset"] % ITEM_BYTES[plane.dtype]:
            raise IndexCorruptError(f"{at}: offset {found['offset']} is misaligned")
    return {n: replace(plane, offset=planes[n]["offset"]) for n, plane in wanted.items()}


def _check_geometry(tensors: dict[str, RecordTensor], where: str) -> None:
    """gate and up are [F, H], down is [H, F], linear biases have their projection's rows."""
    gate, up, down = (tensors[p].shape for p in PROJECTIONS)
    if len(gate) != 2 or up != gate or down != gate[::-1]:
        raise TensorShapeError(
            f"{where}: gate {list(gate)}, up {list(up)}, down {list(down)}; "
            "need [F, H], [F, H], [H, F]"
        )
    for projection in PROJECTIONS:
        bias = tensors.get(f"{projection}_bias")
        if bias is not None and bias.shape != tensors[projection].shape[:1]:
            raise TensorShapeError(
                f"{where}.{projection}_bias has shape {list(bias.shape)}; "
                f"{projection} has {tensors[projection].shape[0]} rows"
            )
