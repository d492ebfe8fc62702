"""GGUF's tensor names and metadata keys in Hugging Face terms, as far as families share them.

Knows the common vocabulary. Does not know what a family does to a tensor's meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from turbospark.dtypes import Raw
from turbospark.errors import SourceError
from turbospark.install.planes import Planes

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_BLOCK = re.compile(r"^blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)$")


def gguf_name(name: str, extra: Mapping[str, str] | None = None) -> str | None:
    """A GGUF tensor name in Hugging Face spelling; None when it is not in the tables.

    `extra` adds or overrides a family's own layer names.
    """
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.match(name)
    if match is None:
        return None
    part = (extra or {}).get(match[2]) or _LAYER.get(match[2])
    return None if part is None else f"model.layers.{match[1]}.{part}.{match[3]}"


def gguf_base_config(
    meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The config.json keys that most architectures share, from GGUF metadata."""
    name = meta["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{name}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise SourceError(f"GGUF metadata has no {name}.{key}")
        return value

    if "token_embd.weight" not in shapes:
        raise SourceError("GGUF file has no tensor token_embd.weight")
    heads = need("attention.head_count")
    config: dict[str, Any] = dict(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=need("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=need("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", need("embedding_length") // heads),
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        max_position_embeddings=get("context_length", 2048),
        sliding_window=get("attention.sliding_window"),
        tie_word_embeddings="output.weight" not in shapes,
    )
    if get("expert_count"):
        config.update(
            num_experts=get("expert_count"),
            num_experts_per_tok=need("expert_used_count"),
            moe_intermediate_size=get("expert_feed_forward_length", get("feed_forward_length")),
        )
    kind = get("rope.scaling.type", "none")
    if kind not in ("none", ""):
        scaling = {
            "rope_type": kind,
            "factor": get("rope.scaling.factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "attention_factor": get("rope.scaling.attn_factor"),
            "beta_fast": get("rope.scaling.yarn_beta_fast"),
            "beta_slow": get("rope.scaling.yarn_beta_slow"),
        }
        config["rope_scaling"] = {k: v for k, v in scaling.items() if v is not None}
    return {k: v for k, v in config.items() if v is not None}


def gguf_sliding_layers(meta: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers have the window, from `attention.sliding_window_pattern`.

    The key is a list with true for windowed layers, or a period whose last layer is global.
    """
    key = f"{meta['general.architecture']}.attention.sliding_window_pattern"
    pattern = meta.get(key)
    if type(pattern) is int and pattern > 0:
        return [i % pattern < pattern - 1 for i in range(layers)]
    if isinstance(pattern, list) and len(pattern) == layers and set(pattern) <= {0, 1}:
        return [bool(entry) for entry in pattern]
    raise SourceError(f"GGUF metadata: {key} = {pattern!r}; expected a period or {layers} booleans")


def minus_one(planes: Planes) -> Planes:
    """A centred norm's weight w, from files that store 1 + w; exact, as 1 + w is float32."""
    return Planes(Raw("float32"), planes.shape, planes.dense(mx.float32) - 1.0)
