"""Routing of tokens to experts and the gated activations between expert matrices.

Knows top-k rules. Does not know where expert weights live (`experts/`) or which model asks.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from turbospark.kernels.choices import fused


@fused
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up."""
    return gate * mx.sigmoid(gate) * up


@fused
def geglu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up with the tanh approximation."""
    cubic = gate + 0.044715 * gate * gate * gate
    return 0.5 * gate * (1.0 + mx.tanh(0.7978845608028654 * cubic)) * up


@fused
def geglu_erf(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up with the exact error function."""
    return 0.5 * gate * (1.0 + mx.erf(gate * 0.7071067811865476)) * up


def clamped_swiglu(limit: float, alpha: float) -> Callable[[mx.array, mx.array], mx.array]:
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides."""

    def activation(gate: mx.array, up: mx.array) -> mx.array:
        gate = mx.minimum(gate, limit)
        return (mx.clip(up, -limit, limit) + 1.0) * gate * mx.sigmoid(alpha * gate)

    return activation


def top_k(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """scores [..., E] -> (ids uint32 [..., k], their scores), best first.

    The order is the router's ranking; experts are summed in it wherever they live, so that the
    sum does not depend on the state of a cache.
    """
    ids = mx.argsort(-scores, axis=-1)[..., :k].astype(mx.uint32)
    return ids, mx.take_along_axis(scores, ids, axis=-1)


def softmax_top_k(logits: mx.array, k: int, normalize: bool) -> tuple[mx.array, mx.array]:
    """Softmax over all experts in float32, then the k best; `normalize` divides by their sum."""
    ids, weights = top_k(mx.softmax(logits.astype(mx.float32), axis=-1), k)
    if normalize:
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    return ids, weights


def top_k_softmax(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k best logits, then a softmax over those alone in float32."""
    ids, chosen = top_k(logits.astype(mx.float32), k)
    return ids, mx.softmax(chosen, axis=-1)


def keep_groups(scores: mx.array, groups: int, kept: int) -> mx.array:
    """scores [..., E] with all but the `kept` best of `groups` equal runs set to zero.

    A group is as good as its best score.
    """
    grouped = mx.unflatten(scores, -1, (groups, -1))
    best, _ = top_k(mx.max(grouped, axis=-1), kept)
    chosen = mx.any(best[..., None] == mx.arange(groups), axis=-2)
    return mx.where(chosen[..., None], grouped, 0.0).reshape(scores.shape)
