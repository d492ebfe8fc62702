"""Qwen 3.5 from GGUF files, which are built here from the original form as llama.cpp documents.

What changes there: value heads of one rank stand together, norms have their one added, A_log is
-exp(A_log), the convolution loses an axis, the draft head becomes further blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from in_memory import Tensors, gathered, logits, planes, random_tensors
from oracle_folders import ORACLES, Oracle
from test_qwen3_5_config import HEAD, IDS, MIXTURE_HEAD, TINY, TINY_MOE, completed, read

from turbospark import OpenOptions, Runner, convert
from turbospark.dtypes import Quant, Raw
from turbospark.errors import SourceError
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.families.gguf_delta import transform
from turbospark.families.qwen3_5 import Config, family
from turbospark.install.planes import Planes, quantize
from turbospark.layers.gated_delta import DeltaShape

LAYER_NAMES = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
PLAIN_NAMES = {plain: part for part, plain in LAYER_NAMES.items()}
HEAD_NAMES = {
    "mtp.fc": "nextn.eh_proj", "mtp.norm": "nextn.shared_head_norm",
    "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
}  # fmt: skip


def tiled(array: np.ndarray, axis: int, shape: DeltaShape, width: int) -> np.ndarray:
    """Value heads from the original order (grouped by key head) to GGUF's."""
    group = shape.value_heads // shape.key_heads
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    split = array.reshape(*before, shape.key_heads, group, width, *after)
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1)).reshape(array.shape)


def as_gguf(name: str, array: np.ndarray, c: Config) -> tuple[str, np.ndarray]:
    """One canonical tensor under its GGUF name, in GGUF's meaning."""
    d, layers = c.delta, c.num_hidden_layers
    stem = name.removesuffix(".weight")
    if "norm" in stem.rsplit(".", 1)[-1] and not stem.endswith("linear_attn.norm"):
        array = array + np.float32(1)
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.weight", array
    if stem in HEAD_NAMES:
        return f"blk.{layers}.{HEAD_NAMES[stem]}.weight", array
    prefix, layer, part = stem.replace("model.layers.", "mtp_.", 1).split(".", 2)
    if prefix == "mtp":
        layer, part = part.split(".", 1)
        layer = str(layers + int(layer))
    if part == "linear_attn.A_log":
        return f"blk.{layer}.ssm_a", -np.exp(tiled(array, 0, d, 1))
    if part == "linear_attn.dt_bias":
        return f"blk.{layer}.ssm_dt.bias", tiled(array, 0, d, 1)
    if part in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
        array = tiled(array, 0, d, 1)
    elif part == "linear_attn.in_proj_z":
        array = tiled(array, 0, d, d.value_dim)
    elif part in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
        array = array.reshape(d.channels, -1)
        v = tiled(array[2 * d.keys :], 0, d, d.value_dim)
        array = np.concatenate([array[: 2 * d.keys], v])
    elif part == "linear_attn.out_proj":
        array = tiled(array, 1, d, d.value_dim)
    return f"blk.{layer}.{PLAIN_NAMES[part]}.weight", array


def gguf_form(c: Config, tensors: Tensors) -> Tensors:
    return dict(as_gguf(name, array, c) for name, array in tensors.items())


def metadata(raw: dict[str, Any], architecture: str, heads: int = 0) -> dict[str, Any]:
    """What llama.cpp's converter writes for a configuration."""
    c = read(raw)
    found = {
        "block_count": c.num_hidden_layers + heads, "embedding_length": c.hidden_size,
        "context_length": c.max_position_embeddings,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.key_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": c.rope_theta,
        "rope.dimension_count": c.rotary_dim, "ssm.conv_kernel": c.delta.taps,
        "ssm.state_size": c.delta.key_dim, "ssm.group_count": c.delta.key_heads,
        "ssm.time_step_rank": c.delta.value_heads, "ssm.inner_size": c.delta.values,
        "full_attention_interval": 4,
    }  # fmt: skip
    if c.num_experts:
        found |= {
            "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok,
            "expert_feed_forward_length": c.moe_intermediate_size,
            "expert_shared_feed_forward_length": c.shared_expert_intermediate_size,
        }  # fmt: skip
    else:
        found["feed_forward_length"] = c.intermediate_size
    if heads:
        found["nextn_predict_layers"] = heads
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in found.items()
    }


def from_gguf(meta: dict[str, Any], file: Tensors) -> Config:
    raw = family.gguf_config(meta, {name: a.shape for name, a in file.items()})
    return family.read_config(ConfigReader(normalize_config(raw), "GGUF metadata"))


# --- in memory ------------------------------------------------------------------------------------

IRREGULAR = ["full_attention", "linear_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    "change", [{}, {"linear_num_value_heads": 2}, {"layer_types": IRREGULAR}], ids=str
)
def test_a_gguf_file_is_the_same_model(change: dict[str, Any]) -> None:
    raw = TINY | change
    c = read(raw)
    tensors = random_tensors(family, c)
    file = gguf_form(c, tensors)
    again = from_gguf(metadata(raw, "qwen35"), file)
    assert again.layer_types == c.layer_types and again.delta == c.delta
    assert (again.rotary_dim, again.rms_norm_eps, again.rope_theta) == (8, 1e-6, 1e7)
    assert again.norm_convention == "plain" and not again.tie_word_embeddings
    ours = logits(family, again, gathered(family.gguf_pieces, again, file), IDS)
    np.testing.assert_allclose(ours, logits(family, c, tensors, IDS), atol=2e-4)


def test_every_tensor_comes_back_as_it_was() -> None:
    c = read(TINY)
    tensors = random_tensors(family, c)
    file = gguf_form(c, tensors)
    found = gathered(family.gguf_pieces, from_gguf(metadata(TINY, "qwen35"), file), file)
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + np.float32(1)
        if name.endswith("A_log"):
            np.testing.assert_allclose(found[name], array, atol=1e-6)
        else:
            np.testing.assert_array_equal(found[name], array.reshape(found[name].shape))


def test_further_blocks_are_the_draft_head() -> None:
    c = completed(TINY, dict.fromkeys(HEAD, ()))
    tensors = random_tensors(family, c)
    file = gguf_form(c, tensors)
    assert "blk.4.nextn.eh_proj.weight" in file and "blk.4.attn_q.weight" in file
    again = from_gguf(metadata(TINY, "qwen35", heads=1), file)
    assert again.num_hidden_layers == 4 and again.mtp_num_hidden_layers == 1
    assert list(again.mtp_tensors) == HEAD and again.mtp_norm_convention == "plain"
    found = gathered(family.gguf_pieces, again, file)
    for name in HEAD:
        added = np.float32(1) if "norm" in name else np.float32(0)
        np.testing.assert_array_equal(found[name], tensors[name] + added)
    for copy in ("embed_tokens", "shared_head_head"):
        assert family.gguf_pieces(again, f"blk.4.nextn.{copy}.weight") == ()
    for wrong in ("blk.4.nextn.other.weight", "blk.3.nextn.eh_proj.weight", "blk.0.ssm_d"):
        assert family.gguf_pieces(again, wrong) is None


def test_the_draft_head_of_a_mixture_comes_with_its_experts() -> None:
    meta = metadata(TINY_MOE, "qwen35moe", heads=1)
    c = completed(TINY_MOE, dict.fromkeys(MIXTURE_HEAD, ()))
    tensors = random_tensors(family, c)
    routed = {
        f"blk.4.ffn_{p}_exps.weight": tensors.pop(f"mtp.layers.0.mlp.experts.{p}_proj.weight")
        for p in ("gate", "up", "down")
    }
    head = {n: a for n, a in tensors.items() if n.startswith("mtp.")}
    file = {"token_embd.weight": tensors["model.embed_tokens.weight"], **gguf_form(c, head)}
    file |= {name: array.reshape(8, -1, array.shape[-1]) for name, array in routed.items()}
    file["blk.0.ffn_gate_shexp.weight"] = np.zeros((48, 64), np.float32)
    again = from_gguf(meta, file)
    assert list(again.mtp_tensors) == MIXTURE_HEAD and again.mtp_norm_convention == "plain"
    found = gathered(family.gguf_pieces, again, file)
    for p in ("gate", "up", "down"):
        experts = found[f"mtp.layers.0.mlp.experts.{p}_proj.weight"]
        np.testing.assert_array_equal(experts, routed[f"blk.4.ffn_{p}_exps.weight"])
    for name, array in head.items():
        added = np.float32(1) if "norm" in name else np.float32(0)
        np.testing.assert_array_equal(found[name], array + added)


def test_mixture_names_lead_to_their_places() -> None:
    meta = metadata(TINY_MOE, "qwen35moe")
    shapes = {"token_embd.weight": (33, 64), "blk.0.ffn_gate_shexp.weight": (48, 64)}
    c = family.read_config(ConfigReader(family.gguf_config(meta, shapes)))
    assert (c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (8, 2, 32)
    assert c.shared_expert_intermediate_size == 48
    pieces = family.gguf_pieces(c, "blk.1.ffn_up_exps.weight")
    assert pieces and (pieces[0].layer, pieces[0].role) == (1, "up")
    fused = family.gguf_pieces(c, "blk.1.ffn_gate_up_exps.weight")
    assert fused and [p.role for p in fused] == ["gate", "up"]
    for stored in ((64,), (1, 64)):
        vector = np.arange(64, dtype=np.float32).reshape(stored)
        gate = family.gguf_pieces(c, "blk.1.ffn_gate_inp_shexp.weight")
        assert gate and gate[0].transform is not None
        found = gate[0].transform(planes(vector))
        assert found.shape == (1, 64) and np.array_equal(np.array(found.weight)[0], np.arange(64))


def test_a_missing_size_is_named() -> None:
    meta = metadata(TINY, "qwen35")
    del meta["qwen35.ssm.state_size"]
    with pytest.raises(SourceError, match=r"GGUF metadata has no qwen35\.ssm\.state_size"):
        family.gguf_config(meta, {"token_embd.weight": (33, 64)})


@pytest.mark.parametrize(("width", "moved"), [(64, True), (32, True), (16, False)])
def test_quantized_columns_move_in_whole_groups_or_become_values(width: int, moved: bool) -> None:
    shape = DeltaShape(2, 6, 16, width, 4)
    values = np.random.default_rng(3).standard_normal((8, 6 * width)).astype(np.float32)
    fmt = Quant("affine", 5, 32, "float16")
    packed = quantize(mx.array(tiled(values, 1, shape, width)), fmt)
    move = transform(shape, "model.layers.0.linear_attn.out_proj.weight")
    assert move is not None
    found: Planes = move(packed)
    assert found.shape == packed.shape and (found.fmt == fmt) == moved
    assert moved or found.fmt == Raw("float32")
    dense = np.array(packed.dense(mx.float32)).reshape(8, 3, 2, width)
    exact = dense.swapaxes(1, 2).reshape(8, -1)
    np.testing.assert_array_equal(np.array(found.dense(mx.float32)), exact)


# --- files ----------------------------------------------------------------------------------------


def write(path: Path, meta: dict[str, Any], file: Tensors) -> Path:
    writer = gguf.GGUFWriter(path, meta["general.architecture"])
    for key, value in list(meta.items())[1:]:
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(key, value)
    for name, array in file.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3_5-base", "qwen35"), ("qwen3_5_moe-base", "qwen35moe")]
)
def test_an_oracle_rewritten_as_gguf_gives_the_reference_logits(
    name: str, architecture: str, tmp_path: Path
) -> None:
    oracle = Oracle(ORACLES / name)
    c = read(oracle.config)
    file: Tensors = {}
    for source, stored in mx.load(str(oracle.path / "model.safetensors")).items():
        array = np.array(stored.astype(mx.float32))
        plain = source.replace("model.language_model.", "model.")
        if plain.startswith(("model.visual.", "mtp.")):
            continue
        if ".mlp.experts." in plain:
            layer, part = plain.split(".")[2], plain.rsplit(".", 1)[1]
            part = {"gate_up_proj": "ffn_gate_up_exps", "down_proj": "ffn_down_exps"}[part]
            file[f"blk.{layer}.{part}.weight"] = array
        else:
            file |= [as_gguf(plain, array, c)]
    path = write(tmp_path / "model.gguf", metadata(oracle.config, architecture), file)
    installed = convert(path, tmp_path / "model.gturbo", progress=False)
    options = OpenOptions(max_context=len(oracle.ids), dtype="float32", device="cpu")
    with Runner.open(installed, options) as runner:
        found = np.array(runner.score(oracle.ids))
    assert float(np.abs(found - oracle.logits).max()) < 2e-4
