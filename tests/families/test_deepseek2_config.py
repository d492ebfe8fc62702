"""DeepSeek-V2: what its configurations, tensor names and GGUF files mean, and what is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from in_memory import Tensors, build, gathered, logits, planes, random_tensors

from turbospark.cache.state import LayerStates
from turbospark.dtypes import Quant, Raw
from turbospark.errors import TurbosparkError, UnsupportedArchitectureError, UnsupportedError
from turbospark.families import family_for_gguf, family_for_model_type, family_for_wire
from turbospark.families.base import ExpertShape
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.deepseek2 import Config, family
from turbospark.install.planes import Planes, quantize

YARN = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
}  # fmt: skip
LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "greedy", "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    "scoring_func": "softmax", "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": YARN,
    "max_position_embeddings": 163840, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip
LARGE = LITE | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "n_routed_experts": 160, "topk_method": "group_limited_greedy",
    "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
}  # fmt: skip
TINY = LITE | {
    "vocab_size": 33, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 512,
    "rope_scaling": YARN | {"factor": 8, "original_max_position_embeddings": 64},
}  # fmt: skip
DENSE = TINY | {"n_routed_experts": None, "q_lora_rank": 24}
IDS = [3, 17, 29, 8, 3, 30, 11, 2, 25, 7, 19, 4]


def read(raw: dict[str, Any]) -> Config:
    return family.read_config(ConfigReader(normalize_config(raw)))


# --- configuration --------------------------------------------------------------------------------


def test_every_name_of_the_family_leads_to_it() -> None:
    assert family_for_model_type("deepseek_v2") is family
    assert family_for_wire("deepseek2") is family
    assert family_for_gguf("deepseek2") is family


def test_the_next_generation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"'deepseek_v3'.*nearest: deepseek_v2"):
        family_for_model_type("deepseek_v3")


def test_the_released_lite_is_recorded_as_the_format_says() -> None:
    arch = family.arch(read(LITE))
    expected = {
        "family": "deepseek2", "hidden_size": 2048, "intermediate_size": 2816,
        "moe_intermediate_size": 1408, "num_heads": 16, "num_kv_heads": 1, "num_full_kv_heads": 1,
        "head_dim": 192, "full_head_dim": 128, "vocab_size": 102400, "sliding_window": 0,
        "final_logit_softcap": 0.0, "rope_theta": 1e4, "full_rope_theta": 1e4,
        "partial_rotary_factor": 0.0, "num_layers": 27, "num_experts": 64, "top_k_experts": 6,
        "tie_word_embeddings": False, "attention_k_eq_v": False, "hidden_activation": "silu",
        "full_attention_layer_mask": (5,) * 27, "attn_output_gate": False,
        "attention_scale": 0.11472138679292612, "embedding_scaled_by_sqrt_hidden": False,
        "router_scaled": False, "ffn_sandwich_norms": False, "shared_expert_gated": False,
        "rope_neox_subdim": True, "mla_kv_lora_rank": 512, "mla_q_lora_rank": 0,
        "mla_nope_head_dim": 128, "mla_rope_head_dim": 64, "mla_v_head_dim": 128,
        "num_dense_leading_layers": 1, "dense_lead_intermediate_size": 10944,
        "rope_scaling_factor": 40.0, "rope_scaling_original_context": 4096,
        "rope_scaling_beta_fast": 32.0, "rope_scaling_beta_slow": 1.0,
        "rope_scaling_mscale": 0.707, "routed_scaling_factor": 1.0,
        "router_scoring_func": "softmax",
    }  # fmt: skip
    assert {name: getattr(arch, name) for name in expected} == expected


@pytest.mark.parametrize("raw", [LITE, LARGE], ids=["lite", "large"])
def test_an_install_of_the_original_gives_the_same_model_back(raw: dict[str, Any]) -> None:
    c = read(raw)
    again = read(family.config_from_arch(family.arch(c)))
    same = {"rope_scaling": None, "max_position_embeddings": 0}
    assert asdict(again) | same == asdict(c) | same
    assert again.rope_scaling is not None and c.rope_scaling is not None
    for key in ("factor", "mscale", "mscale_all_dim", "beta_fast"):
        assert again.rope_scaling[key] == c.rope_scaling[key]


def test_absent_keys_are_the_class_defaults() -> None:
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "num_experts_per_tok", "model_type")  # fmt: skip
    c = read({key: LITE[key] for key in needed})
    assert (c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim) == (
        1536, 512, 128, 64,
    )  # fmt: skip
    assert (c.v_head_dim, c.n_routed_experts, c.moe_intermediate_size) == (128, 64, 1407)
    assert c.shared_width == 2 * 1407 and all(c.sparse) and c.n_group == 1
    assert c.rms_norm_eps == 1e-6 and c.rope_theta == 1e4 and c.rope_scaling is None
    assert c.attention_scale == pytest.approx(192**-0.5)


def test_both_dialects_are_the_same_configuration() -> None:
    rope = {k: v for k, v in YARN.items() if k != "type"} | {"rope_type": "yarn"}
    v5 = {k: v for k, v in LITE.items() if k not in ("rope_theta", "rope_scaling")}
    c, again = read(LITE), read(v5 | {"rope_parameters": rope | {"rope_theta": 10000}})
    assert asdict(again) | {"rope_scaling": c.rope_scaling} == asdict(c)
    assert again.attention_scale == c.attention_scale


def test_a_null_switches_low_rank_queries_and_experts_off() -> None:
    assert read(TINY).q_lora_rank == 0
    assert not any(read(DENSE).sparse) and family.expert_shapes(read(DENSE)) == {}
    shapes = family.weight_shapes(read(TINY | {"n_shared_experts": None}))
    assert not any("shared_experts" in name for name in shapes)


def test_routed_layers_follow_the_lead_and_the_frequency() -> None:
    c = read(TINY | {"num_hidden_layers": 7, "first_k_dense_replace": 2, "moe_layer_freq": 2})
    assert family.expert_shapes(c) == dict.fromkeys((2, 4, 6), ExpertShape(8, 64, 32))
    shapes = family.weight_shapes(c)
    assert shapes["model.layers.3.mlp.gate_proj.weight"] == (96, 64)
    assert shapes["model.layers.2.mlp.shared_experts.down_proj.weight"] == (64, 64)
    assert shapes["model.layers.2.mlp.gate.weight"] == (8, 64)


def test_unequal_temperatures_reach_the_scores_and_the_rotation() -> None:
    c = read(TINY | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}})
    over, under = 0.1 * np.log(40) + 1, 0.05 * np.log(40) + 1
    assert c.attention_scale == pytest.approx(under**2 / 40**0.5)
    rope = build(family, read(DENSE | {"rope_scaling": c.rope_scaling}), tensors()).layers[0]
    assert rope.attention.rope.attention_factor == pytest.approx(over / under)


def tensors() -> Tensors:
    return random_tensors(family, read(DENSE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*'silu'"),
        ({"attention_bias": True}, r"attention_bias = True.*False"),
        ({"mlp_bias": True}, r"mlp_bias = True.*False"),
        ({"norm_topk_prob": True}, r"norm_topk_prob = True.*False"),
        ({"scoring_func": "sigmoid"}, r"scoring_func = 'sigmoid'.*'softmax'"),
        ({"topk_method": "noaux_tc"}, r"topk_method = 'noaux_tc'.*'group_limited_greedy'"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads = 2.*4"),
        ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim = 7"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"'linear'.*yarn or none"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling: required key factor is missing"),
        ({"rope_scaling": YARN | {"mscale": "1"}}, r"rope_scaling: mscale = '1'"),
        ({"topk_method": "group_limited_greedy", "n_group": 3}, r"of n_group = 3 groups"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1},
            r"2 of 8 experts from topk_group = 1 of n_group = 8",
        ),
        ({"num_experts_per_tok": None}, r"required key num_experts_per_tok is missing"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(TINY | change)


# --- tensor names ---------------------------------------------------------------------------------

ATTENTION = "model.layers.1.self_attn"


def stored(name: str, source: Planes) -> dict[str, Planes]:
    found = family.pieces(read(TINY), name)
    assert found, name
    return {str(p.target): p.transform(source) if p.transform else source for p in found}


def kv_b() -> np.ndarray:
    rng = np.random.default_rng(5)
    return rng.standard_normal((4 * (32 + 16), 32)).astype(np.float32)


def test_rows_of_the_joint_matrix_are_sorted_by_head_into_keys_and_values() -> None:
    matrix = kv_b()
    found = stored(f"{ATTENTION}.kv_b_proj.weight", planes(matrix))
    heads = matrix.reshape(4, 48, 32)
    for name, rows in (("k", heads[:, :32]), ("v", heads[:, 32:])):
        ours = found[f"{ATTENTION}.{name}_b_proj.weight"]
        np.testing.assert_array_equal(np.array(ours.weight), rows.reshape(-1, 32))


def test_a_quantized_joint_matrix_is_sorted_without_changing_a_byte() -> None:
    packed = quantize(mx.array(kv_b()), Quant("affine", 4, 32, "bfloat16"))
    found = stored(f"{ATTENTION}.kv_b_proj.weight", packed)
    whole = np.array(packed.dense(mx.float32)).reshape(4, 48, 32)
    values = found[f"{ATTENTION}.v_b_proj.weight"]
    assert values.fmt == packed.fmt and values.shape == (64, 32)
    np.testing.assert_array_equal(np.array(values.dense(mx.float32)), whole[:, 32:].reshape(-1, 32))


@pytest.mark.parametrize("bits", [None, 8])
def test_matrices_stored_apart_give_the_same_rows(bits: int | None) -> None:
    heads = kv_b().reshape(4, 48, 32)
    keys, values = mx.array(heads[:, :32].swapaxes(1, 2)), mx.array(heads[:, 32:])
    as_stored = lambda a: (  # noqa: E731
        Planes(Raw("float32"), a.shape, a)
        if bits is None
        else quantize(a, Quant("affine", bits, 32, "float16"))
    )
    key = stored(f"{ATTENTION}.embed_q.weight", as_stored(keys))[f"{ATTENTION}.k_b_proj.weight"]
    value = stored(f"{ATTENTION}.unembed_out.weight", as_stored(values))
    assert key.fmt == Raw("float32") and key.shape == (128, 32)
    exact = np.array(as_stored(keys).dense(mx.float32)).swapaxes(1, 2).reshape(-1, 32)
    np.testing.assert_array_equal(np.array(key.weight), exact)
    exact = np.array(as_stored(values).dense(mx.float32)).reshape(-1, 32)
    ours = value[f"{ATTENTION}.v_b_proj.weight"].dense(mx.float32)
    np.testing.assert_array_equal(np.array(ours), exact)


def test_experts_are_read_one_by_one_stacked_and_fused() -> None:
    c, layer = read(TINY), "model.layers.1.mlp"
    single = family.pieces(c, f"{layer}.experts.3.up_proj.weight")
    assert single and (single[0].role, single[0].layer, single[0].expert) == ("up", 1, 3)
    stacked = family.pieces(c, f"{layer}.switch_mlp.down_proj.weight")
    assert stacked and (stacked[0].role, stacked[0].expert) == ("down", None)
    fused = family.pieces(c, f"{layer}.experts.gate_up_proj")
    assert fused and [(p.role, p.rows) for p in fused] == [
        ("gate", slice(0, 32)), ("up", slice(32, 64)),
    ]  # fmt: skip


def test_rope_buffers_are_left_out_and_other_tensors_are_unknown() -> None:
    c = read(TINY)
    assert family.pieces(c, f"{ATTENTION}.rotary_emb.inv_freq") == ()
    for name in (
        "model.layers.2.self_attn.kv_b_proj.weight",
        f"{ATTENTION}.k_proj.weight",
        f"{ATTENTION}.kv_a_proj_with_mqa.bias",
        f"{ATTENTION}.q_a_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ):
        assert family.pieces(c, name) is None, name
    assert family.pieces(read(TINY | {"tie_word_embeddings": True}), "lm_head.weight") == ()


# --- memory ---------------------------------------------------------------------------------------


def test_the_cache_holds_one_latent_row_per_position() -> None:
    c = read(DENSE)
    states = LayerStates(build(family, c, tensors()).cache_specs, 100, mx.float32)
    assert states.nbytes == c.num_hidden_layers * 100 * (32 + 8) * 4


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_META: dict[str, Any] = {"general.architecture": "deepseek2"} | {
    f"deepseek2.{key}": value
    for key, value in {
        "block_count": 2, "context_length": 512, "embedding_length": 64,
        "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 4,
        "attention.key_length": 40, "attention.value_length": 16, "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 32, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 8, "rope.freq_base": 10000.0, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_log_multiplier": float(np.float32(0.0707)),
        "leading_dense_block_count": 1,
    }.items()
}  # fmt: skip
ABSORBED_META = GGUF_META | {
    "deepseek2.attention.head_count_kv": 1, "deepseek2.attention.key_length": 40,
    "deepseek2.attention.value_length": 32, "deepseek2.attention.key_length_mla": 40,
    "deepseek2.attention.value_length_mla": 16,
}  # fmt: skip
ROUTED_META = GGUF_META | {
    "deepseek2.expert_count": 8, "deepseek2.expert_used_count": 2,
    "deepseek2.expert_feed_forward_length": 32, "deepseek2.expert_shared_count": 2,
    "deepseek2.expert_weights_scale": 4.0,
}  # fmt: skip
GGUF_PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def as_gguf(model: Tensors, absorbed: bool) -> Tensors:
    found = {
        "token_embd.weight": model["model.embed_tokens.weight"],
        "output_norm.weight": model["model.norm.weight"],
        "output.weight": model["lm_head.weight"],
    }
    for i in range(2):
        for part, plain in GGUF_PARTS.items():
            found[f"blk.{i}.{part}.weight"] = model[f"model.layers.{i}.{plain}.weight"]
        key = model[f"model.layers.{i}.self_attn.k_b_proj.weight"].reshape(4, 32, 32)
        value = model[f"model.layers.{i}.self_attn.v_b_proj.weight"].reshape(4, 16, 32)
        if absorbed:
            found[f"blk.{i}.attn_k_b.weight"] = np.ascontiguousarray(key.swapaxes(1, 2))
            found[f"blk.{i}.attn_v_b.weight"] = value
        else:
            joint = np.concatenate([key, value], axis=1)
            found[f"blk.{i}.attn_kv_b.weight"] = joint.reshape(-1, 32)
    return found


def from_gguf(meta: dict[str, Any], model: Tensors) -> Config:
    raw = family.gguf_config(meta, {name: a.shape for name, a in model.items()})
    return family.read_config(ConfigReader(raw, "GGUF metadata"))


@pytest.mark.parametrize("absorbed", [False, True])
def test_a_gguf_file_of_either_form_is_the_same_model_bit_for_bit(absorbed: bool) -> None:
    c, model = read(DENSE), tensors()
    file = as_gguf(model, absorbed)
    again = from_gguf(ABSORBED_META if absorbed else GGUF_META, file)
    same = {"rope_scaling": None, "moe_intermediate_size": 0}
    assert asdict(again) | same == asdict(c) | same
    assert again.attention_scale == c.attention_scale
    ours = logits(family, again, gathered(family.gguf_pieces, again, file), IDS)
    np.testing.assert_array_equal(ours, logits(family, c, model, IDS))


def test_a_gguf_file_says_how_experts_are_chosen() -> None:
    file = as_gguf(tensors(), False)
    c = from_gguf(ROUTED_META, file)
    assert c.sparse == (False, True) and c.shared_width == 64 and c.n_group == 1
    assert c.routed_scaling_factor == 4.0 and c.num_experts_per_tok == 2
    groups = {"deepseek2.expert_group_count": 4, "deepseek2.expert_group_used_count": 2}
    c = from_gguf(ROUTED_META | groups, file)
    assert (c.n_group, c.topk_group) == (4, 2)
    # Older files of the 236B models leave the groups out; that size always has them.
    c = from_gguf(ROUTED_META | {"deepseek2.expert_count": 160}, file)
    assert (c.n_group, c.topk_group) == (8, 3)


def test_gguf_names_of_experts_lead_to_their_roles() -> None:
    c = from_gguf(ROUTED_META, as_gguf(tensors(), False))
    pieces = family.gguf_pieces(c, "blk.1.ffn_up_exps.weight")
    assert pieces and (pieces[0].layer, pieces[0].role) == (1, "up")
    for part, plain in (("ffn_gate_inp", "gate"), ("ffn_up_shexp", "shared_experts.up_proj")):
        pieces = family.gguf_pieces(c, f"blk.1.{part}.weight")
        assert pieces and pieces[0].target == f"model.layers.1.mlp.{plain}.weight"
    assert family.gguf_pieces(c, "blk.1.attn_qkv.weight") is None


@pytest.mark.parametrize(
    ("meta", "extra"),
    [({"deepseek2.expert_gating_func": 2}, {}), ({}, {"blk.1.exp_probs_b.bias": np.zeros(8)})],
)
def test_a_gguf_file_of_the_next_generation_is_refused(
    meta: dict[str, Any], extra: Tensors
) -> None:
    with pytest.raises(UnsupportedError, match=r"deepseek_v3 and later.*supported: deepseek_v2"):
        from_gguf(ROUTED_META | meta, as_gguf(tensors(), False) | extra)
