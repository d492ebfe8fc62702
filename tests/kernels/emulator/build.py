"""Compiles the emulator's machine and kernel bodies with the system C++ compiler; cached by hash.

Knows compilers and flags. Does not know arrays. `TURBOSPARK_TEST_CXX` names another compiler;
clang also finds unsigned wrap-around and uninitialised locals.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from turbospark.kernels.source import TYPES, Plan

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"turbospark-emulator-{os.getuid()}"
CXX = os.environ.get("TURBOSPARK_TEST_CXX", "g++")
FLAGS = ["-std=c++14", "-O1", "-g0", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
BODY_FLAGS = [
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wdouble-promotion",
    "-Wno-unused",
    "-Wno-unused-but-set-variable",
    "-Wno-unused-parameter",
    "-fno-sanitize-recover=all",
]
SANITIZE = "bounds,shift,signed-integer-overflow,integer-divide-by-zero"


class EmulationError(RuntimeError):
    """A finding of the emulator, or a body that does not compile."""


def is_clang() -> bool:
    """Whether the compiler is clang."""
    return "clang" in CXX


@functools.cache
def machine() -> ctypes.CDLL:
    """The scheduler; loaded globally so that kernels find its symbols."""
    if sys.platform != "linux" or shutil.which(CXX) is None:
        pytest.skip(f"the emulator needs Linux and {CXX}")
    headers = "".join((HERE / n).read_text() for n in ("machine.h", "half.h"))
    text = (HERE / "machine.cpp").read_text()
    library = _compile("machine", text, headers, FLAGS)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _headers() -> str:
    return "".join((HERE / n).read_text() for n in ("machine.h", "half.h", "vocabulary.h"))


def compiled(plan: Plan, dtypes: Sequence[mx.Dtype]) -> ctypes.CDLL:
    """The plan's kernel for those argument dtypes, inputs and then outputs."""
    machine()
    sanitize = SANITIZE + (",unsigned-integer-overflow" if is_clang() else "")
    flags = [*FLAGS, *BODY_FLAGS, f"-fsanitize={sanitize}"]
    flags += [] if is_clang() else ["-Wno-clobbered"]
    text = source_text(plan, dtypes)
    return ctypes.CDLL(str(_compile(plan.kernel.name, text, _headers(), flags)))


def source_text(plan: Plan, dtypes: Sequence[mx.Dtype]) -> str:
    """The C++ text of a kernel: vocabulary, header, constants, arguments, body."""
    kernel = plan.kernel
    lines = ['#include "vocabulary.h"', f'#line 1 "{kernel.name}.header"', kernel.header]
    lines += ["static void emu_body() {", plan.constants]
    names = (*kernel.inputs, *kernel.outputs)
    for i, (name, dtype) in enumerate(zip(names, dtypes, strict=True)):
        const = "const " if i < len(kernel.inputs) else ""
        lines.append(f"  emu::Ptr<{const}{TYPES[dtype]}> {name}{{&emu::arguments[{i}], 0}};")
    lines += [f'#line 1 "{kernel.name}.body"', kernel.body, "}"]
    lines.append('extern "C" { void (*emu_entry)() = emu_body; }')
    return "\n".join(lines) + "\n"


def _compile(name: str, text: str, headers: str, flags: Sequence[str]) -> Path:
    key = hashlib.sha256("\0".join([CXX, *flags, headers, text]).encode()).hexdigest()[:24]
    CACHE.mkdir(mode=0o700, exist_ok=True)
    library = CACHE / f"{name}-{key}.so"
    if library.exists():
        return library
    source = CACHE / f"{name}-{key}.{os.getpid()}.cpp"
    source.write_text(text)
    part = source.with_suffix(".o")
    # Linked without -fsanitize: the handlers are the machine's own.
    _call([CXX, *flags, f"-I{HERE}", "-c", "-o", str(part), str(source)], name)
    whole = source.with_suffix(".so")
    _call([CXX, "-shared", "-o", str(whole), str(part)], name)
    whole.replace(library)
    part.unlink()
    source.unlink()
    return library


def _call(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{name}: compile failed\n{done.stderr[:3000]}")
