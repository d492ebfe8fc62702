"""Qwen 3.5, 3.6 and 3.8, dense and mixture of experts: gated delta nets between full attention.

Three layers of four keep a matrix memory instead of keys and values; attention has an output gate
and rotates a leading part of each head. The mixture adds a gated shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from turbospark.cache.specs import CacheSpec, FullSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import SourceError, UnsupportedError
from turbospark.experts.base import ExpertStore
from turbospark.families import gguf_delta
from turbospark.families.archs import PLAIN, read_scaling, yarn_from_arch, yarn_to_arch
from turbospark.families.base import Capabilities, DraftHead, ExpertShape, Family, Hold, Piece
from turbospark.families.config import ConfigReader
from turbospark.families.dflash_shapes import PREFIX, DflashConfig, dflash_shapes, read_dflash
from turbospark.families.names import expert_pieces, plain_name
from turbospark.families.qwen3_5_shapes import (
    SAME,
    SAME_DELTA,
    attention_shapes,
    delta_shapes,
    feed_forward_shapes,
    mtp_pieces,
    mtp_present,
    mtp_shapes,
    norm_shapes,
)
from turbospark.install.arch import ArchConfig
from turbospark.layers.gated_delta import DeltaShape, GatedDeltaNet
from turbospark.layers.mlp import GatedMLP, SharedExpertMLP
from turbospark.layers.moe import swiglu
from turbospark.layers.rope import Rope, make_rope
from turbospark.layers.weights import Weights

# --- args check -----------------------------------------------------------------------------------

WIRES = {
    "qwen3_5": "qwen35", "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen36", "qwen3_5_moe_text": "qwen36",
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
# Norm weights multiply by 1 + w ("centred") in the original and by w ("plain") where a conversion
# has added the one: mlx-lm's and GGUF's do.
CENTRED, UNCENTRED = "centred", "plain"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json.

    The last three are in no config.json: `complete_config` finds them in tensor names and shapes.
    """

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
    partial_rotary_factor: float
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    delta: DeltaShape
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    mtp_num_hidden_layers: int
    norm_convention: str
    mtp_norm_convention: str
    mtp_tensors: tuple[str, ...]
    dflash: DflashConfig | None = None

    @property
    def centred(self) -> bool:
        return self.norm_convention == CENTRED

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head turn."""
        return int(self.head_dim * self.partial_rotary_factor)


def read_config(c: ConfigReader) -> Config:
    """config.json of any member (hub dialect) -> Config; refuses values that are not computed."""
    kind = c.str("model_type")
    sparse = WIRES[kind] == "qwen36"
    c.expect("hidden_act", "silu")
    c.expect("attn_output_gate", True)
    c.expect("output_gate_type", "silu", "swish")
    for key in ("norm_convention", "mtp_norm_convention"):
        c.expect(key, CENTRED, UNCENTRED)
    layers = c.int("num_hidden_layers")
    config = Config(
        model_type=kind,
        vocab_size=c.int("vocab_size"),
        hidden_size=c.int("hidden_size"),
        intermediate_size=0 if sparse else c.int("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=c.int("num_attention_heads"),
        num_key_value_heads=c.int("num_key_value_heads", 2 if sparse else 4),
        head_dim=c.int("head_dim", 256),
        rms_norm_eps=c.eps("rms_norm_eps", 1e-6),
        rope_theta=c.theta("rope_theta", 1e4),
        rope_scaling=read_scaling(c),
        partial_rotary_factor=c.float("partial_rotary_factor", 0.25),
        max_position_embeddings=c.int("max_position_embeddings", 32768),
        attention_bias=c.bool("attention_bias", False),
        tie_word_embeddings=c.bool("tie_word_embeddings", False),
        layer_types=_layer_types(c, layers),
        delta=_delta(c),
        **_experts(c, sparse),  # type: ignore[arg-type]
        mtp_num_hidden_layers=c.int("mtp_num_hidden_layers", 1, minimum=0),
        norm_convention=c.str("norm_convention", CENTRED),
        mtp_norm_convention=c.str("mtp_norm_convention", CENTRED),
        mtp_tensors=tuple(map(str, c.list("mtp_tensors") or ())),
    )
    _check(config, c.where)
    return replace(config, dflash=read_dflash(c.values.get("dflash"), config))


def _check(c: Config, where: str) -> None:
    """Refuse sizes that do not fit each other."""
    deep = c.mtp_num_hidden_layers > c.num_hidden_layers  # as many names would be made
    unknown = sorted(set(c.mtp_tensors) - set({} if deep else mtp_shapes(c)))
    for wrong, fault in (
        (c.num_attention_heads % c.num_key_value_heads,
         f"num_attention_heads = {c.num_attention_heads} is not a multiple of "
         f"num_key_value_heads = {c.num_key_value_heads}"),
        (c.delta.value_heads % c.delta.key_heads,
         f"linear_num_value_heads = {c.delta.value_heads} is not a multiple of "
         f"linear_num_key_heads = {c.delta.key_heads}"),
        (c.rotary_dim % 2 or not 0 < c.rotary_dim <= c.head_dim,
         f"partial_rotary_factor = {c.partial_rotary_factor} turns {c.rotary_dim} of "
         f"{c.head_dim} dimensions; supported: an even number of them"),
        (c.num_experts_per_tok > c.num_experts,
         f"num_experts_per_tok = {c.num_experts_per_tok} exceeds num_experts = {c.num_experts}"),
        (deep, f"mtp_num_hidden_layers = {c.mtp_num_hidden_layers} exceeds num_hidden_layers = "
         f"{c.num_hidden_layers}"),
        (unknown, f"mtp_tensors = {unknown} are not of this family"),
    ):  # fmt: skip
        if wrong:
            raise UnsupportedError(f"{where}: {fault}")


def _layer_types(c: ConfigReader, layers: int) -> tuple[str, ...]:
    types = c.layer_types(layers, (LINEAR, FULL))
    if types is not None:
        return tuple(types)
    interval = c.int("full_attention_interval", 4)
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))


def _delta(c: ConfigReader) -> DeltaShape:
    defaults = dict(zip(SAME_DELTA, (16, 32, 128, 128, 4), strict=True))
    c.int("linear_conv_kernel_dim", 4, minimum=2)
    return DeltaShape(*(c.int(key, default) for key, default in defaults.items()))


def _experts(c: ConfigReader, sparse: bool) -> dict[str, int]:
    defaults = {
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    if not sparse:
        return dict.fromkeys(defaults, 0)
    c.expect("norm_topk_prob", True)
    c.expect("decoder_sparse_step", 1)
    c.expect("mlp_only_layers", [])
    if "num_local_experts" in c:
        defaults["num_experts"] = c.int("num_local_experts")
    return {key: c.int(key, default) for key, default in defaults.items()}


def complete_config(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with what only a checkpoint's tensor names and shapes tell.

    The norm convention is read off conv1d ([C, taps, 1] in trees that store 1 + w). A draft head
    keeps the original convention in either: mlx-lm leaves `mtp.*` out, so one is grafted unchanged.
    """
    turned = {s[-1] == 1 for n, s in shapes.items() if n.endswith(".linear_attn.conv1d.weight")}
    if len(turned) > 1:
        raise SourceError("conv1d weights are [channels, 1, taps] and [channels, taps, 1] by turns")
    plain = turned.pop() if turned else "quantization" in config
    return {
        **config,
        "norm_convention": UNCENTRED if plain else CENTRED,
        "mtp_norm_convention": CENTRED,
        "mtp_tensors": mtp_present(read_config(ConfigReader(config)), shapes),
    }


def arch(c: Config) -> ArchConfig:
    """The manifest's description of the architecture."""
    return ArchConfig(
        **{field: getattr(c, key) for key, field in SAME.items()},
        **dict(zip(SAME_DELTA.values(), vars(c.delta).values(), strict=True)),
        **{**PLAIN, "attn_output_gate": True, "shared_expert_gated": c.num_experts > 0},
        **yarn_to_arch(c.rope_scaling),
        family=WIRES[c.model_type],
        intermediate_size=c.intermediate_size or c.shared_expert_intermediate_size,
        num_full_kv_heads=c.num_key_value_heads,
        full_head_dim=c.head_dim,
        sliding_window=0,
        full_rope_theta=c.rope_theta,
        full_attention_layer_mask=tuple(1 if kind == FULL else 2 for kind in c.layer_types),
        attention_scale=c.head_dim**-0.5,
        rope_neox_subdim=True,
    )


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys for an install that records only the architecture: a former MLX tree."""
    if a.linear_output_gate_sigmoid:
        raise UnsupportedError(f"linearOutputGateSigmoid = true is not supported by {a.family}")
    width = "shared_expert_intermediate_size" if a.num_experts else "intermediate_size"
    return {key: getattr(a, field) for key, field in (SAME | SAME_DELTA).items()} | {
        "model_type": "qwen3_5_moe_text" if a.num_experts else "qwen3_5_text",
        width: a.intermediate_size,
        "rms_norm_eps": 1e-6,
        "rope_scaling": yarn_from_arch(a),
        "layer_types": [FULL if kind == 1 else LINEAR for kind in a.full_attention_layer_mask],
        "norm_convention": UNCENTRED,
    }


# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Full attention with normed q and k, rope on the head's leading part, and an output gate."""

    def __init__(self, c: Config, w: Weights, name: str, layer: int, rope: Rope) -> None:
        self.layer = layer
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.scale = c.head_dim**-0.5
        self.rope = rope
        self.qkv = w.fused([f"{name}.{p}_proj" for p in "qkv"], bias=c.attention_bias)
        self.o_proj = w.linear(f"{name}.o_proj", bias=c.attention_bias)
        self.q_norm = w.norm(f"{name}.q_norm.weight", c.rms_norm_eps, c.centred)
        self.k_norm = w.norm(f"{name}.k_norm.weight", c.rms_norm_eps, c.centred)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows, start = x.shape[1], states.step.start
        q, k, v = self.qkv(x)
        # q_proj gives each head its query and then its gate.
        q, gate = mx.split(q.reshape(1, rows, self.heads, -1), 2, axis=-1)
        k = k.reshape(1, rows, self.kv_heads, -1)
        v = v.reshape(1, rows, self.kv_heads, -1).swapaxes(1, 2)
        q = self.rope(self.q_norm(q).swapaxes(1, 2), start)
        k = self.rope(self.k_norm(k).swapaxes(1, 2), start)
        out = states.layers[self.layer].attend(q, k, v, states.step, self.scale)
        out = out.swapaxes(1, 2) * mx.sigmoid(gate)
        return self.o_proj(out.reshape(1, rows, -1))


# --- layer and model (feed-forward: layers/mlp.py) ------------------------------------------------


class Layer:
    """x += mixer(norm x); x += feed_forward(norm x)."""

    def __init__(
        self,
        c: Config,
        w: Weights,
        name: str,
        layer: int,
        full: bool,
        rope: Rope,
        experts: ExpertStore | None = None,
    ) -> None:
        self.input_layernorm = w.norm(f"{name}.input_layernorm.weight", c.rms_norm_eps, c.centred)
        self.mixer: Attention | GatedDeltaNet
        if full:
            self.mixer = Attention(c, w, f"{name}.self_attn", layer, rope)
        else:
            self.mixer = GatedDeltaNet(w, f"{name}.linear_attn", layer, c.delta, c.rms_norm_eps)
        self.post_attention_layernorm = w.norm(
            f"{name}.post_attention_layernorm.weight", c.rms_norm_eps, c.centred
        )
        self.mlp: GatedMLP | SharedExpertMLP
        if experts is not None:
            self.mlp = SharedExpertMLP(w, f"{name}.mlp", layer, c.num_experts_per_tok, experts)
        else:
            self.mlp = GatedMLP(w, f"{name}.mlp")

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        x = x + self.mixer(self.input_layernorm(x), states)
        return x + self.mlp(self.post_attention_layernorm(x))


def _rope(c: Config) -> Rope:
    return make_rope(c.rotary_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings)


def mtp_blocks(c: Config, w: Weights, first: int, hold: Hold) -> list[Layer]:
    """The draft head's block: full attention, whatever the model's own layers are."""
    own = replace(c, norm_convention=c.mtp_norm_convention)
    name, experts = "mtp.layers.0", None
    if c.num_experts:
        mlp = w.experts(f"{name}.mlp.experts", c.num_experts, swiglu)
        experts = hold({first: mlp})
    return [Layer(own, w, name, first, True, _rope(c), experts)]


def mtp_tensors(c: Config) -> Shapes:
    """What a draft head of one layer needs; none for others, which no published model has."""
    return mtp_shapes(c) if c.mtp_num_hidden_layers == 1 else {}


def mtp_memory(c: Config) -> list[CacheSpec]:
    """Keys and values of the draft head's block."""
    return [FullSpec(c.num_key_value_heads, c.head_dim, c.head_dim)]


def mtp_norms(c: Config) -> tuple[float, bool]:
    """eps of the draft head's norms, and whether one is added to their weights."""
    return c.rms_norm_eps, c.mtp_norm_convention == CENTRED


def cache_specs(c: Config) -> list[CacheSpec]:
    """What each layer must remember."""
    full = FullSpec(c.num_key_value_heads, c.head_dim, c.head_dim)
    return [full if kind == FULL else c.delta.memory for kind in c.layer_types]


class Model:
    """The forward pass; see `families.base.Model` for the contract."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore | None) -> None:
        self.vocab_size = c.vocab_size
        self.cache_specs = cache_specs(c)
        # The three position axes of mrope are one and the same for text.
        rope = _rope(c)
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.layers = [
            Layer(c, w, f"model.layers.{i}", i, kind == FULL, rope, experts)
            for i, kind in enumerate(c.layer_types)
        ]
        self.norm = w.norm("model.norm.weight", c.rms_norm_eps, c.centred)
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


def weight_shapes(c: Config) -> Shapes:
    """Canonical name -> logical shape of every resident tensor, a present draft head's included."""
    hidden = c.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    for i, kind in enumerate(c.layer_types):
        name = f"model.layers.{i}"
        shapes |= norm_shapes(c, name)
        if kind == FULL:
            shapes |= attention_shapes(c, name)
        else:
            shapes |= delta_shapes(c, name, taps_last=c.centred)
        shapes |= feed_forward_shapes(c, name)
    shapes |= {name: s for name, s in mtp_shapes(c).items() if name in c.mtp_tensors}
    return shapes | dflash_shapes(c.dflash)


def expert_shapes(c: Config) -> dict[int, ExpertShape]:
    """Routed experts of each layer."""
    shape = ExpertShape(c.num_experts, c.hidden_size, c.moe_intermediate_size)
    return dict.fromkeys(range(c.num_hidden_layers), shape) if c.num_experts else {}


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    head = mtp_pieces(c, name)
    if head is not None:
        return tuple(piece for piece in head if piece.target in c.mtp_tensors)
    if name.startswith(PREFIX):
        return (Piece(name),) if name in dflash_shapes(c.dflash) else None
    plain = plain_name(name)
    if plain is None or (c.tie_word_embeddings and plain.startswith("lm_head.")):
        return ()
    routed = expert_pieces(plain, c.moe_intermediate_size) if c.num_experts else None
    if routed is not None:
        return routed
    return (Piece(plain),) if plain in weight_shapes(c) else None


# --- GGUF -----------------------------------------------------------------------------------------

_GGUF_TYPES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}


def gguf_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """GGUF metadata and tensor shapes -> config.json keys; all norms have the one added."""
    config = gguf_delta.base_config(meta, shapes) | {
        "model_type": _GGUF_TYPES[meta["general.architecture"]],
        "norm_convention": UNCENTRED,
        "mtp_norm_convention": UNCENTRED,
    }
    names = [gguf_delta.name(name, config["num_hidden_layers"]) or "" for name in shapes]
    c = read_config(ConfigReader(config, "GGUF metadata"))
    return config | {"mtp_tensors": mtp_present(c, names)}


def gguf_pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a GGUF tensor goes, with its value heads put back in order."""
    target = gguf_delta.name(name, c.num_hidden_layers)
    found = None if target is None else pieces(c, target)
    if target is None or not found:
        return found
    transform = gguf_delta.transform(c.delta, target)
    return tuple(replace(piece, transform=transform or piece.transform) for piece in found)


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="qwen3_5",
    model_types=tuple(WIRES),
    wires=("qwen35", "qwen36"),
    read_config=read_config,
    complete_config=complete_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    cache_specs=cache_specs,
    expert_shapes=expert_shapes,
    pieces=pieces,
    build=Model,
    capabilities=Capabilities(steering=None, drafters=("mtp", "dflash")),
    draft_head=DraftHead(mtp_tensors, mtp_memory, mtp_blocks, mtp_norms),
    gguf_architectures=tuple(_GGUF_TYPES),
    gguf_config=gguf_config,
    gguf_pieces=gguf_pieces,
)
