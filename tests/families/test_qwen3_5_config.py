"""Qwen 3.5: what its configurations and tensor names mean, and what is refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from in_memory import Tensors, build, gathered, logits, random_tensors

from turbospark.cache.state import LayerStates
from turbospark.errors import SourceError, TurbosparkError, UnsupportedArchitectureError
from turbospark.families import family_for_gguf, family_for_model_type, family_for_wire
from turbospark.families.base import ExpertShape
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.qwen3_5 import Config, family, mtp_shapes

ROPE = {
    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    "mrope_interleaved": True, "mrope_section": [11, 11, 10],
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 248320, "hidden_act": "silu", "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "attention_bias": False, "attn_output_gate": True,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "head_dim": 256,
    "output_gate_type": "swish", "rope_parameters": ROPE, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = TEXT | {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}  # fmt: skip
SPARSE = TEXT | {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
SMALL = {
    "vocab_size": 33, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
TINY = DENSE | SMALL | {"intermediate_size": 96}
TINY_MOE = SPARSE | SMALL | {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
IDS = [3, 17, 29, 8, 3, 30, 11, 2, 25, 7, 19, 4]
HEAD = sorted(
    [f"mtp.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"]
    + [f"mtp.layers.0.self_attn.{p}_norm.weight" for p in "qk"]
    + [f"mtp.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    + [f"mtp.layers.0.{p}_layernorm.weight" for p in ("input", "post_attention")]
    + [f"mtp.{p}.weight" for p in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
)


def read(raw: dict[str, Any]) -> Config:
    return family.read_config(ConfigReader(normalize_config(raw)))


def completed(raw: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Config:
    config = family.complete_config(normalize_config(raw), shapes)
    return family.read_config(ConfigReader(config))


# --- configuration --------------------------------------------------------------------------------


def test_every_name_of_the_family_leads_to_it() -> None:
    for name in ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"):
        assert family_for_model_type(name) is family
    assert family_for_wire("qwen35") is family_for_wire("qwen36") is family
    assert family_for_gguf("qwen35") is family_for_gguf("qwen35moe") is family


def test_its_predecessor_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="'qwen3_next' is not supported"):
        family_for_model_type("qwen3_next")


COMMON: dict[str, Any] = {
    "head_dim": 256, "full_head_dim": 256, "vocab_size": 248320, "sliding_window": 0,
    "final_logit_softcap": 0.0, "rope_theta": 1e7, "full_rope_theta": 1e7,
    "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "attention_k_eq_v": False,
    "hidden_activation": "silu", "attn_output_gate": True, "attention_scale": 2**-4,
    "embedding_scaled_by_sqrt_hidden": False, "router_scaled": False,
    "ffn_sandwich_norms": False, "rope_neox_subdim": True, "linear_num_k_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_size": 4,
    "linear_output_gate_sigmoid": False, "rope_scaling_factor": 0.0,
}  # fmt: skip


def test_the_released_dense_model_is_recorded_as_the_format_says() -> None:
    arch = family.arch(read(DENSE))
    expected = COMMON | {
        "family": "qwen35", "hidden_size": 5120, "intermediate_size": 17408,
        "moe_intermediate_size": 0, "num_heads": 24, "num_kv_heads": 4, "num_full_kv_heads": 4,
        "num_layers": 64, "num_experts": 0, "top_k_experts": 0, "shared_expert_gated": False,
        "full_attention_layer_mask": (2, 2, 2, 1) * 16, "linear_num_v_heads": 48,
    }  # fmt: skip
    assert {name: getattr(arch, name) for name in expected} == expected


def test_the_released_mixture_is_recorded_as_the_format_says() -> None:
    arch = family.arch(read(SPARSE))
    expected = COMMON | {
        "family": "qwen36", "hidden_size": 2048, "intermediate_size": 512,
        "moe_intermediate_size": 512, "num_heads": 16, "num_kv_heads": 2, "num_full_kv_heads": 2,
        "num_layers": 40, "num_experts": 256, "top_k_experts": 8, "shared_expert_gated": True,
        "full_attention_layer_mask": (2, 2, 2, 1) * 10, "linear_num_v_heads": 32,
    }  # fmt: skip
    assert {name: getattr(arch, name) for name in expected} == expected


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    "raw", [DENSE, SPARSE, DENSE | {"rope_parameters": ROPE | YARN}], ids=["27b", "35b", "yarn"]
)
def test_an_install_of_the_original_gives_the_same_model_back(raw: dict[str, Any]) -> None:
    c = read(raw)
    again = read(family.config_from_arch(family.arch(c)))
    same = {"rope_scaling": None, "max_position_embeddings": 0, "norm_convention": ""}
    assert asdict(again) | same == asdict(c) | same
    assert again.norm_convention == "plain" and c.norm_convention == "centred"
    if c.rope_scaling and "factor" in c.rope_scaling:
        assert again.rope_scaling and again.rope_scaling["factor"] == 4.0


def test_absent_keys_are_the_class_defaults() -> None:
    needed = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers",
              "num_attention_heads", "intermediate_size")  # fmt: skip
    dense = read({key: DENSE[key] for key in needed})
    moe = read({key: SPARSE[key] for key in needed if key in SPARSE})
    for c, kv_heads in ((dense, 4), (moe, 2)):
        assert (c.num_key_value_heads, c.head_dim, c.rotary_dim) == (kv_heads, 256, 64)
        assert c.rope_theta == 1e4 and c.rms_norm_eps == 1e-6 and not c.tie_word_embeddings
        assert tuple(asdict(c.delta).values()) == (16, 32, 128, 128, 4)
        assert c.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert (moe.num_experts, moe.num_experts_per_tok) == (256, 8)
    assert (moe.moe_intermediate_size, moe.shared_expert_intermediate_size) == (512, 512)


def test_wrapped_and_flat_files_in_all_dialects_are_the_same_configuration() -> None:
    c = read(DENSE)
    wrapped = {"model_type": "qwen3_5", "text_config": DENSE, "vision_config": {"depth": 27}}
    assert read(wrapped) == c
    mlx = ROPE | {"type": "default"}
    mlx.pop("rope_type")
    assert read(DENSE | {"rope_parameters": mlx}) == c
    flat = {k: v for k, v in DENSE.items() if k != "rope_parameters"}
    assert replace(read(flat | {"rope_theta": 1e7}), rope_scaling=c.rope_scaling) == c


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_yarn_is_seen_under_either_of_its_names(key: str) -> None:
    rope = {k: v for k, v in (ROPE | YARN).items() if k != "rope_type"} | {key: "yarn"}
    arch = family.arch(read(DENSE | {"rope_parameters": rope}))
    assert (arch.rope_scaling_factor, arch.rope_scaling_original_context) == (4.0, 262144)


def test_layer_types_beat_the_interval() -> None:
    kinds = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    c = read(TINY | {"layer_types": kinds})
    assert c.layer_types == tuple(kinds)
    shapes = family.weight_shapes(c)
    assert "model.layers.1.linear_attn.A_log" in shapes
    assert "model.layers.0.self_attn.q_proj.weight" in shapes
    assert not any(name.startswith("model.layers.0.linear_attn") for name in shapes)
    interval = read(TINY | {"full_attention_interval": 2}).layer_types
    assert interval == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (TINY, {"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*'silu'"),
        (TINY, {"attn_output_gate": False}, r"attn_output_gate = False.*True"),
        (TINY, {"output_gate_type": "sigmoid"}, r"output_gate_type = 'sigmoid'.*'swish'"),
        (TINY, {"layer_types": ["mamba"] * 4}, r"layer_types\[0\] = 'mamba'"),
        (TINY, {"layer_types": ["full_attention"]}, r"layer_types = '1 entries'; expected"),
        (TINY, {"num_key_value_heads": 3}, r"num_attention_heads = 4.*num_key_value_heads = 3"),
        (TINY, {"linear_num_key_heads": 4}, r"num_value_heads = 6.*num_key_heads = 4"),
        (TINY, {"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim = 1"),
        (TINY, {"rope_parameters": ROPE | {"partial_rotary_factor": 0.1}}, r"turns 3 of 32"),
        (TINY, {"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, r"turns 48 of 32"),
        (TINY, {"rope_parameters": ROPE | {"rope_type": "longrope"}}, r"'longrope'"),
        (TINY, {"rope_parameters": None, "rope_scaling": "yarn"}, r"'yarn'; expected an object"),
        (TINY, {"intermediate_size": None}, r"required key intermediate_size is missing"),
        (TINY, {"norm_convention": "shifted"}, r"norm_convention = 'shifted'.*'plain'"),
        (TINY, {"mtp_tensors": [{}]}, r"mtp_tensors = \['\{\}'\]"),
        (TINY, {"mtp_tensors": ["mtp.fc.bias"]}, r"mtp_tensors = \['mtp.fc.bias'\]"),
        (TINY_MOE, {"mtp_tensors": ["mtp.layers.0.mlp.up_proj.weight"]}, r"mlp.up_proj.*are not"),
        (TINY, {"mtp_num_hidden_layers": 10**9}, r"mtp_num_hidden_layers = 1000000000 exceeds"),
        (TINY_MOE, {"norm_topk_prob": False}, r"norm_topk_prob = False.*True"),
        (TINY_MOE, {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
        (TINY_MOE, {"decoder_sparse_step": 2}, r"decoder_sparse_step = 2"),
        (TINY_MOE, {"num_experts_per_tok": 9}, r"num_experts_per_tok = 9.*num_experts = 8"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    raw: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(raw | change)


def test_an_original_install_with_another_output_gate_is_refused() -> None:
    arch = family.arch(read(DENSE)).model_copy(update={"linear_output_gate_sigmoid": True})
    with pytest.raises(TurbosparkError, match="linearOutputGateSigmoid = true"):
        family.config_from_arch(arch)


# --- what only tensors tell -----------------------------------------------------------------------

CONV = "model.language_model.layers.0.linear_attn.conv1d.weight"


def test_the_norm_convention_is_read_off_the_convolution() -> None:
    assert completed(TINY, {CONV: (160, 1, 4)}).norm_convention == "centred"
    plain = completed(TINY, {CONV: (160, 4, 1)})
    assert plain.norm_convention == "plain"
    name = "model.layers.0.linear_attn.conv1d.weight"
    assert family.weight_shapes(plain)[name] == (160, 4, 1)
    assert family.weight_shapes(read(TINY))[name] == (160, 1, 4)


def test_a_tree_that_has_both_layouts_is_refused() -> None:
    shapes = {CONV: (160, 1, 4), CONV.replace("0", "1"): (160, 4, 1)}
    with pytest.raises(SourceError, match="by turns"):
        completed(TINY, shapes)


def test_without_a_convolution_the_quantization_tells() -> None:
    full = TINY | {"layer_types": ["full_attention"] * 4}
    assert completed(full, {}).norm_convention == "centred"
    packed = full | {"quantization": {"bits": 4, "group_size": 64}}
    assert completed(packed, {}).norm_convention == "plain"


def test_a_plain_tree_gives_the_same_logits_as_the_centred_one() -> None:
    c, tensors = read(TINY), tiny_tensors()
    plain = completed(TINY, {CONV: (160, 4, 1)})
    folded: Tensors = {}
    for name, array in tensors.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + np.float32(1)
        folded[name] = array.swapaxes(1, 2) if "conv1d" in name else array
    ours = logits(family, plain, folded, IDS)
    np.testing.assert_array_equal(ours, logits(family, c, tensors, IDS))


def tiny_tensors() -> Tensors:
    return random_tensors(family, read(TINY))


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_a_draft_head_is_kept_under_its_own_names(prefix: str) -> None:
    assert sorted(mtp_shapes(read(TINY))) == HEAD
    c = completed(TINY, {prefix + name: () for name in HEAD})
    assert list(c.mtp_tensors) == HEAD and c.mtp_norm_convention == "centred"
    shapes = family.weight_shapes(c)
    assert shapes["mtp.fc.weight"] == (64, 128)
    assert shapes["mtp.layers.0.self_attn.q_proj.weight"] == (2 * 4 * 32, 64)
    assert set(shapes) - set(family.weight_shapes(read(TINY))) == set(HEAD)
    for name in HEAD:
        pieces = family.pieces(c, prefix + name)
        assert pieces and pieces[0].target == name


def test_half_a_draft_head_is_kept_as_it_is_and_a_foreign_part_left_out() -> None:
    c = completed(TINY, {"mtp.fc.weight": (), "mtp.embed_tokens.weight": ()})
    assert c.mtp_tensors == ("mtp.fc.weight",)
    assert family.pieces(c, "mtp.embed_tokens.weight") == ()
    assert family.pieces(read(TINY), "mtp.fc.weight") == ()


MIXTURE_HEAD = sorted(
    [name for name in HEAD if ".mlp." not in name]
    + [f"mtp.layers.0.mlp.{p}.weight" for p in ("gate", "shared_expert_gate")]
    + [
        f"mtp.layers.0.mlp.{kind}.{p}_proj.weight"
        for kind in ("experts", "shared_expert")
        for p in ("gate", "up", "down")
    ]
)


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_the_experts_of_a_mixtures_head_are_one_matrix_per_projection(prefix: str) -> None:
    mlp = prefix + "mtp.layers.0.mlp."
    rest = {prefix + name: () for name in MIXTURE_HEAD if ".experts." not in name}
    stacked = completed(
        TINY_MOE, rest | {mlp + "experts.gate_up_proj": (), mlp + "experts.down_proj": ()}
    )
    apart = completed(
        TINY_MOE,
        rest
        | {
            f"{mlp}experts.{e}.{p}_proj.weight": ()
            for e in range(8)
            for p in ("gate", "up", "down")
        },
    )
    assert list(stacked.mtp_tensors) == list(apart.mtp_tensors) == MIXTURE_HEAD
    shapes = family.weight_shapes(apart)
    assert shapes["mtp.layers.0.mlp.experts.up_proj.weight"] == (8 * 32, 64)
    assert shapes["mtp.layers.0.mlp.experts.down_proj.weight"] == (8 * 64, 32)
    assert shapes["mtp.layers.0.mlp.gate.weight"] == (8, 64)
    fused = family.pieces(stacked, mlp + "experts.gate_up_proj")
    assert fused and [p.rows for p in fused] == [slice(0, 32), slice(32, 64)]
    one = family.pieces(apart, mlp + "experts.5.up_proj.weight")
    assert one and (one[0].target, one[0].part) == ("mtp.layers.0.mlp.experts.up_proj.weight", 5)
    # The last expert is missing: nothing of its projection is kept.
    half = completed(TINY_MOE, {f"{mlp}experts.{e}.up_proj.weight": () for e in range(7)})
    assert half.mtp_tensors == () == family.pieces(half, mlp + "experts.0.up_proj.weight")


# --- tensor names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", ["model.", "model.language_model.", "language_model.model."])
def test_names_of_every_wrapper_lead_to_the_same_tensor(wrapper: str) -> None:
    c = read(TINY)
    for part in ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.in_proj_qkv.weight"):
        pieces = family.pieces(c, f"{wrapper}layers.0.{part}")
        assert pieces and pieces[0].target == f"model.layers.0.{part}"
    head = {"language_model.model.": "language_model."}.get(wrapper, "")
    pieces = family.pieces(c, f"{head}lm_head.weight")
    assert pieces and pieces[0].target == "lm_head.weight"


def test_towers_are_left_out_and_other_tensors_are_unknown() -> None:
    c = read(TINY)
    for name in ("model.visual.merger.norm.weight", "vision_tower.blocks.0.attn.qkv.weight"):
        assert family.pieces(c, name) == ()
    for name in (
        "model.layers.3.linear_attn.A_log",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.linear_attn.conv1d.bias",
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    ):
        assert family.pieces(c, name) is None, name
    tied = read(TINY | {"tie_word_embeddings": True})
    assert family.pieces(tied, "lm_head.weight") == ()
    assert "lm_head.weight" not in family.weight_shapes(tied)


def test_experts_are_read_one_by_one_stacked_and_fused() -> None:
    c, layer = read(TINY_MOE), "model.language_model.layers.1.mlp"
    assert family.expert_shapes(c) == dict.fromkeys(range(4), ExpertShape(8, 64, 32))
    single = family.pieces(c, f"{layer}.experts.3.up_proj.weight")
    assert single and (single[0].role, single[0].layer, single[0].expert) == ("up", 1, 3)
    stacked = family.pieces(c, f"{layer}.switch_mlp.down_proj.weight")
    assert stacked and (stacked[0].role, stacked[0].expert) == ("down", None)
    fused = family.pieces(c, f"{layer}.experts.gate_up_proj")
    assert fused and [(p.role, p.rows) for p in fused] == [
        ("gate", slice(0, 32)), ("up", slice(32, 64)),
    ]  # fmt: skip
    shapes = family.weight_shapes(c)
    assert shapes["model.layers.1.mlp.shared_expert.down_proj.weight"] == (64, 48)
    assert shapes["model.layers.1.mlp.shared_expert_gate.weight"] == (1, 64)


@pytest.mark.parametrize("part", "qkvo")
def test_attention_biases_are_read_where_the_configuration_has_them(part: str) -> None:
    c = read(TINY | {"attention_bias": True})
    tensors = random_tensors(family, c)
    name = f"model.layers.3.self_attn.{part}_proj.bias"
    assert tensors[name].shape == (256 if part == "q" else 64,)
    found = logits(family, c, tensors, IDS)
    assert np.abs(found - logits(family, c, tensors | {name: tensors[name] * 0}, IDS)).max() > 1e-3


# --- memory ---------------------------------------------------------------------------------------


def test_linear_layers_hold_a_matrix_and_three_rows_and_full_ones_keys_and_values() -> None:
    states = LayerStates(build(family, read(TINY), tiny_tensors()).cache_specs, 100, mx.float32)
    linear = 4 * (6 * 16 * 16 + 3 * 160)
    assert states.recurrent and states.nbytes == 3 * linear + 2 * 4 * 100 * 2 * 32


@pytest.mark.parametrize("kept", [1, 2, 4, 5])
def test_a_cut_verify_pass_continues_like_single_steps_to_the_bit(kept: int) -> None:
    model = build(family, read(TINY), tiny_tensors())

    def feed(states: LayerStates, ids: list[int], tape: bool = False) -> np.ndarray:
        states.begin(len(ids), tape=tape)
        found = model.head(model(mx.array([ids]), states))
        mx.eval(found, states.arrays())
        states.advance()
        return np.array(found[0])

    verified, stepped = (LayerStates(model.cache_specs, 40, mx.float32) for _ in range(2))
    feed(verified, IDS)
    rows = feed(verified, [5, 9, 21, 14, 6], tape=True)
    verified.keep_rows(kept)
    feed(stepped, IDS)
    for i, token in enumerate([5, 9, 21, 14, 6][:kept]):
        np.testing.assert_array_equal(feed(stepped, [token])[0], rows[i])
    assert verified.position == stepped.position == len(IDS) + kept
    for token in (31, 12):
        np.testing.assert_array_equal(feed(verified, [token]), feed(stepped, [token]))


def test_steering_sees_the_stream_after_the_feed_forward() -> None:
    model, seen = build(family, read(TINY), tiny_tensors()), []
    states = LayerStates(model.cache_specs, 20, mx.float32)
    states.begin(len(IDS))

    def after_layer(layer: int, x: mx.array) -> mx.array:
        seen.append(layer)
        return x * 2 if layer == 1 else x

    steered = model(mx.array([IDS]), states, after_layer)
    states = LayerStates(model.cache_specs, 20, mx.float32)
    states.begin(len(IDS))
    assert seen == [0, 1, 2, 3]
    assert float(mx.abs(steered - model(mx.array([IDS]), states)).max()) > 1e-2


def test_a_source_is_gathered_without_a_rest() -> None:
    tensors = tiny_tensors()
    source = {n.replace("model.", "model.language_model.", 1): a for n, a in tensors.items()}
    found = gathered(family.pieces, read(TINY), source)
    assert set(found) == set(tensors)
