"""Spark-X2.5: three windowed layers to one global, each kind with a rope of its own.

Knows the fused q/k/v projection, the scalar sigmoid gate per head and the exact GELU. Windowed
layers rotate whole heads with a small base, global ones a leading part with a large base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.specs import CacheSpec, FullSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import SourceError, UnsupportedError
from turbospark.experts.base import ExpertStore
from turbospark.families.base import Capabilities, Family, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.gguf import gguf_base_config, gguf_name, gguf_sliding_layers
from turbospark.families.names import plain_name
from turbospark.install.arch import ArchConfig
from turbospark.layers.mlp import GatedMLP
from turbospark.layers.moe import geglu_erf
from turbospark.layers.rope import Rope, make_rope
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")
RMS_EPS = 1e-6


@dataclass(frozen=True)
class RopeConfig:
    """Base of one layer kind's rope, and how many leading dimensions of a head it rotates."""

    theta: float
    dims: int


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json. `ropes` is keyed by layer type."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    sliding_window: int
    layer_types: tuple[str, ...]
    ropes: Mapping[str, RopeConfig]
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool


def read_config(c: ConfigReader) -> Config:
    """config.json -> Config; refuses values that are not computed."""
    c.expect("hidden_act", "gelu")
    c.expect("gate_attn_act_mode", "sigmoid")
    c.expect("headwise_attn_output_gate", True)
    layers = c.int("num_hidden_layers")
    heads, kv_heads = c.int("num_attention_heads"), c.int("num_key_value_heads")
    head_dim = c.int("head_dim")
    if heads % kv_heads:
        raise UnsupportedError(
            f"{c.where}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    kinds = c.layer_types(layers, KINDS)
    if kinds is None:
        kinds = [FULL if i % 4 == 3 else SLIDING for i in range(layers)]
    return Config(
        vocab_size=c.int("vocab_size"),
        hidden_size=c.int("hidden_size"),
        intermediate_size=c.int("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=c.eps("rms_norm_eps", RMS_EPS),
        max_position_embeddings=c.int("max_position_embeddings", 8192),
        sliding_window=c.int("sliding_window"),
        layer_types=tuple(kinds),
        ropes={kind: _rope(c, kind, head_dim) for kind in dict.fromkeys(kinds)},
        attention_bias=c.bool("attention_bias", False),
        mlp_bias=c.bool("mlp_bias", False),
        tie_word_embeddings=c.bool("tie_word_embeddings", True),
    )


def _rope(c: ConfigReader, kind: str, head_dim: int) -> RopeConfig:
    ropes = c.section("rope_parameters")
    rope = None if ropes is None else ropes.section(kind)
    if rope is None:
        raise SourceError(f"{c.where}: required key rope_parameters.{kind} is missing")
    rope.expect("rope_type", "default")
    factor = rope.float("partial_rotary_factor", 1.0)
    dims = int(head_dim * factor)
    if not 0 < dims <= head_dim or dims % 2:
        raise UnsupportedError(
            f"{rope.where}: partial_rotary_factor = {factor} rotates {dims} of {head_dim} "
            "dimensions; supported: an even number of them"
        )
    return RopeConfig(rope.theta("rope_theta", 1e4), dims)


def arch(c: Config) -> ArchConfig:
    """What the manifest records. A kind of layer that the model does not have lends the other's."""
    full = c.ropes.get(FULL) or c.ropes[SLIDING]
    sliding = c.ropes.get(SLIDING) or full
    return ArchConfig(
        family="spark2_5",
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=0,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        num_full_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        full_head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        sliding_window=c.sliding_window,
        final_logit_softcap=0.0,
        rope_theta=sliding.theta,
        full_rope_theta=full.theta,
        partial_rotary_factor=full.dims / c.head_dim,
        num_layers=c.num_hidden_layers,
        num_experts=0,
        top_k_experts=0,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_k_eq_v=False,
        hidden_activation="gelu",
        full_attention_layer_mask=tuple(int(kind == FULL) for kind in c.layer_types),
        attn_output_gate=False,  # that field means a gate inside q_proj; this one has its own
        attention_scale=c.head_dim**-0.5,
        embedding_scaled_by_sqrt_hidden=False,
        router_scaled=False,
        ffn_sandwich_norms=False,
    )


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys of an install that carries only the manifest's architecture."""
    return dict(
        model_type="spark2_5",
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        rms_norm_eps=RMS_EPS,
        sliding_window=a.sliding_window,
        layer_types=[FULL if full else SLIDING for full in a.full_attention_layer_mask],
        rope_parameters={
            FULL: dict(rope_theta=a.full_rope_theta, partial_rotary_factor=a.partial_rotary_factor),
            SLIDING: dict(rope_theta=a.rope_theta, partial_rotary_factor=1.0),
        },
        tie_word_embeddings=a.tie_word_embeddings,
    )


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Grouped-query attention; each head's output is scaled by a sigmoid of the layer's input."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        q, kv = self.heads * c.head_dim, self.kv_heads * c.head_dim
        self.splits = [q, q + kv]
        self.scale = c.head_dim**-0.5
        self.rope = rope
        self.q_k_v_proj = w.linear(f"{name}.q_k_v_proj", bias=c.attention_bias)
        self.g_proj = w.linear(f"{name}.g_proj", bias=c.attention_bias)
        self.out_proj = w.linear(f"{name}.out_proj", bias=c.attention_bias)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows = x.shape[1]
        q, k, v = mx.split(self.q_k_v_proj(x), self.splits, axis=-1)
        q = q.reshape(1, rows, self.heads, -1).swapaxes(1, 2)
        k = k.reshape(1, rows, self.kv_heads, -1).swapaxes(1, 2)
        v = v.reshape(1, rows, self.kv_heads, -1).swapaxes(1, 2)
        q = self.rope(q, states.step.start)
        k = self.rope(k, states.step.start)
        out = states.layers[self.layer].attend(q, k, v, states.step, self.scale).swapaxes(1, 2)
        gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(out.dtype)
        return self.out_proj((out * gate[..., None]).reshape(1, rows, -1))


# --- layer and model (feed-forward: layers/mlp.py) ------------------------------------------------


class Layer:
    """x += attention(norm x); x += mlp(norm x)."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}"
        self.input_layernorm = w.norm(f"{name}.input_layernorm.weight", c.rms_norm_eps)
        self.attention = Attention(c, w, layer, rope)
        self.post_attention_layernorm = w.norm(
            f"{name}.post_attention_layernorm.weight", c.rms_norm_eps
        )
        self.mlp = GatedMLP(w, f"{name}.mlp", geglu_erf, c.mlp_bias)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        x = x + self.attention(self.input_layernorm(x), states)
        return x + self.mlp(self.post_attention_layernorm(x))


def cache_specs(c: Config) -> list[CacheSpec]:
    """What each layer must remember."""
    heads = (c.num_key_value_heads, c.head_dim, c.head_dim)
    kinds: dict[str, CacheSpec] = {
        FULL: FullSpec(*heads),
        SLIDING: RingSpec(*heads, c.sliding_window),
    }
    return [kinds[kind] for kind in c.layer_types]


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore | None) -> None:
        self.vocab_size = c.vocab_size
        self.cache_specs = cache_specs(c)
        ropes = {
            kind: make_rope(rope.dims, rope.theta, None, c.max_position_embeddings)
            for kind, rope in c.ropes.items()
        }
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.layers = [Layer(c, w, i, ropes[kind]) for i, kind in enumerate(c.layer_types)]
        self.norm = w.norm("model.norm.weight", c.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_linear if c.tie_word_embeddings else w.linear("lm_head")

    def __call__(
        self,
        ids: mx.array,
        states: LayerStates,
        after_layer: Callable[[int, mx.array], mx.array] | None = None,
    ) -> mx.array:
        x = self.embed_tokens(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, states)
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        return self.lm_head(self.norm(hidden)).astype(mx.float32)


# --- weight names ---------------------------------------------------------------------------------


def weight_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Canonical name -> logical shape of every tensor; q, k and v stay one matrix."""
    hidden, width = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    for i in range(c.num_hidden_layers):
        name = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}.{norm}.weight"] = (hidden,)
        for matrix, rows, columns, bias in (
            ("self_attn.q_k_v_proj", q + 2 * kv, hidden, c.attention_bias),
            ("self_attn.g_proj", c.num_attention_heads, hidden, c.attention_bias),
            ("self_attn.out_proj", hidden, q, c.attention_bias),
            ("mlp.gate_proj", width, hidden, c.mlp_bias),
            ("mlp.up_proj", width, hidden, c.mlp_bias),
            ("mlp.down_proj", hidden, width, c.mlp_bias),
        ):
            shapes[f"{name}.{matrix}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.{matrix}.bias"] = (rows,)
    return shapes


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    # The publisher's name of the table; some conversions use the common one.
    if plain == "model.embedding.weight":
        plain = "model.embed_tokens.weight"
    return (Piece(plain),) if plain in weight_shapes(c) else None


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "attn_qkv": "self_attn.q_k_v_proj",
    "attn_gate": "self_attn.g_proj",
    "attn_output": "self_attn.out_proj",
}


def gguf_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF metadata and tensor shapes -> config.json keys.

    The plain rope keys are the GLOBAL layers', the `_swa` ones the windowed layers', although
    most layers are windowed.
    """
    config = gguf_base_config(meta, shapes)
    name = meta["general.architecture"]
    head_dim, theta = config["head_dim"], config.pop("rope_theta")

    def rope(suffix: str) -> dict[str, Any]:
        dims = meta.get(f"{name}.rope.dimension_count{suffix}")
        if dims is None:
            raise SourceError(f"GGUF metadata has no {name}.rope.dimension_count{suffix}")
        base = meta.get(f"{name}.rope.freq_base{suffix}", theta)
        return dict(rope_theta=base, partial_rotary_factor=dims / head_dim)

    sliding = gguf_sliding_layers(meta, config["num_hidden_layers"])
    config.update(
        model_type="spark2_5",
        layer_types=[KINDS[s] for s in sliding],
        rope_parameters={FULL: rope(""), SLIDING: rope("_swa")},
        attention_bias="blk.0.attn_qkv.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )
    return config


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes; no tensor of this architecture changes its meaning."""
    target = gguf_name(name, _GGUF_NAMES)
    return None if target is None else pieces(c, target)


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="spark",
    model_types=("spark2_5",),
    wires=("spark2_5",),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=cache_specs,
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(steering=None),
    gguf_architectures=("spark2_5",),
    gguf_config=gguf_config,
    gguf_pieces=gguf_pieces,
)
