"""Parts of configurations and architectures that several families have alike.

Knows which heads go together, what a plain decoder lacks and how YaRN is written. Knows no family.
"""

from __future__ import annotations

from typing import Any

from turbospark.errors import UnsupportedError
from turbospark.families.config import ConfigReader
from turbospark.install.arch import ArchConfig
from turbospark.layers.rope import check_scaling, scaling_kind

PLAIN: dict[str, Any] = dict(
    final_logit_softcap=0.0,
    attention_k_eq_v=False,
    hidden_activation="silu",
    attn_output_gate=False,
    embedding_scaled_by_sqrt_hidden=False,
    router_scaled=False,
    ffn_sandwich_norms=False,
    shared_expert_gated=False,
)
"""What to state for a model without Gemma's particulars, whose values absent keys would mean."""


def check_heads(where: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse query heads that key/value heads do not divide, and odd widths."""
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedError(
            f"{where} has {heads} attention heads over {kv_heads} key/value heads of width "
            f"{head_dim}; heads must be a multiple of key/value heads and the width even"
        )


def read_scaling(c: ConfigReader) -> dict[str, Any] | None:
    """`rope_scaling` with its type and numbers checked; None when absent."""
    section = c.section("rope_scaling")
    scaling = None if section is None else dict(section.values)
    check_scaling(scaling)
    return scaling


def read_yarn(c: ConfigReader) -> dict[str, Any] | None:
    """`rope_scaling` of a family that knows YaRN alone; None without scaling."""
    scaling = c.section("rope_scaling")
    kind = "default" if scaling is None else check_scaling(dict(scaling.values))
    if scaling is None or kind == "default":
        return None
    if kind != "yarn":
        raise UnsupportedError(
            f"{scaling.where}: type {kind!r} is not supported; supported: yarn or none"
        )
    for key, default in (("factor", None), ("mscale", 0.0), ("mscale_all_dim", 0.0)):
        scaling.float(key, default)
    return dict(scaling.values)


def yarn_to_arch(scaling: dict[str, Any] | None) -> dict[str, Any]:
    """The rope scaling fields of `rope_scaling`; none but for YaRN."""
    if scaling is None or scaling_kind(scaling) != "yarn":
        return {}
    return dict(
        rope_scaling_factor=float(scaling["factor"]),
        rope_scaling_original_context=int(scaling.get("original_max_position_embeddings") or 0),
        rope_scaling_beta_fast=float(scaling.get("beta_fast") or 32.0),
        rope_scaling_beta_slow=float(scaling.get("beta_slow") or 1.0),
    )


def yarn_from_arch(a: ArchConfig) -> dict[str, Any] | None:
    """`rope_scaling` of an architecture; None when it has no scaling."""
    if not a.rope_scaling_factor:
        return None
    return dict(
        rope_type="yarn",
        factor=a.rope_scaling_factor,
        original_max_position_embeddings=a.rope_scaling_original_context or None,
        beta_fast=a.rope_scaling_beta_fast,
        beta_slow=a.rope_scaling_beta_slow,
    )
