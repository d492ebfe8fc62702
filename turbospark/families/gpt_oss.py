"""OpenAI gpt-oss: attention with sinks, alternating windows, MXFP4 experts with biases.

Published experts are MXFP4 blocks and stay so. A softmax over the chosen experts alone weighs
them; each is a clamped SwiGLU whose gate and up rows alternate in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.specs import CacheSpec, FullSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.dtypes import Raw
from turbospark.errors import UnsupportedError
from turbospark.experts.base import ExpertStore
from turbospark.families.archs import (
    PLAIN,
    check_heads,
    read_yarn,
    yarn_from_arch,
    yarn_to_arch,
)
from turbospark.families.base import Activation, Capabilities, ExpertShape, Family, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.gguf import gguf_base_config, gguf_name
from turbospark.families.names import expert_pieces, plain_name
from turbospark.families.transforms import transposed
from turbospark.install.arch import ArchConfig
from turbospark.install.planes import Planes
from turbospark.layers.moe import clamped_swiglu, top_k_softmax
from turbospark.layers.rope import Rope, make_rope
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

SWIGLU_ALPHA = 1.702
RMS_EPS = 1e-5
KINDS = ("sliding_attention", "full_attention")
# What the published models have and files without a rope_scaling mean. llama.cpp and mlx-lm
# truncate the correction range; the model was trained without that.
YARN = dict(
    rope_type="yarn",
    factor=32.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
)


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    windows: tuple[int | None, ...]
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    max_position_embeddings: int
    num_local_experts: int
    num_experts_per_tok: int
    swiglu_limit: float
    tie_word_embeddings: bool


def read_config(c: ConfigReader) -> Config:
    """config.json (hub dialect) -> Config; refuses values that are not computed."""
    c.expect("model_type", "gpt_oss")
    c.expect("hidden_act", "silu")
    c.expect("swiglu_alpha", SWIGLU_ALPHA)
    layers, heads = c.int("num_hidden_layers"), c.int("num_attention_heads", 64)
    kv_heads, head_dim = c.int("num_key_value_heads", 8), c.int("head_dim", 64)
    check_heads(c.where, heads, kv_heads, head_dim)
    scaling = read_yarn(c) if "rope_scaling" in c.values else YARN
    if scaling is None:
        raise UnsupportedError(
            f"{c.where}: rope_scaling = {c.raw('rope_scaling')!r} is not supported; "
            "supported: type yarn"
        )
    window = c.int("sliding_window", 128)
    kinds = c.layer_types(layers, KINDS) or [KINDS[i % 2] for i in range(layers)]
    experts = c.int("num_local_experts", c.raw("num_experts", 128))
    top = c.int("num_experts_per_tok", c.raw("experts_per_token", 4))
    if top > experts:
        raise UnsupportedError(
            f"{c.where}: num_experts_per_tok = {top} of num_local_experts = {experts}"
        )
    return Config(
        vocab_size=c.int("vocab_size", 201088),
        hidden_size=c.int("hidden_size"),
        intermediate_size=c.int("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_bias=c.bool("attention_bias", True),
        windows=tuple(window if kind == KINDS[0] else None for kind in kinds),
        rms_norm_eps=c.eps("rms_norm_eps", RMS_EPS),
        rope_theta=c.theta("rope_theta", 150000.0),
        rope_scaling=scaling,
        max_position_embeddings=c.int("max_position_embeddings", 131072),
        num_local_experts=experts,
        num_experts_per_tok=top,
        swiglu_limit=c.float("swiglu_limit", 7.0),
        tie_word_embeddings=c.bool("tie_word_embeddings", False),
    )


def arch(c: Config) -> ArchConfig:
    """The manifest's description of this architecture."""
    return ArchConfig(
        **PLAIN, **yarn_to_arch(c.rope_scaling),
        family="gptOss",
        hidden_size=c.hidden_size, vocab_size=c.vocab_size, num_layers=c.num_hidden_layers,
        intermediate_size=c.intermediate_size, moe_intermediate_size=c.intermediate_size,
        num_experts=c.num_local_experts, top_k_experts=c.num_experts_per_tok,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads, num_full_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim, full_head_dim=c.head_dim,
        sliding_window=next((w for w in c.windows if w), 0),
        full_attention_layer_mask=tuple(0 if w else 1 for w in c.windows),
        rope_theta=c.rope_theta, full_rope_theta=c.rope_theta, partial_rotary_factor=1.0,
        rope_neox_subdim=False,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_scale=c.head_dim**-0.5,
        swiglu_limit=c.swiglu_limit,
    )  # fmt: skip


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys of an install that carries only the manifest's architecture."""
    return dict(
        model_type="gpt_oss",
        vocab_size=a.vocab_size, hidden_size=a.hidden_size, num_hidden_layers=a.num_layers,
        intermediate_size=a.moe_intermediate_size,
        num_attention_heads=a.num_heads, num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        sliding_window=a.sliding_window or None,
        layer_types=[KINDS[kind] for kind in a.full_attention_layer_mask],
        rms_norm_eps=RMS_EPS,
        rope_theta=a.rope_theta, rope_scaling={**(yarn_from_arch(a) or YARN), "truncate": False},
        num_local_experts=a.num_experts, num_experts_per_tok=a.top_k_experts,
        swiglu_limit=a.swiglu_limit,
        tie_word_embeddings=a.tie_word_embeddings,
    )  # fmt: skip


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Grouped-query attention; each query head's sink takes a share of the softmax, no value."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.scale = c.head_dim**-0.5
        self.rope = rope
        self.qkv = w.fused([f"{name}.{p}_proj" for p in "qkv"], bias=c.attention_bias)
        self.o_proj = w.linear(f"{name}.o_proj", bias=c.attention_bias)
        self.sinks = w.array(f"{name}.sinks")

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows, start = x.shape[1], states.step.start
        q, k, v = self.qkv(x)
        q = self.rope(q.reshape(1, rows, self.heads, -1).swapaxes(1, 2), start)
        k = self.rope(k.reshape(1, rows, self.kv_heads, -1).swapaxes(1, 2), start)
        v = v.reshape(1, rows, self.kv_heads, -1).swapaxes(1, 2)
        out = states.layers[self.layer].attend(q, k, v, states.step, self.scale, self.sinks)
        return self.o_proj(out.swapaxes(1, 2).reshape(1, rows, -1))


# --- feed-forward ---------------------------------------------------------------------------------


class SparseMLP:
    """The k experts with the best biased logits, weighed by a softmax over those k."""

    def __init__(self, c: Config, w: Weights, layer: int, experts: ExpertStore) -> None:
        self.layer = layer
        self.top_k = c.num_experts_per_tok
        self.router = w.linear(f"model.layers.{layer}.mlp.router", bias=True)
        self.experts = experts
        experts.watch(layer, lambda x: self.route(x)[0])

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """[1, L, H] -> chosen ids and weights [1, L, k]."""
        return top_k_softmax(self.router(x), self.top_k)

    def __call__(self, x: mx.array) -> mx.array:
        return self.experts.routed(self.layer, x, *self.route(x))


def expert_activation(c: Config) -> Activation:
    """What an expert computes between its matrices."""
    return clamped_swiglu(c.swiglu_limit, SWIGLU_ALPHA)


# --- layer and model ------------------------------------------------------------------------------


class Layer:
    """x += attention(norm x); x += experts(norm x)."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope, experts: ExpertStore) -> None:
        name = f"model.layers.{layer}"
        self.input_layernorm = w.norm(f"{name}.input_layernorm.weight", c.rms_norm_eps)
        self.attention = Attention(c, w, layer, rope)
        self.post_attention_layernorm = w.norm(
            f"{name}.post_attention_layernorm.weight", c.rms_norm_eps
        )
        self.mlp = SparseMLP(c, w, layer, experts)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        x = x + self.attention(self.input_layernorm(x), states)
        return x + self.mlp(self.post_attention_layernorm(x))


def cache_specs(c: Config) -> list[CacheSpec]:
    """What each layer must remember."""
    heads = (c.num_key_value_heads, c.head_dim, c.head_dim)
    return [RingSpec(*heads, w) if w else FullSpec(*heads) for w in c.windows]


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore) -> None:
        self.vocab_size = c.vocab_size
        self.cache_specs = cache_specs(c)
        rope = make_rope(c.head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.layers = [Layer(c, w, i, rope, experts) for i in range(c.num_hidden_layers)]
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
    """Canonical name -> logical shape of every resident tensor."""
    hidden, q = c.hidden_size, c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
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
        for part, rows, columns in (
            ("q_proj", q, hidden),
            ("k_proj", kv, hidden),
            ("v_proj", kv, hidden),
            ("o_proj", hidden, q),
        ):
            shapes[f"{name}.self_attn.{part}.weight"] = (rows, columns)
            if c.attention_bias:
                shapes[f"{name}.self_attn.{part}.bias"] = (rows,)
        shapes[f"{name}.self_attn.sinks"] = (c.num_attention_heads,)
        shapes[f"{name}.mlp.router.weight"] = (c.num_local_experts, hidden)
        shapes[f"{name}.mlp.router.bias"] = (c.num_local_experts,)
    return shapes


def expert_shapes(c: Config) -> dict[int, ExpertShape]:
    """Routed experts, biases included, of every layer."""
    shape = ExpertShape(c.num_local_experts, c.hidden_size, c.intermediate_size, bias=True)
    return dict.fromkeys(range(c.num_hidden_layers), shape)


_PUBLISHED = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?$")
_ALTERNATING = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown.

    Read are the published stacks (gate and up rows alternating) and MLX's separate ones.
    """
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    match = _PUBLISHED.match(plain)
    if match is None:
        routed = expert_pieces(plain, c.intermediate_size)
        fused = routed is not None and len(routed) > 1
        if routed is not None:
            return None if fused else routed
        return (Piece(plain),) if plain in weight_shapes(c) else None
    layer, bias = int(match[1]), match[3] or ""
    roles = tuple(_ALTERNATING) if match[2] == "gate_up_proj" else ("down",)
    return tuple(
        Piece(
            layer=layer,
            role=role + bias,
            rows=_ALTERNATING.get(role) if bias else None,
            transform=None if bias else _rows_of(_ALTERNATING.get(role)),
        )
        for role in roles
    )


def _rows_of(rows: slice | None) -> Callable[[Planes], Planes]:
    """Rows of one expert's matrix. MXFP4 is stored [out, in]; floats as [in, out]."""

    def transform(planes: Planes) -> Planes:
        if isinstance(planes.fmt, Raw):
            planes = transposed(planes)
        return planes if rows is None else planes.rows(rows)

    return transform


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def gguf_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF metadata and tensor shapes -> config.json keys; layers alternate from a window on."""
    config = gguf_base_config(meta, shapes)
    config.update(
        model_type="gpt_oss",
        intermediate_size=config.pop("moe_intermediate_size", 0),
        num_local_experts=config.pop("num_experts", 0),
        rope_scaling={**YARN, **config.get("rope_scaling", {})},
        attention_bias="blk.0.attn_q.bias" in shapes,
    )
    return config


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes; gate and up are apart there, [out, in] in every type."""
    target = gguf_name(name, _GGUF_NAMES)
    if target is None:
        return None
    return pieces(c, target.removesuffix(".weight") if ".sinks." in target else target)


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    wires=("gptOss",),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=cache_specs,
    expert_shapes=expert_shapes,
    expert_activation=expert_activation,
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(steering=None),
    gguf_architectures=("gpt-oss",),
    gguf_config=gguf_config,
    gguf_pieces=gguf_pieces,
)
