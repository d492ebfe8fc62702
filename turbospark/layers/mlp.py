"""Feed-forward blocks that families share: a gated MLP, and routed experts beside a shared one.

Knows matrices and the router's rule. Does not know where routed experts live.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from turbospark.experts.base import ExpertStore
from turbospark.layers.moe import softmax_top_k, swiglu
from turbospark.layers.weights import Weights


class GatedMLP:
    """down(activation(gate x, up x)); `bias`: all three matrices have one."""

    def __init__(
        self,
        w: Weights,
        name: str,
        activation: Callable[[mx.array, mx.array], mx.array] = swiglu,
        bias: bool = False,
    ) -> None:
        self.activation = activation
        self.gate_up = w.fused([f"{name}.gate_proj", f"{name}.up_proj"], bias)
        self.down_proj = w.linear(f"{name}.down_proj", bias)

    def __call__(self, x: mx.array) -> mx.array:
        """[1, L, H] -> [1, L, H]."""
        return self.down_proj(self.activation(*self.gate_up(x)))


class SharedExpertMLP:
    """The best `top_k` of softmax-routed experts, plus a shared one behind its own sigmoid.

    With `normalize`, routing weights are divided by their sum.
    """

    def __init__(
        self,
        w: Weights,
        name: str,
        layer: int,
        top_k: int,
        experts: ExpertStore,
        normalize: bool = True,
    ) -> None:
        self.layer, self.top_k, self.experts = layer, top_k, experts
        self.normalize = normalize
        self.gates = w.fused([f"{name}.gate", f"{name}.shared_expert_gate"])
        self.shared_expert = GatedMLP(w, f"{name}.shared_expert")
        experts.watch(layer, lambda x: softmax_top_k(self.gates(x)[0], top_k, True)[0], beside=True)

    def __call__(self, x: mx.array) -> mx.array:
        """[1, L, H] -> [1, L, H]."""
        scores, share = self.gates(x)
        ids, weights = softmax_top_k(scores, self.top_k, self.normalize)
        shared = mx.sigmoid(share) * self.shared_expert(x)
        return self.experts.routed(self.layer, x, ids, weights, beside=shared) + shared
