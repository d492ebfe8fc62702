"""Gemma 4: what its configurations, tensor names and GGUF files mean, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from in_memory import Reader, Tensors, build, logits, random_tensors
from safetensors.numpy import save_file

from turbospark import OpenOptions, Runner, convert
from turbospark.cache.specs import FullSpec, RingSpec, SharedSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import SourceError, TurbosparkError, UnsupportedError
from turbospark.families import family_for_gguf, family_for_model_type, family_for_wire
from turbospark.families.base import Piece
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.gemma4 import Config, family
from turbospark.layers.weights import Weights

S, F = "sliding_attention", "full_attention"
ROPES: dict[str, Any] = {
    F: {"partial_rotary_factor": 0.25, "rope_theta": 400000.0, "rope_type": "proportional"},
    S: {"rope_theta": 9000.0, "rope_type": "default"},
}
DENSE: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 33, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "rms_norm_eps": 3e-5, "sliding_window": 5, "layer_types": [S, S, F] * 2,
    "rope_parameters": ROPES, "final_logit_softcapping": 12.0, "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision", "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
SMALL = DENSE | {
    "num_hidden_layers": 9, "layer_types": [S, S, F] * 3, "num_kv_shared_layers": 4,
    "attention_k_eq_v": False, "num_global_key_value_heads": None, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 33,
}  # fmt: skip
MIXTURE = DENSE | {
    "num_hidden_layers": 3, "layer_types": [S, S, F], "enable_moe_block": True, "num_experts": 5,
    "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
RELEASED = MIXTURE | {  # 26B-A4B
    "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
    "head_dim": 256, "global_head_dim": 512, "rms_norm_eps": 1e-6, "sliding_window": 1024,
    "layer_types": ([S] * 5 + [F]) * 5, "final_logit_softcapping": 30.0, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704,
    "rope_parameters": {F: ROPES[F] | {"rope_theta": 1e6}, S: ROPES[S] | {"rope_theta": 1e4}},
}  # fmt: skip
IDS = [3, 17, 29, 8, 3, 30, 11, 2, 25, 7, 19, 4]


def read(raw: dict[str, Any]) -> Config:
    return family.read_config(ConfigReader(normalize_config(raw)))


# --- configuration --------------------------------------------------------------------------------


def test_every_name_of_the_family_leads_to_it() -> None:
    for name in ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"):
        assert family_for_model_type(name) is family
    assert family_for_wire("gemma4") is family and family_for_gguf("gemma4") is family


def test_the_released_configuration_is_recorded_as_the_format_says() -> None:
    arch = family.arch(read(RELEASED))
    expected = {
        "family": "gemma4", "hidden_size": 2816, "intermediate_size": 2112,
        "moe_intermediate_size": 704, "num_heads": 16, "num_kv_heads": 8, "num_full_kv_heads": 2,
        "head_dim": 256, "full_head_dim": 512, "vocab_size": 262144, "sliding_window": 1024,
        "final_logit_softcap": 30.0, "rope_theta": 1e4, "full_rope_theta": 1e6,
        "partial_rotary_factor": 0.25, "num_layers": 30, "num_experts": 128, "top_k_experts": 8,
        "tie_word_embeddings": True, "attention_k_eq_v": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "full_attention_layer_mask": (0, 0, 0, 0, 0, 1) * 5, "attn_output_gate": False,
        "attention_scale": 1.0, "embedding_scaled_by_sqrt_hidden": True, "router_scaled": True,
        "ffn_sandwich_norms": True, "shared_expert_gated": False, "rope_neox_subdim": False,
    }  # fmt: skip
    assert {name: getattr(arch, name) for name in expected} == expected


def test_an_install_of_the_original_gives_the_same_configuration_back() -> None:
    c = read(RELEASED)
    assert asdict(read(family.config_from_arch(family.arch(c)))) == asdict(c)


def test_absent_keys_are_those_of_transformers() -> None:
    c = read({"model_type": "gemma4_text"})
    assert (c.hidden_size, c.intermediate_size, c.num_hidden_layers) == (2304, 9216, 30)
    assert (c.vocab_size, c.num_attention_heads, c.rms_norm_eps) == (262144, 8, 1e-6)
    assert c.layer_types == ((S,) * 5 + (F,)) * 5 and c.sources == (None,) * 30
    sliding, full = c.kinds[S], c.kinds[F]
    assert (sliding.kv_heads, sliding.head_dim, sliding.window) == (4, 256, 512)
    assert (full.kv_heads, full.head_dim, full.window) == (4, 512, None)
    assert sliding.rope["rope_theta"] == 1e4 and full.rope["rope_theta"] == 1e6
    assert full.rope["partial_rotary_factor"] == 0.25
    assert (c.final_logit_softcapping, c.per_layer_width, c.num_experts) == (0.0, 256, 0)
    assert c.tie_word_embeddings and not c.use_double_wide_mlp and not c.attention_k_eq_v


def test_the_unified_member_has_a_wider_window_and_no_per_layer_inputs() -> None:
    c = read({"model_type": "gemma4_unified_text"})
    assert c.kinds[S].window == 1024 and c.per_layer_width == 0
    with pytest.raises(UnsupportedError, match=r"enable_moe_block = True.*False"):
        read({"model_type": "gemma4_unified_text", "enable_moe_block": True})


def test_a_null_width_of_per_layer_inputs_means_none() -> None:
    assert read(DENSE | {"hidden_size_per_layer_input": None}).per_layer_width == 0


def test_the_last_layer_attends_to_everything_whatever_the_file_says() -> None:
    assert read(DENSE | {"layer_types": [S] * 6}).layer_types == (S,) * 5 + (F,)


def test_key_value_heads_of_full_layers_count_only_when_keys_are_values() -> None:
    assert read(DENSE).kinds[F].kv_heads == 1
    assert read(DENSE | {"attention_k_eq_v": False}).kinds[F].kv_heads == 2


@pytest.mark.parametrize("model", [DENSE, SMALL, MIXTURE])
def test_the_dialect_of_transformers_5_says_the_same(model: dict[str, Any]) -> None:
    shape = {"head_dim": 32}
    if model["attention_k_eq_v"]:
        shape["num_key_value_heads"] = 1
    kinds = model["layer_types"]
    v5 = {k: v for k, v in model.items() if not k.startswith(("global_", "num_global_"))}
    v5["per_layer_config"] = {str(i): shape for i, kind in enumerate(kinds) if kind == F}
    wrapped = {"model_type": "gemma4", "text_config": v5, "dtype": "bfloat16"}
    assert asdict(read(wrapped)) == asdict(read(model))
    v5["per_layer_config"] = {}  # what is left when no layer differs
    assert read(v5).kinds[F].head_dim == 16


def test_shared_layers_read_the_last_own_layer_of_their_kind() -> None:
    c = read(SMALL)
    assert c.sources == (None, None, None, None, None, 2, 4, 4, 2)
    assert [c.width(i) for i in range(9)] == [96] * 5 + [192] * 4
    specs = build(family, c, random_tensors(family, c)).cache_specs
    assert specs[4] == RingSpec(2, 16, 16, 5) and specs[2] == FullSpec(2, 32, 32)
    assert specs[5:] == [SharedSpec(2), SharedSpec(4), SharedSpec(4), SharedSpec(2)]


def rope(kind: str, **change: Any) -> dict[str, Any]:
    return {"rope_parameters": ROPES | {kind: ROPES[kind] | change}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "silu"}, r"hidden_activation = 'silu'.*gelu_pytorch_tanh"),
        ({"attention_bias": True}, r"attention_bias = True.*False"),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention = 'all'.*'vision'"),
        ({"layer_types": ["linear_attention"] * 6}, r"layer_types\[0\] = 'linear_attention'"),
        ({"layer_types": [F]}, r"layer_types = '1 entries'.*6 entries"),
        ({"num_key_value_heads": 3}, r"sliding_attention has 4 attention heads over 3"),
        ({"num_global_key_value_heads": 3}, r"full_attention has 4 attention heads over 3"),
        ({"head_dim": 15}, r"sliding_attention has .* of width 15"),
        ({"sliding_window": 0}, r"sliding_window = 0.*at least 1"),
        ({"rope_theta": 1e4}, r"rope_theta = 10000.0.*leaving it out"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling = .*leaving it out"),
        ({"rope_parameters": {S: ROPES[S]}}, r"required key full_attention is missing"),
        ({"rope_parameters": {F: {}, S: ROPES[S]}}, r"required key rope_theta is missing"),
        (rope(F, rope_type="yarn"), r"full_attention: rope_type = 'yarn'.*'proportional'"),
        (rope(S, partial_rotary_factor=0.5), r"sliding_attention: partial_rotary_factor = 0.5"),
        ({"per_layer_config": {"2": {"head_dim": 32}}}, r"per_layer_config.*one shape"),
        ({"per_layer_config": {"2": {"intermediate_size": 3}}}, r"intermediate_size = 3"),
        ({"num_kv_shared_layers": 4}, r"num_kv_shared_layers = 4 leaves \['full_attention'\]"),
        ({"num_kv_shared_layers": 6}, r"num_kv_shared_layers = 6 leaves"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 32},
            r"vocab_size_per_layer_input = 32; expected at least 33",
        ),
        ({"enable_moe_block": True}, r"required key num_experts is missing"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            r"top_k_experts 5 exceeds num_experts 4",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_key_and_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TurbosparkError, match=message):
        read(DENSE | change)


# --- meaning --------------------------------------------------------------------------------------


def test_proportional_rope_turns_the_first_share_of_pairs_with_the_head_as_divisor() -> None:
    c = read(DENSE)
    layers = build(family, c, random_tensors(family, c)).layers
    full = np.array(layers[2].attention.rope.periods)
    turning = 400000.0 ** (2 * np.arange(4) / 32)
    np.testing.assert_allclose(full, [*turning, *[np.inf] * 12], rtol=1e-6)
    sliding = np.array(layers[0].attention.rope.periods)
    np.testing.assert_allclose(sliding, 9000.0 ** (2 * np.arange(8) / 16), rtol=1e-6)


def test_a_factor_slows_proportional_rope_down() -> None:
    c = read(DENSE | rope(F, factor=4.0))
    periods = np.array(c.kinds[F].make_rope(4096).periods)
    np.testing.assert_allclose(periods[1], 4 * 400000.0 ** (2 / 32), rtol=1e-6)


def test_raw_keys_are_the_values_of_full_layers_that_have_no_projection_for_them() -> None:
    """With the same matrix as value projection, a model with one computes the same."""
    shared = read(DENSE)
    apart = replace(shared, attention_k_eq_v=False)
    tensors = random_tensors(family, shared)
    both = tensors | {
        f"model.layers.{i}.self_attn.v_proj.weight": tensors[
            f"model.layers.{i}.self_attn.k_proj.weight"
        ]
        for i in (2, 5)
    }
    np.testing.assert_allclose(
        logits(family, apart, both, IDS), logits(family, shared, tensors, IDS), atol=1e-5
    )


def test_steering_sees_the_stream_after_the_layer_scalar() -> None:
    c = read(DENSE)
    tensors = random_tensors(family, c)
    tensors["model.layers.3.layer_scalar"][:] = 0.0
    model = build(family, c, tensors)
    states = LayerStates(model.cache_specs, 16, mx.float32)
    states.begin(len(IDS))
    seen: dict[int, float] = {}

    def look(layer: int, x: mx.array) -> mx.array:
        seen[layer] = float(mx.max(mx.abs(x)))
        return x

    model(mx.array([IDS]), states, look)
    assert seen[3] == 0.0 and seen[2] > 0.0


def test_constants_are_not_rounded_to_the_dtype_they_meet() -> None:
    c = read(DENSE | {"hidden_size": 96})  # sqrt(96) = 9.798; in bfloat16 9.8125
    tensors = random_tensors(family, c)
    weights = Weights(Reader(tensors), family.weight_shapes(c), mx.bfloat16)
    model = family.build(c, weights, None)
    states = LayerStates(model.cache_specs, 4, mx.bfloat16)
    states.begin(1)
    first = model.layers[0]
    got: list[mx.array] = []
    model.layers = [lambda x, *_: got.append(x) or x]
    model(mx.array([[5]]), states)
    model.layers = [first]
    exact = tensors["model.embed_tokens.weight"][5] * np.float32(96**0.5)
    np.testing.assert_array_equal(
        np.array(got[0][0, 0].astype(mx.float32)),
        np.array(mx.array(exact).astype(mx.bfloat16).astype(mx.float32)),
    )


# --- tensor names ---------------------------------------------------------------------------------


def test_every_wrapper_leads_to_the_same_tensor() -> None:
    c = read(SMALL)
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        for name in ("layers.8.layer_scalar", "embed_tokens_per_layer.weight"):
            assert family.pieces(c, prefix + name) == (Piece(f"model.{name}"),)


def test_towers_and_tied_heads_are_left_out() -> None:
    c = read(DENSE)
    for name in (
        "model.vision_tower.patch_embedder.input_proj.weight",
        "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.vision_embedder.patch_dense.weight",
        "embed_audio.embedding_projection.weight",
        "model.audio_tower.layers.0.norm_out.weight",
        "lm_head.weight",
        "language_model.lm_head.weight",
    ):
        assert family.pieces(c, name) == (), name


def test_keys_and_values_of_sharing_layers_are_left_out_and_of_others_read() -> None:
    c = read(SMALL)
    for part in ("k_proj", "v_proj", "k_norm"):
        assert family.pieces(c, f"model.layers.5.self_attn.{part}.weight") == ()
        assert family.pieces(c, f"model.layers.4.self_attn.{part}.weight") != ()
    assert "model.layers.5.self_attn.q_proj.weight" in family.weight_shapes(c)
    assert "model.layers.5.self_attn.k_proj.weight" not in family.weight_shapes(c)


def test_tensors_of_other_members_are_unknown() -> None:
    c = read(DENSE)
    for name in (
        "model.layers.2.self_attn.v_proj.weight",  # keys are values there
        "model.layers.6.self_attn.k_proj.weight",
        "model.layers.0.per_layer_input_gate.weight",
        "model.layers.0.router.proj.weight",
        "model.layers.0.experts.gate_up_proj",
        "model.layers.0.self_attn.q_proj.bias",
    ):
        assert family.pieces(c, name) is None, name


@pytest.mark.parametrize("dialect", ["experts", "experts.switch_glu"])
def test_experts_come_fused_or_stacked(dialect: str) -> None:
    c = read(MIXTURE)
    name = f"model.language_model.layers.1.{dialect}"
    gate, up = family.pieces(c, f"{name}.gate_up_proj")
    assert (gate.layer, gate.role, gate.rows) == (1, "gate", slice(0, 32))
    assert (up.layer, up.role, up.rows) == (1, "up", slice(32, 64))
    assert family.pieces(c, f"{name}.down_proj") == (Piece(layer=1, role="down"),)
    assert family.pieces(c, f"{name}.up_proj.weight") == (Piece(layer=1, role="up"),)
    assert set(family.expert_shapes(c)) == {0, 1, 2} and family.expert_shapes(read(DENSE)) == {}


# --- GGUF -----------------------------------------------------------------------------------------


def metadata(model: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes for `model`."""
    kinds, shared = model["layer_types"], model.get("num_kv_shared_layers", 0)
    width, layers = model["intermediate_size"], model["num_hidden_layers"]
    keys: dict[str, Any] = {
        "block_count": layers, "embedding_length": model["hidden_size"],
        "feed_forward_length": width, "context_length": 4096, "attention.head_count": 4,
        "attention.head_count_kv": model["num_key_value_heads"],
        "attention.key_length": model["global_head_dim"],
        "attention.value_length": model["global_head_dim"],
        "attention.key_length_swa": model["head_dim"],
        "attention.value_length_swa": model["head_dim"],
        "attention.layer_norm_rms_epsilon": model["rms_norm_eps"],
        "attention.sliding_window": model["sliding_window"],
        "attention.sliding_window_pattern": [kind == S for kind in kinds],
        "attention.shared_kv_layers": shared, "rope.freq_base": 400000.0,
        "rope.freq_base_swa": 9000.0, "rope.dimension_count": model["global_head_dim"],
        "rope.dimension_count_swa": model["head_dim"],
        "final_logit_softcapping": model["final_logit_softcapping"],
        "embedding_length_per_layer_input": model["hidden_size_per_layer_input"],
    }  # fmt: skip
    if model.get("use_double_wide_mlp"):
        keys["feed_forward_length"] = [width] * (layers - shared) + [2 * width] * shared
    if model["num_global_key_value_heads"]:
        keys["attention.head_count_kv"] = [2 if kind == S else 1 for kind in kinds]
    if model.get("enable_moe_block"):
        keys["expert_count"], keys["expert_used_count"] = 5, 2
        keys["expert_feed_forward_length"] = model["moe_intermediate_size"]
    return {"general.architecture": "gemma4"} | {f"gemma4.{k}": v for k, v in keys.items()}


def as_gguf(model: dict[str, Any], tensors: Tensors) -> Tensors:
    """Tensors under the names of the gguf package, with the divisors of the full layers' rope."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, model["num_hidden_layers"])
    bare = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    found: Tensors = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32)}
    for name, array in tensors.items():
        block, _, part = name.removeprefix("model.layers.").partition(".")
        if part in bare:
            found[f"blk.{block}.{bare[part]}"] = array
            continue
        stem = name.removesuffix(".weight")
        target = names.get_name(stem)
        assert target is not None, name
        found[f"{target}.weight"] = array
    return found


def read_gguf(meta: dict[str, Any], tensors: Tensors) -> Config:
    raw = family.gguf_config(meta, {name: a.shape for name, a in tensors.items()})
    json.dumps(raw)  # it is stored in the manifest
    return family.read_config(ConfigReader(raw, "GGUF metadata"))


@pytest.mark.parametrize("model", [DENSE, SMALL, MIXTURE])
def test_gguf_metadata_says_the_same_as_config_json(model: dict[str, Any]) -> None:
    c = read(model)
    stored = as_gguf(model, random_tensors(family, c))
    from_gguf = read_gguf(metadata(model), stored)
    full = replace(c.kinds[F], rope={"rope_type": "factors", "rope_theta": 400000.0})
    same = replace(
        c, kinds={S: c.kinds[S], F: full}, max_position_embeddings=4096,
        per_layer_vocab=from_gguf.per_layer_vocab,
    )  # fmt: skip
    assert asdict(from_gguf) == asdict(same)


def save_mixture(folder: Path, tensors: Tensors, experts: Tensors) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    save_file(tensors | experts, folder / "model.safetensors")


def test_a_gguf_file_computes_what_the_same_checkpoint_in_safetensors_does(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    c = read(MIXTURE)
    rng = np.random.default_rng(7)
    tensors = random_tensors(family, c)
    experts = {
        f"model.layers.{i}.experts.{part}": rng.standard_normal(shape).astype(np.float32) / 8
        for i in range(3)
        for part, shape in (("gate_up_proj", (5, 64, 64)), ("down_proj", (5, 64, 32)))
    }
    save_mixture(tmp_path / "hf", tensors, experts)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    for key, value in metadata(MIXTURE).items():
        if key != "general.architecture":
            add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
            add[type(value)](key, value)
    for name, array in as_gguf(MIXTURE, tensors | experts).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scores = []
    for source in (tmp_path / "hf", tmp_path / "model.gguf"):
        install = convert(source, tmp_path / f"{source.stem}.gturbo", progress=False)
        options = OpenOptions(max_context=32, device="cpu", dtype="float32")
        with Runner.open(install, options) as runner:
            scores.append(np.array(runner.score(IDS)))
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


def test_a_gguf_file_without_its_rope_divisors_is_refused() -> None:
    stored = as_gguf(DENSE, random_tensors(family, read(DENSE)))
    del stored["rope_freqs.weight"]
    with pytest.raises(SourceError, match=r"no tensor rope_freqs\.weight"):
        read_gguf(metadata(DENSE), stored)


def test_a_short_window_pattern_is_refused() -> None:
    stored = as_gguf(DENSE, random_tensors(family, read(DENSE)))
    meta = metadata(DENSE) | {"gemma4.attention.sliding_window_pattern": [True]}
    with pytest.raises(SourceError, match=r"sliding_window_pattern has 1 entries for 6 layers"):
        read_gguf(meta, stored)


def test_unknown_gguf_tensors_are_unknown() -> None:
    c = read(DENSE)
    assert family.gguf_pieces(c, "blk.0.attn_gate.weight") is None
    assert family.gguf_pieces(c, "blk.0.ffn_gate_inp.weight") is None  # no experts here
