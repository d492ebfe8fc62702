"""The CUDA text of a launch as MLX's cuda_kernel builds it, compiled by nvcc where there is one.

Knows MLX 0.32's wrapping of a body (read in its source, since a CPU build cannot print it).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from turbospark.kernels.source import TYPES, Launch

# What mlx/backend/cuda/device/utils.cuh brings into scope, as far as kernels use it, and a macro
# of a short name that MLX defines before every kernel.
SCOPE = """
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cooperative_groups.h>
#define inf __int_as_float(0x7f800000)
"""


def cuda_text(launch: Launch) -> str:
    """The translation unit MLX hands to NVRTC for `launch`."""
    plan, kernel = launch.plan, launch.plan.kernel
    arguments = [
        f"const {TYPES[a.dtype]}* {name}"
        for name, a in zip(kernel.inputs, launch.inputs, strict=True)
    ]
    arguments += [
        f"{TYPES[dtype]}* {name}"
        for name, (_, dtype) in zip(kernel.outputs, plan.outputs, strict=True)
    ]
    header, body = plan.text("cuda")
    return "\n".join(
        [
            SCOPE,
            header,
            "namespace mlx::core::cu {",
            "namespace cg = cooperative_groups;",
            f'extern "C" __global__ void custom_kernel_{kernel.name}({", ".join(arguments)}) {{',
            body,
            "}",
            "}",
        ]
    )


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of a kernel; `sass` is empty without cuobjdump."""

    registers: int
    spilled: int
    shared: int


def compile_cuda(launch: Launch, arch: str = "sm_90a") -> Compiled:
    """Compile for `arch`. Raises AssertionError with nvcc's errors.

    Skips the test unless TURBOSPARK_TEST_NVCC is set: it takes seconds a kernel.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None or not os.environ.get("TURBOSPARK_TEST_NVCC"):
        pytest.skip("set TURBOSPARK_TEST_NVCC=1 to compile the CUDA text with nvcc")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "k.cu"
        source.write_text(cuda_text(launch))
        command = [nvcc, "-std=c++17", "-cubin", f"-arch={arch}", "-Xptxas=-v", "-w"]
        command += ["-o", str(Path(folder) / "k.cubin"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{launch.plan.kernel.name}: {done.stderr[:3000]}")
    number = lambda p: int((re.search(p, done.stderr) or [0, 0])[1])  # noqa: E731
    return Compiled(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill stores"),
        number(r"(\d+) bytes smem"),
    )
