"""gpt-oss: what its configurations, tensor names and GGUF files mean, and what is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from in_memory import Reader, planes

from turbospark.cache.specs import FullSpec, RingSpec
from turbospark.dtypes import MXFP4, Quant
from turbospark.errors import TurbosparkError
from turbospark.families import family_for_gguf, family_for_model_type, family_for_wire
from turbospark.families.base import Piece
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.gpt_oss import Config, family
from turbospark.install.planes import Planes, quantize
from turbospark.layers.rope import make_rope
from turbospark.layers.weights import Weights

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096, "truncate": False,
}  # fmt: skip
RELEASED: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "attention_bias": True, "hidden_act": "silu", "initial_context_length": 4096,
    "max_position_embeddings": 131072, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "rope_scaling": YARN, "swiglu_limit": 7.0, "tie_word_embeddings": False,
}  # fmt: skip
TINY = RELEASED | {
    "vocab_size": 33, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 3,
    "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def read(raw: dict[str, Any]) -> Config:
    return family.read_config(ConfigReader(normalize_config(raw)))


# --- configuration --------------------------------------------------------------------------------


def test_every_name_of_the_family_leads_to_it() -> None:
    assert family_for_model_type("gpt_oss") is family
    assert family_for_wire("gptOss") is family
    assert family_for_gguf("gpt-oss") is family


def test_the_released_configuration_is_recorded_as_the_format_says() -> None:
    arch = family.arch(read(RELEASED))
    expected = {
        "family": "gptOss", "hidden_size": 2880, "intermediate_size": 2880,
        "moe_intermediate_size": 2880, "num_heads": 64, "num_kv_heads": 8, "num_full_kv_heads": 8,
        "head_dim": 64, "full_head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
        "final_logit_softcap": 0.0, "rope_theta": 150000.0, "full_rope_theta": 150000.0,
        "partial_rotary_factor": 1.0, "num_layers": 24, "num_experts": 32, "top_k_experts": 4,
        "tie_word_embeddings": False, "attention_k_eq_v": False, "hidden_activation": "silu",
        "full_attention_layer_mask": (0, 1) * 12, "attn_output_gate": False,
        "attention_scale": 0.125, "embedding_scaled_by_sqrt_hidden": False,
        "router_scaled": False, "ffn_sandwich_norms": False, "shared_expert_gated": False,
        "rope_neox_subdim": False, "swiglu_limit": 7.0, "rope_scaling_factor": 32.0,
        "rope_scaling_original_context": 4096, "rope_scaling_beta_fast": 32.0,
        "rope_scaling_beta_slow": 1.0,
    }  # fmt: skip
    assert {name: getattr(arch, name) for name in expected} == expected


def test_an_install_of_the_original_gives_the_same_configuration_back() -> None:
    c = read(RELEASED)
    assert asdict(read(family.config_from_arch(family.arch(c)))) == asdict(c)


def test_absent_keys_are_the_class_defaults() -> None:
    needed = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")
    c = read({key: TINY[key] for key in needed} | {"num_hidden_layers": 3})
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (64, 8, 64)
    assert (c.num_local_experts, c.num_experts_per_tok, c.vocab_size) == (128, 4, 201088)
    assert c.windows == (128, None, 128) and c.attention_bias and not c.tie_word_embeddings
    assert c.rms_norm_eps == 1e-5 and c.rope_theta == 150000.0 and c.swiglu_limit == 7.0
    assert c.rope_scaling == YARN


def test_layer_types_decide_which_layers_have_the_window() -> None:
    assert read(TINY).windows == (8, None)
    assert read(TINY | {"layer_types": ["full_attention", "sliding_attention"]}).windows == (
        None,
        8,
    )


def test_windowed_layers_keep_a_ring_and_the_others_everything() -> None:
    c = read(TINY)
    model = family.build(c, zero_weights(c), Experts())
    assert model.cache_specs == [RingSpec(2, 16, 16, 8), FullSpec(2, 16, 16)]


def test_both_dialects_are_the_same_configuration() -> None:
    v5 = {k: v for k, v in RELEASED.items() if k not in ("rope_theta", "rope_scaling")}
    v5 |= {"rope_parameters": YARN | {"rope_theta": 150000}, "swiglu_alpha": 1.702}
    assert asdict(read(v5)) == asdict(read(RELEASED))


def test_the_untruncated_range_reaches_pairs_that_truncating_would_leave() -> None:
    plain = np.array(make_rope(64, 150000.0, YARN, 131072).periods)
    cut = np.array(make_rope(64, 150000.0, YARN | {"truncate": True}, 131072).periods)
    different = np.flatnonzero(np.abs(cut / plain - 1) > 0.01)
    assert different.min() >= 8 and different.max() <= 18 and len(different) >= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*'silu'"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha = 1.0.*1.702"),
        ({"rope_scaling": None}, r"rope_scaling = None.*yarn"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r"'linear'.*yarn"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_scaling: required key factor is missing"),
        ({"num_key_value_heads": 3}, r"4 attention heads over 3 key/value heads"),
        ({"head_dim": 15}, r"of width 15"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types\[1\] = 'chunked"),
        ({"layer_types": ["full_attention"]}, r"layer_types = '1 entries'.*2 entries"),
        ({"num_experts_per_tok": 4}, r"num_experts_per_tok = 4 of num_local_experts = 3"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(TINY | change)


# --- experts --------------------------------------------------------------------------------------

LAYER = "model.layers.1.mlp.experts"


def taken(found: tuple[Piece, ...] | None, source: Planes, expert: int) -> dict[str, Planes]:
    """What a conversion would store of one expert, by role."""
    assert found
    stored = {}
    for piece in found:
        part = source.expert(expert)
        part = part if piece.rows is None else part.rows(piece.rows)
        stored[str(piece.role)] = part if piece.transform is None else piece.transform(part)
    return stored


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def test_float_stacks_are_turned_and_their_gate_and_up_columns_taken_apart() -> None:
    stack = random(3, 64, 64)  # [experts, hidden, 2 * width]
    found = taken(family.pieces(read(TINY), f"{LAYER}.gate_up_proj"), planes(stack), 2)
    np.testing.assert_array_equal(np.array(found["gate"].weight), stack[2, :, 0::2].T)
    np.testing.assert_array_equal(np.array(found["up"].weight), stack[2, :, 1::2].T)
    assert found["gate"].shape == (32, 64)
    stack = random(3, 32, 64)  # [experts, width, hidden]
    found = taken(family.pieces(read(TINY), f"{LAYER}.down_proj"), planes(stack), 1)
    np.testing.assert_array_equal(np.array(found["down"].weight), stack[1].T)


def test_mxfp4_stacks_keep_their_bytes_and_alternate_by_rows() -> None:
    stack = quantize(mx.array(random(3, 64, 64)), MXFP4)  # [experts, 2 * width, hidden]
    values = np.array(stack.dense(mx.float32))
    found = taken(family.pieces(read(TINY), f"{LAYER}.gate_up_proj"), stack, 2)
    for role, first in (("gate", 0), ("up", 1)):
        assert found[role].fmt == MXFP4 and found[role].shape == (32, 64)
        np.testing.assert_array_equal(
            np.array(found[role].weight), np.array(stack.weight)[2, first::2]
        )
        np.testing.assert_array_equal(np.array(found[role].dense(mx.float32)), values[2, first::2])
    down = quantize(mx.array(random(3, 64, 32)), MXFP4)
    found = taken(family.pieces(read(TINY), f"{LAYER}.down_proj"), down, 0)
    np.testing.assert_array_equal(np.array(found["down"].weight), np.array(down.weight)[0])


def test_expert_biases_alternate_too_and_are_never_turned() -> None:
    both, down = random(3, 64), random(3, 64)
    found = taken(family.pieces(read(TINY), f"{LAYER}.gate_up_proj_bias"), planes(both), 1)
    np.testing.assert_array_equal(np.array(found["gate_bias"].weight), both[1, 0::2])
    np.testing.assert_array_equal(np.array(found["up_bias"].weight), both[1, 1::2])
    found = taken(family.pieces(read(TINY), f"{LAYER}.down_proj_bias"), planes(down), 1)
    np.testing.assert_array_equal(np.array(found["down_bias"].weight), down[1])


@pytest.mark.parametrize(
    ("names", "pieces"),
    [
        (f"{LAYER}.{{}}_proj.{{}}", family.pieces),
        ("blk.1.ffn_{}_exps.{}", family.gguf_pieces),
    ],
    ids=["mlx", "gguf"],
)
def test_projections_stored_apart_are_taken_as_they_lie(names: str, pieces: Any) -> None:
    c = read(TINY)
    for role in ("gate", "up", "down"):
        shape = family.expert_shapes(c)[1].matrix(role)
        stack = quantize(mx.array(random(3, *shape)), Quant("affine", 4, 32, "bfloat16"))
        found = taken(pieces(c, names.format(role, "weight")), stack, 2)
        np.testing.assert_array_equal(np.array(found[role].weight), np.array(stack.weight)[2])
        bias = random(3, shape[0])
        found = taken(pieces(c, names.format(role, "bias")), planes(bias), 2)
        np.testing.assert_array_equal(np.array(found[f"{role}_bias"].weight), bias[2])


# --- other tensors --------------------------------------------------------------------------------


def test_rope_buffers_are_left_out_and_other_tensors_are_unknown() -> None:
    c = read(TINY)
    assert family.pieces(c, "model.layers.0.self_attn.rotary_emb.inv_freq") == ()
    for name in (
        f"{LAYER}.gate_up_proj.weight",
        f"{LAYER}.gate_up_proj_blocks",
        "model.layers.2.self_attn.sinks",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ):
        assert family.pieces(c, name) is None, name
    assert family.pieces(read(TINY | {"tie_word_embeddings": True}), "lm_head.weight") == ()


def test_attention_biases_are_known_only_where_the_configuration_has_them() -> None:
    name = "model.layers.0.self_attn.o_proj.bias"
    assert family.pieces(read(TINY), name) == (Piece(name),)
    assert family.pieces(read(TINY | {"attention_bias": False}), name) is None


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_META: dict[str, Any] = {"general.architecture": "gpt-oss"} | {
    f"gpt-oss.{key}": value
    for key, value in {
        "block_count": 2, "context_length": 131072, "embedding_length": 64,
        "feed_forward_length": 32, "expert_feed_forward_length": 32, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16,
        "attention.sliding_window": 8, "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": 3, "expert_used_count": 2, "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }.items()
}  # fmt: skip
GGUF_SHAPES = {"token_embd.weight": (33, 64), "output.weight": (33, 64), "blk.0.attn_q.bias": (64,)}


def test_gguf_metadata_is_the_same_configuration_untruncated_range_included() -> None:
    raw = family.gguf_config(GGUF_META, GGUF_SHAPES)
    c = family.read_config(ConfigReader(raw, "GGUF metadata"))
    assert asdict(c) == asdict(read(TINY))


def test_gguf_names_lead_to_canonical_ones() -> None:
    c = read(TINY)
    for name, target in {
        "blk.1.attn_sinks.weight": "model.layers.1.self_attn.sinks",
        "blk.1.attn_output.bias": "model.layers.1.self_attn.o_proj.bias",
        "blk.1.post_attention_norm.weight": "model.layers.1.post_attention_layernorm.weight",
        "blk.1.ffn_gate_inp.bias": "model.layers.1.mlp.router.bias",
        "blk.0.ffn_gate_inp.weight": "model.layers.0.mlp.router.weight",
    }.items():
        assert family.gguf_pieces(c, name) == (Piece(target),)
    assert family.gguf_pieces(c, "blk.0.ffn_gate.weight") is None
    assert family.gguf_pieces(c, "rope_freqs.weight") is None


# --- numbers --------------------------------------------------------------------------------------


class Experts:
    """A store that is asked for nothing."""

    def watch(self, layer: int, router: Any) -> None:
        self.router = router


def zero_weights(c: Config) -> Any:
    shapes = family.weight_shapes(c)
    return Weights(
        Reader({n: np.zeros(s, np.float32) for n, s in shapes.items()}), shapes, mx.float32
    )


def test_the_router_bias_takes_part_in_the_choice() -> None:
    c, experts = read(TINY), Experts()
    weights = zero_weights(c)
    bias = np.float32([0.0, 3.0, 1.0])
    weights.reader.tensors["model.layers.1.mlp.router.bias"] = bias
    route = family.build(c, weights, experts).layers[1].mlp.route
    ids, shares = route(mx.ones((1, 1, 64)))
    assert np.array(ids).tolist() == [[[1, 2]]]
    np.testing.assert_allclose(np.array(shares)[0, 0, 0], 1 / (1 + np.exp(-2.0)), rtol=1e-6)
