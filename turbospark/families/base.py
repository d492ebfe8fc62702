"""What a family declares: how its checkpoint is read, named, shaped and run.

Knows the vocabulary shared by all families. Does not know any one architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from turbospark.cache.specs import CacheSpec
from turbospark.cache.state import LayerStates
from turbospark.experts.base import ExpertStore
from turbospark.experts.mlp import ExpertMLP
from turbospark.families.config import ConfigReader
from turbospark.install.arch import ArchConfig
from turbospark.install.planes import Planes
from turbospark.layers.moe import swiglu


@dataclass(frozen=True)
class ExpertShape:
    """Routed experts of one layer: gate and up are [width, hidden], down is [hidden, width].

    With `bias`, each projection has a per-expert bias vector.
    """

    count: int
    hidden: int
    width: int
    bias: bool = False

    def matrix(self, projection: str) -> tuple[int, int]:
        """Logical (rows, columns) of one expert's projection."""
        return (self.hidden, self.width) if projection == "down" else (self.width, self.hidden)


@dataclass(frozen=True)
class Piece:
    """One canonical tensor (or one part of the routed experts) found in a source tensor.

    Resident: `target` is the canonical name. Routed: `target` is None, `layer` and `role` ("gate",
    "up", "down", or "gate_bias", ...) say where it goes; `expert` is its number, or None when the
    source's leading axis counts the experts. Several source tensors that are runs of one matrix's
    rows, or of a table's: `target` is its name and `part` the place of these rows. `rows` picks
    rows of the source (of each expert's matrix when stacked); `transform` is applied to the picked
    planes (of one expert at a time).
    """

    target: str | None = None
    layer: int | None = None
    role: str | None = None
    expert: int | None = None
    rows: slice | None = None
    transform: Callable[[Planes], Planes] | None = None
    part: int | None = None


@dataclass(frozen=True)
class Capabilities:
    """What a family can do; refusal texts and `supports_*` both read these fields.

    A field is None where the feature works and holds the cause where it does not. Steering works
    only where a family says so: an edit at the wrong point of a layer would go unnoticed.
    """

    chunked_prefill: str | None = None
    steering: str | None = "where its stream is edited has not been settled"
    kv_quant: str | None = None
    prefix_reuse: str | None = None
    session_pool: str | None = None
    drafters: tuple[str, ...] = ()


NOT_BUILT: tuple[str, ...] = ()
"""Capabilities that no build has yet: declared by families, refused at open, left out of tables."""


AfterLayer = Callable[[int, mx.array], mx.array]
"""Called with a layer's number and output [1, L, hidden]; what it returns goes on."""


class Model(Protocol):
    """A family's forward pass over arrays already in memory. Batch is always one row of ids."""

    vocab_size: int
    cache_specs: list[CacheSpec]

    def __call__(
        self,
        ids: mx.array,
        states: LayerStates,
        after_layer: AfterLayer | None = None,
    ) -> mx.array:
        """ids int32 [1, L] -> residual stream [1, L, hidden] before the final norm."""

    def final_norm(self, hidden: mx.array) -> mx.array:
        """[1, L, hidden] -> what the output head reads."""

    def head(self, hidden: mx.array) -> mx.array:
        """[1, L, hidden] before the final norm -> float32 logits [1, L, vocab]."""


Activation = Callable[[mx.array, mx.array], mx.array]
Block = Callable[[mx.array, Any], mx.array]
Hold = Callable[[dict[int, ExpertMLP]], ExpertStore]
"""A store of experts by layer that are in memory already."""


@dataclass(frozen=True)
class DraftHead:
    """What a family knows of its multi-token-prediction head; the rest is the same in all.

    Each function takes the family's config.
    """

    tensors: Callable[[Any], Mapping[str, tuple[int, ...]]]
    """Every tensor of a whole head and its shape; none where the family has no such head."""
    memory: Callable[[Any], list[CacheSpec]]
    """A cache for each block."""
    blocks: Callable[[Any, Any, int, Hold], Sequence[Block]]
    """(config, weights, index of the first block's cache, what holds experts) -> the blocks."""
    norms: Callable[[Any], tuple[float, bool]]
    """(eps, centred) of the head's norms."""


@dataclass(frozen=True)
class Family:
    """One architecture family: one file, one row of the registry."""

    name: str
    model_types: tuple[str, ...]
    wires: tuple[str, ...]
    read_config: Callable[[ConfigReader], Any]
    arch: Callable[[Any], ArchConfig]
    config_from_arch: Callable[[ArchConfig], dict[str, Any]]
    weight_shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    cache_specs: Callable[[Any], list[CacheSpec]]
    """What each layer must remember: sizes an open before a weight is read."""
    pieces: Callable[[Any, str], tuple[Piece, ...] | None]
    build: Callable[..., Model]
    complete_config: Callable[[dict[str, Any], Mapping[str, tuple[int, ...]]], dict[str, Any]] = (
        lambda config, shapes: config
    )
    """config.json with what only the checkpoint's tensor names and shapes tell, for installs."""
    expert_shapes: Callable[[Any], dict[int, ExpertShape]] = lambda config: {}
    table_shapes: Callable[[Any], dict[int, tuple[str, tuple[int, int]]]] = lambda config: {}
    """Layer -> (canonical name, shape) of a table that is looked up by rows and kept in a file."""
    derived: Callable[[Any], dict[str, list[int]]] = lambda config: {}
    """Whole-number tensors that the family computes itself; one in a checkpoint must agree."""
    reads_ids: bool = False
    """The forward pass reads token ids on the host: none can begin for a token not yet known."""
    expert_activation: Callable[[Any], Activation] = lambda config: swiglu
    capabilities: Capabilities = field(default_factory=Capabilities)
    draft_head: DraftHead | None = None
    gguf_architectures: tuple[str, ...] = ()
    gguf_config: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict] | None = None
    gguf_pieces: Callable[[Any, str], tuple[Piece, ...] | None] | None = None
