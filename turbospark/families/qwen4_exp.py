"""Qwen 4 (experimental): gated delta nets, block-sparse attention, several residual streams.

Three layers of four keep a matrix memory; the fourth attends to the blocks that an indexer scores
best. Streams are read and written by hyper-connections, which also stand in for the layer norms.
Some layers add embeddings of hashed n-grams. Every layer has routed and shared experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import mlx.core as mx

from turbospark.cache.sparse import Index, SparseKV
from turbospark.cache.specs import CacheSpec, SparseSpec
from turbospark.cache.state import LayerStates
from turbospark.experts.base import ExpertStore
from turbospark.families.base import Capabilities, ExpertShape, Family, Piece
from turbospark.families.names import expert_pieces, plain_name
from turbospark.families.qwen3_5_shapes import Shapes, attention_shapes, delta_shapes
from turbospark.families.qwen4_config import (
    LINEAR,
    SPARSE,
    Config,
    arch,
    config_from_arch,
    read_config,
)
from turbospark.install.planes import Planes
from turbospark.layers.gated_delta import GatedDeltaNet
from turbospark.layers.hyper import HyperConnection, HyperMixer, written
from turbospark.layers.linear import fuse
from turbospark.layers.mlp import SharedExpertMLP
from turbospark.layers.ngram import NgramEmbedding, NgramShape
from turbospark.layers.rope import Rope, make_rope
from turbospark.layers.weights import Weights

# --- args check: qwen4_config.py ------------------------------------------------------------------

# --- attention ------------------------------------------------------------------------------------


class Attention:
    """Block-sparse attention with normed q and k and an output gate, and the indexer beside it."""

    def __init__(self, c: Config, w: Weights, name: str, layer: int, rope: Rope) -> None:
        assert c.indexer is not None  # `read_config` said so
        self.layer, self.indexer, self.rope = layer, c.indexer, rope
        self.heads, self.kv_heads, self.head_dim = (
            c.num_attention_heads, c.num_key_value_heads, c.head_dim,
        )  # fmt: skip
        names = [f"{name}.{p}_proj" for p in "qkv"]
        parts = [w.linear(n, bias=c.attention_bias) for n in names]
        index = f"{name}.indexer.index_qk_proj"
        sizes = [w.shapes[f"{n}.weight"][0] for n in (*names, index)]
        self.project = fuse([*parts, w.linear(index)], sizes)
        self.o_proj = w.linear(f"{name}.o_proj", bias=c.attention_bias)
        self.q_norm, self.k_norm, self.index_q_norm, self.index_k_norm = (
            w.norm(f"{name}.{norm}.weight", c.rms_norm_eps, centred=True)
            for norm in ("q_norm", "k_norm", "indexer.q_layernorm", "indexer.k_layernorm")
        )

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        rows, start = x.shape[1], states.step.start
        cache: SparseKV = states.layers[self.layer]
        q, k, v, projected = self.project(x)
        # q_proj gives each head its query and then its gate.
        q, gate = mx.split(q.reshape(rows, self.heads, -1), 2, axis=-1)
        k, v = (a.reshape(rows, self.kv_heads, -1) for a in (k, v))
        q, k = self._turn(self.q_norm(q), start), self._turn(self.k_norm(k), start)
        index = self._index(projected[0], start)
        out = cache.attend(q, k, v, index, states.step, self.head_dim**-0.5)
        return self.o_proj((out * mx.sigmoid(gate)).reshape(1, rows, -1))

    def _turn(self, x: mx.array, start: int, every: int = 1) -> mx.array:
        """[L, heads, D] rotated at positions start, start + every, ..."""
        return self.rope(x.swapaxes(0, 1)[None], start, every)[0].swapaxes(0, 1)

    def _index(self, projected: mx.array, start: int) -> Index:
        """Index queries and raw keys of rows [L, (heads + 1) * D]."""
        dim = self.indexer.head_dim
        queries, raw = mx.split(projected, [self.indexer.heads * dim], axis=-1)
        queries = self.index_q_norm(queries.reshape(len(projected), -1, dim))

        def block_keys(means: mx.array, first: int) -> mx.array:
            """A block stands where its first position stands."""
            keys = self.index_k_norm(means)[:, None]
            return self._turn(keys, first, every=self.indexer.ratio)[:, 0]

        return Index(self.layer, self._turn(queries, start), raw, block_keys)


# --- layer and model (feed-forward: layers/mlp.py; n-grams: layers/ngram.py) ----------------------


class Layer:
    """Add n-grams; read, mix, write; read, feed forward, write. Writes go to the un-normed x."""

    def __init__(self, c: Config, w: Weights, layer: int, rope: Rope, experts: ExpertStore) -> None:
        name, eps = f"model.layers.{layer}", c.rms_norm_eps
        self.ngrams: NgramEmbedding | None = None
        if layer in c.ngrams:
            state = c.num_hidden_layers + list(c.ngrams).index(layer)
            self.ngrams = NgramEmbedding(w, f"{name}.ple", state, ngram_shape(c, layer), eps)
        self.mixer: Attention | GatedDeltaNet
        if c.layer_types[layer] == SPARSE:
            self.mixer = Attention(c, w, f"{name}.self_attn", layer, rope)
        else:
            sigmoid = c.output_gate == "sigmoid"
            self.mixer = GatedDeltaNet(w, f"{name}.linear_attn", layer, c.delta, eps, sigmoid)
        self.read_mixer, self.read_mlp = (
            HyperConnection(w, f"{name}.{part}_hyper_connection", c.hc_count, eps)
            for part in ("attn", "mlp")
        )
        self.mlp = SharedExpertMLP(
            w, f"{name}.mlp", layer, c.num_experts_per_tok, experts, c.norm_topk_prob
        )

    def __call__(self, x: mx.array, ids: mx.array, states: LayerStates) -> mx.array:
        if self.ngrams is not None:
            x = x + self.ngrams(x, ids, states)
        mixed, weights = self.read_mixer(x)
        x = written(x, weights, self.mixer(mixed, states))
        mixed, weights = self.read_mlp(x)
        return written(x, weights, self.mlp(mixed))


def ngram_shape(c: Config, layer: int) -> NgramShape:
    """Sizes of one layer's n-gram embedding."""
    return NgramShape(c.ngrams[layer], c.hc_count, c.hidden_size, c.ple_conv_kernel_size)


def cache_specs(c: Config) -> list[CacheSpec]:
    """What each layer must remember, and after them what each layer with n-grams does."""
    specs: list[CacheSpec] = []
    for kind in c.layer_types:
        if kind == LINEAR:
            specs.append(c.delta.memory)
        else:
            assert c.indexer is not None  # `read_config` said so
            ratio, chosen = c.indexer.ratio, c.indexer.budget // c.indexer.ratio
            heads, dim = c.num_key_value_heads, c.head_dim
            specs.append(SparseSpec(heads, dim, c.indexer.head_dim, ratio, chosen))
    return specs + [ngram_shape(c, layer).memory for layer in c.ngrams]


class Model:
    """The forward pass; see `families.base.Model` for the contract. `hc_count` streams wide."""

    def __init__(self, c: Config, w: Weights, experts: ExpertStore | None) -> None:
        assert experts is not None  # every layer has them
        self.vocab_size, self.streams = c.vocab_size, c.hc_count
        self.cache_specs = cache_specs(c)
        # The three position axes of mrope are one and the same for text.
        rope = make_rope(c.rotary_dim, c.rope_theta, None, c.max_position_embeddings)
        self.embed_tokens = w.embedding("model.embed_tokens")
        self.layers = [Layer(c, w, i, rope, experts) for i in range(c.num_hidden_layers)]
        self.read = HyperMixer(w, "model.hyper_connection_mixer", c.hc_count, c.rms_norm_eps)
        self.lm_head = self.embed_tokens.as_linear if c.tie_word_embeddings else w.linear("lm_head")

    def __call__(
        self,
        ids: mx.array,
        states: LayerStates,
        after_layer: Callable[[int, mx.array], mx.array] | None = None,
    ) -> mx.array:
        x = mx.tile(self.embed_tokens(ids), (1, 1, self.streams))
        for i, layer in enumerate(self.layers):
            x = layer(x, ids, states)
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def final_norm(self, hidden: mx.array) -> mx.array:
        return self.read(hidden)[0]

    def head(self, hidden: mx.array) -> mx.array:
        return self.lm_head(self.final_norm(hidden)).astype(mx.float32)


# --- weight names ---------------------------------------------------------------------------------


def weight_shapes(c: Config) -> Shapes:
    """Canonical name -> logical shape of every resident tensor."""
    shapes: Shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    shapes |= _hyper_shapes(c, "model.hyper_connection_mixer", writes=False)
    for i, kind in enumerate(c.layer_types):
        name = f"model.layers.{i}"
        for part in ("attn", "mlp"):
            shapes |= _hyper_shapes(c, f"{name}.{part}_hyper_connection", writes=True)
        shapes |= (
            _attention_shapes(c, name) if kind == SPARSE else delta_shapes(c, name, taps_last=True)
        )
        shapes |= _mlp_shapes(c, f"{name}.mlp")
        if i in c.ngrams:
            shapes |= _ngram_shapes(c, f"{name}.ple")
    return shapes


def _hyper_shapes(c: Config, name: str, writes: bool) -> Shapes:
    shapes: Shapes = {
        f"{name}.hc_norm.weight": (c.wide,),
        f"{name}.input_mix_weight_down.weight": (c.hc_lowrank, c.wide),
        f"{name}.input_mix_weight_up.weight": (c.wide, c.hc_lowrank),
    }
    return shapes | ({f"{name}.block_inject_weight.weight": (c.hc_count, c.wide)} if writes else {})


def _attention_shapes(c: Config, name: str) -> Shapes:
    assert c.indexer is not None  # `read_config` said so
    i, indexer = c.indexer, f"{name}.self_attn.indexer"
    shapes = attention_shapes(c, name)
    shapes[f"{indexer}.index_qk_proj.weight"] = ((i.heads + 1) * i.head_dim, c.hidden_size)
    return shapes | {f"{indexer}.{p}_layernorm.weight": (i.head_dim,) for p in "qk"}


def _mlp_shapes(c: Config, name: str) -> Shapes:
    hidden, width = c.hidden_size, c.shared_expert_intermediate_size
    return {
        f"{name}.gate.weight": (c.num_experts, hidden),
        f"{name}.shared_expert_gate.weight": (1, hidden),
        f"{name}.shared_expert.gate_proj.weight": (width, hidden),
        f"{name}.shared_expert.up_proj.weight": (width, hidden),
        f"{name}.shared_expert.down_proj.weight": (hidden, width),
    }


def _ngram_shapes(c: Config, name: str) -> Shapes:
    norms: Shapes = {f"{name}.norm_{p}.weight": (c.wide,) for p in ("key", "query", "conv")}
    return norms | {
        f"{name}.key_proj.weight": (c.wide, c.ple_embed_dim),
        f"{name}.value_proj.weight": (c.hidden_size, c.ple_embed_dim),
        f"{name}.conv1d.weight": (c.wide, 1, c.ple_conv_kernel_size),
    }


def table_shapes(c: Config) -> dict[int, tuple[str, tuple[int, int]]]:
    """Layer -> canonical name and shape of its n-gram table, which is stored by rows."""
    return {
        layer: (
            f"model.layers.{layer}.{_TABLE}.weight",
            (found.rows, c.ple_embed_dim // len(found.sizes)),
        )
        for layer, found in c.ngrams.items()
    }


def derived(c: Config) -> dict[str, list[int]]:
    """Whole-number tensors that a checkpoint may carry and that must be what is derived here."""
    values: dict[str, list[int]] = {}
    for layer, found in c.ngrams.items():
        name = f"model.layers.{layer}.ple.ple_embedding"
        values[f"{name}.layer_multipliers"] = list(found.multipliers)
        values[f"{name}.ngram_heads_vocab_sizes"] = list(found.sizes)
        values[f"{name}.ngram_heads_offsets"] = found.offsets.tolist()
    return values


def expert_shapes(c: Config) -> dict[int, ExpertShape]:
    """Routed experts of each layer."""
    shape = ExpertShape(c.num_experts, c.hidden_size, c.moe_intermediate_size)
    return dict.fromkeys(range(c.num_hidden_layers), shape)


_TABLE = "ple.ple_embedding.ngram_embedding"
_SHARD = re.compile(rf"^(model\.layers\.\d+\.{re.escape(_TABLE)})\.shard_(\d+)\.weight$")
_DRAFT = re.compile(r"^(?:language_model\.|model\.)*mtp\.")


def pieces(c: Config, name: str) -> tuple[Piece, ...] | None:
    """Where a source tensor goes; () when it is left out, None when it is unknown."""
    plain = None if _DRAFT.match(name) else plain_name(name)
    if plain is None:
        return ()
    if plain.startswith("model.lm_head."):
        plain = plain.removeprefix("model.")
    if c.tie_word_embeddings and plain.startswith("lm_head."):
        return ()
    if plain in derived(c):
        return ()
    shard = _SHARD.match(plain)
    if shard is not None:
        return (Piece(f"{shard[1]}.weight", part=int(shard[2])),)
    if any(plain == table for table, _ in table_shapes(c).values()):
        return (Piece(plain, part=0),)
    routed = expert_pieces(plain, c.moe_intermediate_size)
    if routed is not None:
        return routed
    if plain not in weight_shapes(c):
        return None
    return (Piece(plain, transform=_taps_last if plain.endswith("conv1d.weight") else None),)


def _taps_last(planes: Planes) -> Planes:
    """A convolution [channels, 1, taps]; MLX trees have [channels, taps, 1]."""
    channels = planes.shape[0]
    return Planes(
        planes.fmt, (channels, 1, planes.weight.size // channels),
        planes.weight.reshape(channels, 1, -1),
    )  # fmt: skip


# --- capabilities ---------------------------------------------------------------------------------

family = Family(
    name="qwen4_exp",
    model_types=("qwen4_exp", "qwen4_exp_text"),
    wires=("qwen4exp",),
    read_config=read_config,
    arch=arch,
    config_from_arch=config_from_arch,
    weight_shapes=weight_shapes,
    table_shapes=table_shapes,
    derived=derived,
    cache_specs=cache_specs,
    expert_shapes=expert_shapes,
    pieces=pieces,
    build=Model,
    reads_ids=True,
    capabilities=Capabilities(
        steering="the residual stream is several streams wide, and no vector is measured on it",
    ),
)
