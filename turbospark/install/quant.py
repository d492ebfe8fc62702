"""The `quant` block of a manifest: which geometry each component has, as the original gates it.

Knows the five slots and the accepted combinations. Does not know tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turbospark.dtypes import Format, Quant, Raw
from turbospark.errors import IndexCorruptError
from turbospark.install.files import printable

SLOTS = ("embedding", "attention", "router", "sharedExpert", "routedExpert")

_BF16_BITS = {
    "embedding": (4,),
    "attention": (4,),
    "router": (8,),
    "sharedExpert": (4, 8),
    "routedExpert": (2, 4),
}
_LOW_BITS = (1, 2)  # fp16 companions, group 128: every slot
_RAW_ROUTER = (32, "raw", "none", "none", 0)
_EXECUTABLE_GGUF = (
    *("q8_0", "q4_k", "q5_k", "q6_k", "mxfp4", "q2_k"),
    *("iq3_xxs", "iq4_nl", "iq4_xs", "iq2_xxs", "iq2_xs", "iq1_s", "iq3_s", "iq2_s", "iq1_m"),
)
_KEYS = ("weightBits", "scheme", "scaleType", "biasType", "groupSize")
_SCALE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _row(slot: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(slot.get(key) for key in _KEYS)


def _accepted(name: str) -> list[tuple[Any, ...]]:
    """Every (bits, scheme, scale, bias, group) the original accepts in a slot, GGUF aside."""
    found = [(bits, "affine", "bf16", "bf16", 64) for bits in _BF16_BITS[name]]
    found += [(bits, "affine", "fp16", "fp16", 128) for bits in _LOW_BITS]
    return [*found, _RAW_ROUTER] if name == "router" else found


def check_quant(quant: object) -> None:
    """Refuse a block with a slot outside the accepted combinations. Raises IndexCorruptError."""
    if not isinstance(quant, dict):
        raise IndexCorruptError("manifest.quant must be an object")
    for name in SLOTS:
        slot = quant.get(name)
        where = f"manifest.quant.{name}"
        if not isinstance(slot, dict):
            raise IndexCorruptError(f"{where} is missing or not an object")
        for key in ("weightBits", "groupSize"):
            if key in slot and type(slot[key]) is not int:
                raise IndexCorruptError(f"{where}.{key} must be an integer")
        if name != "attention" and slot == quant.get("attention"):
            continue  # the default of a component that the model lacks
        if slot.get("scheme") == "gguf":
            _check_gguf(slot, where)
        elif _row(slot) not in _accepted(name):
            raise IndexCorruptError(
                f"{where}: (bits, scheme, scale, bias, group) = "
                f"{printable(repr(_row(slot)))} is not one of {_accepted(name)}"
            )


def _check_gguf(slot: dict[str, Any], where: str) -> None:
    types = slot.get("ggmlTypes")
    if types is None:
        types = [slot.get("ggmlType")]
    if not isinstance(types, list) or not types or not all(isinstance(t, str) for t in types):
        raise IndexCorruptError(f"{where}: ggmlType or ggmlTypes must name GGUF types")
    bad = [printable(t) for t in types if t.lower() not in _EXECUTABLE_GGUF]
    if bad:
        raise IndexCorruptError(
            f"{where}: GGUF types {bad} are not executable; known: {', '.join(_EXECUTABLE_GGUF)}"
        )


def quant_block(slots: Mapping[str, Format | None]) -> dict[str, Any] | None:
    """The block for these formats, or None where the original would refuse it.

    `slots` maps slot names to formats; a component that the model lacks (absent or None) takes
    the attention slot.
    """
    attention = slots.get("attention")
    block = {}
    for name in SLOTS:
        fmt = slots.get(name) or attention
        row = None if fmt is None else _slot(fmt)
        missing = fmt is attention and slots.get(name) is None
        if row is None or not (missing or _row(row) in _accepted(name)):
            return None
        block[name] = row
    return block


def _slot(fmt: Format) -> dict[str, Any] | None:
    if isinstance(fmt, Quant) and fmt.mode == "affine":
        scale = _SCALE_NAMES[fmt.scale_dtype]
        values: tuple[Any, ...] = (fmt.bits, "affine", scale, scale, fmt.group_size)
    elif fmt == Raw("float32"):
        values = _RAW_ROUTER
    else:
        return None
    return dict(zip(_KEYS, values, strict=True))
