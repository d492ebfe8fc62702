"""Checkpoints with a draft head: a tiny trunk whose next token its newest token alone decides.

All sublayers of the trunk and of the head write zeros, so that logits are a function of the
embedding; the head's `fc` hands on the embedding it is given. With the hidden row ignored the head
then says exactly what the trunk will say: acceptance is real, and it breaks with every wrong row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from oracle_folders import ORACLES

from turbospark import convert

Edit = Callable[[dict[str, mx.array]], Any]
BASE, MIXTURE = "qwen3_5-base", "qwen3_5_moe-base"


def checkpoint(
    path: Path, *, honest: bool, seed: int = 0, base: str = BASE, width: int | None = None,
    apart: bool = False,
) -> Path:  # fmt: skip
    """`base` with a whole random head; `honest`: one that says what the trunk says.

    Of a mixture `width` is the experts' own, where the base's is too narrow to be quantized, and
    with `apart` each expert of the head has tensors of its own.
    """
    source = ORACLES / base
    path.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    tensors = dict(mx.load(str(source / "model.safetensors")))
    rng = np.random.default_rng(seed)
    dtype = next(iter(tensors.values())).dtype
    tensors = {k: v for k, v in tensors.items() if "mtp." not in k}
    if width is not None:
        text["moe_intermediate_size"] = width
        for name in [name for name in tensors if ".mlp.experts." in name]:
            shape = expert_shapes(text)[name.rsplit(".", 1)[-1]]
            tensors[name] = mx.array(rng.normal(size=shape).astype(np.float32) * 0.3).astype(dtype)
    for name, shape in head_shapes(text).items():
        value = rng.normal(size=shape) * (0.1 if len(shape) > 1 else 0.05)
        tensors[name] = mx.array(value.astype(np.float32)).astype(dtype)
    (path / "config.json").write_text(json.dumps(config))
    if honest:
        hidden = text["hidden_size"]
        silent = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "experts.down_proj")
        for name in tensors:
            if name.endswith(silent) and "visual" not in name:
                tensors[name] = mx.zeros_like(tensors[name])
        eye = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1)
        tensors["mtp.fc.weight"] = mx.array(eye.astype(np.float32)).astype(dtype)
        tensors["mtp.pre_fc_norm_embedding.weight"] = mx.zeros((hidden,), dtype)
        (final,) = (v for k, v in tensors.items() if k.endswith("model.norm.weight"))
        tensors["mtp.norm.weight"] = final
    if apart:
        tensors = {k: v for name, t in tensors.items() for k, v in one_by_one(name, t).items()}
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    return path


def one_by_one(name: str, tensor: mx.array) -> dict[str, mx.array]:
    """The head's stacks of experts as a matrix each; anything else as it is."""
    if not name.startswith("mtp.layers.0.mlp.experts."):
        return {name: tensor}
    stem, projection = name.rsplit(".", 1)
    found = {}
    for e, matrix in enumerate(tensor):
        if projection == "down_proj":
            found[f"{stem}.{e}.down_proj.weight"] = matrix
        else:
            gate, up = mx.split(matrix, 2)
            found |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
    return found


def expert_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    """Stacks of experts as published."""
    e, f, h = text["num_experts"], text["moe_intermediate_size"], text["hidden_size"]
    return {"gate_up_proj": (e, 2 * f, h), "down_proj": (e, h, f)}


def feed_forward_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    """Of a dense head's block, or of a mixture's."""
    h, mlp = text["hidden_size"], "mtp.layers.0.mlp."
    routed = {}
    if "num_experts" in text:
        f, name = text["shared_expert_intermediate_size"], mlp + "shared_expert."
        routed = {mlp + "experts." + part: shape for part, shape in expert_shapes(text).items()}
        routed |= {
            mlp + "gate.weight": (text["num_experts"], h),
            mlp + "shared_expert_gate.weight": (1, h),
        }
    else:
        f, name = text["intermediate_size"], mlp
    return routed | {
        name + "gate_proj.weight": (f, h),
        name + "up_proj.weight": (f, h),
        name + "down_proj.weight": (h, f),
    }


def head_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head, written out by hand."""
    h, d = text["hidden_size"], text["head_dim"]
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
        **feed_forward_shapes(text),
    }


def install(path: Path, *, quant: dict[str, Any] | None = None, **settings: Any) -> Path:
    """The same as an install, quantized as `quant` says."""
    source = checkpoint(path.with_name(path.name + "-source"), **settings)
    return convert(source, path, progress=False, **(quant or {}))


def edited(source: Path, edit: Edit) -> Path:
    """The checkpoint with tensors that `edit` has changed."""
    tensors = dict(mx.load(str(source / "model.safetensors")))
    mx.eval(list(tensors.values()))
    edit(tensors)
    (source / "model.safetensors").unlink()
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    return source
