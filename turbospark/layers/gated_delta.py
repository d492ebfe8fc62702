"""The gated delta net: linear attention with a matrix memory per value head.

In this order: some of a pass replayed, the recurrence's inputs (convolution, norms, gates), the
layer. Knows no model; `cache.recurrent` holds its state, `kernels.delta_rows` is the recurrence and
`kernels.delta_step` all of it for one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from turbospark.cache.attend import Step
from turbospark.cache.recurrent import RecurrentState, Saved
from turbospark.cache.specs import RecurrentSpec
from turbospark.cache.state import LayerStates
from turbospark.kernels import delta_rows, delta_step
from turbospark.kernels.delta_rows import DeltaInputs, gated_delta
from turbospark.kernels.delta_step import L2_EPS, Delta, decay_of
from turbospark.layers.norm import RMSNorm
from turbospark.layers.weights import Weights

# Above this many rows MLX's Metal kernel works in blocks and rounds differently than row by row.
SEQUENTIAL_ROWS = 8


# --- a part of a pass -----------------------------------------------------------------------------


def replay_state(x: DeltaInputs, state: mx.array, rows: int, kernels: bool = False) -> mx.array:
    """The state after the first `rows` rows: by our kernel to the bit what the pass held there, by
    MLX's primitive rounded as single steps round.
    """
    most = rows if kernels else SEQUENTIAL_ROWS
    for start in range(0, rows, most):
        part = x.rows(slice(start, min(start + most, rows)))
        _, state = gated_delta(part, state, kernels)
    return state


# --- what goes in and comes out -------------------------------------------------------------------


def causal_conv(x: mx.array, kernel: mx.array) -> mx.array:
    """Depthwise causal convolution: x [1, taps - 1 + L, C], kernel [taps, C] -> [1, L, C].

    The first taps - 1 rows of x are the past. Taps are summed oldest first, for any L.
    """
    taps = kernel.shape[0]
    rows = x.shape[1] - taps + 1
    if rows == 1:
        return mx.sum(x * kernel, axis=1, keepdims=True)
    y = x[:, :rows] * kernel[0]
    for i in range(1, taps):
        y = y + x[:, i : i + rows] * kernel[i]
    return y


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)."""
    return x * mx.sigmoid(x)


def l2_norm(x: mx.array, scale: mx.array) -> mx.array:
    """x / sqrt(sum(x^2) + eps) over the last axis, times sqrt(D) * `scale` [D]."""
    return mx.fast.rms_norm(x, scale, L2_EPS / x.shape[-1])


# --- the layer ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeltaShape:
    """Heads and widths of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of q | k | v, which the convolution runs over."""
        return 2 * self.keys + self.values

    @property
    def memory(self) -> RecurrentSpec:
        """What a cache must hold for one layer."""
        return RecurrentSpec(
            self.value_heads, self.value_dim, self.key_dim, self.taps - 1, self.channels
        )


class GatedDeltaNet:
    """Projections, convolution, recurrence, gated norm; one layer of tensors under `name`.

    The gate of the output is silu(z), or sigmoid(z) with `sigmoid`.
    """

    def __init__(
        self,
        w: Weights,
        name: str,
        layer: int,
        shape: DeltaShape,
        eps: float,
        sigmoid: bool = False,
    ) -> None:
        self.layer, self.shape = layer, shape
        self.in_proj = w.fused([f"{name}.in_proj_{p}" for p in ("qkv", "z", "b", "a")])
        self.out_proj = w.linear(f"{name}.out_proj")
        taps = w.array(f"{name}.conv1d.weight", mx.float32).reshape(shape.channels, shape.taps)
        self.delta = Delta(
            shape.key_heads,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
            taps=mx.contiguous(taps.T),
            rate=-mx.exp(w.array(f"{name}.A_log", mx.float32)),
            dt_bias=w.array(f"{name}.dt_bias", mx.float32),
            norm=w.array(f"{name}.norm.weight", mx.float32),
            eps=eps,
            sigmoid=sigmoid,
        )
        self.norm = RMSNorm(self.delta.norm, eps)
        self.kernels = w.kernels.gated_delta and delta_rows.takes(shape.key_dim)
        self.one_launch = self.kernels and delta_step.takes(shape.key_dim, shape.value_dim)
        # q carries 1 / sqrt(Dk) twice: once to undo the root of the mean, once as its scale.
        self.q_scale = mx.full((shape.key_dim,), 1.0 / shape.key_dim)
        self.k_scale = mx.full((shape.key_dim,), shape.key_dim**-0.5)
        mx.eval(self.delta.taps, self.delta.rate, self.q_scale, self.k_scale)

    def __call__(self, x: mx.array, states: LayerStates) -> mx.array:
        """x [1, L, H] -> [1, L, H]; the layer's memory moves on by L rows."""
        shape, rows = self.shape, x.shape[1]
        memory: RecurrentState = states.layers[self.layer]
        if self.kernels:
            states.step.count("delta_rows", rows)
        if rows == 1 and self.one_launch:
            return self._one_row(x, memory, states.step)
        qkv, z, b, a = self.in_proj(x)
        joined = mx.concatenate([memory.conv.astype(qkv.dtype), qkv], axis=1)
        inputs = self._inputs(joined, b, a)
        before = memory.state
        out, state = gated_delta(inputs, before, self.kernels)

        def after(count: int) -> Saved:
            return replay_state(inputs, before, count, self.kernels), self._past(joined, count)

        memory.update(states.step, (state, self._past(joined, rows)), after)
        z = z.astype(mx.float32).reshape(1, rows, shape.value_heads, shape.value_dim)
        out = self.norm(out) * self.delta.gate(z)
        return self.out_proj(out.reshape(1, rows, shape.values).astype(x.dtype))

    def _one_row(self, x: mx.array, memory: RecurrentState, step: Step) -> mx.array:
        """`__call__` for one row, with one launch between the projections."""
        row = self.in_proj.joined(x)
        out, past, state = delta_step.delta_step(row, memory.conv, memory.state, self.delta)
        # A tape of one row is never cut: its replay is what it left.
        memory.update(step, (state, past), lambda _: (state, past))
        return self.out_proj(out)

    def _inputs(self, joined: mx.array, b: mx.array, a: mx.array) -> DeltaInputs:
        shape, rows = self.shape, b.shape[1]
        mixed = silu(causal_conv(joined.astype(mx.float32), self.delta.taps))
        q, k, v = mx.split(mixed, [shape.keys, 2 * shape.keys], axis=-1)
        heads = (1, rows, shape.key_heads, shape.key_dim)
        return DeltaInputs(
            l2_norm(q.reshape(heads), self.q_scale),
            l2_norm(k.reshape(heads), self.k_scale),
            v.reshape(1, rows, shape.value_heads, shape.value_dim),
            decay_of(a, self.delta.rate, self.delta.dt_bias),
            mx.sigmoid(b.astype(mx.float32)),
        )

    def _past(self, joined: mx.array, count: int) -> mx.array:
        """The convolution inputs that the row after `count` rows reads; a copy, so that the
        pass's whole input does not stay alive behind a view.
        """
        return mx.contiguous(joined[:, count : count + self.shape.taps - 1])
