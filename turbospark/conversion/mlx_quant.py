"""How config.json describes MLX-quantized tensors, and what the planes say about it.

Knows the `quantization` section with its per-path exceptions and the shapes of packed planes.
Does not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark.dtypes import MODES, Quant, affine
from turbospark.errors import SourceError, UnsupportedError

COMPANION_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8"}
_SETTINGS = ("bits", "group_size", "mode")
_AFFINE_DEFAULTS = {"bits": 4, "group_size": 64}

Plane = tuple[str, tuple[int, ...]]  # dtype as the container spells it, shape


def check_method(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint quantized by a method whose tensors cannot be read, by its name."""
    section = config.get("quantization_config")
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise SourceError("config.json: quantization_config is not an object")
    method = section.get("quant_method")
    if method not in (None, "mxfp4"):
        raise UnsupportedError(
            f"config.json: quantization_config.quant_method = {method!r} is not supported; "
            "supported: mxfp4, MLX quantization, or an unquantized checkpoint"
        )


@dataclass(frozen=True)
class QuantConfig:
    """The `quantization` section: one default and exceptions by module path."""

    default: Mapping[str, Any] | None
    exceptions: Mapping[str, Any]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> QuantConfig:
        """From a normalised configuration; a checkpoint without the section has no default."""
        section = config.get("quantization")
        if section is None:
            return cls(None, {})
        if not isinstance(section, Mapping):
            raise SourceError("config.json: quantization is not an object")
        exceptions = {k: v for k, v in section.items() if isinstance(v, (Mapping, bool))}
        return cls({k: section[k] for k in _SETTINGS if k in section}, exceptions)

    def geometry(
        self, path: str, weight: tuple[int, ...], scales: Plane | None, biases: Plane | None
    ) -> tuple[Quant, tuple[int, ...]]:
        """Format and logical shape of the packed tensor at module `path`.

        `weight` is the shape in uint32 words. Raises SourceError where the configuration and the
        planes contradict each other or a companion is missing.
        """
        if scales is None:
            raise SourceError(f"tensor {path}.weight is packed (U32) but {path}.scales is missing")
        fmt = self._format(path, scales[0])
        if fmt.has_biases and biases is None:
            raise SourceError(f"tensor {path}.weight is {fmt} but {path}.biases is missing")
        if not fmt.has_biases and biases is not None:
            raise SourceError(f"tensor {path}.weight is {fmt}, which has no biases; found some")
        if biases is not None and biases != scales:
            raise SourceError(
                f"tensor {path}: biases {_plane(biases)} differ from scales {_plane(scales)}"
            )
        return fmt, _logical(path, fmt, weight, scales[1])

    def _format(self, path: str, companion: str) -> Quant:
        settings = self.exceptions.get(path, self.default)
        if settings is None or settings is False:
            said = "no quantization section" if settings is None else "it is not quantized"
            raise SourceError(f"tensor {path}.weight is packed (U32) but config.json says: {said}")
        if settings is True:
            settings = self.default or {}
        mode = settings.get("mode", "affine")
        expected = _format(path, mode, settings)
        found = COMPANION_DTYPES.get(companion, companion)
        allowed = (
            ("bfloat16", "float16", "float32") if mode == "affine" else (expected.scale_dtype,)
        )
        if found not in allowed:
            raise SourceError(
                f"tensor {path}.scales has dtype {companion}; {mode} needs {' or '.join(allowed)}"
            )
        return Quant(expected.mode, expected.bits, expected.group_size, found)


def _format(path: str, mode: Any, settings: Mapping[str, Any]) -> Quant:
    where = f"config.json: quantization of {path}"
    known = _AFFINE_DEFAULTS
    if mode != "affine":
        if mode not in MODES:
            modes = ", ".join(("affine", *MODES))
            raise UnsupportedError(f"{where}: mode {mode!r} is not supported; supported: {modes}")
        known = {"bits": MODES[mode].bits, "group_size": MODES[mode].group_size}
    bits, group = (settings.get(k, known[k]) for k in ("bits", "group_size"))
    if type(bits) is not int or type(group) is not int:
        raise SourceError(f"{where}: bits = {bits!r}, group_size = {group!r}; expected integers")
    if mode == "affine":
        try:
            return affine(bits, group)
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}: {error}") from error
    if (bits, group) != (known["bits"], known["group_size"]):
        raise SourceError(
            f"{where}: {mode} has bits={known['bits']}, group_size={known['group_size']}; "
            f"found bits={bits}, group_size={group}"
        )
    return MODES[mode]


def _logical(
    path: str, fmt: Quant, weight: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, ...]:
    columns = weight[-1] * 32 // fmt.bits if weight else 0
    agree = len(weight) >= 2 and weight[:-1] == scales[:-1] and columns % fmt.group_size == 0
    if not agree or fmt.words(columns) != weight[-1] or scales[-1] != columns // fmt.group_size:
        raise SourceError(
            f"tensor {path}: weight {list(weight)} words and scales {list(scales)} do not fit "
            f"{fmt} as config.json says; {weight[-1] if weight else 0} words are "
            f"{columns} columns, or {columns / fmt.group_size:g} groups"
        )
    return (*weight[:-1], columns)


def _plane(plane: Plane) -> str:
    return f"{plane[0]} {list(plane[1])}"
