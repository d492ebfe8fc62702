"""What each layer must remember, as a family declares it.

Knows shapes. Does not know memory or arithmetic: `cache.state` turns specs into buffers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FullSpec:
    """Keys and values of every position."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class PackedSpec:
    """Keys and values of every position, the old ones packed into so many bits per element."""

    kv_heads: int
    dim: int
    key_bits: int
    value_bits: int


@dataclass(frozen=True)
class RingSpec:
    """Keys and values of the newest positions; row i attends to j with i - window < j <= i."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: one row of [latent | rotated key] per position."""

    latent_dim: int
    rope_dim: int


@dataclass(frozen=True)
class RecurrentSpec:
    """A gated delta net: fp32 state [value_heads, value_dim, key_dim], last conv inputs."""

    value_heads: int
    value_dim: int
    key_dim: int
    conv_rows: int
    conv_channels: int


@dataclass(frozen=True)
class RowSpec:
    """The newest row of `width` elements that a pass left: where a draft head goes on."""

    width: int


@dataclass(frozen=True)
class SharedSpec:
    """No memory of its own: reads the keys and values that layer `source` wrote in this pass."""

    source: int


@dataclass(frozen=True)
class SparseSpec:
    """Block-sparse attention: keys and values of every position, an index key per block of them.

    A block is `ratio` positions; a query reads the `chosen` best blocks and the open one. `packed`
    says how old keys and values are kept where they are packed; index keys never are.
    """

    kv_heads: int
    head_dim: int
    index_dim: int
    ratio: int
    chosen: int
    packed: PackedSpec | None = None

    @property
    def dense_keys(self) -> int:
        """The most visible positions at which every one of them is attended."""
        return (self.chosen + 1) * self.ratio - 1


@dataclass(frozen=True)
class NgramSpec:
    """Hashed n-grams: the last inputs of a convolution, and the newest `tokens` ids.

    `fill` stands for tokens before the first.
    """

    conv_rows: int
    conv_channels: int
    tokens: int
    fill: int


CarriedSpec = RecurrentSpec | RowSpec | SparseSpec | NgramSpec
"""Memory of which a part can only be put back from a snapshot."""
CacheSpec = FullSpec | PackedSpec | RingSpec | LatentSpec | SharedSpec | CarriedSpec
