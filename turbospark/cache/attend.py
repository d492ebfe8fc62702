"""Scaled dot product attention over rows that a cache already holds.

Knows masks and the one-call or row-by-row choice. Does not know where keys came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass
class Step:
    """One forward pass over `rows` new positions beginning at absolute position `start`.

    With `rows_attention` all query rows attend in one call; without it one call per row.
    With `tape` recurrent layers keep what they need to be cut back to some of the rows.
    With `force_dense` block-sparse layers attend to everything. `masks` memoises what layers of one
    kind share within the pass; `replays` keeps what a cache overwrote in it and a later layer still
    reads. `attention_calls` counts calls over all layers, `fused_layers` the layers that ran as
    fused launches, `counts` what block-sparse layers did, by the names of `PhaseCounters`. `fault`
    int32 [rows] is above 0 where a block's score is not a number: the layer's number plus one.
    """

    start: int
    rows: int
    rows_attention: bool = True
    tape: bool = False
    force_dense: bool = False
    masks: dict[tuple[int, ...], mx.array] = field(default_factory=dict)
    replays: dict[Any, Any] = field(default_factory=dict)
    attention_calls: int = 0
    fused_layers: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    fault: mx.array | None = None

    def count(self, name: str, amount: int) -> None:
        """Add to one of `counts`."""
        self.counts[name] = self.counts.get(name, 0) + amount

    @property
    def end(self) -> int:
        return self.start + self.rows


def causal_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    sinks: mx.array | None,
    step: Step,
) -> mx.array:
    """q [1, H, L, D] over k [1, KV, S, D], v [1, KV, S, Dv]; the last query sees all S keys."""
    rows, length = q.shape[2], k.shape[2]
    step.attention_calls += 1 if step.rows_attention else rows
    if rows == 1:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, sinks=sinks)
    if step.rows_attention:
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask="causal", sinks=sinks
        )
    outputs = []
    for i in range(rows):
        seen = length - rows + i + 1
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen], scale=scale, sinks=sinks
            )
        )
    return mx.concatenate(outputs, axis=2)


def masked_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array,
    scale: float,
    sinks: mx.array | None,
    step: Step,
) -> mx.array:
    """As `causal_attention` with an explicit boolean mask [L, S], true where attended."""
    step.attention_calls += 1 if step.rows_attention else q.shape[2]
    if step.rows_attention or q.shape[2] == 1:
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=mask[None, None], sinks=sinks
        )
    outputs = [
        mx.fast.scaled_dot_product_attention(
            q[:, :, i : i + 1], k, v, scale=scale, mask=mask[None, None, i : i + 1], sinks=sinks
        )
        for i in range(q.shape[2])
    ]
    return mx.concatenate(outputs, axis=2)


def ring_mask(start: int, rows: int, window: int, capacity: int) -> np.ndarray:
    """Boolean [rows, min(start + rows, capacity)]: which slot each query row may read.

    Slot s holds the newest position p < start + rows with p % capacity == s.
    """
    end = start + rows
    slots = np.arange(min(end, capacity))
    held = slots + (end - 1 - slots) // capacity * capacity
    row = np.arange(start, end)[:, None]
    return (held <= row) & (held > row - window)
