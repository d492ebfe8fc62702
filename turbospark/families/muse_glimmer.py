"""Muse Glimmer: windowed layers with rope, every fourth layer global and without positions.

Knows its four norm conventions: weightless on embeddings, queries and keys; centred (1 + w) with
one epsilon before each sub-layer and another after it; plain before the head. Text only: the
vision tower of a checkpoint is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.specs import CacheSpec, FullSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import SourceError, UnsupportedError
from turbospark.experts.base import ExpertStore
from turbospark.families.archs import check_heads
from turbospark.families.base import Capabilities, Family, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.gguf import (
    gguf_base_config,
    gguf_name,
    gguf_sliding_layers,
    minus_one,
)
from turbospark.families.names import plain_name, unpermute_rows
from turbospark.install.arch import ArchConfig
from turbospark.layers.mlp import GatedMLP
from turbospark.layers.norm import RMSNorm
from turbospark.layers.rope import Rope, make_rope
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

KINDS = ("full_attention", "sliding_attention")
# Values that an install's architecture does not record: constants of the released model.
RMS_EPS, POST_NORM_EPS = 1e-5, 1e-8
QK_SCALE_FACTOR = 3.87
OUTPUT_MULTIPLIER = 0.19611613513818404  # (hidden_size / 256) ** -0.5


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json.

    `sliding[i]` says that layer i has the window and rope; the others have neither. With
    `qk_norm_weights`, queries and keys are normed with stored weights that hold the factor.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    post_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    sliding_window: int
    sliding: tuple[bool, ...]
    final_logit_softcapping: float
    qk_scale_factor: float
    output_multiplier: float
    tie_word_embeddings: bool
    qk_norm_weights: bool


def read_config(c: ConfigReader) -> Config:
    """config.json (hub dialect) -> Config; absent keys have the values of the released model.

    transformers leaves keys that equal its class defaults out of the files it saves.
    """
    c.expect("hidden_activation", "silu")
    c.expect("hidden_act", "silu")
    c.expect("attention_bias", False)
    c.expect("partial_rotary_factor", 1.0)
    for key in ("sliding_window", "final_logit_softcapping"):
        if key in c.values and c.values[key] is None:
            raise UnsupportedError(f"{c.where}: {key} = None is not supported; supported: a number")
    scaling = c.section("rope_scaling")
    if scaling is not None:
        scaling.expect("rope_type", "default")
        scaling.expect("type", "default")
    layers = c.int("num_hidden_layers", 52)
    heads, kv_heads = c.int("num_attention_heads", 32), c.int("num_key_value_heads", 2)
    head_dim = c.int("head_dim", 128)
    check_heads(c.where, heads, kv_heads, head_dim)
    theta = c.theta("rope_theta", 1e4)
    return Config(
        vocab_size=c.int("vocab_size", 202048),
        hidden_size=c.int("hidden_size", 6656),
        intermediate_size=c.int("intermediate_size", 19968),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=c.eps("rms_norm_eps", RMS_EPS),
        post_norm_eps=c.eps("post_norm_eps", POST_NORM_EPS),
        rope_theta=theta,
        max_position_embeddings=c.int("max_position_embeddings", 131072),
        sliding_window=c.int("sliding_window", 2048),
        sliding=_sliding(c, layers, theta),
        final_logit_softcapping=_positive(c, "final_logit_softcapping", 20.0),
        qk_scale_factor=c.float("qk_scale_factor", QK_SCALE_FACTOR),
        output_multiplier=c.float("output_multiplier", OUTPUT_MULTIPLIER),
        tie_word_embeddings=c.bool("tie_word_embeddings", False),
        qk_norm_weights=c.bool("qk_norm_weights", False),
    )


def _positive(c: ConfigReader, key: str, default: float) -> float:
    value = c.float(key, default)
    if value <= 0:
        raise UnsupportedError(f"{c.where}: {key} = {value} is not supported; supported: above 0")
    return value


def _sliding(c: ConfigReader, layers: int, theta: float) -> tuple[bool, ...]:
    """Which layers are windowed. The pattern is counted backward: the last layer is global.

    The reference takes the window from `layer_types`, whether there is rope from
    `layer_rope_theta` and its base from `rope_theta`. Files in which the three tell different
    stories are refused: no known model is meant that way.
    """
    sliding = [(layers - 1 - i) % 4 != 0 for i in range(layers)]
    types = c.layer_types(layers, KINDS)
    thetas = c.list("layer_rope_theta", layers)
    if thetas is None:
        thetas = [theta if s else 0 for s in sliding]
    if types is not None:
        sliding = [kind == "sliding_attention" for kind in types]
    for i, (windowed, base) in enumerate(zip(sliding, thetas, strict=True)):
        expected = theta if windowed else 0
        if isinstance(base, bool) or base != expected:
            raise UnsupportedError(
                f"{c.where}: layer_rope_theta[{i}] = {base!r} does not fit layer_types[{i}] = "
                f"{KINDS[windowed]!r} and rope_theta = {theta}; supported: {expected}"
            )
    return tuple(sliding)


def arch(c: Config) -> ArchConfig:
    """What the manifest records. A full theta of 0 says that global layers have no positions."""
    return ArchConfig(
        family="museGlimmer",
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
        final_logit_softcap=c.final_logit_softcapping,
        rope_theta=c.rope_theta,
        full_rope_theta=0.0,
        partial_rotary_factor=1.0,
        num_layers=c.num_hidden_layers,
        num_experts=0,
        top_k_experts=0,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_k_eq_v=False,
        hidden_activation="silu",
        full_attention_layer_mask=tuple(0 if s else 1 for s in c.sliding),
        attn_output_gate=False,  # that field means a gate inside q_proj; this one has its own
        attention_scale=c.head_dim**-0.5,
        embedding_scaled_by_sqrt_hidden=False,
        router_scaled=False,
        ffn_sandwich_norms=True,
    )


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys of an install that carries only the manifest's architecture."""
    if a.full_rope_theta:
        raise UnsupportedError(
            f"manifest.arch.fullRopeTheta = {a.full_rope_theta}; family museGlimmer has no rope "
            "on global layers: expected 0"
        )
    kinds = [KINDS[0] if full else KINDS[1] for full in a.full_attention_layer_mask]
    return dict(
        model_type="muse_glimmer_text",
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        rms_norm_eps=RMS_EPS,
        post_norm_eps=POST_NORM_EPS,
        rope_theta=a.rope_theta,
        sliding_window=a.sliding_window,
        layer_types=kinds,
        layer_rope_theta=[0 if kind == KINDS[0] else a.rope_theta for kind in kinds],
        final_logit_softcapping=a.final_logit_softcap,
        qk_scale_factor=QK_SCALE_FACTOR,
        output_multiplier=OUTPUT_MULTIPLIER,
        tie_word_embeddings=a.tie_word_embeddings,
    )


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Grouped-query attention on normed queries and keys; its output is gated element by element.

    `qk_scale_factor` multiplies queries on top of head_dim ** -0.5.
    """

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope | None) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.scale = c.head_dim**-0.5
        self.rope = rope
        self.qkvg = w.fused([f"{name}.{p}_proj" for p in ("q", "k", "v", "gate")])
        self.o_proj = w.linear(f"{name}.o_proj")
        if c.qk_norm_weights:
            self.q_norm = w.norm(f"{name}.q_norm.weight", c.rms_norm_eps)
            self.k_norm = w.norm(f"{name}.k_norm.weight", c.rms_norm_eps)
        else:
            factor = mx.full((c.head_dim,), c.qk_scale_factor, dtype=mx.float32)
            mx.eval(factor)
            self.q_norm = RMSNorm(factor, c.rms_norm_eps)
            self.k_norm = RMSNorm(None, c.rms_norm_eps)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows = x.shape[1]
        q, k, v, gate = self.qkvg(x)
        q = self.q_norm(q.reshape(1, rows, self.heads, -1)).swapaxes(1, 2)
        k = self.k_norm(k.reshape(1, rows, self.kv_heads, -1)).swapaxes(1, 2)
        v = v.reshape(1, rows, self.kv_heads, -1).swapaxes(1, 2)
        if self.rope is not None:
            q = self.rope(q, states.step.start)
            k = self.rope(k, states.step.start)
        out = states.layers[self.layer].attend(q, k, v, states.step, self.scale)
        out = out.swapaxes(1, 2).reshape(1, rows, -1)
        return self.o_proj(out * mx.sigmoid(gate))


# --- layer and model (feed-forward: layers/mlp.py) ------------------------------------------------


class Layer:
    """x += norm(attention(norm x)); x += norm(mlp(norm x)); all four norms centred."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope | None) -> None:
        def norm(name: str, eps: float) -> RMSNorm:
            return w.norm(f"model.layers.{layer}.{name}_layernorm.weight", eps, centred=True)

        self.input_layernorm = norm("input", c.rms_norm_eps)
        self.attention = Attention(c, w, layer, rope)
        self.post_attention_layernorm = norm("post_attention", c.post_norm_eps)
        self.pre_feedforward_layernorm = norm("pre_feedforward", c.rms_norm_eps)
        self.mlp = GatedMLP(w, f"model.layers.{layer}.mlp")
        self.post_feedforward_layernorm = norm("post_feedforward", c.post_norm_eps)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        x = x + self.post_attention_layernorm(self.attention(self.input_layernorm(x), states))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def cache_specs(c: Config) -> list[CacheSpec]:
    """What each layer must remember."""
    heads = (c.num_key_value_heads, c.head_dim, c.head_dim)
    return [RingSpec(*heads, c.sliding_window) if s else FullSpec(*heads) for s in c.sliding]


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore | None) -> None:
        self.vocab_size = c.vocab_size
        self.cache_specs = cache_specs(c)
        rope = make_rope(c.head_dim, c.rope_theta, None, c.max_position_embeddings)
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.embed_norm = RMSNorm(None, c.rms_norm_eps)
        self.layers = [Layer(c, w, i, rope if s else None) for i, s in enumerate(c.sliding)]
        self.norm = w.norm("model.norm.weight", c.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_linear if c.tie_word_embeddings else w.linear("lm_head")
        self.multiplier, self.cap = c.output_multiplier, c.final_logit_softcapping

    def __call__(
        self,
        ids: mx.array,
        states: LayerStates,
        after_layer: Callable[[int, mx.array], mx.array] | None = None,
    ) -> mx.array:
        x = self.embed_norm(self.embed_tokens(ids))
        for i, layer in enumerate(self.layers):
            x = layer(x, states)
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        logits = self.lm_head(self.norm(hidden)).astype(mx.float32) * self.multiplier
        return mx.tanh(logits / self.cap) * self.cap


# --- weight names ---------------------------------------------------------------------------------


def weight_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Canonical name -> logical shape of every tensor."""
    hidden, width = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "post_feedforward_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.gate_proj": (q, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    if c.qk_norm_weights:
        layer.update({"self_attn.q_norm": (c.head_dim,), "self_attn.k_norm": (c.head_dim,)})
    for i in range(c.num_hidden_layers):
        shapes.update({f"model.layers.{i}.{name}.weight": s for name, s in layer.items()})
    return shapes


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    return (Piece(plain),) if plain in weight_shapes(c) else None


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROTATED = re.compile(r"^blk\.\d+\.attn_(q|k|q_norm|k_norm)\.weight$")


def gguf_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF metadata and tensor shapes -> config.json keys.

    The query factor is not in the metadata: it is the weight of a norm made up for the purpose.
    """
    config = gguf_base_config(meta, shapes)
    name = meta["general.architecture"]
    multiplier = meta.get(f"{name}.logit_scale")
    if multiplier is None:
        raise SourceError(f"GGUF metadata has no {name}.logit_scale")
    sliding = gguf_sliding_layers(meta, config["num_hidden_layers"])
    theta = meta.get(f"{name}.rope.freq_base_swa", config["rope_theta"])
    config.update(
        model_type="muse_glimmer_text",
        post_norm_eps=POST_NORM_EPS,  # not in the metadata either
        rope_theta=theta,
        layer_types=[KINDS[s] for s in sliding],
        layer_rope_theta=[theta if s else 0 for s in sliding],
        final_logit_softcapping=meta.get(f"{name}.final_logit_softcapping", 20.0),
        output_multiplier=multiplier,
        qk_norm_weights=True,
    )
    return config


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes. q and k rows are interleaved there, centred norms hold 1 + w."""
    target = gguf_name(name, _GGUF_NAMES)
    found = None if target is None else pieces(c, target)
    if not found or target is None:
        return found
    rotated = _ROTATED.match(name)
    if rotated:
        heads = {"q": c.num_attention_heads, "k": c.num_key_value_heads}.get(rotated[1], 1)
        return (Piece(target, transform=unpermute_rows(heads)),)
    if target.endswith("layernorm.weight"):
        return (Piece(target, transform=minus_one),)
    return found


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="muse_glimmer",
    model_types=("muse_glimmer", "muse_glimmer_text"),
    wires=("museGlimmer",),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=cache_specs,
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(steering=None),
    gguf_architectures=("muse-glimmer",),
    gguf_config=gguf_config,
    gguf_pieces=gguf_pieces,
)
