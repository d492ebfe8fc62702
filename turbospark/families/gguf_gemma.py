"""GGUF metadata and tensor names of Gemma 3 and 4, which share their sandwich of norms.

Knows the two architectures' keys. Does not know their forward passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from turbospark.errors import SourceError, UnsupportedError
from turbospark.families.gguf import gguf_base_config, gguf_name
from turbospark.families.kinds import FULL, SLIDING

SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = SANDWICH | {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA4_TOP = {
    "rope_freqs.weight": "rope_freqs.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_GEMMA4_BARE = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")


def gemma3_name(name: str) -> str | None:
    """A Gemma 3 tensor in Hugging Face spelling; None when it is not in the tables."""
    return gguf_name(name, SANDWICH)


def gemma4_name(name: str) -> str | None:
    """A Gemma 4 tensor in Hugging Face spelling; None when it is not in the tables."""
    match = _BLOCK.match(name)
    if match and match[2] in _GEMMA4_BARE:
        return f"model.layers.{match[1]}.{_GEMMA4_BARE[match[2]]}"
    return _GEMMA4_TOP.get(name) or gguf_name(name, _GEMMA4)


def gemma3_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Gemma 3 metadata -> config.json keys.

    The files hold neither the query scale nor, before 2026, the pattern and the local theta:
    these are the architecture's constants. Norms are stored with their one added.
    """
    config = gguf_base_config(meta, shapes)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    # The 27B scales by the width per head of its residual stream, the others by the head's own.
    scalar = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    config.update(
        model_type="gemma3_text",
        layer_types=layer_types(meta, layers, period=6),
        query_pre_attn_scalar=scalar,
        rope_local_base_freq=meta.get("gemma3.rope.freq_base_swa", 1e4),
        final_logit_softcapping=meta.get("gemma3.final_logit_softcapping"),
        norms_include_one=True,
    )
    if "gemma3.rope.freq_base" not in meta:
        config["rope_theta"] = 1e6
    return config


def gemma4_config(meta: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Gemma 4 metadata -> config.json keys.

    Proportional rope comes as a tensor of divisors of the full layers' frequencies. That values
    are taken from the key projection shows in a full layer without `attn_v`.
    """
    if "rope_freqs.weight" not in shapes:
        raise SourceError("GGUF file has no tensor rope_freqs.weight, which gemma4 needs")
    config = gguf_base_config(meta, shapes)

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"gemma4.{key}", default)

    layers = config["num_hidden_layers"]
    types = [*layer_types(meta, layers, period=6)[:-1], FULL]
    full, sliding = types.index(FULL), types.index(SLIDING) if SLIDING in types else 0
    kv_heads = _each(config["num_key_value_heads"], layers)
    full_shape = {"head_dim": config["head_dim"], "num_key_value_heads": kv_heads[full]}
    widths = _each(config["intermediate_size"], layers)
    experts = config.pop("num_experts_per_tok", None)
    config.update(
        model_type="gemma4_text",
        layer_types=types,
        intermediate_size=widths[0],
        use_double_wide_mlp=widths[-1] == 2 * widths[0],
        num_key_value_heads=kv_heads[sliding],
        head_dim=get("attention.key_length_swa", full_shape["head_dim"]),
        per_layer_config={str(i): full_shape for i, kind in enumerate(types) if kind == FULL},
        num_kv_shared_layers=get("attention.shared_kv_layers", 0),
        attention_k_eq_v=f"blk.{full}.attn_v.weight" not in shapes,
        rope_parameters={
            SLIDING: {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4)},
            FULL: {"rope_type": "factors", "rope_theta": config.pop("rope_theta")},
        },
        final_logit_softcapping=get("final_logit_softcapping"),
        hidden_size_per_layer_input=get("embedding_length_per_layer_input", 0),
        enable_moe_block=experts is not None,
        top_k_experts=experts,
    )
    if "per_layer_token_embd.weight" in shapes:
        config["vocab_size_per_layer_input"] = shapes["per_layer_token_embd.weight"][0]
    return config


def layer_types(meta: Mapping[str, Any], layers: int, period: int) -> list[str]:
    """Layer kinds from the window pattern: flags by layer, or every how many layers is full."""
    name = f"{meta['general.architecture']}.attention.sliding_window_pattern"
    pattern = meta.get(name, period)
    if isinstance(pattern, int):
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    elif len(pattern) < layers:
        raise SourceError(f"GGUF metadata: {name} has {len(pattern)} entries for {layers} layers")
    return [SLIDING if flag else FULL for flag in list(pattern)[:layers]]


def _each(value: Any, layers: int) -> list[int]:
    values = [value] * layers if isinstance(value, int) else list(value)
    if len(values) < layers:
        raise UnsupportedError(f"GGUF metadata lists {len(values)} values for {layers} layers")
    return values
