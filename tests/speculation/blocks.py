"""A tiny model with a random DFlash2 drafter beside it, as two checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from oracle_folders import ORACLES

BASE = "qwen3_5-base"
LAYERS, HEADS, KV, DIM, WIDTH = 2, 4, 2, 8, 48
OWN = {
    "block_size": 5, "conv_group_size": 8, "conv_kernel_size": 2, "mask_token_id": 3,
    "selector_rank": 6, "selector_top_k": 4, "target_layer_ids": [0, 2],
}  # fmt: skip


def drafter(
    path: Path, window: int = 12, rank: int = 6, knows: Path | None = None, **changes: object
) -> Path:
    """The drafter's folder; `changes` are config.json keys.

    With `knows`, a checkpoint whose newest token alone decides the next one (`heads`), its selector
    scores every token as that model does: the rank is the model's width.
    """
    raw = json.loads((ORACLES / BASE / "config.json").read_text())
    text = raw.get("text_config", raw)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    config = {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "head_dim": DIM, "rms_norm_eps": 1e-6, "vocab_size": vocab,
        "max_position_embeddings": 4096, "sliding_window": window,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dflash_config": {**OWN, "selector_rank": rank}, **changes,
    }  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in shapes(hidden, vocab, rank).items():
        scale = 0.3 if len(shape) > 1 else 0.1
        value = rng.normal(size=shape) * scale + (len(shape) == 1)
        tensors[name] = mx.array(value.astype(np.float32)).astype(mx.bfloat16)
    if knows is not None:
        tensors |= knowing(tensors, dict(mx.load(str(knows / "model.safetensors"))))
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    return path


def knowing(own: dict[str, mx.array], model: dict[str, mx.array]) -> dict[str, mx.array]:
    """What of a drafter makes its walk follow the model: silent blocks hand on the embedding of the
    mask, so that every hidden row is the same; the selector makes ones of it, and its codebooks are
    what the model's output head multiplies.
    """
    named = {k.rsplit("language_model.", 1)[-1].removeprefix("model."): v for k, v in model.items()}
    embed, final = (
        np.array(named[f"{k}.weight"].astype(mx.float32)) for k in ("embed_tokens", "norm")
    )
    out = np.array(named.get("lm_head.weight", named["embed_tokens.weight"]).astype(mx.float32))
    normed = embed / np.sqrt((embed**2).mean(-1, keepdims=True) + 1e-6)
    scale = np.array(own["norm.weight"].astype(mx.float32))
    row = normed[OWN["mask_token_id"]] * scale
    found = {
        "candidate_selector.hidden_projection.weight": np.tile(row / (row @ row), (len(row), 1)),
        "candidate_selector.predecessor_codebook": 50 * normed * (1 + final),
        "candidate_selector.successor_codebook": out,
    }
    silent = {
        k: mx.zeros_like(v)
        for k, v in own.items()
        if k.endswith(("o_proj.weight", "down_proj.weight"))
    }
    return silent | {k: mx.array(v) for k, v in found.items()}


def shapes(h: int, vocab: int, rank: int = 6) -> dict[str, tuple[int, ...]]:
    """Names as published, written out by hand."""
    q, kv, groups = HEADS * DIM, KV * DIM, h // 8
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, 2 * h), "hidden_norm.weight": (h,), "norm.weight": (h,),
        "candidate_selector.hidden_projection.weight": (rank, h),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
    }  # fmt: skip
    for i in range(LAYERS):
        found |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
            f"layers.{i}.self_attn.q_proj.weight": (q, h),
            f"layers.{i}.self_attn.k_proj.weight": (kv, h),
            f"layers.{i}.self_attn.v_proj.weight": (kv, h),
            f"layers.{i}.self_attn.o_proj.weight": (h, q),
            f"layers.{i}.self_attn.q_norm.weight": (DIM,),
            f"layers.{i}.self_attn.k_norm.weight": (DIM,),
            f"layers.{i}.attention_conv.base_kernel": (2, 2, h),
            f"layers.{i}.attention_conv.kernel_projection.weight": (4 * groups, h),
            f"layers.{i}.mlp_conv.base_kernel": (2, 2, h),
            f"layers.{i}.mlp_conv.kernel_projection.weight": (4 * groups, h),
            f"layers.{i}.mlp.gate_proj.weight": (WIDTH, h),
            f"layers.{i}.mlp.up_proj.weight": (WIDTH, h),
            f"layers.{i}.mlp.down_proj.weight": (h, WIDTH),
        }
    return found
