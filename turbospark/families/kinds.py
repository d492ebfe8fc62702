"""Models whose sliding and full attention layers differ: which layer is which, how each attends.

Knows the config keys of both dialects for windows, ropes and shapes by kind of layer. Does not
know any family's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from turbospark.cache.specs import CacheSpec, FullSpec, RingSpec, SharedSpec
from turbospark.errors import SourceError, UnsupportedError
from turbospark.families.config import ConfigReader
from turbospark.layers.rope import Rope, check_scaling, make_rope

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Kind:
    """Attention of the layers of one kind; `window` None attends to everything.

    `rope` holds `rope_theta` and, unless it is plain, `rope_type` with its numbers.
    """

    kv_heads: int
    head_dim: int
    window: int | None
    rope: dict[str, Any]

    @property
    def cache_spec(self) -> CacheSpec:
        """What a layer of this kind must remember."""
        if self.window is None:
            return FullSpec(self.kv_heads, self.head_dim, self.head_dim)
        return RingSpec(self.kv_heads, self.head_dim, self.head_dim, self.window)

    def make_rope(self, max_position_embeddings: int, factors: np.ndarray | None = None) -> Rope:
        """The rotation of queries and keys; `factors` divide the frequencies of type factors."""
        theta = self.rope["rope_theta"]
        return make_rope(self.head_dim, theta, self.rope, max_position_embeddings, factors=factors)


def read_layer_types(c: ConfigReader, count: int, period: int) -> tuple[str, ...]:
    """The kind of each layer; without `layer_types` every `period`-th is full."""
    types = c.layer_types(count, (SLIDING, FULL))
    if types is None:
        return tuple(FULL if (i + 1) % period == 0 else SLIDING for i in range(count))
    return tuple(types)


def layer_specs(
    kinds: dict[str, Kind], types: tuple[str, ...], sources: tuple[int | None, ...] = ()
) -> list[CacheSpec]:
    """What each layer must remember; one that reads the keys of its source has no memory."""
    own = sources or (None,) * len(types)
    return [
        kinds[kind].cache_spec if source is None else SharedSpec(source)
        for kind, source in zip(types, own, strict=True)
    ]


def read_rope(c: ConfigReader, name: str, supported: tuple[str, ...]) -> dict[str, Any]:
    """The rope of one kind, in a section named after it; its type and numbers are checked."""
    rope = c.section(name)
    if rope is None:
        raise SourceError(f"{c.where}: required key {name} is missing")
    key = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    rope.expect(key, *supported)
    if rope.str(key, "default") != "proportional":
        rope.expect("partial_rotary_factor", 1.0)
    check_scaling(dict(rope.values), proportional=True)
    return dict(rope.values, rope_theta=rope.theta("rope_theta"))


def override_shape(
    c: ConfigReader, name: str, types: tuple[str, ...], shape: dict[str, int]
) -> dict[str, int] | None:
    """`shape` as `per_layer_config` (transformers 5) overrides it for the layers of one kind.

    None without that key. Other overrides, and layers of a kind that differ, are refused.
    """
    overrides = c.section("per_layer_config")
    if overrides is None:
        return None
    found = []
    for i in (i for i, kind in enumerate(types) if kind == name):
        entry = overrides.section(str(i)) or ConfigReader({})
        for key in entry.values.keys() - shape.keys():
            entry.expect(key)
        found.append({key: entry.int(key, value) for key, value in shape.items()})
    if any(other != found[0] for other in found):
        raise UnsupportedError(
            f"{overrides.where} = {found} for {name} layers is not supported; supported: one "
            "shape for all layers of a kind"
        )
    return found[0] if found else shape


def read_sources(c: ConfigReader, types: tuple[str, ...]) -> tuple[int | None, ...]:
    """The layer whose keys and values each layer reads; None where it has its own.

    The last `num_kv_shared_layers` read the last layer before them of their kind.
    """
    shared = c.int("num_kv_shared_layers", 0, minimum=0)
    own = types[: max(len(types) - shared, 0)]
    if set(own) != set(types):
        raise UnsupportedError(
            f"{c.where}: num_kv_shared_layers = {shared} leaves {sorted(set(types) - set(own))} "
            f"layers without keys and values to read (of {len(types)} layers)"
        )
    last = {kind: i for i, kind in enumerate(own)}
    return (*(None for _ in own), *(last[kind] for kind in types[len(own) :]))
