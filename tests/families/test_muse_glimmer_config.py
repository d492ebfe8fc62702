"""Muse Glimmer: what its configurations and tensor names mean, and which are refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from in_memory import Tensors, build, gathered, logits, random_tensors

from turbospark.errors import SourceError, TurbosparkError
from turbospark.families import family_for_gguf, family_for_model_type, family_for_wire
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.muse_glimmer import Config, family

TEXT: dict[str, Any] = {
    "model_type": "muse_glimmer_text", "vocab_size": 33, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 2e-4, "post_norm_eps": 4e-3,
    "rope_theta": 40000.0, "sliding_window": 5, "final_logit_softcapping": 9.0,
    "qk_scale_factor": 2.5, "output_multiplier": 0.25,
}  # fmt: skip
IDS = [3, 17, 29, 8, 3, 30, 11, 2, 25, 7, 19, 4]


def read(raw: dict[str, Any]) -> Config:
    return family.read_config(ConfigReader(normalize_config(raw)))


# --- configuration --------------------------------------------------------------------------------


def test_every_name_of_the_family_leads_to_it() -> None:
    assert family_for_model_type("muse_glimmer") is family
    assert family_for_model_type("muse_glimmer_text") is family
    assert family_for_wire("museGlimmer") is family
    assert family_for_gguf("muse-glimmer") is family


def test_a_file_that_states_nothing_but_its_rope_is_the_released_model() -> None:
    arch = family.arch(read({"model_type": "muse_glimmer", "rope_theta": 500000.0}))
    expected = {
        "family": "museGlimmer", "hidden_size": 6656, "intermediate_size": 19968,
        "moe_intermediate_size": 0, "num_heads": 32, "num_kv_heads": 2, "num_full_kv_heads": 2,
        "head_dim": 128, "full_head_dim": 128, "vocab_size": 202048, "sliding_window": 2048,
        "final_logit_softcap": 20.0, "rope_theta": 500000.0, "full_rope_theta": 0.0,
        "partial_rotary_factor": 1.0, "num_layers": 52, "num_experts": 0, "top_k_experts": 0,
        "tie_word_embeddings": False, "attention_k_eq_v": False, "hidden_activation": "silu",
        "full_attention_layer_mask": (0, 0, 0, 1) * 13, "attn_output_gate": False,
        "attention_scale": 128**-0.5, "embedding_scaled_by_sqrt_hidden": False,
        "router_scaled": False, "ffn_sandwich_norms": True, "shared_expert_gated": False,
        "rope_neox_subdim": False,
    }  # fmt: skip
    assert {name: getattr(arch, name) for name in expected} == expected


def test_absent_constants_are_those_of_the_released_model() -> None:
    c = read({"model_type": "muse_glimmer"})
    assert (c.rms_norm_eps, c.post_norm_eps) == (1e-5, 1e-8)
    assert (c.qk_scale_factor, c.output_multiplier) == (3.87, 26**-0.5)
    assert c.rope_theta == 1e4  # the class default; published files say 5e5


def test_an_install_of_the_original_gives_the_same_configuration_back() -> None:
    c = read({"model_type": "muse_glimmer", "rope_theta": 500000.0})
    again = read(family.config_from_arch(family.arch(c)))
    assert asdict(again) == asdict(c)


def test_an_install_with_rope_on_global_layers_is_refused() -> None:
    arch = family.arch(read(TEXT)).model_copy(update={"full_rope_theta": 5e5})
    with pytest.raises(TurbosparkError, match=r"fullRopeTheta = 500000\.0.*expected 0"):
        family.config_from_arch(arch)


def test_the_pattern_is_counted_backward_from_the_last_layer() -> None:
    assert read(TEXT).sliding == (True, False, True, True, True, False)


def test_a_stated_pattern_beats_the_counted_one() -> None:
    kinds = ["full_attention", "sliding_attention"] * 3
    c = read(TEXT | {"layer_types": kinds, "layer_rope_theta": [0, 40000.0] * 3})
    assert c.sliding == (False, True) * 3


def test_both_dialects_and_the_wrapper_mean_the_same() -> None:
    rope = {"rope_theta": 40000.0, "rope_type": "default"}
    inner = {k: v for k, v in TEXT.items() if k != "rope_theta"} | {"rope_parameters": rope}
    wrapped = {"model_type": "muse_glimmer", "text_config": inner, "tie_word_embeddings": False}
    assert read(inner) == read(wrapped) == read(TEXT) == read(TEXT | {"model_type": "muse_glimmer"})


def test_tying_is_read_from_either_level() -> None:
    assert read({"model_type": "muse_glimmer", "text_config": TEXT, "tie_word_embeddings": True})
    outer = {"model_type": "muse_glimmer", "text_config": TEXT, "tie_word_embeddings": True}
    inner = {"model_type": "muse_glimmer", "text_config": TEXT | {"tie_word_embeddings": True}}
    assert read(outer).tie_word_embeddings and read(inner).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "gelu"}, r"hidden_activation = 'gelu'.*supported: 'silu'"),
        ({"hidden_act": "relu"}, r"hidden_act = 'relu'.*supported: 'silu'"),
        ({"attention_bias": True}, r"attention_bias = True.*supported: False"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5.*supported: 1\.0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_scaling: rope_type = 'yarn'.*'default'"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: type = 'linear'.*'default'"),
        ({"sliding_window": None}, r"sliding_window = None.*supported: a number"),
        ({"final_logit_softcapping": None}, r"final_logit_softcapping = None"),
        ({"final_logit_softcapping": 0.0}, r"final_logit_softcapping = 0\.0.*above 0"),
        ({"num_key_value_heads": 3}, r"4 attention heads over 3 key/value heads"),
        ({"head_dim": 7}, r"of width 7.*even"),
        ({"layer_types": ["full_attention"] * 5}, r"layer_types = '5 entries'.*6 entries"),
        ({"layer_types": ["linear_attention"] * 6}, r"layer_types\[0\] = 'linear_attention'"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(TEXT | change)


@pytest.mark.parametrize(
    ("thetas", "message"),
    [
        ([40000.0] * 6, r"layer_rope_theta\[1\] = 40000\.0.*'full_attention'.*supported: 0"),
        ([0] * 6, r"layer_rope_theta\[0\] = 0.*'sliding_attention'.*supported: 40000\.0"),
        ([5e5, 0, 5e5, 5e5, 5e5, 0], r"layer_rope_theta\[0\] = 500000\.0.*rope_theta = 40000\.0"),
        ([40000.0, False, 4e4, 4e4, 4e4, 0], r"layer_rope_theta\[1\] = False"),
    ],
)
def test_layer_types_and_layer_rope_theta_must_tell_the_same(
    thetas: list[float], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(TEXT | {"layer_rope_theta": thetas})


def test_layer_types_against_the_counted_thetas_are_refused() -> None:
    kinds = ["full_attention", "sliding_attention"] * 3
    with pytest.raises(TurbosparkError, match=r"layer_rope_theta\[0\] = 40000\.0"):
        read(TEXT | {"layer_types": kinds})


# --- tensor names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_each_dialect_of_names_leads_to_the_plain_one(prefix: str) -> None:
    c = read(TEXT)
    for name in family.weight_shapes(c):
        if name.startswith("model."):
            (piece,) = family.pieces(c, prefix + name.removeprefix("model."))
            assert piece.target == name and piece.transform is None
    for head in ("lm_head.weight", "language_model.lm_head.weight"):
        assert family.pieces(c, head)[0].target == "lm_head.weight"


@pytest.mark.parametrize(
    "name",
    [
        "model.vision_tower.layers.0.attn.q_proj.weight", "vision_tower.ln_pre.bias",
        "model.vision_adapter.fc1.weight", "vision_adapter.fc2.weight",
        "model.vision_projection.weight", "vision_projection.weight",
        "model.language_model.rotary_emb.inv_freq",
    ],
)  # fmt: skip
def test_the_tower_and_rope_buffers_are_left_out(name: str) -> None:
    assert family.pieces(read(TEXT), name) == ()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight", "model.layers.6.input_layernorm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.self_attn.q_proj.bias",
        "model.embed_norm.weight",
    ],
)  # fmt: skip
def test_any_other_tensor_is_unknown(name: str) -> None:
    assert family.pieces(read(TEXT), name) is None


def test_a_tied_model_leaves_a_stored_head_out() -> None:
    c = read(TEXT | {"tie_word_embeddings": True})
    assert family.pieces(c, "language_model.lm_head.weight") == ()
    assert "lm_head.weight" not in family.weight_shapes(c)


# --- norms ----------------------------------------------------------------------------------------


def test_centred_norms_stay_float32_whatever_the_model_computes_in() -> None:
    c = read(TEXT)
    tensors = random_tensors(family, c)
    fine = np.linspace(-0.01, 0.01, c.hidden_size, dtype=np.float32)
    tensors["model.layers.0.post_attention_layernorm.weight"] = fine
    layer = build(family, c, tensors, mx.bfloat16).layers[0]
    norm = layer.post_attention_layernorm
    assert norm.weight.dtype == mx.float32 and norm.eps == c.post_norm_eps
    np.testing.assert_array_equal(np.array(norm.weight), 1 + fine)
    assert layer.input_layernorm.eps == layer.pre_feedforward_layernorm.eps == c.rms_norm_eps
    assert layer.post_feedforward_layernorm.eps == c.post_norm_eps


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_META: dict[str, Any] = {
    "general.architecture": "muse-glimmer",
    "muse-glimmer.block_count": 6, "muse-glimmer.embedding_length": 24,
    "muse-glimmer.feed_forward_length": 40, "muse-glimmer.context_length": 131072,
    "muse-glimmer.attention.head_count": 4, "muse-glimmer.attention.head_count_kv": 2,
    "muse-glimmer.attention.key_length": 8, "muse-glimmer.attention.value_length": 8,
    "muse-glimmer.attention.layer_norm_rms_epsilon": 2e-4,
    "muse-glimmer.attention.sliding_window": 5,
    "muse-glimmer.attention.sliding_window_pattern": [True, False, True, True, True, False],
    "muse-glimmer.rope.freq_base": 40000.0, "muse-glimmer.final_logit_softcapping": 9.0,
    "muse-glimmer.logit_scale": 0.25,
}  # fmt: skip
GGUF_PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_gate": "self_attn.gate_proj",
    "attn_output": "self_attn.o_proj", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rope rows in pairs, as GGUF has them: 0, d/2, 1, d/2 + 1, ... of each head."""
    halves = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def as_gguf(tensors: Tensors, c: Config) -> Tensors:
    found = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    for i in range(c.num_hidden_layers):
        for part, plain in GGUF_PARTS.items():
            array = tensors[f"model.layers.{i}.{plain}.weight"]
            if part in ("attn_q", "attn_k"):
                array = interleaved(array, 4 if part == "attn_q" else 2)
            elif array.ndim == 1:
                array = 1 + array
            found[f"blk.{i}.{part}.weight"] = array
        found[f"blk.{i}.attn_q_norm.weight"] = np.full(8, c.qk_scale_factor, np.float32)
        found[f"blk.{i}.attn_k_norm.weight"] = np.ones(8, np.float32)
    return found


def read_gguf(meta: dict[str, Any], tensors: Tensors) -> Config:
    raw = family.gguf_config(meta, {name: a.shape for name, a in tensors.items()})
    return family.read_config(ConfigReader(raw, "GGUF metadata"))


def test_a_gguf_file_is_the_same_model_bit_for_bit() -> None:
    c = read(TEXT | {"post_norm_eps": 1e-8})  # the format has no key for it
    tensors = random_tensors(family, c)
    stored = as_gguf(tensors, c)
    from_gguf = read_gguf(GGUF_META, stored)
    assert asdict(from_gguf) == asdict(c) | {"qk_scale_factor": 3.87, "qk_norm_weights": True}
    canonical = gathered(family.gguf_pieces, from_gguf, stored)
    for name, array in tensors.items():
        np.testing.assert_array_equal(canonical[name], array, err_msg=name)
    ours = logits(family, from_gguf, canonical, IDS)
    np.testing.assert_array_equal(ours, logits(family, c, tensors, IDS))


def test_a_gguf_period_is_counted_forward() -> None:
    stored = as_gguf(random_tensors(family, read(TEXT)), read(TEXT))
    meta = GGUF_META | {"muse-glimmer.attention.sliding_window_pattern": 4}
    assert read_gguf(meta, stored).sliding == (True, True, True, False, True, True)


@pytest.mark.parametrize("pattern", [None, 0, True, [True] * 5, [2] * 6, "4"])
def test_a_gguf_pattern_that_fits_no_layers_is_refused(pattern: object) -> None:
    stored = {"token_embd.weight": np.zeros((33, 24), np.float32)}
    meta = GGUF_META | {"muse-glimmer.attention.sliding_window_pattern": pattern}
    with pytest.raises(SourceError, match=r"sliding_window_pattern.*a period or 6 booleans"):
        read_gguf(meta, stored)


def test_a_gguf_file_without_its_logit_scale_is_refused() -> None:
    meta = {k: v for k, v in GGUF_META.items() if not k.endswith("logit_scale")}
    with pytest.raises(SourceError, match=r"no muse-glimmer\.logit_scale"):
        read_gguf(meta, {"token_embd.weight": np.zeros((33, 24), np.float32)})


@pytest.mark.parametrize("name", ["blk.0.attn_qkv.weight", "blk.6.attn_q.weight", "mm.0.weight"])
def test_an_unknown_gguf_tensor_is_unknown(name: str) -> None:
    stored = as_gguf(random_tensors(family, read(TEXT)), read(TEXT))
    assert family.gguf_pieces(read_gguf(GGUF_META, stored), name) is None
