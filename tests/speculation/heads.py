"""Checkpoints with a draft head: a tiny trunk whose next token its newest token alone decides.

All sublayers of the trunk and of the head write zeros, so that logits are a function of the
embedding; the head's `fc` hands on the embedding it is given. With the hidden row ignored the head
then says exactly what the trunk will say: acceptance is real, and it breaks with every wrong row.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from oracle_folders import ORACLES

from turbospark import convert

BASE = "qwen3_5-base"


def checkpoint(path: Path, *, honest: bool, seed: int = 0) -> Path:
    """BASE with a whole random head; `honest`: one that says what the trunk says."""
    source = ORACLES / BASE
    path.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", config)
    tensors = dict(mx.load(str(source / "model.safetensors")))
    rng = np.random.default_rng(seed)
    dtype = next(iter(tensors.values())).dtype
    tensors = {k: v for k, v in tensors.items() if "mtp." not in k}
    for name, shape in head_shapes(text).items():
        value = rng.normal(size=shape) * (0.1 if len(shape) > 1 else 0.05)
        tensors[name] = mx.array(value.astype(np.float32)).astype(dtype)
    if honest:
        hidden = text["hidden_size"]
        silent = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
        for name in tensors:
            if name.endswith(silent) and "visual" not in name:
                tensors[name] = mx.zeros_like(tensors[name])
        eye = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1)
        tensors["mtp.fc.weight"] = mx.array(eye.astype(np.float32)).astype(dtype)
        tensors["mtp.pre_fc_norm_embedding.weight"] = mx.zeros((hidden,), dtype)
        (final,) = (v for k, v in tensors.items() if k.endswith("model.norm.weight"))
        tensors["mtp.norm.weight"] = final
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    return path


def head_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a dense head, written out by hand."""
    h, f, d = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * d, text["num_key_value_heads"] * d
    layer = "mtp.layers.0."
    return {
        "mtp.fc.weight": (h, 2 * h),
        "mtp.pre_fc_norm_embedding.weight": (h,),
        "mtp.pre_fc_norm_hidden.weight": (h,),
        "mtp.norm.weight": (h,),
        layer + "input_layernorm.weight": (h,),
        layer + "post_attention_layernorm.weight": (h,),
        layer + "self_attn.q_proj.weight": (2 * q, h),
        layer + "self_attn.k_proj.weight": (kv, h),
        layer + "self_attn.v_proj.weight": (kv, h),
        layer + "self_attn.o_proj.weight": (h, q),
        layer + "self_attn.q_norm.weight": (d,),
        layer + "self_attn.k_norm.weight": (d,),
        layer + "mlp.gate_proj.weight": (f, h),
        layer + "mlp.up_proj.weight": (f, h),
        layer + "mlp.down_proj.weight": (h, f),
    }


def install(path: Path, *, honest: bool) -> Path:
    """The same as an install."""
    source = checkpoint(path.with_name(path.name + "-source"), honest=honest)
    return convert(source, path, progress=False)
