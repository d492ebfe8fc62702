"""Llama 2/3.x and what follows its shape: Mistral, Qwen2, Qwen3, SmolLM2, Mixtral, Qwen3-MoE.

One pre-norm block: grouped-query attention with half-split rope, then a SwiGLU feed-forward or
softmax-routed experts. Differences between the members are values of `Config`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.specs import CacheSpec, FullSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import UnsupportedError
from turbospark.experts.base import ExpertStore
from turbospark.families.archs import PLAIN, check_heads, read_scaling, yarn_from_arch, yarn_to_arch
from turbospark.families.base import Capabilities, ExpertShape, Family, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.gguf import gguf_base_config, gguf_name
from turbospark.families.names import expert_pieces, plain_name, unpermute_rows
from turbospark.install.arch import ArchConfig
from turbospark.kernels.rope_kv import Heads
from turbospark.layers.fused_decode import (
    FusedDecode,
    FusedExperts,
    FusedLayer,
    FusedMLP,
    NormedHead,
    fused_experts,
    fused_layer,
    fused_mlp,
)
from turbospark.layers.mlp import GatedMLP
from turbospark.layers.moe import softmax_top_k, swiglu
from turbospark.layers.rope import Rope, make_rope, scaling_kind
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

WIRES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
# Class defaults of the original configurations, for files that leave the key out.
_EPS = {"mistral": 1e-6, "mixtral": 1e-5}
_THETA = {"mixtral": 1e6}


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sparse: tuple[bool, ...] = ()


def read_config(c: ConfigReader) -> Config:
    """config.json of any member (hub dialect) -> Config; refuses values that are not computed."""
    kind = c.str("model_type")
    c.expect("hidden_act", "silu")
    c.expect("model_parallel", False)
    layers, heads = c.int("num_hidden_layers"), c.int("num_attention_heads")
    hidden = c.int("hidden_size")
    kv_heads = c.int("num_key_value_heads", heads)
    head_dim = c.int("head_dim", hidden // heads)
    check_heads(c.where, heads, kv_heads, head_dim)
    attention_bias = kind == "qwen2" or c.bool("attention_bias", False)
    return Config(
        model_type=kind,
        vocab_size=c.int("vocab_size"),
        hidden_size=hidden,
        intermediate_size=c.int("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=c.eps("rms_norm_eps", _EPS.get(kind, 1e-6)),
        rope_theta=c.theta("rope_theta", _THETA.get(kind, 1e4)),
        rope_scaling=read_scaling(c),
        max_position_embeddings=c.int("max_position_embeddings", 2048),
        windows=_windows(c, kind, layers),
        qkv_bias=attention_bias,
        o_bias=attention_bias and kind != "qwen2",
        mlp_bias=c.bool("mlp_bias", False) if kind == "llama" else False,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        tie_word_embeddings=c.bool("tie_word_embeddings", False),
        **_experts(c, kind, layers),
    )


def _windows(c: ConfigReader, kind: str, layers: int) -> tuple[int | None, ...]:
    """Attention window of each layer; None attends to everything."""
    if kind == "llama":
        return (None,) * layers
    window = c.int("sliding_window", 0, minimum=0) or None
    if kind.startswith("qwen") and not c.bool("use_sliding_window", False):
        window = None
    types = c.layer_types(layers, ("full_attention", "sliding_attention"))
    if types is not None and (kind.startswith("qwen") and kind != "qwen3_moe"):
        if window is None and "sliding_attention" in types:
            raise UnsupportedError(
                f"{c.where}: layer_types has sliding_attention but sliding_window is "
                f"{c.raw('sliding_window')!r} and use_sliding_window is "
                f"{c.raw('use_sliding_window')!r}; they must agree"
            )
        return tuple(window if t == "sliding_attention" else None for t in types)
    if kind in ("qwen2", "qwen3") and window is not None:
        first = c.int("max_window_layers", 28, minimum=0)
        return tuple(window if i >= first else None for i in range(layers))
    return (window,) * layers


def _experts(c: ConfigReader, kind: str, layers: int) -> dict[str, Any]:
    if kind not in ("mixtral", "qwen3_moe"):
        return {}
    key = "num_experts" if c.raw("num_experts") is not None else "num_local_experts"
    count = c.int(key)
    top = c.int("num_experts_per_tok", 2 if kind == "mixtral" else 8)
    if top > count:
        raise UnsupportedError(f"{c.where}: num_experts_per_tok {top} exceeds {key} {count}")
    if kind == "mixtral":
        width, normalize, sparse = c.int("intermediate_size"), True, (True,) * layers
    else:
        width, normalize = c.int("moe_intermediate_size"), c.bool("norm_topk_prob", False)
        step = c.int("decoder_sparse_step", 1)
        dense = c.list("mlp_only_layers") or []
        sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return dict(
        num_experts=count,
        num_experts_per_tok=top,
        moe_intermediate_size=width,
        norm_topk_prob=normalize,
        sparse=sparse,
    )


def arch(c: Config) -> ArchConfig:
    """The manifest's description of the architecture."""
    return ArchConfig(
        family=WIRES[c.model_type],
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        num_full_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        full_head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        sliding_window=next((w for w in c.windows if w), 0),
        rope_theta=c.rope_theta,
        full_rope_theta=c.rope_theta,
        partial_rotary_factor=1.0,
        num_layers=c.num_hidden_layers,
        num_experts=c.num_experts,
        top_k_experts=c.num_experts_per_tok,
        tie_word_embeddings=c.tie_word_embeddings,
        full_attention_layer_mask=tuple(0 if w else 1 for w in c.windows),
        attention_scale=c.head_dim**-0.5,
        rope_neox_subdim=False,
        **PLAIN,
        **yarn_to_arch(c.rope_scaling),
    )


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys of an install that carries only the manifest's architecture.

    The epsilon is a constant of each member: 1e-5 for llama, 1e-6 for qwen.
    """
    kind = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}.get(a.family, "llama")
    if a.family == "llama" and (a.num_experts or a.sliding_window):
        kind = "mixtral" if a.num_experts else "mistral"
    config: dict[str, Any] = dict(
        model_type=kind,
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        rms_norm_eps=1e-5 if a.family == "llama" else 1e-6,
        rope_theta=a.rope_theta,
        tie_word_embeddings=a.tie_word_embeddings,
        sliding_window=a.sliding_window or None,
    )
    if a.num_experts:
        config.update(
            num_experts=a.num_experts,
            num_experts_per_tok=a.top_k_experts,
            moe_intermediate_size=a.moe_intermediate_size,
            norm_topk_prob=True,
        )
    scaling = yarn_from_arch(a)
    if scaling:
        config["rope_scaling"] = scaling
    return config


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Grouped-query attention; q and k are normed per head where the member does so."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.head_dim = c.head_dim
        self.scale = c.head_dim**-0.5
        self.rope = rope
        self.qkv = w.fused([f"{name}.{p}_proj" for p in "qkv"], bias=c.qkv_bias)
        self.o_proj = w.linear(f"{name}.o_proj", bias=c.o_bias)
        self.q_norm = w.norm(f"{name}.q_norm.weight", c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = w.norm(f"{name}.k_norm.weight", c.rms_norm_eps) if c.qk_norm else None

    def fused_heads(self) -> Heads:
        """The heads between the projections, as kernels take them."""
        q, k = self.q_norm, self.k_norm
        if q is None or k is None:
            return Heads(self.heads, self.kv_heads, self.head_dim)
        return Heads(self.heads, self.kv_heads, self.head_dim, q.weight, k.weight, q.eps)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows = x.shape[1]
        q, k, v = self.qkv(x)
        q = q.reshape(1, rows, self.heads, -1)
        k = k.reshape(1, rows, self.kv_heads, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        v = v.reshape(1, rows, self.kv_heads, -1).swapaxes(1, 2)
        q = self.rope(q.swapaxes(1, 2), states.step.start)
        k = self.rope(k.swapaxes(1, 2), states.step.start)
        out = states.layers[self.layer].attend(q, k, v, states.step, self.scale)
        return self.o_proj(out.swapaxes(1, 2).reshape(1, rows, -1))


# --- feed-forward (dense: layers/mlp.py) ----------------------------------------------------------


class SparseMLP:
    """Softmax over all experts in float32, the best k, each a SwiGLU."""

    def __init__(self, c: Config, w: Weights, layer: int, experts: ExpertStore) -> None:
        self.layer = layer
        self.top_k, self.normalize = c.num_experts_per_tok, c.norm_topk_prob
        self.router = w.linear(f"model.layers.{layer}.mlp.gate")
        self.experts = experts
        experts.watch(layer, lambda x: self.route(x)[0])

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """[1, L, H] -> chosen ids and weights [1, L, k]."""
        return softmax_top_k(self.router(x), self.top_k, self.normalize)

    def __call__(self, x: mx.array) -> mx.array:
        ids, weights = self.route(x)
        return self.experts.routed(self.layer, x, ids, weights)


# --- layer and model ------------------------------------------------------------------------------


class Layer:
    """x += attention(norm x); x += feed_forward(norm x)."""

    def __init__(
        self, c: Config, w: Weights, layer: int, rope: Rope, experts: ExpertStore | None
    ) -> None:
        name = f"model.layers.{layer}"
        self.input_layernorm = w.norm(f"{name}.input_layernorm.weight", c.rms_norm_eps)
        self.attention = Attention(c, w, layer, rope)
        self.post_attention_layernorm = w.norm(
            f"{name}.post_attention_layernorm.weight", c.rms_norm_eps
        )
        self.mlp: GatedMLP | SparseMLP
        if experts is not None and c.sparse[layer]:
            self.mlp = SparseMLP(c, w, layer, experts)
        else:
            self.mlp = GatedMLP(w, f"{name}.mlp", bias=c.mlp_bias)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        x = x + self.attention(self.input_layernorm(x), states)
        return x + self.mlp(self.post_attention_layernorm(x))

    def fused(self, dtype: mx.Dtype) -> FusedLayer | None:
        """The same as a few launches; None where it has to stay as it is."""
        a, m, norm = self.attention, self.mlp, self.post_attention_layernorm
        if isinstance(m, GatedMLP):
            mlp: FusedMLP | FusedExperts | None = fused_mlp(
                norm, m.gate_up, m.down_proj, "silu", dtype
            )
        else:
            mlp = fused_experts(
                norm, m.router, m.top_k, m.normalize, m.experts, m.layer, "silu", dtype
            )
        return fused_layer(
            self.input_layernorm, a.qkv, a.fused_heads(), a.rope, a.scale, a.o_proj, mlp, dtype
        )


def cache_specs(c: Config) -> list[CacheSpec]:
    """What each layer must remember."""
    heads = (c.num_key_value_heads, c.head_dim, c.head_dim)
    return [RingSpec(*heads, w) if w else FullSpec(*heads) for w in c.windows]


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore | None) -> None:
        self.vocab_size = c.vocab_size
        self.cache_specs = cache_specs(c)
        factors = w.numpy("rope_freqs.weight") if "rope_freqs.weight" in w else None
        rope = make_rope(
            c.head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings, factors=factors
        )
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.layers = [Layer(c, w, i, rope, experts) for i in range(c.num_hidden_layers)]
        self.norm = w.norm("model.norm.weight", c.rms_norm_eps)
        lm_head = self.embed_tokens.head if c.tie_word_embeddings else w.linear("lm_head")
        self.logits = NormedHead(self.norm, lm_head, w.kernels, w.dtype)
        self.decode = FusedDecode(
            self.layers, [layer.fused(w.dtype) for layer in self.layers], w.kernels
        )

    def __call__(
        self,
        ids: mx.array,
        states: LayerStates,
        after_layer: Callable[[int, mx.array], mx.array] | None = None,
    ) -> mx.array:
        x = self.embed_tokens(ids)
        if self.decode.takes(states):
            return self.decode(x, states, after_layer)
        for i, layer in enumerate(self.layers):
            x = layer(x, states)
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        return self.logits(hidden).astype(mx.float32)


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
    if scaling_kind(c.rope_scaling) == "factors":
        shapes["rope_freqs.weight"] = (c.head_dim // 2,)
    for i in range(c.num_hidden_layers):
        name = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}.{norm}.weight"] = (hidden,)
        _matrix(shapes, f"{name}.self_attn.q_proj", q, hidden, c.qkv_bias)
        _matrix(shapes, f"{name}.self_attn.k_proj", kv, hidden, c.qkv_bias)
        _matrix(shapes, f"{name}.self_attn.v_proj", kv, hidden, c.qkv_bias)
        _matrix(shapes, f"{name}.self_attn.o_proj", hidden, q, c.o_bias)
        if c.qk_norm:
            shapes[f"{name}.self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[f"{name}.self_attn.k_norm.weight"] = (c.head_dim,)
        if c.sparse and c.sparse[i]:
            shapes[f"{name}.mlp.gate.weight"] = (c.num_experts, hidden)
        else:
            _matrix(shapes, f"{name}.mlp.gate_proj", c.intermediate_size, hidden, c.mlp_bias)
            _matrix(shapes, f"{name}.mlp.up_proj", c.intermediate_size, hidden, c.mlp_bias)
            _matrix(shapes, f"{name}.mlp.down_proj", hidden, c.intermediate_size, c.mlp_bias)
    return shapes


def _matrix(shapes: dict, name: str, rows: int, columns: int, bias: bool) -> None:
    shapes[f"{name}.weight"] = (rows, columns)
    if bias:
        shapes[f"{name}.bias"] = (rows,)


def expert_shapes(c: Config) -> dict[int, ExpertShape]:
    """Routed experts of each sparse layer."""
    shape = ExpertShape(c.num_experts, c.hidden_size, c.moe_intermediate_size)
    return {i: shape for i, sparse in enumerate(c.sparse) if sparse}


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    plain = plain.replace(".block_sparse_moe.gate.", ".mlp.gate.")
    routed = expert_pieces(plain, c.moe_intermediate_size) if c.sparse else None
    if routed is not None:
        return routed
    return (Piece(plain),) if plain in weight_shapes(c) else None


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_GGUF_LAYER = re.compile(r"^blk\.(\d+)\.attn_([qk])\.(weight|bias)$")


def gguf_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF metadata and tensor shapes -> config.json keys."""
    architecture = meta["general.architecture"]
    config = gguf_base_config(meta, shapes)
    config["model_type"] = _GGUF_TYPES[architecture]
    if architecture == "llama" and config.get("num_experts"):
        config["model_type"] = "mixtral"
    elif architecture == "llama" and config.get("sliding_window"):
        config["model_type"] = "mistral"
    if config.get("num_experts"):
        config["norm_topk_prob"] = True
    if "blk.0.attn_output.bias" in shapes or (
        architecture != "qwen2" and "blk.0.attn_q.bias" in shapes
    ):
        config["attention_bias"] = True
    if "blk.0.ffn_gate.bias" in shapes:
        config["mlp_bias"] = True
    if "rope_freqs.weight" in shapes:
        config["rope_scaling"] = {"rope_type": "factors"}
    return config


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes; the llama architecture stores q and k rows interleaved."""
    if name == "rope_freqs.weight":
        return (Piece(name),)
    target = gguf_name(name)
    if target is None:
        return None
    found = pieces(c, target)
    match = _GGUF_LAYER.match(name)
    if match and WIRES[c.model_type] == "llama" and found:
        heads = c.num_attention_heads if match[2] == "q" else c.num_key_value_heads
        return (Piece(found[0].target, transform=unpermute_rows(heads)),)
    return found


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="llama",
    model_types=tuple(WIRES),
    wires=("llama", "qwen2", "qwen3", "qwen3moe"),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=cache_specs,
    expert_shapes=expert_shapes,
    expert_activation=lambda config: swiglu,
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(steering=None),
    gguf_architectures=tuple(_GGUF_TYPES),
    gguf_config=gguf_config,
    gguf_pieces=gguf_pieces,
)
