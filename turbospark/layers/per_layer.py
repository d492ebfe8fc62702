"""Inputs that every layer gets of its own, beside the residual stream.

Knows how they are made from a token and from its embedding, and how a layer takes them in. Does
not know where in a layer that happens.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.layers.moe import geglu_tanh
from turbospark.layers.scaling import scaled
from turbospark.layers.weights import Weights


class PerLayerInputs:
    """The token's row of a table and a projection of its embedding, normed and averaged.

    The table holds all layers side by side: [vocab, layers * width].
    """

    def __init__(self, w: Weights, layers: int, width: int, hidden: int, eps: float) -> None:
        self.shape = (layers, width)
        self.hidden = hidden
        self.table = w.embedding("model.embed_tokens_per_layer")
        self.projection = w.linear("model.per_layer_model_projection")
        self.norm = w.norm("model.per_layer_projection_norm.weight", eps)

    def __call__(self, ids: mx.array, x: mx.array) -> mx.array:
        """ids [1, L] and scaled embeddings x [1, L, H] -> [1, L, layers, width]."""
        shape = (*ids.shape, *self.shape)
        context = self.norm(scaled(self.projection(x), self.hidden**-0.5).reshape(shape))
        token = scaled(self.table(ids), self.shape[1] ** 0.5).reshape(shape)
        return scaled(context + token, 2**-0.5)


class PerLayerGate:
    """norm(project(gelu(gate x) * the layer's own input))."""

    def __init__(self, w: Weights, name: str, eps: float) -> None:
        self.gate = w.linear(f"{name}.per_layer_input_gate")
        self.projection = w.linear(f"{name}.per_layer_projection")
        self.norm = w.norm(f"{name}.post_per_layer_input_norm.weight", eps)

    def __call__(self, x: mx.array, own: mx.array) -> mx.array:
        """x [1, L, H], own [1, L, width] -> [1, L, H]."""
        return self.norm(self.projection(geglu_tanh(self.gate(x), own)))
