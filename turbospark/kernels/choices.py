"""Which of two ways to the same result a back end takes, and from where on: one measured table.

Knows back ends and sizes. Does not know models. A threshold of None means never.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps

import mlx.core as mx


@dataclass(frozen=True)
class Choices:
    """Thresholds of one back end.

    `unpack_rows`: rows of a product from which a packed matrix is unpacked once and multiplied
    dense. `padded_routes`: (token, rank) routes from which experts are unpacked and multiplied as
    one padded batch. `attention_keys`: keys from which one row attends by the split-K kernel over
    the whole buffer. `packed_rows`: the most rows of a pass that attend packed caches by kernels;
    `fused_rows`: the most rows of a pass that runs through fused layers;
    `compiled`: one row runs through all of them as one traced graph; `chained`: with one launch
    for each layer. `block_sparse`: chosen blocks are scored, selected and attended by kernels;
    `gated_delta`: a gated delta net's recurrence is one launch, and of one row all between the
    projections. `prefill_chunk`: prompt tokens per pass for "auto".
    """

    unpack_rows: int | None
    padded_routes: int | None
    attention_keys: int | None
    packed_rows: int | None
    fused_rows: int | None
    compiled: bool
    chained: bool
    block_sparse: bool
    gated_delta: bool
    prefill_chunk: int

    def without_kernels(self) -> Choices:
        """The same with MLX's own operations alone."""
        return replace(
            self,
            attention_keys=None,
            packed_rows=None,
            fused_rows=None,
            compiled=False,
            chained=False,
            block_sparse=False,
            gated_delta=False,
        )


PLAIN = Choices(
    unpack_rows=None,
    padded_routes=None,
    attention_keys=None,
    packed_rows=None,
    fused_rows=None,
    compiled=False,
    chained=False,
    block_sparse=False,
    gated_delta=False,
    prefill_chunk=512,
)

CHOICES = {
    # Packed matrices are expanded at open; the figures do not apply.
    "cpu": PLAIN,
    # Unmeasured: MLX's own kernels are kept. Its launches cost a tenth of CUDA's and read packed
    # matrices at memory speed, so what fusing saves on CUDA is small there.
    "metal": PLAIN,
    # One H200, mlx 0.32.4: quantized_matmul 56-119 TFLOP/s against 157-537 dense; gather_qmm 5;
    # one row over 8k, 32k, 128k keys of 8 heads: MLX 57, 183, 650 us, the kernel 80, 114, 247.
    # A gated delta net of 32 heads of 128, one row between projections: MLX 141-254 us, ours 15-26;
    # the recurrence of 512 rows: 44,187 and 177.
    # Fused layers take up to 8 rows, but each number of rows is compiled anew, for 20 s.
    "cuda": Choices(
        unpack_rows=256,
        padded_routes=2048,
        attention_keys=16384,
        packed_rows=8,
        fused_rows=1,
        compiled=True,
        chained=True,
        block_sparse=True,
        gated_delta=True,
        prefill_chunk=4096,
    ),
}


def fused(operation: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """An elementwise operation as one kernel on a GPU, where each launch costs; plain on a CPU,
    where fusing would need a compiler on the user's machine.
    """
    compiled = mx.compile(operation, shapeless=True)

    @wraps(operation)
    def run(*args: mx.array) -> mx.array:
        if mx.default_device().type == mx.DeviceType.cpu:
            return operation(*args)
        return compiled(*args)

    return run


def backend(device: mx.Device) -> str:
    """ "cpu", "metal" or "cuda"."""
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def choices(device: mx.Device, kernels: str = "auto") -> Choices:
    """The table's row for `device`; with kernels "reference", without kernels of our own."""
    row = CHOICES[backend(device)]
    return row if kernels == "auto" else row.without_kernels()
