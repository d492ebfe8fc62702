"""Spark-X2.5: what its configurations and tensor names mean, and which are refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_memory import Tensors, build, gathered, logits, random_tensors
from safetensors.numpy import save_file

from turbospark.conversion import convert
from turbospark.dtypes import Quant, Raw
from turbospark.errors import SourceError, TurbosparkError
from turbospark.families import family_for_gguf, family_for_model_type, family_for_wire
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.spark import Config, RopeConfig, family
from turbospark.install.opening import Install

ROPES = {
    "full_attention": {"rope_theta": 600000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_theta": 9000.0, "partial_rotary_factor": 1.0},
}
TINY: dict[str, Any] = {
    "model_type": "spark2_5", "vocab_size": 33, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "sliding_window": 5, "rms_norm_eps": 3e-5, "rope_parameters": ROPES,
}  # fmt: skip
RELEASED = TINY | {
    "vocab_size": 131072, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "rms_norm_eps": 1e-6, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 9,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5000000},
        "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000},
    },
}  # fmt: skip
IDS = [3, 17, 29, 8, 3, 30, 11, 2, 25, 7, 19, 4]


def read(raw: dict[str, Any]) -> Config:
    return family.read_config(ConfigReader(normalize_config(raw)))


# --- configuration --------------------------------------------------------------------------------


def test_every_name_of_the_family_leads_to_it() -> None:
    assert family_for_model_type("spark2_5") is family
    assert family_for_wire("spark2_5") is family
    assert family_for_gguf("spark2_5") is family


def test_the_released_configuration_is_recorded_as_the_format_says() -> None:
    arch = family.arch(read(RELEASED))
    expected = {
        "family": "spark2_5", "hidden_size": 2560, "intermediate_size": 10240,
        "moe_intermediate_size": 0, "num_heads": 16, "num_kv_heads": 4, "num_full_kv_heads": 4,
        "head_dim": 256, "full_head_dim": 256, "vocab_size": 131072, "sliding_window": 512,
        "final_logit_softcap": 0.0, "rope_theta": 1e4, "full_rope_theta": 5e6,
        "partial_rotary_factor": 0.25, "num_layers": 36, "num_experts": 0, "top_k_experts": 0,
        "tie_word_embeddings": True, "attention_k_eq_v": False, "hidden_activation": "gelu",
        "full_attention_layer_mask": (0, 0, 0, 1) * 9, "attn_output_gate": False,
        "attention_scale": 2.0**-4, "embedding_scaled_by_sqrt_hidden": False,
        "router_scaled": False, "ffn_sandwich_norms": False, "shared_expert_gated": False,
        "rope_neox_subdim": False,
    }  # fmt: skip
    assert {name: getattr(arch, name) for name in expected} == expected


def test_an_install_of_the_original_gives_the_same_configuration_back() -> None:
    c = read(RELEASED)
    assert asdict(read(family.config_from_arch(family.arch(c)))) == asdict(c)


def test_absent_keys_are_those_of_the_reference() -> None:
    c = read({k: v for k, v in TINY.items() if k != "rms_norm_eps"})
    assert c.rms_norm_eps == 1e-6 and c.tie_word_embeddings
    assert not c.attention_bias and not c.mlp_bias
    assert [kind.split("_")[0] for kind in c.layer_types] == ["sliding"] * 3 + ["full", "sliding"]


def test_each_kind_of_layer_has_a_rope_of_its_own() -> None:
    c = read(TINY)
    assert c.ropes == {
        "sliding_attention": RopeConfig(9000.0, 16),
        "full_attention": RopeConfig(600000.0, 4),
    }
    layers = build(family, c, random_tensors(family, c)).layers
    sliding, full = layers[0].attention.rope, layers[3].attention.rope
    assert (sliding.dims, full.dims) == (16, 4)
    # The divisor of a partial rope is what it rotates, not the head.
    np.testing.assert_allclose(np.array(full.periods), [1.0, 600000.0**0.5], rtol=1e-6)
    np.testing.assert_allclose(np.array(sliding.periods)[1], 9000.0 ** (2 / 16), rtol=1e-6)


def test_a_model_of_one_kind_needs_no_rope_of_the_other() -> None:
    kinds = ["sliding_attention"] * 5
    ropes = {"sliding_attention": ROPES["sliding_attention"]}
    arch = family.arch(read(TINY | {"layer_types": kinds, "rope_parameters": ropes}))
    assert arch.full_attention_layer_mask == (0,) * 5 and arch.rope_theta == 9000.0


def ropes_with(kind: str, **change: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPES | {kind: ROPES[kind] | change}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, r"hidden_act = 'gelu_pytorch_tanh'.*'gelu'"),
        ({"gate_attn_act_mode": "silu"}, r"gate_attn_act_mode = 'silu'.*'sigmoid'"),
        ({"headwise_attn_output_gate": False}, r"headwise_attn_output_gate = False.*True"),
        ({"num_key_value_heads": 3}, r"num_attention_heads = 4.*num_key_value_heads = 3"),
        ({"layer_types": ["linear_attention"] * 5}, r"layer_types\[0\] = 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, r"layer_types = '1 entries'.*5 entries"),
        ({"sliding_window": None}, r"required key sliding_window is missing"),
        ({"rope_parameters": None}, r"rope_parameters\.sliding_attention is missing"),
        ({"rope_parameters": {"sliding_attention": {}}}, r"rope_parameters\.full_attention is mis"),
        (ropes_with("full_attention", rope_type="yarn"), r"full_attention: rope_type = 'yarn'"),
        (ropes_with("full_attention", partial_rotary_factor=0.2), r"rotates 3 of 16 dimensions"),
        (ropes_with("sliding_attention", partial_rotary_factor=2.0), r"rotates 32 of 16"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(TINY | change)


# --- tensor names ---------------------------------------------------------------------------------


def test_the_table_goes_by_either_name() -> None:
    c = read(TINY)
    for name in ("model.embedding.weight", "model.embed_tokens.weight"):
        assert family.pieces(c, name)[0].target == "model.embed_tokens.weight"


def test_a_tied_model_leaves_a_stored_head_out_and_an_untied_one_reads_it() -> None:
    assert family.pieces(read(TINY), "lm_head.weight") == ()
    untied = read(TINY | {"tie_word_embeddings": False})
    assert family.pieces(untied, "lm_head.weight")[0].target == "lm_head.weight"


def test_biases_are_known_only_where_the_configuration_has_them() -> None:
    names = ["q_k_v_proj", "g_proj", "out_proj"]
    with_bias = read(TINY | {"attention_bias": True, "mlp_bias": True})
    for name in [f"model.layers.0.self_attn.{n}.bias" for n in names]:
        assert family.pieces(read(TINY), name) is None
        assert family.pieces(with_bias, name)[0].target == name
    assert family.weight_shapes(with_bias)["model.layers.4.mlp.up_proj.bias"] == (128,)


def test_rope_buffers_are_left_out_and_other_tensors_are_unknown() -> None:
    c = read(TINY)
    assert family.pieces(c, "model.layers.0.self_attn.rotary_emb.inv_freq") == ()
    assert family.pieces(c, "model.layers.0.self_attn.q_proj.weight") is None
    assert family.pieces(c, "model.layers.5.self_attn.out_proj.weight") is None


# --- quantization ---------------------------------------------------------------------------------


def test_head_gates_stay_as_they_are_when_the_rest_is_quantized(tmp_path: Path) -> None:
    c = read(TINY)
    source = tmp_path / "tiny"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(TINY))
    save_file(random_tensors(family, c), source / "model.safetensors")
    install = Install.open(convert(source, tmp_path / "tiny.gturbo", bits=4, progress=False))
    formats = {name: install.resident.entry(name).fmt for name in install.resident.names}
    assert formats["model.layers.0.self_attn.g_proj.weight"] == Raw("float32")
    assert isinstance(formats["model.layers.0.self_attn.q_k_v_proj.weight"], Quant)
    override = {"*.g_proj.weight": {"bits": 8}}
    install = Install.open(
        convert(source, tmp_path / "b.gturbo", bits=4, overrides=override, progress=False)
    )
    gate = install.resident.entry("model.layers.0.self_attn.g_proj.weight").fmt
    assert isinstance(gate, Quant) and gate.bits == 8


# --- GGUF -----------------------------------------------------------------------------------------

GGUF_META: dict[str, Any] = {
    "general.architecture": "spark2_5",
    "spark2_5.block_count": 5, "spark2_5.embedding_length": 64,
    "spark2_5.feed_forward_length": 128, "spark2_5.context_length": 8192,
    "spark2_5.vocab_size": 33, "spark2_5.attention.head_count": 4,
    "spark2_5.attention.head_count_kv": 2, "spark2_5.attention.key_length": 16,
    "spark2_5.attention.value_length": 16, "spark2_5.attention.layer_norm_rms_epsilon": 3e-5,
    "spark2_5.attention.sliding_window": 5,
    "spark2_5.attention.sliding_window_pattern": [True, True, True, False, True],
    "spark2_5.rope.freq_base": 600000.0, "spark2_5.rope.freq_base_swa": 9000.0,
    "spark2_5.rope.dimension_count": 4, "spark2_5.rope.dimension_count_swa": 16,
}  # fmt: skip
GGUF_PARTS = {
    "attn_norm": "input_layernorm", "attn_qkv": "self_attn.q_k_v_proj",
    "attn_gate": "self_attn.g_proj", "attn_output": "self_attn.out_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def as_gguf(tensors: Tensors) -> Tensors:
    found = {"token_embd.weight": tensors["model.embed_tokens.weight"]}
    found["output_norm.weight"] = tensors["model.norm.weight"]
    for i in range(5):
        for part, plain in GGUF_PARTS.items():
            for suffix in ("weight", "bias"):
                if f"model.layers.{i}.{plain}.{suffix}" in tensors:
                    array = tensors[f"model.layers.{i}.{plain}.{suffix}"]
                    found[f"blk.{i}.{part}.{suffix}"] = array
    return found


def read_gguf(meta: dict[str, Any], tensors: Tensors) -> Config:
    raw = family.gguf_config(meta, {name: a.shape for name, a in tensors.items()})
    return family.read_config(ConfigReader(raw, "GGUF metadata"))


@pytest.mark.parametrize("bias", [False, True])
def test_a_gguf_file_is_the_same_model_bit_for_bit(bias: bool) -> None:
    c = read(TINY | {"attention_bias": bias, "mlp_bias": bias})
    tensors = random_tensors(family, c)
    stored = as_gguf(tensors)
    from_gguf = read_gguf(GGUF_META, stored)
    assert asdict(from_gguf) == asdict(c)
    canonical = gathered(family.gguf_pieces, from_gguf, stored)
    ours = logits(family, from_gguf, canonical, IDS)
    np.testing.assert_array_equal(ours, logits(family, c, tensors, IDS))


def test_the_plain_gguf_rope_key_belongs_to_global_layers() -> None:
    stored = as_gguf(random_tensors(family, read(TINY)))
    ropes = read_gguf(GGUF_META, stored).ropes
    assert ropes["full_attention"].theta == 600000.0
    assert ropes["sliding_attention"].theta == 9000.0
    meta = {k: v for k, v in GGUF_META.items() if not k.endswith("freq_base_swa")}
    assert read_gguf(meta, stored).ropes["sliding_attention"].theta == 600000.0


def test_a_gguf_file_with_a_head_of_its_own_is_untied() -> None:
    stored = as_gguf(random_tensors(family, read(TINY)))
    assert read_gguf(GGUF_META, stored).tie_word_embeddings
    stored["output.weight"] = stored["token_embd.weight"]
    assert not read_gguf(GGUF_META, stored).tie_word_embeddings


@pytest.mark.parametrize("key", ["rope.dimension_count", "rope.dimension_count_swa"])
def test_a_gguf_file_without_its_rope_widths_is_refused(key: str) -> None:
    meta = {k: v for k, v in GGUF_META.items() if k != f"spark2_5.{key}"}
    with pytest.raises(SourceError, match=rf"no spark2_5\.{key}$"):
        read_gguf(meta, as_gguf(random_tensors(family, read(TINY))))
