"""The routed expert MLP of 1 to 8 tokens, straight from slot pools or records as read from disk.

Knows which kernels take what on which back end; they are `expert_matrix` and `expert_scalar`, the
reference is in `experts`. Metal keeps MLX's own gathered products: unmeasured there.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.kernels import expert_matrix, expert_scalar
from turbospark.kernels.choices import backend
from turbospark.kernels.experts import (
    PLAIN,
    Around,
    Experts,
    Matrix,
    Plane,
    expert_mlp_reference,
    in_records,
    stacked,
)

__all__ = [
    "PLAIN",
    "Around",
    "Experts",
    "Matrix",
    "Plane",
    "expert_mlp",
    "expert_mlp_reference",
    "in_records",
    "stacked",
]

MAX_TOKENS = 8
# One H200, GPU time, one token, 8 of 128 experts of 2048 x 768: gate and up 7.7 us, down 6.9;
# without the matrix unit 8.4 and 6.8.
GATE_UP = {"cuda": expert_matrix.Tuning(tiles=2, simdgroups=4)}
DOWN = {"cuda": expert_matrix.Tuning(tiles=1, simdgroups=4)}
SCALAR = {"cuda": expert_scalar.Tuning(rows=2, simdgroups=8)}


def takes(experts: Experts, tokens: int) -> bool:
    """Whether kernels may be asked: formats alike, planes aligned to 16 bytes, few tokens."""
    gate, up, down = experts.gate, experts.up, experts.down
    alike = gate.fmt == up.fmt and (gate.bias is None) == (up.bias is None)
    aligned = all(m.weight.offset % 4 == m.weight.stride % 4 == 0 for m in (gate, up, down))
    return 1 <= tokens <= MAX_TOKENS and alike and aligned and expert_scalar.takes(experts)


def expert_mlp(
    x: mx.array, slots: mx.array, weights: mx.array, experts: Experts, around: Around = PLAIN
) -> mx.array:
    """`expert_mlp_reference`, by kernels where they take the experts.

    x must begin at a multiple of 16 bytes.
    """
    where = backend(mx.default_device())
    if not takes(experts, x.shape[0]):
        return expert_mlp_reference(x, slots, weights, experts, around)
    if where in GATE_UP and expert_matrix.takes(experts, x.dtype, around.norm is not None):
        h = expert_matrix.launch_gate_up(x, slots, experts, around, GATE_UP[where]).run(where)[0]
        tuning = DOWN[where]
        down = expert_matrix.launch_down(h, slots, weights, experts, around, x.dtype, tuning)
    elif where in SCALAR:
        scalar = SCALAR[where]
        h = expert_scalar.launch_gate_up(x, slots, experts, around, scalar).run(where)[0]
        down = expert_scalar.launch_down(h, slots, weights, experts, around, x.dtype, scalar)
    else:
        return expert_mlp_reference(x, slots, weights, experts, around)
    return down.run(where)[0]
