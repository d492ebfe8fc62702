"""The Metal text that MLX generates for a launch, type-checked by clang on any machine.

Calling a metal_kernel while a function is exported builds the source without a Metal device, and
verbose=True prints it. MLX's own utils.h (in its wheel) goes before it, as on a Mac; stub/ stands
in for <metal_stdlib>, with real address spaces. Code generation and pipeline limits are not
covered.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest

from turbospark.kernels.source import Launch

HERE = Path(__file__).parent
INCLUDE = Path(mx.__file__).parent / "include"
FLAGS = [
    "-x", "c++", "-fsyntax-only", "-nostdinc", "-nostdinc++", "-ferror-limit=8", "-Wall",
    "-Wextra", "-Wno-unknown-attributes", "-Wno-undefined-inline", "-Wno-undefined-internal",
    "-Wno-c++17-extensions", "-Wno-unused", "-Wno-unused-parameter", "-Wno-sign-compare",
    "-Werror=implicit-float-conversion", "-Werror=double-promotion", "-DTS_MSL_STUB",
]  # fmt: skip


def clang() -> str:
    """The newest clang++ at hand; skips the test without one."""
    for name in ("clang++", *(f"clang++-{v}" for v in range(22, 18, -1))):
        if shutil.which(name):
            return name
    pytest.skip("the Metal type check needs clang++ 19 or newer (apt-get install clang-19)")
    raise AssertionError


def metal_text(launch: Launch) -> str:
    """What MLX hands to the Metal compiler for `launch`, less its utils.h."""

    verbose = launch.plan.built("metal", stream=mx.gpu, verbose=True)

    def call(*inputs: mx.array) -> list[mx.array]:
        return verbose(inputs=list(inputs))

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        sys.stdout.flush()
        kept = os.dup(1)
        with log.open("wb") as sink:
            os.dup2(sink.fileno(), 1)
            try:
                mx.export_function(str(Path(folder) / "k.mlxfn"), call, *launch.inputs)
            finally:
                sys.stdout.flush()
                os.dup2(kept, 1)
                os.close(kept)
        printed = log.read_text()
    return printed.split("```\n", 1)[1].rsplit("```", 1)[0]


@functools.cache
def _mlx_utils() -> str:
    text = (INCLUDE / "mlx/backend/metal/kernels/utils.h").read_text()
    # Array parameters in an address space: Metal takes them, plain clang does not.
    return re.sub(r"strides\[[23]\]\)", "* strides)", text.replace("#pragma once", ""))


def type_errors(source: str, standard: str = "c++14") -> str:
    """clang's errors on a Metal text; empty when there are none."""
    text = f'# 1 "mlx_utils.h" 3\n{_mlx_utils()}\n# 1 "generated.metal"\n{source}'
    command = [clang(), *FLAGS, f"-std={standard}", f"-I{HERE}/stub", f"-I{INCLUDE}", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""
