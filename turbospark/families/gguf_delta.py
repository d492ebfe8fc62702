"""How GGUF stores models with gated delta nets, undone: names, metadata, order of value heads.

GGUF keeps the value heads of one rank over all key heads together, so that ggml can tile where
others repeat. Knows names and layouts; does not know a family's forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.dtypes import Quant, Raw
from turbospark.errors import SourceError
from turbospark.families.gguf import gguf_base_config, gguf_name
from turbospark.install.planes import Planes
from turbospark.layers.gated_delta import DeltaShape

_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SUFFIXLESS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
# Of the draft head's layers, what it has once. The last two repeat the model's own tables.
_HEAD = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
    "embed_tokens": "embed_tokens",
    "shared_head_head": "lm_head",
}
_BLOCK = re.compile(r"^blk\.(?P<layer>\d+)\.(?:nextn\.(?P<head>\w+)\.weight|(?P<part>[\w.]+))$")


def name(source: str, layers: int) -> str | None:
    """A GGUF tensor's name in Hugging Face spelling; None when it is in no table.

    Blocks from number `layers` on are the draft head's: `mtp.*`.
    """
    match = _BLOCK.match(source)
    if match is None:
        return gguf_name(source)
    layer = int(match["layer"])
    if match["head"]:
        part = _HEAD.get(match["head"])
        # Each block of a deeper head repeats these; the first block's count.
        where = "mtp" if layer == layers else f"mtp.layers.{layer - layers}"
        return f"{where}.{part}.weight" if part and layer >= layers else None
    if match["part"] in _SUFFIXLESS:
        return f"model.layers.{layer}.{_SUFFIXLESS[match['part']]}"
    found = gguf_name(source, _LAYER)
    if found is None or layer < layers:
        return found
    return found.replace(f"model.layers.{layer}.", f"mtp.layers.{layer - layers}.")


def base_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The config.json keys of a hybrid model; which layers are linear shows in their tensors."""
    prefix = meta["general.architecture"]

    def need(key: str) -> Any:
        value = meta.get(f"{prefix}.{key}")
        if value is None:
            raise SourceError(f"GGUF metadata has no {prefix}.{key}")
        return value

    config = gguf_base_config(meta, shapes)
    heads = meta.get(f"{prefix}.nextn_predict_layers", 0)
    layers = config["num_hidden_layers"] - heads
    value_heads = need("ssm.time_step_rank")
    rotary = meta.get(f"{prefix}.rope.dimension_count")
    config.update(
        num_hidden_layers=layers,
        mtp_num_hidden_layers=heads,
        layer_types=[
            "linear_attention" if f"blk.{i}.ssm_a" in shapes else "full_attention"
            for i in range(layers)
        ],
        linear_num_key_heads=need("ssm.group_count"),
        linear_num_value_heads=value_heads,
        linear_key_head_dim=need("ssm.state_size"),
        linear_value_head_dim=need("ssm.inner_size") // value_heads,
        linear_conv_kernel_dim=need("ssm.conv_kernel"),
        partial_rotary_factor=0.25 if rotary is None else rotary / config["head_dim"],
    )
    shared = shapes.get("blk.0.ffn_gate_shexp.weight")
    if shared is not None:
        config["shared_expert_intermediate_size"] = shared[0]
    return config


# --- layouts --------------------------------------------------------------------------------------


def transform(shape: DeltaShape, target: str) -> Callable[[Planes], Planes] | None:
    """What turns a GGUF tensor into the canonical `target`; None when it already is."""
    part = target.split(".linear_attn.")[-1]
    if part == "A_log":
        return lambda planes: _log(planes.rows(_heads(shape, 1)))
    if part in ("dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return lambda planes: planes.rows(_heads(shape, 1))
    if part == "in_proj_z.weight":
        return lambda planes: planes.rows(_heads(shape, shape.value_dim))
    if part == "in_proj_qkv.weight":
        return lambda planes: planes.rows(_channels(shape))
    if part == "conv1d.weight":
        return lambda planes: _reshaped(planes.rows(_channels(shape)), (*planes.shape, 1))
    if part == "out_proj.weight":
        return lambda planes: _columns(planes, shape)
    if part.endswith(".shared_expert_gate.weight"):
        return lambda planes: _reshaped(planes, (1, planes.shape[-1]))
    return None


def _order(shape: DeltaShape) -> np.ndarray:
    """Where GGUF has value head h: heads of one rank stand together, ordered by key head."""
    group = shape.value_heads // shape.key_heads
    heads = np.arange(shape.value_heads)
    return heads % group * shape.key_heads + heads // group


def _heads(shape: DeltaShape, width: int) -> mx.array:
    """Rows of all value heads of `width` rows each, in their own order."""
    rows = _order(shape)[:, None] * width + np.arange(width)
    return mx.array(rows.reshape(-1).astype(np.uint32))


def _channels(shape: DeltaShape) -> mx.array:
    """Rows of q | k | v, of which only v's are out of order."""
    before = mx.arange(2 * shape.keys, dtype=mx.uint32)
    return mx.concatenate([before, 2 * shape.keys + _heads(shape, shape.value_dim)])


def _columns(planes: Planes, shape: DeltaShape) -> Planes:
    """Columns [rows, values] with the value heads in their own order.

    Quantized groups move whole; where a head ends inside a group the values become float32.
    """
    fmt, width = planes.fmt, shape.value_dim
    if isinstance(fmt, Quant) and (width % fmt.group_size or width * fmt.bits % 32):
        fmt = Raw("float32")
        planes = Planes(fmt, planes.shape, planes.dense(mx.float32))
    order = mx.array(_order(shape).astype(np.uint32))

    def moved(plane: mx.array) -> mx.array:
        heads = plane.reshape(plane.shape[0], shape.value_heads, -1)
        return mx.take(heads, order, axis=1).reshape(plane.shape)

    return Planes(fmt, planes.shape, *map(moved, planes.arrays()))


def _log(planes: Planes) -> Planes:
    """GGUF stores -exp(A_log)."""
    return Planes(Raw("float32"), planes.shape, mx.log(-planes.dense(mx.float32)))


def _reshaped(planes: Planes, shape: tuple[int, ...]) -> Planes:
    """The same values under a shape with the same last axis, or with one of 1 after it."""
    return Planes(planes.fmt, shape, *(a.reshape(*shape[:-1], -1) for a in planes.arrays()))
