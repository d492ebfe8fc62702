"""DeepSeek-V2, V2-Lite, V2.5 and Coder-V2: latent attention and routed experts beside shared ones.

Attention keeps one latent row per position for all heads. Keys and values are never expanded:
their matrices are folded into the query and into what comes out, for prompts and for single
tokens alike, so that every chunking of a prompt computes the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.specs import CacheSpec, LatentSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import UnsupportedError
from turbospark.experts.base import ExpertStore
from turbospark.families.archs import PLAIN, read_yarn, yarn_from_arch, yarn_to_arch
from turbospark.families.base import Capabilities, ExpertShape, Family, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.gguf import gguf_base_config, gguf_name
from turbospark.families.names import expert_pieces, plain_name
from turbospark.families.transforms import join_heads, rows_of_heads, turn_heads
from turbospark.install.arch import ArchConfig
from turbospark.layers.mlp import GatedMLP
from turbospark.layers.moe import keep_groups, top_k
from turbospark.layers.rope import Rope, make_rope, mscale
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

LATENT_EPS = 1e-6  # of the two norms on latents, whatever rms_norm_eps says
RMS_EPS = 1e-6
# The one size with group-limited routing (V2, V2.5, Coder-V2), for files that cannot say it:
# routed experts -> (groups, groups kept).
_GROUPS = {160: (8, 3)}


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    """Width of the query's latent; 0 projects queries directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    sparse: tuple[bool, ...]
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    moe_intermediate_size: int
    shared_width: int
    """Rows of the shared experts taken as one; 0 when there are none."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """1 / sqrt(head width), times YaRN's temperature squared where mscale_all_dim asks."""
        yarn = self.rope_scaling or {}
        weight = yarn.get("mscale_all_dim")
        m = mscale(yarn["factor"], weight) if weight else 1.0
        return m * m / self.qk_head_dim**0.5


def read_config(c: ConfigReader) -> Config:
    """config.json (hub dialect) -> Config; refuses values that are not computed."""
    c.expect("model_type", "deepseek_v2")
    c.expect("hidden_act", "silu")
    for flag in ("attention_bias", "mlp_bias", "norm_topk_prob"):
        c.expect(flag, False)
    layers, heads = c.int("num_hidden_layers"), c.int("num_attention_heads")
    c.expect("num_key_value_heads", heads)
    rope_dim = c.int("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise UnsupportedError(f"{c.where}: qk_rope_head_dim = {rope_dim}; supported: even")
    return Config(
        vocab_size=c.int("vocab_size"),
        hidden_size=c.int("hidden_size"),
        intermediate_size=c.int("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        q_lora_rank=_or_none(c, "q_lora_rank", 1536),
        kv_lora_rank=c.int("kv_lora_rank", 512),
        qk_nope_head_dim=c.int("qk_nope_head_dim", 128),
        qk_rope_head_dim=rope_dim,
        v_head_dim=c.int("v_head_dim", 128),
        rms_norm_eps=c.eps("rms_norm_eps", RMS_EPS),
        rope_theta=c.theta("rope_theta", 1e4),
        rope_scaling=read_yarn(c),
        max_position_embeddings=c.int("max_position_embeddings", 2048),
        tie_word_embeddings=c.bool("tie_word_embeddings", False),
        **_experts(c, layers),
    )


def _or_none(c: ConfigReader, key: str, default: int) -> int:
    """A count that an explicit null switches off (0)."""
    return 0 if key in c.values and c.values[key] is None else c.int(key, default, minimum=0)


def _experts(c: ConfigReader, layers: int) -> dict[str, Any]:
    """Which layers are routed, and how."""
    c.expect("scoring_func", "softmax")
    c.expect("topk_method", "greedy", "group_limited_greedy")
    count = _or_none(c, "n_routed_experts", 64)
    top = c.int("num_experts_per_tok") if count else 0
    first = c.int("first_k_dense_replace", 0, minimum=0) if count else layers
    every = c.int("moe_layer_freq", 1)
    groups = kept = 1
    if c.raw("topk_method", "greedy") == "group_limited_greedy":
        groups, kept = c.int("n_group"), c.int("topk_group")
    if count % groups or kept > groups or top > count // groups * kept:
        raise UnsupportedError(
            f"{c.where}: {top} of {count} experts from topk_group = {kept} of n_group = {groups} "
            "groups; experts must divide into the groups, and the groups kept must hold enough"
        )
    width = c.int("moe_intermediate_size", 1407)
    return dict(
        sparse=tuple(i >= first and i % every == 0 for i in range(layers)),
        n_routed_experts=count, num_experts_per_tok=top, n_group=groups, topk_group=kept,
        routed_scaling_factor=c.float("routed_scaling_factor", 1.0),
        moe_intermediate_size=width,
        shared_width=width * _or_none(c, "n_shared_experts", 2) if count else 0,
    )  # fmt: skip


def arch(c: Config) -> ArchConfig:
    """The manifest's description of this architecture."""
    lead = c.sparse.index(True) if True in c.sparse else 0
    routed = c.n_routed_experts
    return ArchConfig(
        **PLAIN, **yarn_to_arch(c.rope_scaling),
        family="deepseek2",
        hidden_size=c.hidden_size, vocab_size=c.vocab_size, num_layers=c.num_hidden_layers,
        intermediate_size=c.shared_width if routed else c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size if routed else 0,
        num_experts=routed, top_k_experts=c.num_experts_per_tok,
        num_heads=c.num_attention_heads, num_kv_heads=1, num_full_kv_heads=1,
        head_dim=c.qk_head_dim, full_head_dim=c.v_head_dim, sliding_window=0,
        rope_theta=c.rope_theta, full_rope_theta=c.rope_theta, partial_rotary_factor=0.0,
        rope_neox_subdim=True, tie_word_embeddings=c.tie_word_embeddings,
        full_attention_layer_mask=(5,) * c.num_hidden_layers, attention_scale=c.attention_scale,
        mla_kv_lora_rank=c.kv_lora_rank, mla_q_lora_rank=c.q_lora_rank,
        mla_nope_head_dim=c.qk_nope_head_dim, mla_rope_head_dim=c.qk_rope_head_dim,
        mla_v_head_dim=c.v_head_dim, num_dense_leading_layers=lead,
        dense_lead_intermediate_size=c.intermediate_size if lead else 0,
        routed_scaling_factor=c.routed_scaling_factor,
        rope_scaling_mscale=float((c.rope_scaling or {}).get("mscale_all_dim") or 0.0),
    )  # fmt: skip


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys of an install that carries only the manifest's architecture."""
    config: dict[str, Any] = dict(
        model_type="deepseek_v2",
        vocab_size=a.vocab_size, hidden_size=a.hidden_size, num_hidden_layers=a.num_layers,
        intermediate_size=a.dense_lead_intermediate_size or a.intermediate_size,
        num_attention_heads=a.num_heads, rms_norm_eps=RMS_EPS,
        q_lora_rank=a.mla_q_lora_rank or None, kv_lora_rank=a.mla_kv_lora_rank,
        qk_nope_head_dim=a.mla_nope_head_dim, qk_rope_head_dim=a.mla_rope_head_dim,
        v_head_dim=a.mla_v_head_dim,
        rope_theta=a.rope_theta, rope_scaling=yarn_from_arch(a),
        tie_word_embeddings=a.tie_word_embeddings, n_routed_experts=a.num_experts or None,
    )  # fmt: skip
    if a.num_experts:
        config.update(
            num_experts_per_tok=a.top_k_experts, moe_intermediate_size=a.moe_intermediate_size,
            n_shared_experts=a.intermediate_size // a.moe_intermediate_size,
            first_k_dense_replace=a.num_dense_leading_layers,
            routed_scaling_factor=a.routed_scaling_factor, **_routing(a.num_experts),
        )  # fmt: skip
    if a.rope_scaling_factor:
        weight = a.rope_scaling_mscale
        config["rope_scaling"].update(mscale=weight, mscale_all_dim=weight)
    return config


def _routing(experts: int) -> dict[str, Any]:
    groups, kept = _GROUPS.get(experts, (1, 1))
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return dict(topk_method=method, n_group=groups, topk_group=kept)


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Latent attention: the query is carried into the latent, attends there, and comes back."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.heads = c.num_attention_heads
        self.nope_dim, self.latent_dim = c.qk_nope_head_dim, c.kv_lora_rank
        self.scale = c.attention_scale
        self.rope = rope
        query = "q_a_proj" if c.q_lora_rank else "q_proj"
        self.inputs = w.fused([f"{name}.{query}", f"{name}.kv_a_proj_with_mqa"])
        self.q_a_layernorm = self.q_b_proj = None
        if c.q_lora_rank:
            self.q_a_layernorm = w.norm(f"{name}.q_a_layernorm.weight", LATENT_EPS)
            self.q_b_proj = w.linear(f"{name}.q_b_proj")
        self.kv_a_layernorm = w.norm(f"{name}.kv_a_layernorm.weight", LATENT_EPS)
        self.k_b_proj = w.per_head(f"{name}.k_b_proj", self.heads, transpose=False)
        self.v_b_proj = w.per_head(f"{name}.v_b_proj", self.heads)
        self.o_proj = w.linear(f"{name}.o_proj")

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows, start = x.shape[1], states.step.start
        q, latent = self.inputs(x)
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.reshape(1, rows, self.heads, -1).swapaxes(1, 2)
        q, q_pe = mx.split(q, [self.nope_dim], axis=-1)
        # Packed products on CUDA take whole rows only, and a split is strided.
        q = self.k_b_proj(mx.contiguous(q))
        latent, k_pe = mx.split(latent[:, None], [self.latent_dim], axis=-1)
        row = mx.concatenate([self.kv_a_layernorm(latent), self.rope(k_pe, start)], axis=-1)
        q = mx.concatenate([q, self.rope(q_pe, start)], axis=-1)
        cache = states.layers[self.layer]
        cache.write(row, states.step)
        out = self.v_b_proj(cache.attend(q, states.step, self.scale))
        return self.o_proj(out.swapaxes(1, 2).reshape(1, rows, -1))


# --- feed-forward (dense: layers/mlp.py) ----------------------------------------------------------


class SparseMLP:
    """The routed experts' sum plus the shared experts, which every token takes ungated."""

    def __init__(self, c: Config, w: Weights, layer: int, experts: ExpertStore) -> None:
        name = f"model.layers.{layer}.mlp"
        self.layer = layer
        self.top_k, self.groups, self.kept = c.num_experts_per_tok, c.n_group, c.topk_group
        self.factor = c.routed_scaling_factor
        self.router = w.linear(f"{name}.gate")
        self.experts = experts
        self.shared = GatedMLP(w, f"{name}.shared_experts") if c.shared_width else None
        experts.watch(layer, lambda x: self.route(x)[0], beside=self.shared is not None)

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """[1, L, H] -> chosen ids and weights [1, L, k]; the weights are not renormalised."""
        scores = mx.softmax(self.router(x).astype(mx.float32), axis=-1)
        if self.groups > 1:
            scores = keep_groups(scores, self.groups, self.kept)
        ids, weights = top_k(scores, self.top_k)
        return ids, weights * self.factor

    def __call__(self, x: mx.array) -> mx.array:
        beside = None if self.shared is None else self.shared(x)
        y = self.experts.routed(self.layer, x, *self.route(x), beside)
        return y if beside is None else y + beside


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
        if experts is not None and c.sparse[layer]:
            self.mlp: SparseMLP | GatedMLP = SparseMLP(c, w, layer, experts)
        else:
            self.mlp = GatedMLP(w, f"{name}.mlp")

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        x = x + self.attention(self.input_layernorm(x), states)
        return x + self.mlp(self.post_attention_layernorm(x))


def cache_specs(c: Config) -> list[CacheSpec]:
    """What each layer must remember."""
    return [LatentSpec(c.kv_lora_rank, c.qk_rope_head_dim)] * c.num_hidden_layers


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore | None) -> None:
        self.vocab_size = c.vocab_size
        self.cache_specs = cache_specs(c)
        longest = c.max_position_embeddings
        rope = make_rope(
            c.qk_rope_head_dim, c.rope_theta, c.rope_scaling, longest, interleaved=True
        )
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
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for i, sparse in enumerate(c.sparse):
        parts = {**_attention_shapes(c), **_mlp_shapes(c, sparse)}
        shapes.update({f"model.layers.{i}.{part}.weight": s for part, s in parts.items()})
    return shapes


def _attention_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """The checkpoint's kv_b_proj is kept as k_b_proj and v_b_proj: its rows sorted by kind."""
    hidden, heads, latent = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.kv_a_proj_with_mqa": (latent + c.qk_rope_head_dim, hidden),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.k_b_proj": (heads * c.qk_nope_head_dim, latent),
        "self_attn.v_b_proj": (heads * c.v_head_dim, latent),
        "self_attn.o_proj": (hidden, heads * c.v_head_dim),
    }
    if c.q_lora_rank:
        shapes["self_attn.q_a_proj"] = (c.q_lora_rank, hidden)
        shapes["self_attn.q_a_layernorm"] = (c.q_lora_rank,)
    query = "q_b_proj" if c.q_lora_rank else "q_proj"
    shapes[f"self_attn.{query}"] = (heads * c.qk_head_dim, c.q_lora_rank or hidden)
    return shapes


def _mlp_shapes(c: Config, sparse: bool) -> dict[str, tuple[int, ...]]:
    router = {"mlp.gate": (c.n_routed_experts, c.hidden_size)} if sparse else {}
    name = "mlp.shared_experts" if sparse else "mlp"
    width = c.shared_width if sparse else c.intermediate_size
    into, out = (width, c.hidden_size), (c.hidden_size, width)
    matrices = {f"{name}.gate_proj": into, f"{name}.up_proj": into, f"{name}.down_proj": out}
    return {**router, **(matrices if width else {})}


def expert_shapes(c: Config) -> dict[int, ExpertShape]:
    """Routed experts of each sparse layer."""
    shape = ExpertShape(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size)
    return {i: shape for i, sparse in enumerate(c.sparse) if sparse}


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    routed = expert_pieces(plain, c.moe_intermediate_size) if c.n_routed_experts else None
    if routed is not None:
        return routed
    attention, _, part = plain.removesuffix(".weight").rpartition(".")
    key, value = f"{attention}.k_b_proj.weight", f"{attention}.v_b_proj.weight"
    shapes = weight_shapes(c)
    if key in shapes and part == "kv_b_proj":
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        width = nope + c.v_head_dim  # each head has its key's rows, then its value's
        return (
            Piece(key, transform=rows_of_heads(heads, width, range(nope))),
            Piece(value, transform=rows_of_heads(heads, width, range(nope, width))),
        )
    if key in shapes and part == "embed_q":
        return (Piece(key, transform=turn_heads),)
    if key in shapes and part == "unembed_out":
        return (Piece(value, transform=join_heads),)
    return (Piece(plain),) if plain in shapes else None


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q", "attn_v_b": "self_attn.unembed_out",
    **{f"ffn_{p}_shexp": f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")},
}  # fmt: skip


def gguf_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF metadata and tensor shapes -> config.json keys; DeepSeek-V3 has the same string."""
    get = lambda key, default=None: meta.get(f"deepseek2.{key}", default)  # noqa: E731
    if get("expert_gating_func", 1) != 1 or any(".exp_probs_b" in name for name in shapes):
        raise UnsupportedError(
            "GGUF metadata: this deepseek2 file routes by sigmoid with expert biases "
            "(deepseek_v3 and later), which is not supported; supported: deepseek_v2, softmax"
        )
    config = gguf_base_config(meta, shapes)
    rope_dim = get("rope.dimension_count", 64)
    # Files with attn_k_b describe the absorbed form; *_mla then holds the heads' own widths.
    key_dim = get("attention.key_length_mla") or get("attention.key_length", 192)
    experts = config.pop("num_experts", None)
    config.update(
        model_type="deepseek_v2",
        num_key_value_heads=config["num_attention_heads"],
        q_lora_rank=get("attention.q_lora_rank"), kv_lora_rank=get("attention.kv_lora_rank"),
        qk_nope_head_dim=key_dim - rope_dim, qk_rope_head_dim=rope_dim,
        v_head_dim=get("attention.value_length_mla") or get("attention.value_length"),
        n_routed_experts=experts, n_shared_experts=get("expert_shared_count", 0),
        first_k_dense_replace=get("leading_dense_block_count", 0),
        routed_scaling_factor=get("expert_weights_scale", 1.0),
        norm_topk_prob=bool(get("expert_weights_norm", False)),
        **_routing(experts or 0),
    )  # fmt: skip
    if get("expert_group_count", 1) > 1:
        config.update(
            topk_method="group_limited_greedy",
            n_group=get("expert_group_count"), topk_group=get("expert_group_used_count"),
        )  # fmt: skip
    if config.get("rope_scaling"):
        # Stored is 0.1 * mscale_all_dim, as float32; every V2 has mscale equal to it.
        weight = round(10 * get("rope.scaling.yarn_log_multiplier", 0.0), 6)
        config["rope_scaling"].update(mscale=weight, mscale_all_dim=weight)
    return config


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes; rope rows are stored as the checkpoint has them."""
    target = gguf_name(name, _GGUF_NAMES)
    return None if target is None else pieces(c, target)


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="deepseek2",
    model_types=("deepseek_v2",),
    wires=("deepseek2",),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=cache_specs,
    expert_shapes=expert_shapes,
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(kv_quant="its cache already holds compressed latent rows"),
    gguf_architectures=("deepseek2",),
    gguf_config=gguf_config,
    gguf_pieces=gguf_pieces,
)
