"""Gemma 4, the text half: 26B-A4B, 31B, 12B (unified), E2B, E4B.

Sandwich norms around attention and a gelu feed-forward; sliding and full layers differ in head
width, key/value heads and rope. Members add routed experts, values taken from the key projection,
layers that read another layer's keys and values, and inputs of their own for every layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.state import LayerStates
from turbospark.errors import UnsupportedError
from turbospark.experts.base import ExpertStore
from turbospark.families.archs import check_heads
from turbospark.families.base import Capabilities, ExpertShape, Family, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.gguf_gemma import gemma4_config, gemma4_name
from turbospark.families.kinds import (
    FULL,
    SLIDING,
    Kind,
    layer_specs,
    override_shape,
    read_layer_types,
    read_rope,
    read_sources,
)
from turbospark.families.names import expert_pieces, plain_name
from turbospark.install.arch import ArchConfig
from turbospark.layers.mlp import GatedMLP
from turbospark.layers.moe import geglu_tanh, softmax_top_k
from turbospark.layers.norm import RMSNorm
from turbospark.layers.per_layer import PerLayerGate, PerLayerInputs
from turbospark.layers.rope import Rope
from turbospark.layers.scaling import scaled, soft_cap
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs.

    `sources[i]` is the layer whose keys and values layer i reads, None where it has its own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    layer_types: tuple[str, ...]
    kinds: dict[str, Kind]
    attention_k_eq_v: bool
    sources: tuple[int | None, ...]
    use_double_wide_mlp: bool
    rms_norm_eps: float
    max_position_embeddings: int
    final_logit_softcapping: float
    tie_word_embeddings: bool
    per_layer_width: int
    per_layer_vocab: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    def kind(self, layer: int) -> Kind:
        """How `layer` attends."""
        return self.kinds[self.layer_types[layer]]

    def values_from_keys(self, layer: int) -> bool:
        """Whether the raw keys of `layer` are its values too."""
        return self.attention_k_eq_v and self.layer_types[layer] == FULL

    def width(self, layer: int) -> int:
        """Width of the layer's dense feed-forward."""
        wide = self.use_double_wide_mlp and self.sources[layer] is not None
        return self.intermediate_size * (2 if wide else 1)


def read_config(c: ConfigReader) -> Config:
    """config.json of any member (either dialect) -> Config; absent keys as in transformers."""
    unified = c.str("model_type").startswith("gemma4_unified")
    c.expect("hidden_activation", "gelu_pytorch_tanh")
    c.expect("hidden_act", "gelu_pytorch_tanh")
    c.expect("attention_bias", False)
    c.expect("use_bidirectional_attention", "vision", False)  # images only; "all" is not causal
    if unified:
        c.expect("hidden_size_per_layer_input", 0)
        c.expect("enable_moe_block", False)
    c.expect("partial_rotary_factor", 1.0)
    for key in ("rope_theta", "rope_scaling"):
        c.expect(key)  # what a flat `rope_parameters` becomes; each kind needs its own
    types = read_layer_types(c, c.int("num_hidden_layers", 30), period=6)
    types = (*types[:-1], FULL)  # whatever the file says, as upstream
    window = c.int("sliding_window", 1024 if unified else 512)
    return Config(
        vocab_size=c.int("vocab_size", 262144),
        hidden_size=c.int("hidden_size", 2304),
        intermediate_size=c.int("intermediate_size", 9216),
        num_attention_heads=c.int("num_attention_heads", 8),
        layer_types=types,
        kinds={SLIDING: _kind(c, SLIDING, types, window), FULL: _kind(c, FULL, types, None)},
        attention_k_eq_v=c.bool("attention_k_eq_v", False),
        sources=read_sources(c, types),
        use_double_wide_mlp=c.bool("use_double_wide_mlp", False),
        rms_norm_eps=c.eps("rms_norm_eps", 1e-6),
        max_position_embeddings=c.int("max_position_embeddings", 262144 if unified else 131072),
        final_logit_softcapping=c.float("final_logit_softcapping", 0.0),
        tie_word_embeddings=c.bool("tie_word_embeddings", True),
        **_per_layer(c, unified),
        **_experts(c),
    )


def _kind(c: ConfigReader, name: str, types: tuple[str, ...], window: int | None) -> Kind:
    """One kind's geometry: hub files have `global_*` keys, v5 files overrides by layer."""
    base = {
        "head_dim": c.int("head_dim", 256),
        "num_key_value_heads": c.int("num_key_value_heads", 4),
    }
    shape = override_shape(c, name, types, base)
    if shape is None and name == FULL:
        base["head_dim"] = c.int("global_head_dim", 512)
        if c.bool("attention_k_eq_v", False):
            heads = c.int("num_global_key_value_heads", base["num_key_value_heads"])
            base["num_key_value_heads"] = heads
    shape = shape or base
    ropes = c.section("rope_parameters") or ConfigReader(ROPES, c.where)
    rope = read_rope(ropes, name, ("default", "linear", "proportional", "factors"))
    kind = Kind(shape["num_key_value_heads"], shape["head_dim"], window, rope)
    if name in types:
        heads = c.int("num_attention_heads", 8)
        check_heads(f"{c.where}: {name}", heads, kind.kv_heads, kind.head_dim)
    return kind


def _per_layer(c: ConfigReader, unified: bool) -> dict[str, int]:
    absent = "hidden_size_per_layer_input" not in c.values and not unified
    width = c.int("hidden_size_per_layer_input", 256 if absent else 0, minimum=0)
    least = c.int("vocab_size", 262144) if width else 1  # every token has a row
    vocab = c.int("vocab_size_per_layer_input", 262144, minimum=least)
    return dict(per_layer_width=width, per_layer_vocab=vocab)


def _experts(c: ConfigReader) -> dict[str, int]:
    if not c.bool("enable_moe_block", False):
        return dict(num_experts=0, top_k_experts=0, moe_intermediate_size=0)
    count, top = c.int("num_experts"), c.int("top_k_experts")
    if top > count:
        raise UnsupportedError(f"{c.where}: top_k_experts {top} exceeds num_experts {count}")
    width = c.int("moe_intermediate_size")
    return dict(num_experts=count, top_k_experts=top, moe_intermediate_size=width)


def arch(c: Config) -> ArchConfig:
    """The manifest's description; sharing and per-layer inputs are ours to record beside it."""
    sliding, full = c.kinds[SLIDING], c.kinds[FULL]
    partial = {"proportional": full.rope.get("partial_rotary_factor", 1.0), "factors": 0.25}
    return ArchConfig(
        family="gemma4",
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size,
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
        partial_rotary_factor=float(partial.get(str(full.rope.get("rope_type")), 1.0)),
        num_layers=c.num_hidden_layers,
        num_experts=c.num_experts,
        top_k_experts=c.top_k_experts,
        tie_word_embeddings=c.tie_word_embeddings,
        attention_k_eq_v=c.attention_k_eq_v,
        hidden_activation="gelu_pytorch_tanh",
        full_attention_layer_mask=tuple(int(t == FULL) for t in c.layer_types),
    )


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys of an install that carries only the manifest's architecture.

    Such installs are of the members without per-layer inputs and shared keys and values.
    """
    full = dict(ROPES[FULL], rope_theta=a.full_rope_theta)
    full["partial_rotary_factor"] = a.partial_rotary_factor
    return dict(
        model_type="gemma4_text",
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        num_global_key_value_heads=a.num_full_kv_heads,
        head_dim=a.head_dim,
        global_head_dim=a.full_head_dim,
        hidden_activation=a.hidden_activation,
        rms_norm_eps=1e-6,
        sliding_window=a.sliding_window,
        layer_types=[FULL if full else SLIDING for full in a.full_attention_layer_mask],
        rope_parameters={SLIDING: dict(ROPES[SLIDING], rope_theta=a.rope_theta), FULL: full},
        final_logit_softcapping=a.final_logit_softcap,
        attention_k_eq_v=a.attention_k_eq_v,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=a.tie_word_embeddings,
        enable_moe_block=a.num_experts > 0,
        num_experts=a.num_experts or None,
        top_k_experts=a.top_k_experts or None,
        moe_intermediate_size=a.moe_intermediate_size or None,
    )


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Queries, keys and values normed per head (values without weight), scores not scaled.

    A sharing layer has queries only; without a value projection the raw keys are the values.
    """

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}.self_attn"
        kind = c.kind(layer)
        self.layer = layer
        self.head_dim = kind.head_dim
        self.rope = rope
        self.shares = c.sources[layer] is not None
        projections = "q" if self.shares else "qk" if c.values_from_keys(layer) else "qkv"
        self.qkv = w.fused([f"{name}.{p}_proj" for p in projections])
        self.o_proj = w.linear(f"{name}.o_proj")
        self.q_norm = w.norm(f"{name}.q_norm.weight", c.rms_norm_eps)
        if not self.shares:
            self.k_norm = w.norm(f"{name}.k_norm.weight", c.rms_norm_eps)
            self.v_norm = RMSNorm(None, c.rms_norm_eps)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows, step = x.shape[1], states.step
        q, *kv = (p.reshape(1, rows, -1, self.head_dim) for p in self.qkv(x))
        q = self.rope(self.q_norm(q).swapaxes(1, 2), step.start)
        cache = states.layers[self.layer]
        if self.shares:
            out = cache.read(q, step, 1.0)
        else:
            k = self.rope(self.k_norm(kv[0]).swapaxes(1, 2), step.start)
            v = self.v_norm(kv[-1]).swapaxes(1, 2)
            out = cache.attend(q, k, v, step, 1.0)
        return self.o_proj(out.swapaxes(1, 2).reshape(1, rows, -1))


# --- feed-forward ---------------------------------------------------------------------------------


class Router:
    """Softmax over all experts of the unweighted norm of x, the k best, each with its own scale."""

    def __init__(self, c: Config, w: Weights, name: str) -> None:
        self.top_k = c.top_k_experts
        scale = w.array(f"{name}.scale", mx.float32) * c.hidden_size**-0.5
        self.norm = RMSNorm(scale, c.rms_norm_eps)
        self.proj = w.linear(f"{name}.proj")
        self.per_expert_scale = w.array(f"{name}.per_expert_scale", mx.float32)
        mx.eval(scale)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [1, L, H] -> ids and weights [1, L, k]."""
        ids, weights = softmax_top_k(self.proj(self.norm(x)), self.top_k, normalize=True)
        return ids, weights * self.per_expert_scale[ids]


class FeedForward:
    """norm(mlp(norm x)); with experts norm(norm(mlp(norm x)) + norm(experts(norm x)))."""

    def __init__(self, c: Config, w: Weights, layer: int, experts: ExpertStore | None) -> None:
        name = f"model.layers.{layer}"
        self.layer = layer

        def norm(suffix: str) -> RMSNorm:
            return w.norm(f"{name}.{suffix}.weight", c.rms_norm_eps)

        self.mlp = GatedMLP(w, f"{name}.mlp", geglu_tanh)
        self.pre_norm = norm("pre_feedforward_layernorm")
        self.post_norm = norm("post_feedforward_layernorm")
        self.experts = experts if c.num_experts else None
        if self.experts is not None:
            self.router = Router(c, w, f"{name}.router")
            self.post_norm_1 = norm("post_feedforward_layernorm_1")
            self.pre_norm_2 = norm("pre_feedforward_layernorm_2")
            self.post_norm_2 = norm("post_feedforward_layernorm_2")
            self.experts.watch(layer, lambda x: self.router(x)[0], beside=True)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.mlp(self.pre_norm(x))
        if self.experts is not None:
            y = self.post_norm_1(y)
            ids, weights = self.router(x)
            routed = self.experts.routed(self.layer, self.pre_norm_2(x), ids, weights, beside=y)
            y = y + self.post_norm_2(routed)
        return self.post_norm(y)


# --- layer and model ------------------------------------------------------------------------------


class Layer:
    """Attention, feed-forward and the layer's own input added in turn, then one scale for all."""

    def __init__(
        self, c: Config, w: Weights, layer: int, rope: Rope, experts: ExpertStore | None
    ) -> None:
        name = f"model.layers.{layer}"
        self.input_norm = w.norm(f"{name}.input_layernorm.weight", c.rms_norm_eps)
        self.attention = Attention(c, w, layer, rope)
        self.post_norm = w.norm(f"{name}.post_attention_layernorm.weight", c.rms_norm_eps)
        self.feed_forward = FeedForward(c, w, layer, experts)
        self.gate = PerLayerGate(w, name, c.rms_norm_eps) if c.per_layer_width else None
        self.layer_scalar = w.array(f"{name}.layer_scalar")

    def __call__(self, x: mx.array, states: LayerStates, own: mx.array | None) -> mx.array:
        x = x + self.post_norm(self.attention(self.input_norm(x), states))
        x = x + self.feed_forward(x)
        if self.gate is not None and own is not None:
            x = x + self.gate(x, own)
        return x * self.layer_scalar


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore | None) -> None:
        self.vocab_size = c.vocab_size
        self.embed_by = c.hidden_size**0.5
        self.softcap = c.final_logit_softcapping
        self.cache_specs = layer_specs(c.kinds, c.layer_types, c.sources)
        factors = w.numpy("rope_freqs.weight") if "rope_freqs.weight" in w else None
        longest = c.max_position_embeddings
        ropes = {name: kind.make_rope(longest, factors) for name, kind in c.kinds.items()}
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.per_layer: PerLayerInputs | None = None
        if c.per_layer_width:
            sizes = (c.num_hidden_layers, c.per_layer_width, c.hidden_size)
            self.per_layer = PerLayerInputs(w, *sizes, c.rms_norm_eps)
        self.layers = [Layer(c, w, i, ropes[name], experts) for i, name in enumerate(c.layer_types)]
        self.norm = w.norm("model.norm.weight", c.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_linear if c.tie_word_embeddings else w.linear("lm_head")

    def __call__(
        self,
        ids: mx.array,
        states: LayerStates,
        after_layer: Callable[[int, mx.array], mx.array] | None = None,
    ) -> mx.array:
        x = scaled(self.embed_tokens(ids), self.embed_by)
        own = None if self.per_layer is None else self.per_layer(ids, x)
        for i, layer in enumerate(self.layers):
            x = layer(x, states, None if own is None else own[:, :, i])
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
    hidden, layers = c.hidden_size, c.num_hidden_layers
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    if any(kind.rope.get("rope_type") == "factors" for kind in c.kinds.values()):
        shapes["rope_freqs.weight"] = (c.kinds[FULL].head_dim // 2,)
    if c.per_layer_width:
        all_inputs = layers * c.per_layer_width
        shapes["model.embed_tokens_per_layer.weight"] = (c.per_layer_vocab, all_inputs)
        shapes["model.per_layer_model_projection.weight"] = (all_inputs, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (c.per_layer_width,)
    for i in range(layers):
        for suffix, shape in _layer_shapes(c, i).items():
            shapes[f"model.layers.{i}.{suffix}"] = shape
    return shapes


def _layer_shapes(c: Config, layer: int) -> dict[str, tuple[int, ...]]:
    kind, hidden, wide = c.kind(layer), c.hidden_size, c.width(layer)
    q, kv = c.num_attention_heads * kind.head_dim, kind.kv_heads * kind.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (kind.head_dim,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "layer_scalar": (1,),
    }
    if c.sources[layer] is None:
        shapes["self_attn.k_proj.weight"] = (kv, hidden)
        shapes["self_attn.k_norm.weight"] = (kind.head_dim,)
        if not c.values_from_keys(layer):
            shapes["self_attn.v_proj.weight"] = (kv, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if c.num_experts:
        norms += ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"]
        norms += ["post_feedforward_layernorm_2"]
        shapes["router.proj.weight"] = (c.num_experts, hidden)
        shapes["router.scale"] = (hidden,)
        shapes["router.per_expert_scale"] = (c.num_experts,)
    if c.per_layer_width:
        norms.append("post_per_layer_input_norm")
        shapes["per_layer_input_gate.weight"] = (c.per_layer_width, hidden)
        shapes["per_layer_projection.weight"] = (hidden, c.per_layer_width)
    shapes.update({f"{norm}.weight": (hidden,) for norm in norms})
    return shapes


def expert_shapes(c: Config) -> dict[int, ExpertShape]:
    """Routed experts: every layer of a member that has them."""
    shape = ExpertShape(c.num_experts, c.hidden_size, c.moe_intermediate_size)
    return dict.fromkeys(range(c.num_hidden_layers), shape) if c.num_experts else {}


_KEYS_AND_VALUES = re.compile(r"^model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    match = _KEYS_AND_VALUES.match(plain)
    if match and int(match[1]) < c.num_hidden_layers and c.sources[int(match[1])] is not None:
        return ()  # files keep these of layers that read another layer's
    routed = expert_pieces(plain, c.moe_intermediate_size) if c.num_experts else None
    if routed is not None:
        return routed
    return (Piece(plain),) if plain in weight_shapes(c) else None


# --- GGUF -----------------------------------------------------------------------------------------


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes; stored as it is in safetensors."""
    target = gemma4_name(name)
    return None if target is None else pieces(c, target)


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    wires=("gemma4",),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=lambda c: layer_specs(c.kinds, c.layer_types, c.sources),
    expert_shapes=expert_shapes,
    expert_activation=lambda config: geglu_tanh,
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(steering=None),
    gguf_architectures=("gemma4",),
    gguf_config=gemma4_config,
    gguf_pieces=gguf_pieces,
)
