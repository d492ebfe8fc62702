"""Reading config.json in both dialects, with every assumed value checked.

Knows the hub dialect (flat keys, `rope_scaling`) and the one transformers 5 saves
(`rope_parameters`, `dtype`). Does not know any family's defaults.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping
from typing import Any

from turbospark.errors import SourceError, UnsupportedError

# Text settings that multimodal wrappers keep beside `text_config`.
_TIED = "tie_word_embeddings"
_OUTER_KEYS = (
    _TIED, "eos_token_id", "bos_token_id", "pad_token_id",
    "quantization", "quantization_config", "torch_dtype", "dtype",
)  # fmt: skip


def normalize_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """One flat text configuration in the hub dialect.

    `text_config` is lifted; the inner value of a key wins where both levels have it, but two that
    contradict each other about a tied head leave None: releases of transformers differ in which
    they follow. A flat `rope_parameters` becomes `rope_theta` + `rope_scaling`; one keyed by layer
    type stays.
    """
    if not isinstance(raw, Mapping):
        raise SourceError(f"config.json holds {type(raw).__name__}; expected an object")
    text = raw.get("text_config")
    if text is None:
        config = dict(raw)
    elif isinstance(text, Mapping):
        config = {k: raw[k] for k in _OUTER_KEYS if k in raw}
        config.update({k: v for k, v in text.items() if v is not None or k not in config})
        if raw.get(_TIED) not in (None, config.get(_TIED)):
            config[_TIED] = None
        config.setdefault("model_type", raw.get("model_type"))
        config["architectures"] = raw.get("architectures")
    else:
        raise SourceError(f"config.json: text_config is {type(text).__name__}; expected an object")
    _flatten_rope(config)
    if "torch_dtype" not in config and "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if "quantization" not in config and _is_mlx(config.get("quantization_config")):
        config["quantization"] = config["quantization_config"]
    return config


def _is_mlx(quantization: Any) -> bool:
    return isinstance(quantization, Mapping) and {"group_size", "bits"} <= set(quantization)


def _flatten_rope(config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        return
    scaling = dict(config.pop("rope_parameters"))
    theta = scaling.pop("rope_theta", None)
    partial = scaling.pop("partial_rotary_factor", None)
    if theta is not None:
        config["rope_theta"] = theta
    if partial is not None:
        config["partial_rotary_factor"] = partial
    plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    extra = {k: v for k, v in scaling.items() if k.startswith("mrope")}
    config["rope_scaling"] = (extra or None) if plain else scaling


class ConfigReader:
    """Typed access to one configuration; every complaint names the key and the value found."""

    def __init__(
        self, values: Mapping[builtins.str, Any], where: builtins.str = "config.json"
    ) -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: builtins.str) -> builtins.bool:
        return self.values.get(key) is not None

    def raw(self, key: builtins.str, default: Any = None) -> Any:
        """The value as it stands; None counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def int(
        self, key: builtins.str, default: builtins.int | None = None, minimum: builtins.int = 1
    ) -> builtins.int:
        """A whole number >= minimum."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
            raise self._bad(key, value, "a whole number")
        if value < minimum:
            raise self._bad(key, value, f"at least {minimum}")
        if value >= 2**63:
            raise self._bad(key, value, "a number below 2^63")
        return int(value)

    def float(
        self,
        key: builtins.str,
        default: builtins.float | None = None,
        minimum: builtins.float = -math.inf,
    ) -> builtins.float:
        """A finite number >= minimum."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._bad(key, value, "a number")
        if not math.isfinite(value):
            raise self._bad(key, value, "a finite number")
        if value < minimum:
            raise self._bad(key, value, f"at least {minimum:g}")
        return float(value)

    def theta(self, key: builtins.str, default: builtins.float | None = None) -> builtins.float:
        """The base of rotary frequencies: a number above 1."""
        value = self.float(key, default)
        if value <= 1:
            raise self._bad(key, value, "a number above 1")
        return value

    def eps(self, key: builtins.str, default: builtins.float | None = None) -> builtins.float:
        """What a norm adds to a mean square: a number >= 0."""
        return self.float(key, default, minimum=0)

    def bool(self, key: builtins.str, default: builtins.bool | None = None) -> builtins.bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def str(self, key: builtins.str, default: builtins.str | None = None) -> builtins.str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._bad(key, value, "a string")
        return value

    def list(
        self, key: builtins.str, length: builtins.int | None = None
    ) -> builtins.list[Any] | None:
        """A list, of `length` entries if given; None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self._bad(key, value, "a list")
        if length is not None and len(value) != length:
            raise self._bad(key, f"{len(value)} entries", f"{length} entries")
        return value

    def section(self, key: builtins.str) -> ConfigReader | None:
        """A nested object as a reader of its own; None when absent."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._bad(key, value, "an object")
        return ConfigReader(value, f"{self.where}: {key}")

    def expect(self, key: builtins.str, *supported: Any) -> None:
        """Refuse a value other than those the family computes; absent or null is accepted."""
        value = self.values.get(key)
        if value is not None and value not in supported:
            allowed = " or ".join(repr(v) for v in supported) or "leaving it out"
            raise UnsupportedError(
                f"{self.where}: {key} = {value!r} is not supported; supported: {allowed}"
            )

    def layer_types(
        self, count: builtins.int, supported: tuple[builtins.str, ...]
    ) -> builtins.list[builtins.str] | None:
        """`layer_types` with each entry checked; None when absent."""
        kinds = self.list("layer_types", count)
        for i, kind in enumerate(kinds or ()):
            if kind not in supported:
                raise UnsupportedError(
                    f"{self.where}: layer_types[{i}] = {kind!r} is not supported; "
                    f"supported: {', '.join(supported)}"
                )
        return kinds

    def _value(self, key: builtins.str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise SourceError(f"{self.where}: required key {key} is missing")
        return value

    def _bad(self, key: builtins.str, value: Any, expected: builtins.str) -> SourceError:
        return SourceError(f"{self.where}: {key} = {value!r}; expected {expected}")
