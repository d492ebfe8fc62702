"""Names and shapes of the tensors of a Qwen 3.5 block, and of its multi-token-prediction head.

Knows the fields of the family's config, and which of them the manifest records as they are. Does
not know how anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from turbospark.families.base import Piece
from turbospark.families.names import expert_pieces
from turbospark.families.transforms import join_heads

Shapes = dict[str, tuple[int, ...]]

# config.json key -> field of the architecture, where the value is the same.
SAME = {
    "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "num_experts_per_tok": "top_k_experts",
} | {
    key: key for key in (
        "hidden_size", "head_dim", "vocab_size", "rope_theta", "partial_rotary_factor",
        "tie_word_embeddings", "num_experts", "moe_intermediate_size",
    )
}  # fmt: skip
SAME_DELTA = {  # in the order of DeltaShape
    "linear_num_key_heads": "linear_num_k_heads", "linear_num_value_heads": "linear_num_v_heads",
    "linear_key_head_dim": "linear_key_head_dim", "linear_value_head_dim": "linear_value_head_dim",
    "linear_conv_kernel_dim": "linear_conv_kernel_size",
}  # fmt: skip


def mtp_shapes(c: Any) -> Shapes:
    """The multi-token prediction head, which a checkpoint may carry.

    The routed experts of a mixture's head are one matrix per projection, one under another.
    """
    hidden = c.hidden_size
    if not c.mtp_num_hidden_layers:
        return {}
    shapes: Shapes = {"mtp.fc.weight": (hidden, 2 * hidden)}
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{norm}.weight"] = (hidden,)
    for i in range(c.mtp_num_hidden_layers):
        name = f"mtp.layers.{i}"
        shapes |= norm_shapes(c, name) | attention_shapes(c, name) | feed_forward_shapes(c, name)
        if c.num_experts:
            routed = mlp_shapes(c, f"{name}.mlp.experts", c.moe_intermediate_size)
            shapes |= {n: (c.num_experts * rows, width) for n, (rows, width) in routed.items()}
    return shapes


_MTP = re.compile(r"^(?:language_model\.|model\.)*(?=mtp\.)")


def mtp_pieces(c: Any, name: str) -> tuple[Piece, ...] | None:
    """Where a tensor of the head goes, whichever way experts are stored; None for any other."""
    if not _MTP.match(name):
        return None
    plain, routed = _MTP.sub("", name), None
    if c.num_experts:
        routed = expert_pieces(f"model.{plain.removeprefix('mtp.')}", c.moe_intermediate_size)
    if routed is None:
        return (Piece(plain),)
    return tuple(
        Piece(
            f"mtp.layers.{p.layer}.mlp.experts.{p.role}_proj.weight",
            rows=p.rows,
            transform=join_heads if p.expert is None else None,
            part=p.expert,
        )
        for p in routed
    )


def mtp_present(c: Any, names: Iterable[str]) -> list[str]:
    """The head's tensors that a checkpoint of `names` has, experts only where it has them all."""
    parts: dict[str | None, set[int | None]] = {}
    for name in names:
        for piece in mtp_pieces(c, name) or ():
            parts.setdefault(piece.target, set()).add(piece.part)
    whole = {n for n, found in parts.items() if None in found or len(found) == c.num_experts}
    return [name for name in sorted(mtp_shapes(c)) if name in whole]


def attention_shapes(c: Any, name: str) -> Shapes:
    hidden, kv = c.hidden_size, c.num_key_value_heads * c.head_dim
    q = c.num_attention_heads * c.head_dim
    matrices = {"q": (2 * q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes: Shapes = {f"{name}.self_attn.{p}_proj.weight": s for p, s in matrices.items()}
    if c.attention_bias:
        shapes |= {f"{name}.self_attn.{p}_proj.bias": s[:1] for p, s in matrices.items()}
    return shapes | {f"{name}.self_attn.{p}_norm.weight": (c.head_dim,) for p in "qk"}


def delta_shapes(c: Any, name: str, taps_last: bool) -> Shapes:
    """`taps_last`: convolutions are [channels, 1, taps], not [channels, taps, 1]."""
    d, hidden, mixer = c.delta, c.hidden_size, f"{name}.linear_attn"
    return {
        f"{mixer}.in_proj_qkv.weight": (d.channels, hidden),
        f"{mixer}.in_proj_z.weight": (d.values, hidden),
        f"{mixer}.in_proj_b.weight": (d.value_heads, hidden),
        f"{mixer}.in_proj_a.weight": (d.value_heads, hidden),
        f"{mixer}.conv1d.weight": (d.channels, *((1, d.taps) if taps_last else (d.taps, 1))),
        f"{mixer}.A_log": (d.value_heads,),
        f"{mixer}.dt_bias": (d.value_heads,),
        f"{mixer}.norm.weight": (d.value_dim,),
        f"{mixer}.out_proj.weight": (hidden, d.values),
    }


def norm_shapes(c: Any, name: str) -> Shapes:
    norms = ("input_layernorm", "post_attention_layernorm")
    return {f"{name}.{norm}.weight": (c.hidden_size,) for norm in norms}


def feed_forward_shapes(c: Any, name: str) -> Shapes:
    """The MLP of a dense layer; of a mixture what every token meets: routers, the shared expert."""
    if not c.num_experts:
        return mlp_shapes(c, f"{name}.mlp", c.intermediate_size)
    shared = mlp_shapes(c, f"{name}.mlp.shared_expert", c.shared_expert_intermediate_size)
    return {
        f"{name}.mlp.gate.weight": (c.num_experts, c.hidden_size),
        f"{name}.mlp.shared_expert_gate.weight": (1, c.hidden_size),
        **shared,
    }


def mlp_shapes(c: Any, name: str, width: int) -> Shapes:
    up = {f"{name}.{p}_proj.weight": (width, c.hidden_size) for p in ("gate", "up")}
    return {**up, f"{name}.down_proj.weight": (c.hidden_size, width)}
