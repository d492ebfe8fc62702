"""Runs a launch on the CPU, a threadgroup at a time, with every access checked.

Knows arrays and the machine's interface. Does not know what kernels compute.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from emulator.build import EmulationError, compiled, machine
from turbospark.kernels.source import SIMD, Launch, Plan

NUMPY = {
    mx.float32: np.float32,
    mx.float16: np.uint16,
    mx.bfloat16: np.uint16,
    mx.int32: np.int32,
    mx.uint32: np.uint32,
    mx.uint8: np.uint8,
    mx.int64: np.int64,
}
METAL_BUFFERS = 31
CUDA_ONLY = ("chain",)
CUDA_GROUPS_YZ = 65535


class Argument(ctypes.Structure):
    """EmuArgument of machine.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("item", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("preset", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("reads", ctypes.c_int64),
        ("writes", ctypes.c_int64),
        ("unwritten", ctypes.c_int64),
    ]


@dataclass
class Emulated:
    """Outputs and updated inputs as float64 (floats) or integer numpy arrays, and counts."""

    outputs: list[np.ndarray]
    updated: dict[str, np.ndarray] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)
    threadgroup_bytes: int = 0
    switches: int = 0


@dataclass(frozen=True)
class Sparse:
    """An input too large for memory: untouched zero pages behind `bits` of dtype `dtype`."""

    bits: np.ndarray
    dtype: mx.Dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def ndim(self) -> int:
        return self.bits.ndim

    @property
    def size(self) -> int:
        return self.bits.size


def sparse(shape: tuple[int, ...], dtype: mx.Dtype) -> Sparse:
    """Zeros of any size; only pages that are touched take memory."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(NUMPY[dtype]).itemsize
    no_reserve = 0x4000
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return Sparse(np.frombuffer(pages, NUMPY[dtype]).reshape(shape), dtype)


def emulate(launch: Launch, seed: int = 0) -> Emulated:
    """Run `launch`; the seed shuffles the order of threads and threadgroups (0: in order).

    Outputs are poisoned first, and each of their elements must be written. Raises EmulationError.
    """
    plan, kernel = launch.plan, launch.plan.kernel
    check_launch(launch)
    dtypes = [a.dtype for a in launch.inputs] + [d for _, d in plan.outputs]
    library = compiled(plan, dtypes)
    arrays = []
    for name, array in zip(kernel.inputs, launch.inputs, strict=True):
        bits = array.bits if isinstance(array, Sparse) else to_bits(array)
        arrays.append(bits.copy() if name in kernel.updates else bits)
    for shape, dtype in plan.outputs:
        poisoned = np.empty(shape, NUMPY[dtype])
        poisoned.view(np.uint8).fill(0xFF)
        arrays.append(poisoned)
    names = (*kernel.inputs, *kernel.outputs)
    arguments = (Argument * len(arrays))()
    for i, (name, array) in enumerate(zip(names, arrays, strict=True)):
        written = i >= len(kernel.inputs) or name in kernel.updates
        arguments[i] = Argument(
            name.encode(), array.ctypes.data, array.size, array.itemsize, int(written),
            int(i < len(kernel.inputs)), 0, 0, 0, 0,
        )  # fmt: skip
    statistics = _run(library, arguments, plan, seed)
    for argument in arguments:
        if argument.unwritten and argument.name.decode() not in kernel.partial:
            raise EmulationError(
                f"{kernel.name}: {argument.unwritten} of {argument.size} elements of output "
                f"{argument.name.decode()} never written"
            )
    values = dict(zip(names, zip(arrays, dtypes, strict=True), strict=True))
    return Emulated(
        [float64(*values[n]) for n in kernel.outputs],
        {n: float64(*values[n]) for n in kernel.updates},
        {a.name.decode(): a.reads for a in arguments},
        statistics[1],
        statistics[0],
    )


def _run(library: ctypes.CDLL, arguments: ctypes.Array, plan: Plan, seed: int) -> list[int]:
    text = ctypes.create_string_buffer(2048)
    statistics = (ctypes.c_int64 * 2)()
    entry = ctypes.c_void_p.in_dll(library, "emu_entry")
    failed = machine().emu_run(
        plan.kernel.name.encode(),
        entry,
        arguments,
        len(arguments),
        (ctypes.c_int * 3)(*plan.groups),
        (ctypes.c_int * 3)(plan.threads, 1, 1),
        ctypes.c_uint32(seed),
        text,
        len(text),
        statistics,
    )
    if failed:
        raise EmulationError(text.value.decode())
    return list(statistics)


def to_bits(array: mx.array) -> np.ndarray:
    """The array as numpy, row after row as MLX hands it to a kernel, 16-bit floats as uint16."""
    if array.dtype in (mx.bfloat16, mx.float16):
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.array(array))


def float64(bits: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """The values behind `bits`: floats as float64, integers as they are."""
    if dtype == mx.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == mx.float16:
        return bits.view(np.float16).astype(np.float64)
    if dtype != mx.float32:
        return bits
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return bits.astype(np.float64)


def check_launch(launch: Launch) -> None:
    """Refuse what one of the GPU back ends would refuse or misread. Raises EmulationError."""
    plan, kernel, wrong = launch.plan, launch.plan.kernel, []
    for name, array in zip(kernel.inputs, launch.inputs, strict=True):
        if array.ndim == 0:
            wrong.append(f"input {name} is 0-d: a reference in Metal, a pointer in CUDA")
        if array.size == 0:
            wrong.append(f"input {name} is empty")
        if name in kernel.updates and array.size < 8:
            wrong.append(f"input {name} is constant in Metal below 8 elements, cannot be updated")
    if plan.threads % SIMD or plan.threads > 256:
        wrong.append(f"threadgroup of {plan.threads}: want a multiple of 32, at most 256")
    if max(plan.groups[1:]) > CUDA_GROUPS_YZ:
        wrong.append("more than 65535 threadgroups in y or z (CUDA limit)")
    if max(plan.grid) >= 2**31 or min(plan.groups) < 1:
        wrong.append(f"threadgroups {plan.groups}")
    buffers = len(kernel.inputs) + len(kernel.outputs)
    if buffers > METAL_BUFFERS and kernel.name not in CUDA_ONLY:
        wrong.append("more than 31 buffers")
    if wrong:
        raise EmulationError(f"{kernel.name}: " + "; ".join(wrong))
