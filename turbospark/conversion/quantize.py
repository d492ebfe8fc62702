"""Which tensors a conversion quantizes, and to what.

Knows the caller's wishes (`bits`, `group_size`, `mode`, overrides by name) and which tensors are
matrices. Does not read or write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from turbospark.conversion.plan import Plan, Provider, expert_name
from turbospark.conversion.source import listed
from turbospark.dtypes import AFFINE_GROUPS, MODES, Format, Quant, Raw, affine
from turbospark.errors import OptionError, UnsupportedError

# A wrong choice of experts costs more than the bits saved: routers get eight of them.
ROUTER = re.compile(r"(^|\.)(mlp\.gate|router|router\.proj|shared_expert_gate)\.weight$")
_ROUTER_BITS = 8
# One output per head: nothing to save, and each gates a whole head (mlx-lm keeps it too).
HEAD_GATE = re.compile(r"\.self_attn\.g_proj\.weight$")
Overrides = Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True)
class QuantRequest:
    """What the caller asked for; `settings` is None where formats stay as they are."""

    settings: Mapping[str, Any] | None
    overrides: Overrides

    @classmethod
    def of(
        cls, bits: int | None, group_size: int | None, mode: str, overrides: Overrides | None
    ) -> QuantRequest:
        """Check the options. Raises OptionError, UnsupportedError."""
        if overrides is not None and not isinstance(overrides, Mapping):
            raise OptionError(f"overrides={overrides!r}; expected a mapping of patterns")
        overrides = dict(overrides or {})
        for pattern, value in overrides.items():
            if not isinstance(pattern, str):
                raise OptionError(f"overrides: pattern {pattern!r}; expected a string")
            if value is not None:
                _format(f"override {pattern!r}", value, "bfloat16")
        if bits is None and mode == "affine":
            if group_size is not None and not overrides:
                raise OptionError(f"group_size={group_size} was given without bits")
            return cls(None, overrides)
        settings = {"bits": bits, "group_size": group_size, "mode": mode}
        settings = {k: v for k, v in settings.items() if v is not None}
        _format("convert", settings, "bfloat16")
        return cls(settings, overrides)


def choose_formats(plan: Plan, request: QuantRequest) -> dict[str, Format]:
    """The stored format of every canonical name (`expert_name` for routed experts).

    Raises UnsupportedError for columns that do not divide, OptionError for overrides that match
    nothing or a tensor that is already quantized.
    """
    formats: dict[str, Format] = {}
    tables = {table.name for table in plan.tables.values()}
    chosen: set[str] = set()
    bad: list[str] = []
    matched: set[str] = set()
    for name, provider in targets(plan):
        fmt, pattern = _wanted(name, provider, request)
        if name in tables and not pattern:
            fmt = _narrowed(fmt, provider)
        matched.update(pattern)
        formats[name] = fmt
        if fmt != provider.fmt and isinstance(fmt, Quant):
            chosen.add(name)
            if provider.shape[-1] % fmt.group_size:
                bad.append(_indivisible(name, provider.shape[-1], fmt))
    unmatched = [p for p in request.overrides if p not in matched]
    if unmatched:
        raise OptionError(f"overrides match no tensor: {listed(unmatched)}")
    if bad:
        raise UnsupportedError(f"cannot be quantized: {listed(bad)}")
    if request.settings is not None and not chosen:
        asked = ", ".join(f"{name}={value}" for name, value in request.settings.items())
        kept = sorted({str(f) for f in formats.values() if isinstance(f, Quant)})
        raise OptionError(
            f"{asked}: nothing to quantize, every matrix is already quantized "
            f"({listed(kept)}); leave quantization out to keep it, or take an unquantized source"
        )
    return formats


def targets(plan: Plan) -> Iterator[tuple[str, Provider]]:
    """(canonical name, provider) of every resident tensor, table and role of every layer."""
    yield from plan.resident.items()
    for table in plan.tables.values():
        yield table.name, table.parts[0]
    for layer, roles in plan.experts.items():
        for role, providers in roles.items():
            yield expert_name(layer, role), providers[0]


def is_matrix(name: str, provider: Provider) -> bool:
    """Whether a tensor is a linear map or an embedding: norms and convolutions are not."""
    return len(provider.shape) == 2 and name.endswith(".weight") and "conv" not in name


def _wanted(name: str, provider: Provider, request: QuantRequest) -> tuple[Format, list[str]]:
    """The format of one tensor and the override patterns that match it; the last one counts."""
    patterns = [p for p in request.overrides if fnmatchcase(name, p)]
    stored = provider.fmt
    settings = request.overrides[patterns[-1]] if patterns else request.settings
    if settings is None or (not patterns and HEAD_GATE.search(name)):
        return stored, patterns
    if isinstance(stored, Quant) or not is_matrix(name, provider):
        if not patterns:
            return stored, patterns
        what = f"already {stored}" if isinstance(stored, Quant) else "not a matrix"
        raise OptionError(f"override {patterns[-1]!r} matches {name}, which is {what}")
    if not patterns and ROUTER.search(name):
        group = settings.get("group_size", 64) if settings.get("mode") == "affine" else 64
        settings = {"bits": _ROUTER_BITS, "group_size": group}
    return _format(name, settings, stored.dtype), patterns


def _narrowed(fmt: Format, provider: Provider) -> Format:
    """A table's format with groups that divide its rows, which are short; as stored if none do."""
    if not isinstance(fmt, Quant) or provider.shape[-1] % fmt.group_size == 0:
        return fmt
    groups = [g for g in AFFINE_GROUPS if provider.shape[-1] % g == 0 and g < fmt.group_size]
    if fmt.mode != "affine" or not groups:
        return provider.fmt
    return affine(fmt.bits, max(groups), fmt.scale_dtype)


def _format(what: str, settings: Mapping[str, Any], dtype: str) -> Quant:
    if not isinstance(settings, Mapping):
        raise OptionError(f"{what}: {settings!r}; expected bits, group_size, mode, or None")
    unknown = set(settings) - {"bits", "group_size", "mode"}
    if unknown:
        raise OptionError(f"{what}: unknown setting {sorted(unknown)[0]!r}; bits, group_size, mode")
    mode = settings.get("mode", "affine")
    for key in ("bits", "group_size"):
        if key in settings and type(settings[key]) is not int:
            raise OptionError(f"{what}: {key}={settings[key]!r}; expected an integer")
    if mode == "affine":
        if "bits" not in settings:
            raise OptionError(f"{what}: affine quantization needs bits")
        try:
            return affine(settings["bits"], settings.get("group_size", 64), dtype)
        except UnsupportedError as error:  # what a caller asks is an option, not a checkpoint
            raise OptionError(f"{what}: {error}") from None
    if not isinstance(mode, str) or mode not in MODES:
        raise OptionError(f"{what}: mode {mode!r} is unknown; affine, {', '.join(MODES)}")
    fmt = MODES[mode]
    for key, fixed in (("bits", fmt.bits), ("group_size", fmt.group_size)):
        if settings.get(key, fixed) != fixed:
            raise OptionError(f"{what}: {mode} has {key}={fixed}; got {settings[key]}")
    return fmt


def _indivisible(name: str, columns: int, fmt: Quant) -> str:
    groups = [g for g in AFFINE_GROUPS if columns % g == 0]
    works = f"group_size {groups} or an override None" if groups else "an override None"
    return f"{name} ({columns} columns, group_size {fmt.group_size}; works: {works})"


def changed(fmt: Format, stored: Format) -> bool:
    """Whether a tensor of `stored` format must be quantized to become `fmt`."""
    return isinstance(stored, Raw) and isinstance(fmt, Quant)
