"""Gemma 3, the text half: 270M, 1B, 4B, 12B, 27B.

Sandwich norms around grouped-query attention and a gelu feed-forward. Sliding layers have a rope
of their own; queries and keys are normed per head; embeddings are scaled by sqrt(hidden_size).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.state import LayerStates
from turbospark.errors import UnsupportedError
from turbospark.families.archs import check_heads
from turbospark.families.base import Capabilities, Family, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.gguf_gemma import gemma3_config, gemma3_name
from turbospark.families.kinds import (
    FULL,
    SLIDING,
    Kind,
    layer_specs,
    read_layer_types,
    read_rope,
)
from turbospark.families.names import plain_name
from turbospark.install.arch import ArchConfig
from turbospark.layers.mlp import GatedMLP
from turbospark.layers.moe import geglu_tanh
from turbospark.layers.norm import RMSNorm
from turbospark.layers.rope import Rope
from turbospark.layers.scaling import scaled, soft_cap
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json.

    Norms multiply by 1 + weight. `norms_include_one` says that the stored weights are that sum,
    as GGUF files hold them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    layer_types: tuple[str, ...]
    kinds: dict[str, Kind]
    query_pre_attn_scalar: float
    rms_norm_eps: float
    max_position_embeddings: int
    final_logit_softcapping: float
    tie_word_embeddings: bool
    norms_include_one: bool

    def norm(self, w: Weights, name: str) -> RMSNorm:
        """The norm `name`, whichever way its weight is stored."""
        return w.norm(f"{name}.weight", self.rms_norm_eps, centred=not self.norms_include_one)


def read_config(c: ConfigReader) -> Config:
    """config.json (either dialect) -> Config; absent keys as in transformers.

    The published wrappers leave out most keys that equal a class default.
    """
    c.expect("hidden_activation", "gelu_pytorch_tanh")
    c.expect("hidden_act", "gelu_pytorch_tanh")
    c.expect("attention_bias", False)
    c.expect("attn_logit_softcapping")
    c.expect("use_bidirectional_attention", False)
    c.expect("partial_rotary_factor", 1.0)
    period = c.int("sliding_window_pattern", 6)
    types = read_layer_types(c, c.int("num_hidden_layers", 26), period)
    if SLIDING in types and c.values.get("sliding_window", 0) is None:
        raise UnsupportedError(
            f"{c.where}: sliding_window = None is not supported with {SLIDING} layers; "
            "supported: a number"
        )
    window = c.int("sliding_window", 4096)
    return Config(
        vocab_size=c.int("vocab_size", 262208),
        hidden_size=c.int("hidden_size", 2304),
        intermediate_size=c.int("intermediate_size", 9216),
        num_attention_heads=c.int("num_attention_heads", 8),
        layer_types=types,
        kinds={SLIDING: _kind(c, SLIDING, window), FULL: _kind(c, FULL, None)},
        query_pre_attn_scalar=c.float("query_pre_attn_scalar", 256.0, minimum=1e-6),
        rms_norm_eps=c.eps("rms_norm_eps", 1e-6),
        max_position_embeddings=c.int("max_position_embeddings", 131072),
        final_logit_softcapping=c.float("final_logit_softcapping", 0.0),
        tie_word_embeddings=c.bool("tie_word_embeddings", True),
        norms_include_one=c.bool("norms_include_one", False),
    )


def _kind(c: ConfigReader, name: str, window: int | None) -> Kind:
    """Hub files have one `rope_theta` and `rope_scaling` for full layers, v5 files a section."""
    if name == FULL:
        scaling = c.section("rope_scaling") or ConfigReader({})
        flat = {**scaling.values, "rope_theta": c.theta("rope_theta", 1e6)}
    else:
        flat = {"rope_theta": c.theta("rope_local_base_freq", 1e4)}
    section = c.section("rope_parameters")
    if section is not None:
        own = section.section(name) or ConfigReader({})
        flat = {"rope_theta": flat["rope_theta"], **own.values}
    rope = read_rope(ConfigReader({name: flat}, c.where), name, ("default", "linear"))
    kind = Kind(c.int("num_key_value_heads", 4), c.int("head_dim", 256), window, rope)
    heads = c.int("num_attention_heads", 8)
    check_heads(f"{c.where}: {name}", heads, kind.kv_heads, kind.head_dim)
    return kind


def arch(c: Config) -> ArchConfig:
    """The manifest's description. The format's original readers do not know this family."""
    sliding, full = c.kinds[SLIDING], c.kinds[FULL]
    return ArchConfig(
        family="gemma3",
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=0,
        num_heads=c.num_attention_heads,
        num_kv_heads=sliding.kv_heads,
        num_full_kv_heads=full.kv_heads,
        head_dim=sliding.head_dim,
        full_head_dim=full.head_dim,
        vocab_size=c.vocab_size,
        sliding_window=sliding.window or 0,
        final_logit_softcap=c.final_logit_softcapping,
        rope_theta=sliding.rope["rope_theta"],
        full_rope_theta=full.rope["rope_theta"],
        partial_rotary_factor=1.0,
        num_layers=len(c.layer_types),
        num_experts=0,
        top_k_experts=0,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_k_eq_v=False,
        hidden_activation="gelu_pytorch_tanh",
        full_attention_layer_mask=tuple(int(t == FULL) for t in c.layer_types),
        attention_scale=c.query_pre_attn_scalar**-0.5,
        router_scaled=False,
    )


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """Refused: only turbospark writes such installs, and the manifest's fields do not say how
    norms are stored and full layers' rope is scaled.
    """
    raise UnsupportedError(
        f"manifest.turbospark.config is missing; an install of family {a.family} needs it: "
        "convert the checkpoint again"
    )


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Grouped-query attention with queries and keys normed per head."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.head_dim = c.kinds[c.layer_types[layer]].head_dim
        self.scale = c.query_pre_attn_scalar**-0.5
        self.rope = rope
        self.qkv = w.fused([f"{name}.{p}_proj" for p in "qkv"])
        self.o_proj = w.linear(f"{name}.o_proj")
        self.q_norm = c.norm(w, f"{name}.q_norm")
        self.k_norm = c.norm(w, f"{name}.k_norm")

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows, step = x.shape[1], states.step
        q, k, v = (p.reshape(1, rows, -1, self.head_dim) for p in self.qkv(x))
        q = self.rope(self.q_norm(q).swapaxes(1, 2), step.start)
        k = self.rope(self.k_norm(k).swapaxes(1, 2), step.start)
        out = states.layers[self.layer].attend(q, k, v.swapaxes(1, 2), step, self.scale)
        return self.o_proj(out.swapaxes(1, 2).reshape(1, rows, -1))


# --- layer and model (feed-forward: layers/mlp.py) ------------------------------------------------


class Layer:
    """x += norm(attention(norm x)); x += norm(feed_forward(norm x))."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}"
        self.attention = Attention(c, w, layer, rope)
        self.mlp = GatedMLP(w, f"{name}.mlp", geglu_tanh)
        self.input_norm, self.post_norm, self.pre_mlp_norm, self.post_mlp_norm = (
            c.norm(w, f"{name}.{norm}") for norm in NORMS
        )

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        x = x + self.post_norm(self.attention(self.input_norm(x), states))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: None = None) -> None:
        self.vocab_size = c.vocab_size
        self.embed_by = c.hidden_size**0.5
        self.softcap = c.final_logit_softcapping
        self.cache_specs = layer_specs(c.kinds, c.layer_types)
        ropes = {name: k.make_rope(c.max_position_embeddings) for name, k in c.kinds.items()}
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.layers = [Layer(c, w, i, ropes[name]) for i, name in enumerate(c.layer_types)]
        self.norm = c.norm(w, "model.norm")
        self.lm_head = self.embed_tokens.as_linear if c.tie_word_embeddings else w.linear("lm_head")

    def __call__(
        self,
        ids: mx.array,
        states: LayerStates,
        after_layer: Callable[[int, mx.array], mx.array] | None = None,
    ) -> mx.array:
        x = scaled(self.embed_tokens(ids), self.embed_by)
        for i, layer in enumerate(self.layers):
            x = layer(x, states)
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        return soft_cap(self.lm_head(self.norm(hidden)), self.softcap)


# --- weight names ---------------------------------------------------------------------------------


def weight_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Canonical name -> logical shape of every resident tensor."""
    hidden, wide = c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    for i, kind in enumerate(c.kinds[name] for name in c.layer_types):
        name = f"model.layers.{i}"
        q, kv = c.num_attention_heads * kind.head_dim, kind.kv_heads * kind.head_dim
        shapes.update({f"{name}.{norm}.weight": (hidden,) for norm in NORMS})
        shapes.update(
            {
                f"{name}.self_attn.q_proj.weight": (q, hidden),
                f"{name}.self_attn.k_proj.weight": (kv, hidden),
                f"{name}.self_attn.v_proj.weight": (kv, hidden),
                f"{name}.self_attn.o_proj.weight": (hidden, q),
                f"{name}.self_attn.q_norm.weight": (kind.head_dim,),
                f"{name}.self_attn.k_norm.weight": (kind.head_dim,),
                f"{name}.mlp.gate_proj.weight": (wide, hidden),
                f"{name}.mlp.up_proj.weight": (wide, hidden),
                f"{name}.mlp.down_proj.weight": (hidden, wide),
            }
        )
    return shapes


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    return (Piece(plain),) if plain in weight_shapes(c) else None


# --- GGUF -----------------------------------------------------------------------------------------


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes; its norms hold 1 + weight (`norms_include_one`)."""
    target = gemma3_name(name)
    return None if target is None else pieces(c, target)


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    wires=("gemma3",),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=lambda c: layer_specs(c.kinds, c.layer_types),
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(steering=None),
    gguf_architectures=("gemma3",),
    gguf_config=gemma3_config,
    gguf_pieces=gguf_pieces,
)
