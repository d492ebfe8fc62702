"""The configuration of Qwen 4 (experimental): every key, its default and what is refused.

Knows config.json and the manifest's description. Does not know tensors or arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from turbospark.errors import SourceError, UnsupportedError
from turbospark.families.archs import PLAIN, check_heads
from turbospark.families.config import ConfigReader
from turbospark.families.qwen3_5_shapes import SAME, SAME_DELTA
from turbospark.install.arch import ArchConfig
from turbospark.layers.gated_delta import DeltaShape
from turbospark.layers.ngram import NgramHash

LINEAR, SPARSE = "linear_attention", "full_attention"
_KINDS = {LINEAR: LINEAR} | dict.fromkeys(
    (SPARSE, "qwen_sparse_attention", "indexed_attention"), SPARSE
)
MAX_NGRAM_HEADS = 4096


@dataclass(frozen=True)
class Indexer:
    """What scores blocks: heads over one key head, the keys attended and how many make a block."""

    heads: int
    head_dim: int
    budget: int
    ratio: int


@dataclass(frozen=True)
class Config:
    """Everything the forward pass needs; names from config.json. `ngrams`: layer -> its hash."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    delta: DeltaShape
    output_gate: str
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    hc_count: int
    hc_lowrank: int
    indexer: Indexer | None
    ple_embed_dim: int
    ple_conv_kernel_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    split_ngram_parts: int
    seed: int
    ngrams: Mapping[int, NgramHash]

    @property
    def rotary_dim(self) -> int:
        """How many leading dimensions of a head turn; the index heads turn as many."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def wide(self) -> int:
        """Width of all residual streams together."""
        return self.hc_count * self.hidden_size


def read_config(c: ConfigReader) -> Config:
    """config.json (hub dialect) -> Config; refuses values that are not computed."""
    c.expect("hidden_act", "silu")
    c.expect("output_gate_type", "sigmoid", "silu")
    scaling = c.section("rope_scaling")
    if scaling is not None:
        for key in ("rope_type", "type"):
            scaling.expect(key, "default", "mrope")
    layers, hidden = c.int("num_hidden_layers"), c.int("hidden_size", 2048)
    types = _layer_types(c, layers)
    c.int("linear_conv_kernel_dim", 4, minimum=2)
    delta = (c.int(k, d) for k, d in zip(SAME_DELTA, (16, 32, 128, 128, 4), strict=True))
    config = Config(
        model_type=c.str("model_type"),
        vocab_size=c.int("vocab_size", 248320),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=c.int("num_attention_heads", 16),
        num_key_value_heads=c.int("num_key_value_heads", 2),
        head_dim=c.int("head_dim", 256),
        attention_bias=c.bool("attention_bias", False),
        rms_norm_eps=c.eps("rms_norm_eps", 1e-6),
        rope_theta=c.theta("rope_theta", 1e4),
        partial_rotary_factor=c.float("partial_rotary_factor", 1.0),
        max_position_embeddings=c.int("max_position_embeddings", 32768),
        tie_word_embeddings=c.bool("tie_word_embeddings", False),
        layer_types=types,
        delta=DeltaShape(*delta),
        output_gate=c.str("output_gate_type", "silu"),
        num_experts=c.int("num_experts", 512),
        num_experts_per_tok=c.int("num_experts_per_tok", 10),
        norm_topk_prob=c.bool("norm_topk_prob", True),
        moe_intermediate_size=c.int("moe_intermediate_size", 512),
        shared_expert_intermediate_size=c.int("shared_expert_intermediate_size", 512),
        hc_count=c.int("hc_count", 4, minimum=2),
        hc_lowrank=c.int("hc_lowrank", 320),
        indexer=_indexer(c),
        ple_embed_dim=c.int("ple_embed_dim", hidden),
        ple_conv_kernel_size=c.int("ple_conv_kernel_size", 4),
        heads_per_ngram=c.int("heads_per_ngram", 8),
        ngram_vocab_size_base=c.int("ngram_vocab_size_base", 20_000_000),
        make_ngram_vocab_size_divisible_by=c.int("make_ngram_vocab_size_divisible_by", 128),
        split_ngram_parts=c.int("split_ngram_parts", 512),
        seed=c.int("seed", 1234, minimum=0),
        ngrams={},
    )
    _check(config, c.where)
    return replace(config, ngrams=_ngrams(c, config))


def _layer_types(c: ConfigReader, layers: int) -> tuple[str, ...]:
    types = c.layer_types(layers, tuple(_KINDS))
    if types is not None:
        return tuple(_KINDS[kind] for kind in types)
    interval = c.int("full_attention_interval", 4)
    return tuple(LINEAR if (i + 1) % interval else SPARSE for i in range(layers))


def _indexer(c: ConfigReader) -> Indexer | None:
    names = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
    given = [name for name in names if f"indexer_{name}" in c]
    if not given:
        return None
    if len(given) < len(names):
        absent = ", ".join(f"indexer_{name}" for name in names if name not in given)
        raise SourceError(
            f"{c.where}: required keys {absent} are missing beside indexer_{given[0]}"
        )
    c.expect("indexer_kv_heads", 1)
    heads, _, dim, budget, ratio = (c.int(f"indexer_{name}") for name in names)
    if budget % ratio:
        raise UnsupportedError(
            f"{c.where}: indexer_budget = {budget} is not a multiple of "
            f"indexer_compress_ratio = {ratio}"
        )
    return Indexer(heads, dim, budget, ratio)


def _check(c: Config, where: str) -> None:
    """Refuse sizes that do not fit each other."""
    check_heads(where, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    index_dim = c.indexer.head_dim if c.indexer else c.head_dim
    for wrong, fault in (
        (c.delta.value_heads % c.delta.key_heads,
         f"linear_num_value_heads = {c.delta.value_heads} is not a multiple of "
         f"linear_num_key_heads = {c.delta.key_heads}"),
        (c.rotary_dim % 2 or not 0 < c.rotary_dim <= min(c.head_dim, index_dim),
         f"partial_rotary_factor = {c.partial_rotary_factor} turns {c.rotary_dim} dimensions; "
         f"supported: an even number up to {min(c.head_dim, index_dim)}"),
        (c.num_experts_per_tok > c.num_experts,
         f"num_experts_per_tok = {c.num_experts_per_tok} exceeds num_experts = {c.num_experts}"),
        (SPARSE in c.layer_types and c.indexer is None,
         "layers with full attention need indexer_n_heads and its four companions"),
    ):  # fmt: skip
        if wrong:
            raise UnsupportedError(f"{where}: {fault}")


def _ngrams(c: ConfigReader, config: Config) -> dict[int, NgramHash]:
    """The hash of each layer with n-grams; ids in the configuration count from one."""
    listed = c.list("ple_layer_ids") or []
    if not all(type(i) is int for i in listed):
        raise SourceError(f"{c.where}: ple_layer_ids = {listed!r}; expected whole numbers")
    layers = [i - 1 for i in sorted(set(listed))]
    if not layers:
        return {}
    for layer in layers:
        if not 0 <= layer < config.num_hidden_layers or config.layer_types[layer] != LINEAR:
            raise UnsupportedError(
                f"{c.where}: ple_layer_ids has {layer + 1}; supported: linear_attention layers, "
                f"counted from 1 to {config.num_hidden_layers}"
            )
    size, per_size = c.int("ngram_size", 3, minimum=2), config.heads_per_ngram
    heads, base = (size - 1) * per_size, config.ngram_vocab_size_base
    divisor = config.make_ngram_vocab_size_divisible_by
    # The largest head is a prime not far above the base; 2^31 rows are the most that a table has.
    if heads * len(layers) > MAX_NGRAM_HEADS or heads * base + divisor >= 2**31:
        raise UnsupportedError(
            f"{c.where}: {len(layers)} tables of {heads} n-gram heads of {base} rows; supported: "
            f"{MAX_NGRAM_HEADS} heads in all and tables below 2^31 rows"
        )
    if config.ple_embed_dim % heads:
        raise UnsupportedError(
            f"{c.where}: ple_embed_dim = {config.ple_embed_dim} is not a multiple of {heads} heads"
        )
    return {
        layer: NgramHash.derive(
            vocab=config.vocab_size, size=size, per_size=per_size, base=base, divisor=divisor,
            seed=config.seed, module=module, eos=_eos(c),
        )
        for module, layer in enumerate(layers)
    }  # fmt: skip


def _eos(c: ConfigReader) -> int:
    """The token that ends a text for n-grams: the first of a list. Stops are another matter."""
    listed = c.raw("eos_token_id")
    if not isinstance(listed, list):
        return c.int("eos_token_id", minimum=0)
    if not listed or type(listed[0]) is not int or not 0 <= listed[0] < 2**31:
        raise SourceError(f"{c.where}: eos_token_id = {listed!r}; expected token ids")
    return listed[0]


# config.json key -> field of the architecture, where the value is the same.
_SAME = SAME | {"hc_count": "hc_mult", "hc_lowrank": "hc_lowrank"}
_SAME_INDEX = {
    "indexer_n_heads": "ca_index_n_heads", "indexer_kv_heads": "ca_index_kv_heads",
    "indexer_head_dim": "ca_index_head_dim", "indexer_budget": "ca_index_budget",
    "indexer_compress_ratio": "ca_csa_compress_rate",
}  # fmt: skip
_SAME_NGRAM = {
    "ple_embed_dim": "ple_embed_dim", "ple_conv_kernel_size": "ple_conv_kernel_size",
    "heads_per_ngram": "ple_heads_per_ngram", "ngram_vocab_size_base": "ple_ngram_vocab_size_base",
    "make_ngram_vocab_size_divisible_by": "ple_make_divisible_by",
    "split_ngram_parts": "ple_split_ngram_parts", "seed": "ple_seed",
}  # fmt: skip


def arch(c: Config) -> ArchConfig:
    """The manifest's description of the architecture."""
    index: dict[str, Any] = {}
    if c.indexer is not None:
        i = c.indexer
        values = (i.heads, 1, i.head_dim, i.budget, i.ratio)
        index = dict(zip(_SAME_INDEX.values(), values, strict=True))
        index["ca_index_top_k"] = i.budget // i.ratio  # in blocks
    ngrams: dict[str, Any] = {}
    if c.ngrams:
        first = next(iter(c.ngrams.values()))
        ngrams = {field: getattr(c, key) for key, field in _SAME_NGRAM.items()} | {
            "ple_ngram_size": len(first.multipliers),
            "ple_layer_ids": tuple(layer + 1 for layer in c.ngrams),
            "ple_eos_token_id": first.eos,
        }
    return ArchConfig(
        **{field: getattr(c, key) for key, field in _SAME.items()},
        **dict(zip(SAME_DELTA.values(), vars(c.delta).values(), strict=True)),
        **{**PLAIN, "attn_output_gate": True, "shared_expert_gated": True},
        **index,
        **ngrams,
        family="qwen4exp",
        intermediate_size=c.shared_expert_intermediate_size,
        num_full_kv_heads=c.num_key_value_heads,
        full_head_dim=c.head_dim,
        sliding_window=0,
        full_rope_theta=c.rope_theta,
        full_attention_layer_mask=tuple(1 if kind == SPARSE else 2 for kind in c.layer_types),
        attention_scale=c.head_dim**-0.5,
        rope_neox_subdim=True,
        linear_output_gate_sigmoid=c.output_gate == "sigmoid",
    )


def config_from_arch(a: ArchConfig) -> dict[str, Any]:
    """config.json keys for an install that records only the architecture."""
    same = _SAME | SAME_DELTA
    if a.ca_index_n_heads:
        same |= _SAME_INDEX
    if a.ple_layer_ids:
        same |= _SAME_NGRAM
    return {key: getattr(a, field) for key, field in same.items()} | {
        "model_type": "qwen4_exp_text",
        "shared_expert_intermediate_size": a.intermediate_size,
        "rms_norm_eps": 1e-6,
        "output_gate_type": "sigmoid" if a.linear_output_gate_sigmoid else "silu",
        "layer_types": [SPARSE if kind == 1 else LINEAR for kind in a.full_attention_layer_mask],
        "ple_layer_ids": list(a.ple_layer_ids),
        "ngram_size": a.ple_ngram_size or 3,
        "eos_token_id": a.ple_eos_token_id,
    }
