"""A DFlash2 drafter as its config.json describes it, and the names and shapes of its tensors.

Knows names and numbers. Does not know the arithmetic. An install keeps the drafter's tensors under
`dflash.` and its config.json under the key "dflash" of the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turbospark.errors import UnsupportedError
from turbospark.families.config import ConfigReader

PREFIX = "dflash."
MOST_ROWS = 256
"""Of a block: every round computes all of them. Published drafters have 8 or 16."""


@dataclass(frozen=True)
class DflashConfig:
    """Sizes; `target_layers` are the model's layers whose output it reads."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    max_positions: int
    window: int
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    conv_taps: int
    conv_group: int
    rank: int
    top_k: int
    vocab_size: int


def read_dflash(values: Mapping[str, Any] | None, model: Any) -> DflashConfig | None:
    """The drafter's config.json, checked against the config of the model it drafts for."""
    if values is None:
        return None
    where = 'the "dflash" part of the configuration'
    own = values.get("dflash_config")
    c = ConfigReader(values, where)
    d = ConfigReader(own if isinstance(own, dict) else {}, f"dflash_config of {where}")
    hidden, positions = c.int("hidden_size"), c.int("max_position_embeddings", 262144)
    layers = d.list("target_layer_ids") or []
    if not all(type(i) is int for i in layers):
        raise UnsupportedError(
            f"{where}: target_layer_ids = {layers!r:.60}; expected whole numbers"
        )
    found = DflashConfig(
        hidden_size=hidden,
        intermediate_size=c.int("intermediate_size"),
        layers=c.int("num_hidden_layers"),
        heads=c.int("num_attention_heads"),
        kv_heads=c.int("num_key_value_heads"),
        head_dim=c.int("head_dim"),
        eps=c.eps("rms_norm_eps", 1e-6),
        rope_theta=c.theta("rope_theta", 1e7),
        max_positions=positions,
        window=c.int("sliding_window", positions) if values.get("sliding_window") else positions,
        block_size=d.int("block_size", minimum=2),
        mask_token=d.int("mask_token_id", minimum=0),
        target_layers=tuple(layers),
        conv_taps=d.int("conv_kernel_size"),
        conv_group=d.int("conv_group_size"),
        rank=d.int("selector_rank"),
        top_k=d.int("selector_top_k"),
        vocab_size=c.int("vocab_size"),
    )
    _check(found, model, where)
    return found


def _check(c: DflashConfig, model: Any, where: str) -> None:
    depth = model.num_hidden_layers
    for wrong, fault in (
        (c.hidden_size != model.hidden_size,
         f"hidden_size = {c.hidden_size}; the model's is {model.hidden_size}"),
        (c.vocab_size != model.vocab_size,
         f"vocab_size = {c.vocab_size}; the model's is {model.vocab_size}"),
        (not c.target_layers or not all(0 <= i < depth for i in c.target_layers),
         f"target_layer_ids = {list(c.target_layers)}; the model has layers 0..{depth - 1}"),
        (c.layers > depth, f"num_hidden_layers = {c.layers}; the model has {depth}"),
        (c.block_size > MOST_ROWS, f"block_size = {c.block_size}; supported: 2..{MOST_ROWS}"),
        (c.mask_token >= c.vocab_size, f"mask_token_id = {c.mask_token} of {c.vocab_size} tokens"),
        (c.hidden_size % c.conv_group or c.heads % c.kv_heads or c.head_dim % 2,
         "conv_group_size, num_key_value_heads or head_dim do not divide what they must"),
        (c.top_k > c.vocab_size, f"selector_top_k = {c.top_k} of {c.vocab_size} tokens"),
    ):  # fmt: skip
        if wrong:
            raise UnsupportedError(f"{where}: {fault}")


def dflash_shapes(c: DflashConfig | None) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of the drafter; none without one."""
    if c is None:
        return {}
    hidden, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    selector = "candidate_selector"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(c.target_layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        f"{selector}.hidden_projection.weight": (c.rank, hidden),
        f"{selector}.predecessor_codebook": (c.vocab_size, c.rank),
        f"{selector}.successor_codebook": (c.vocab_size, c.rank),
    }
    for i in range(c.layers):
        layer = f"layers.{i}"
        matrices = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": s for p, s in matrices.items()}
        shapes |= {f"{layer}.self_attn.{p}_norm.weight": (c.head_dim,) for p in "qk"}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for conv in ("attention_conv", "mlp_conv"):
            rows = 2 * c.conv_taps * (hidden // c.conv_group)
            shapes[f"{layer}.{conv}.base_kernel"] = (2, c.conv_taps, hidden)
            shapes[f"{layer}.{conv}.kernel_projection.weight"] = (rows, hidden)
        for p in ("gate", "up"):
            shapes[f"{layer}.mlp.{p}_proj.weight"] = (c.intermediate_size, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, c.intermediate_size)
    return {PREFIX + name: shape for name, shape in shapes.items()}
