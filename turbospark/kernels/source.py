"""One kernel body for Metal, CUDA and the tests' CPU emulator; a launch as plain data.

Knows how MLX builds custom kernels and which prelude each back end needs. Does not know what any
kernel computes. Kernels are built by device at the first launch: `mx.fast.cuda_kernel` refuses to
be constructed on other builds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from turbospark.kernels.shorten import shortened

PRELUDES = Path(__file__).parent / "preludes"
SIMD = 32

Value = int | bool | mx.Dtype

TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.int64: "int64_t",
}
"""Names that all three preludes know."""


@dataclass(frozen=True)
class Kernel:
    """A body with the names of its arguments; `header` holds its helpers.

    `updates` names inputs that the body writes in place through `ts_writable`. MLX does not know:
    whoever reads such an array afterwards must also depend on an output of the launch. `partial`
    names outputs of which some elements may stay unwritten, `early` inputs that are read before
    `ts_await`.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    header: str = ""
    updates: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    early: tuple[str, ...] = ()


class Recorder(Protocol):
    """Takes launches instead of a device."""

    def add(self, plan: Plan, inputs: list[Any]) -> list[Any]:
        """What stands for the launch's outputs."""


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
"""Where `Plan.run` goes while it is set."""


@dataclass(frozen=True)
class Plan:
    """A kernel with everything fixed but its inputs, made once per shape.

    `template` values are dtypes and sizes fixed by the model; every new set is compiled anew, so
    lengths and positions travel in arrays. They are written into the body: handing them to MLX at
    every call would double a launch's cost on the host. `threads` is the size of one threadgroup
    along x, `groups` counts threadgroups.
    """

    kernel: Kernel
    template: dict[str, Value]
    groups: tuple[int, int, int]
    threads: int
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    _calls: dict[tuple[str, tuple[mx.Dtype, ...]], Callable[..., list[mx.array]]] = field(
        default_factory=dict, compare=False
    )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Threads along each axis, as MLX counts."""
        return (self.groups[0] * self.threads, self.groups[1], self.groups[2])

    @property
    def constants(self) -> str:
        """The template as lines of the body, with the preludes' names of types."""
        lines = []
        for name, value in self.template.items():
            if isinstance(value, bool):
                lines.append(f"  constexpr bool {name} = {str(value).lower()};\n")
            elif isinstance(value, int):
                lines.append(f"  constexpr int {name} = {value};\n")
            else:
                lines.append(f"  using {name} = {TYPES[value]};\n")
        return "".join(lines)

    def text(self, backend: str) -> tuple[str, str]:
        """What "metal" or "cuda" compiles: definitions and the body."""
        return shortened(prelude(backend) + self.kernel.header, self.constants + self.kernel.body)

    def run(self, backend: str, inputs: list[mx.array]) -> list[mx.array]:
        """Launch on "metal" or "cuda", unless a recorder takes it; the outputs in order, lazily."""
        recording = recorder.get()
        return self.launch(backend, inputs) if recording is None else recording.add(self, inputs)

    def launch(self, backend: str, inputs: list[mx.array]) -> list[mx.array]:
        """Launch on "metal" or "cuda"; the outputs in order, lazily."""
        dtypes = tuple([a.dtype for a in inputs])
        call = self._calls.get((backend, dtypes))
        if call is None:
            call = self._calls[backend, dtypes] = self.built(backend, dtypes)
        return call(inputs=inputs)

    def built(
        self, backend: str, dtypes: tuple[mx.Dtype, ...] = (), **how: Any
    ) -> Callable[..., list[mx.array]]:
        """A callable of `inputs` of `dtypes` on "metal" or "cuda"; `how` goes to MLX at every call.

        MLX keeps compiled kernels by name, and the name it is given says nothing about the inputs:
        a norm in float32 would be read by what was compiled for bfloat16.
        """
        text = self.constants + self.kernel.body + "".join(map(str, dtypes))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        make: Any = mx.fast.metal_kernel if backend == "metal" else mx.fast.cuda_kernel
        header, source = self.text(backend)
        call = make(
            name=f"turbospark_{self.kernel.name}_{digest}",
            input_names=list(self.kernel.inputs),
            output_names=list(self.kernel.outputs),
            source=source,
            header=header,
        )
        return partial(
            call,
            grid=self.grid,
            threadgroup=(self.threads, 1, 1),
            output_shapes=[shape for shape, _ in self.outputs],
            output_dtypes=[dtype for _, dtype in self.outputs],
            **how,
        )


@dataclass(frozen=True)
class Launch:
    """A plan and the arrays it reads."""

    plan: Plan
    inputs: list[mx.array]

    def run(self, backend: str) -> list[mx.array]:
        """Launch on "metal" or "cuda"; the outputs in order, lazily."""
        return self.plan.run(backend, self.inputs)


@cache
def prelude(backend: str) -> str:
    """The text of the vocabulary of "metal" or "cuda"."""
    return (PRELUDES / f"{backend}.h").read_text()


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def in_own_memory(values: Sequence[float], dtype: mx.Dtype) -> mx.array:
    """`values` at the head of at least 16 bytes.

    MLX keeps arrays of 8 bytes and less in one page that the host writes for every token: on CUDA
    a kernel that reads a number there waits some 20 us for the page.
    """
    return mx.array([*values, 0, 0, 0], dtype=dtype)


@lru_cache(maxsize=1024)
def constant(*values: float) -> mx.array:
    """float32 [n + 3] that begins with numbers fixed by the model: made once, so that no launch
    fills it.
    """
    return in_own_memory(values, mx.float32)


@lru_cache(maxsize=1024)
def constant_ints(*values: int) -> mx.array:
    """int32 [n + 3] that begins with sizes fixed by the model."""
    return in_own_memory(values, mx.int32)
