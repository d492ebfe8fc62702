"""Tiny checkpoints with known values, written by the reference libraries.

Values are random and exactly representable in bfloat16, so no storage changes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 2, 4, 2, 16, 128, 40
EXPERTS, WIDTH = 4, 32

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "intermediate_size": FFN, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
MOE = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip


def values(*shape: int, seed: list[int]) -> np.ndarray:
    """Random float32 that are bfloat16 numbers."""
    found = np.random.default_rng(seed[0]).standard_normal(shape).astype(np.float32)
    seed[0] += 1
    return (found.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def attention(name: str, seed: list[int], qk_norm: bool = False) -> dict[str, np.ndarray]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found = {
        f"{name}.self_attn.q_proj.weight": values(q, HIDDEN, seed=seed),
        f"{name}.self_attn.k_proj.weight": values(kv, HIDDEN, seed=seed),
        f"{name}.self_attn.v_proj.weight": values(kv, HIDDEN, seed=seed),
        f"{name}.self_attn.o_proj.weight": values(HIDDEN, q, seed=seed),
        f"{name}.input_layernorm.weight": values(HIDDEN, seed=seed),
        f"{name}.post_attention_layernorm.weight": values(HIDDEN, seed=seed),
    }
    if qk_norm:
        found[f"{name}.self_attn.q_norm.weight"] = values(HEAD_DIM, seed=seed)
        found[f"{name}.self_attn.k_norm.weight"] = values(HEAD_DIM, seed=seed)
    return found


def ends(seed: list[int]) -> dict[str, np.ndarray]:
    return {
        "model.embed_tokens.weight": values(VOCAB, HIDDEN, seed=seed),
        "lm_head.weight": values(VOCAB, HIDDEN, seed=seed),
        "model.norm.weight": values(HIDDEN, seed=seed),
    }


def llama_tensors() -> dict[str, np.ndarray]:
    """Canonical name -> values of a dense model."""
    seed = [0]
    found = ends(seed)
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        found.update(attention(name, seed))
        found[f"{name}.mlp.gate_proj.weight"] = values(FFN, HIDDEN, seed=seed)
        found[f"{name}.mlp.up_proj.weight"] = values(FFN, HIDDEN, seed=seed)
        found[f"{name}.mlp.down_proj.weight"] = values(HIDDEN, FFN, seed=seed)
    return found


def moe_tensors() -> tuple[dict[str, np.ndarray], dict[tuple[int, str], np.ndarray]]:
    """Canonical resident tensors, and (layer, role) -> values of all experts stacked."""
    seed = [100]
    found, experts = ends(seed), {}
    for i in range(LAYERS):
        name = f"model.layers.{i}"
        found.update(attention(name, seed, qk_norm=True))
        found[f"{name}.mlp.gate.weight"] = values(EXPERTS, HIDDEN, seed=seed)
        experts[i, "gate"] = values(EXPERTS, WIDTH, HIDDEN, seed=seed)
        experts[i, "up"] = values(EXPERTS, WIDTH, HIDDEN, seed=seed)
        experts[i, "down"] = values(EXPERTS, HIDDEN, WIDTH, seed=seed)
    return found, experts


def store_experts(
    experts: dict[tuple[int, str], np.ndarray], storage: str
) -> dict[str, np.ndarray]:
    """Routed experts as a checkpoint stores them: "single", "stacked" or "fused" tensors."""
    found = {}
    for (layer, role), stack in experts.items():
        name = f"model.layers.{layer}.mlp"
        if storage == "single":
            for e, matrix in enumerate(stack):
                found[f"{name}.experts.{e}.{role}_proj.weight"] = matrix
        elif storage == "stacked":
            found[f"{name}.switch_mlp.{role}_proj.weight"] = stack
        elif role == "down":
            found[f"{name}.experts.down_proj"] = stack
        elif role == "gate":
            both = np.concatenate([stack, experts[layer, "up"]], axis=1)
            found[f"{name}.experts.gate_up_proj"] = both
    return found


def save_folder(path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    """A Hugging Face checkpoint folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[stem]}.weight"


def permute(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF's llama architecture stores q and k: rotated pairs side by side."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def save_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    kind: str,
    architecture: str = "llama",
    experts: dict[tuple[int, str], np.ndarray] | None = None,
    extra: dict[str, tuple[str, np.ndarray]] | None = None,
) -> Path:
    """A GGUF model; matrices are stored as `kind`, vectors and routers as F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if experts:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(WIDTH)
    stored = {}
    for name, array in tensors.items():
        if architecture == "llama" and ".q_proj" in name:
            array = permute(array, HEADS)
        if architecture == "llama" and ".k_proj" in name:
            array = permute(array, KV_HEADS)
        plain = array.ndim == 1 or ".mlp.gate." in name
        stored[gguf_name(name)] = ("F32" if plain else kind, array)
    for (layer, role), stack in (experts or {}).items():
        stored[f"blk.{layer}.ffn_{role}_exps.weight"] = (kind, stack)
    for name, (type_name, array) in (stored | (extra or {})).items():
        quant = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(name, gguf.quantize(array, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
