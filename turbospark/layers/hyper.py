"""Hyper-connections: several residual streams side by side, read by a learned mix and written back.

Knows the wide stream [1, L, streams * H], stream after stream. Does not know what stands between
a read and its write.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.layers.gated_delta import silu
from turbospark.layers.weights import Weights


class GroupedNorm:
    """A centred RMS norm of each stream by itself, with one weight over all of them."""

    def __init__(self, w: Weights, name: str, streams: int, eps: float) -> None:
        self.streams, self.eps = streams, eps
        weight = w.norm(name, eps, centred=True).weight
        assert weight is not None
        self.scale: mx.array = weight
        """1 + w, in float32."""

    def __call__(self, x: mx.array) -> mx.array:
        """[1, L, streams * H] -> the same shape and dtype; one rounding."""
        grouped = x.reshape(*x.shape[:-1], self.streams, -1).astype(mx.float32)
        normed = mx.fast.rms_norm(grouped, None, self.eps).reshape(x.shape)
        return (normed * self.scale).astype(x.dtype)


class HyperMixer:
    """Reads one stream: the mean of all, normed, each element times a gate of its own.

    The division by the number of streams and the mean are part of the function. `beside` names
    matrices over the same input, whose outputs come along.
    """

    def __init__(
        self, w: Weights, name: str, streams: int, eps: float, beside: tuple[str, ...] = ()
    ) -> None:
        self.streams = streams
        self.norm = GroupedNorm(w, f"{name}.hc_norm.weight", streams, eps)
        self.down = w.fused([f"{name}.{part}" for part in ("input_mix_weight_down", *beside)])
        self.up = w.linear(f"{name}.input_mix_weight_up")

    def __call__(self, x: mx.array) -> tuple[mx.array, list[mx.array]]:
        """x [1, L, streams * H] -> ([1, L, H], what the matrices beside give)."""
        y = self.norm(x)
        low, *beside = self.down(y)
        gates = mx.sigmoid(self.up(silu(low / self.streams)))
        gated = (gates * y).reshape(*y.shape[:-1], self.streams, -1)
        return mx.mean(gated.astype(mx.float32), axis=-2).astype(y.dtype), beside


class HyperConnection:
    """Reads one stream for a branch, and weighs how the branch's output goes into each."""

    def __init__(self, w: Weights, name: str, streams: int, eps: float) -> None:
        self.streams = streams
        self.mixer = HyperMixer(w, name, streams, eps, ("block_inject_weight",))

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [1, L, streams * H] -> (branch input [1, L, H], weights [1, L, streams])."""
        mixed, (inject,) = self.mixer(x)
        return mixed, 2.0 * mx.sigmoid(inject / self.streams)


def written(x: mx.array, weights: mx.array, out: mx.array) -> mx.array:
    """x [1, L, streams * H] with `out` [1, L, H] added to each stream, times its weight."""
    spread = weights[..., None] * out[..., None, :]
    return x + spread.reshape(x.shape)
