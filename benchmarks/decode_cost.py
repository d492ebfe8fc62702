"""What a decode step costs besides time: launches in its graph, bytes it must and does move.

Knows MLX graphs and the shapes of llama-like configs. Does not time anything.
"""

from __future__ import annotations

import io
import re
from typing import Any

import mlx.core as mx

# Primitives that change how an array is looked at, and launch nothing.
VIEWS = {
    "AsStrided",
    "Broadcast",
    "BroadcastAxes",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "StopGradient",
    "Transpose",
    "Unflatten",
    "View",
}
LABEL = re.compile(r'\[label ="(\w+)", shape=rectangle\]')


def launches(*outputs: mx.array) -> int:
    """Operations in the graph of `outputs`, not evaluated yet, that launch at least one kernel."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs)
    return sum(name not in VIEWS for name in LABEL.findall(text.getvalue()))


def packed_bytes(rows: int, columns: int, bits: int = 4) -> int:
    """Codes and 16-bit companions per 64 columns of a matrix."""
    return rows * columns * bits // 8 + rows * columns // 64 * 4


def least_bytes(c: dict[str, Any], length: int) -> int:
    """Bytes that one token after `length` others must read or write: matrices and keys once."""
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    layer = packed_bytes((heads + 2 * kv) * dim, hidden) + packed_bytes(hidden, heads * dim)
    layer += 2 * kv * dim * 2 * (length + 2)  # all read, one written
    if "num_experts" in c:
        layer += packed_bytes(c["num_experts"], hidden, 8)
        layer += 3 * c["num_experts_per_tok"] * packed_bytes(c["moe_intermediate_size"], hidden)
    else:
        layer += 3 * packed_bytes(c["intermediate_size"], hidden)
    return c["num_hidden_layers"] * layer + packed_bytes(c["vocab_size"] + 1, hidden)


def moved_bytes(c: dict[str, Any], length: int, splits: int) -> int:
    """`least_bytes` and what fused launches hand to each other through memory."""
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim = c.get("head_dim") or hidden // heads
    handed = 2 * ((heads + 2 * kv) * dim + 2 * heads * dim + 3 * hidden)  # qkv, q, attended, x
    handed += 4 * heads * min(splits, length) * (dim + 2)
    if "num_experts" in c:
        handed += 4 * c["num_experts_per_tok"] * c["moe_intermediate_size"] + 2 * c["num_experts"]
    else:
        handed += 2 * c["intermediate_size"]
    logits = c["vocab_size"] * (2 + 4)
    return least_bytes(c, length) + 2 * (c["num_hidden_layers"] * handed + logits)
