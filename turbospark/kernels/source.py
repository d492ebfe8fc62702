"""One kernel body for Metal, CUDA and the tests' CPU emulator; a launch as plain data.

Knows how MLX builds custom kernels and which prelude each back end needs. Does not know what any
kernel computes. Kernels are built by device at the first launch: `mx.fast.cuda_kernel` refuses to
be constructed on other builds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

PRELUDES = Path(__file__).parent / "preludes"
SIMD = 32

Value = int | bool | mx.Dtype


@dataclass(frozen=True)
class Kernel:
    """A body with the names of its arguments; `header` holds its helpers.

    `updates` names inputs that the body writes in place through `ts_writable`. MLX does not know:
    whoever reads such an array afterwards must also depend on an output of the launch. `partial`
    names outputs of which some elements may stay unwritten.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    header: str = ""
    updates: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One run of a kernel: arrays in, template values, threadgroups, arrays out.

    `template` values are dtypes and sizes fixed by the model; every new set is compiled anew, so
    lengths and positions travel in arrays. `threads` is the size of one threadgroup along x.
    """

    kernel: Kernel
    inputs: Sequence[mx.array]
    template: dict[str, Value]
    groups: tuple[int, int, int]
    threads: int
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Threads along each axis, as MLX counts."""
        return (self.groups[0] * self.threads, self.groups[1], self.groups[2])

    def run(self, backend: str, **how: Any) -> list[mx.array]:
        """Launch on "metal" or "cuda"; the outputs in order, lazily. `how` goes to MLX."""
        outputs: list[mx.array] = built(self.kernel, backend)(
            inputs=list(self.inputs),
            template=list(self.template.items()),
            grid=self.grid,
            threadgroup=(self.threads, 1, 1),
            output_shapes=[shape for shape, _ in self.outputs],
            output_dtypes=[dtype for _, dtype in self.outputs],
            **how,
        )
        return outputs


@cache
def prelude(backend: str) -> str:
    """The text of the vocabulary of "metal" or "cuda"."""
    return (PRELUDES / f"{backend}.h").read_text()


@cache
def built(kernel: Kernel, backend: str) -> Callable[..., Any]:
    """MLX's callable for `kernel` on "metal" or "cuda"."""
    make: Any = mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel
    kernel_of_mlx: Callable[..., Any] = make(
        name=f"turbospark_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=prelude(backend) + kernel.header,
    )
    return kernel_of_mlx


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@lru_cache(maxsize=1024)
def constant(*values: float) -> mx.array:
    """float32 [n] of numbers fixed by the model: made once, so that no launch fills it."""
    return mx.array(values, dtype=mx.float32)


@lru_cache(maxsize=1024)
def constant_ints(*values: int) -> mx.array:
    """int32 [n] of sizes fixed by the model."""
    return mx.array(values, dtype=mx.int32)
