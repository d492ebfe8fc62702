"""Gemma 3: what its configurations, tensor names and GGUF files mean, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from in_memory import Tensors, build, gathered, logits, random_tensors

from turbospark.cache.specs import FullSpec, RingSpec
from turbospark.errors import SourceError, TurbosparkError, UnsupportedError
from turbospark.families import family_for_gguf, family_for_model_type, family_for_wire
from turbospark.families.base import Piece
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.gemma3 import Config, family
from turbospark.install.arch import FAMILY_WIRES, ArchConfig

S, F = "sliding_attention", "full_attention"
TINY: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 33, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 3e-5, "rope_theta": 400000.0, "rope_local_base_freq": 9000.0,
    "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": {"rope_type": "linear", "factor": 8},
}  # fmt: skip
IDS = [3, 17, 29, 8, 3, 30, 11, 2, 25, 7, 19, 4]


def read(raw: dict[str, Any]) -> Config:
    return family.read_config(ConfigReader(normalize_config(raw)))


# --- configuration --------------------------------------------------------------------------------


def test_every_name_of_the_family_leads_to_it() -> None:
    for name in ("gemma3", "gemma3_text"):
        assert family_for_model_type(name) is family
    assert family_for_wire("gemma3") is family and family_for_gguf("gemma3") is family


def test_the_published_wrapper_leaves_class_defaults_out() -> None:
    """google/gemma-3-4b-it names six text settings; the rest are those of transformers."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    c = read({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 9}})
    assert (c.vocab_size, c.num_attention_heads, c.rms_norm_eps) == (262208, 8, 1e-6)
    assert (c.query_pre_attn_scalar, c.final_logit_softcapping) == (256.0, 0.0)
    assert c.tie_word_embeddings and not c.norms_include_one
    assert c.layer_types[:7] == (S,) * 5 + (F, S) and len(c.layer_types) == 34
    sliding, full = c.kinds[S], c.kinds[F]
    assert (sliding.kv_heads, sliding.head_dim, sliding.window) == (4, 256, 1024)
    assert sliding.rope == {"rope_theta": 1e4}
    assert full.rope == {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    assert (full.kv_heads, full.head_dim, full.window) == (4, 256, None)


def test_the_manifest_records_the_family_under_a_name_of_our_own() -> None:
    arch = family.arch(read(TINY))
    assert arch.family == "gemma3" and "gemma3" not in FAMILY_WIRES
    assert ArchConfig.from_manifest(arch.to_manifest()) == arch
    assert (arch.rope_theta, arch.full_rope_theta, arch.sliding_window) == (9000.0, 400000.0, 5)
    assert arch.full_attention_layer_mask == (0, 0, 1, 0, 0)
    assert arch.attention_scale == 24**-0.5 and arch.ffn_sandwich_norms
    with pytest.raises(UnsupportedError, match=r"manifest\.turbospark\.config is missing"):
        family.config_from_arch(arch)


def test_the_dialect_of_transformers_5_says_the_same() -> None:
    v5 = {k: v for k, v in TINY.items() if not k.startswith(("rope_", "sliding_window_"))}
    v5["layer_types"] = [S, S, F, S, S]
    v5["rope_parameters"] = {
        F: {"rope_type": "linear", "factor": 8, "rope_theta": 400000.0},
        S: {"rope_type": "default", "rope_theta": 9000.0},
    }
    ours, theirs = read(TINY), read({"model_type": "gemma3", "text_config": v5})
    assert theirs.kinds[S].rope.pop("rope_type") == "default"
    assert asdict(theirs) == asdict(ours)


def test_ropes_that_the_section_leaves_open_have_the_defaults() -> None:
    c = read(TINY | {"rope_theta": None, "rope_parameters": {F: {"rope_type": "default"}}})
    assert c.kinds[F].rope["rope_theta"] == 1e6 and c.kinds[S].rope["rope_theta"] == 9000.0


def test_a_model_of_full_layers_needs_no_window() -> None:
    c = read(TINY | {"sliding_window": None, "layer_types": [F] * 5})
    specs = build(family, c, random_tensors(family, c)).cache_specs
    assert specs == [FullSpec(2, 32, 32)] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "silu"}, r"hidden_activation = 'silu'.*gelu_pytorch_tanh"),
        ({"attention_bias": True}, r"attention_bias = True.*False"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50.0.*leaving it out"),
        ({"use_bidirectional_attention": True}, r"use_bidirectional_attention = True.*False"),
        ({"sliding_window": None}, r"sliding_window = None.*a number"),
        ({"num_key_value_heads": 3}, r"4 attention heads over 3"),
        ({"head_dim": 31}, r"of width 31"),
        ({"layer_types": ["chunked_attention"] * 5}, r"layer_types\[0\] = 'chunked_attention'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"rope_type = 'yarn'.*'default' or 'linear'"),
        ({"rope_scaling": {"type": "dynamic"}}, r"type = 'dynamic'.*'default' or 'linear'"),
        ({"rope_parameters": {S: {"rope_type": "llama3"}}}, r"sliding_attention: .*'llama3'"),
        ({"rope_scaling": ["linear"]}, r"rope_scaling = \['linear'\]; expected an object"),
        ({"rope_parameters": {S: "linear", F: {}}}, r"attention = 'linear'; expected"),
        ({"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar = 0; expected at least 1e-06"),
        ({"query_pre_attn_scalar": "x"}, r"query_pre_attn_scalar = 'x'; expected a number"),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(TINY | change)


# --- meaning --------------------------------------------------------------------------------------


def test_the_linear_factor_slows_full_layers_only() -> None:
    c = read(TINY)
    layers = build(family, c, random_tensors(family, c)).layers
    full, sliding = (np.array(layers[i].attention.rope.periods) for i in (2, 0))
    np.testing.assert_allclose(full, 8 * 400000.0 ** (np.arange(16) / 16), rtol=1e-6)
    np.testing.assert_allclose(sliding, 9000.0 ** (np.arange(16) / 16), rtol=1e-6)
    assert build(family, c, random_tensors(family, c)).cache_specs[:3] == [
        RingSpec(2, 32, 32, 5), RingSpec(2, 32, 32, 5), FullSpec(2, 32, 32),
    ]  # fmt: skip


def test_scores_are_scaled_by_the_query_scalar_not_the_head() -> None:
    c = read(TINY)
    assert build(family, c, random_tensors(family, c)).layers[0].attention.scale == 24**-0.5


def test_a_soft_cap_bounds_the_logits() -> None:
    c = read(TINY)
    tensors = random_tensors(family, c)
    free = logits(family, c, tensors, IDS)
    capped = logits(family, replace(c, final_logit_softcapping=2.0), tensors, IDS)
    np.testing.assert_allclose(capped, 2.0 * np.tanh(free / 2.0), atol=1e-6)
    assert np.abs(free).max() > 2.0


# --- tensor names ---------------------------------------------------------------------------------


def test_every_wrapper_leads_to_the_same_tensor_and_towers_are_left_out() -> None:
    c = read(TINY)
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        name = "layers.4.pre_feedforward_layernorm.weight"
        assert family.pieces(c, prefix + name) == (Piece(f"model.{name}"),)
    for name in ("vision_tower.vision_model.post_layernorm.weight", "lm_head.weight",
                 "model.multi_modal_projector.mm_soft_emb_norm.weight"):  # fmt: skip
        assert family.pieces(c, name) == ()
    untied = read(TINY | {"tie_word_embeddings": False})
    assert family.pieces(untied, "language_model.lm_head.weight") == (Piece("lm_head.weight"),)
    for name in ("model.layers.5.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert family.pieces(c, name) is None


# --- GGUF -----------------------------------------------------------------------------------------

META: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 5, "gemma3.embedding_length": 64, "gemma3.feed_forward_length": 96,
    "gemma3.context_length": 131072, "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 2, "gemma3.attention.key_length": 32,
    "gemma3.attention.value_length": 32, "gemma3.attention.layer_norm_rms_epsilon": 3e-5,
    "gemma3.attention.sliding_window": 5, "gemma3.attention.sliding_window_pattern": 3,
    "gemma3.rope.freq_base": 400000.0, "gemma3.rope.freq_base_swa": 9000.0,
    "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0,
}  # fmt: skip
OLD = ("gemma3.rope.freq_base_swa", "gemma3.attention.sliding_window_pattern")


def as_gguf(tensors: Tensors) -> Tensors:
    """Tensors under the names of the gguf package, norms with their one added."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 5)
    found: Tensors = {}
    for name, array in tensors.items():
        target = names.get_name(name.removesuffix(".weight"))
        assert target is not None, name
        found[f"{target}.weight"] = array + np.float32(1) if "norm" in name else array
    return found


def read_gguf(meta: dict[str, Any], tensors: Tensors) -> Config:
    raw = family.gguf_config(meta, {name: a.shape for name, a in tensors.items()})
    json.dumps(raw)  # it is stored in the manifest
    return family.read_config(ConfigReader(raw, "GGUF metadata"))


def test_a_gguf_file_is_the_same_model_bit_for_bit() -> None:
    c = replace(read(TINY), query_pre_attn_scalar=32.0)  # not in the metadata: the head's width
    tensors = random_tensors(family, c)
    stored = as_gguf(tensors)
    from_gguf = read_gguf(META, stored)
    assert from_gguf.norms_include_one and not c.norms_include_one
    assert from_gguf.kinds[S] == c.kinds[S] and from_gguf.layer_types == c.layer_types
    canonical = gathered(family.gguf_pieces, from_gguf, stored)
    ours = logits(family, from_gguf, canonical, IDS)
    np.testing.assert_array_equal(ours, logits(family, c, tensors, IDS))


def test_files_without_pattern_and_local_theta_have_those_of_the_architecture() -> None:
    stored = as_gguf(random_tensors(family, read(TINY)))
    c = read_gguf({k: v for k, v in META.items() if k not in OLD}, stored)
    assert c.layer_types == (S,) * 5 and c.kinds[S].rope["rope_theta"] == 1e4
    without = {k: v for k, v in META.items() if k != "gemma3.rope.freq_base"}
    assert read_gguf(without, stored).kinds[F].rope["rope_theta"] == 1e6


def test_the_largest_member_scales_by_its_width_per_head() -> None:
    shapes = {"token_embd.weight": (33, 5376)}
    meta = META | {
        "gemma3.block_count": 62, "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32, "gemma3.attention.key_length": 128,
    }  # fmt: skip
    assert family.gguf_config(meta, shapes)["query_pre_attn_scalar"] == 168


def test_a_gguf_file_with_a_head_of_its_own_is_untied() -> None:
    stored = as_gguf(random_tensors(family, read(TINY)))
    assert read_gguf(META, stored).tie_word_embeddings
    stored["output.weight"] = stored["token_embd.weight"]
    c = read_gguf(META, stored)
    assert not c.tie_word_embeddings
    assert family.gguf_pieces(c, "output.weight") == (Piece("lm_head.weight"),)
    assert family.gguf_pieces(c, "blk.0.attn_q.bias") is None


def test_a_short_window_pattern_is_refused() -> None:
    stored = as_gguf(random_tensors(family, read(TINY)))
    with pytest.raises(SourceError, match=r"sliding_window_pattern has 2 entries for 5 layers"):
        read_gguf(META | {"gemma3.attention.sliding_window_pattern": [True, False]}, stored)
