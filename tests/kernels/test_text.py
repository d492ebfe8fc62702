"""Every kernel's text: rules of both back ends, Metal's types, CUDA's compiler where present."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from emulator import lint
from emulator.cuda_text import compile_cuda
from emulator.metal_text import metal_text, type_errors
from launches import LAUNCHES

import turbospark.kernels
from turbospark.kernels.source import Kernel


def all_kernels() -> set[Kernel]:
    found = set()
    for module in pkgutil.iter_modules(turbospark.kernels.__path__, "turbospark.kernels."):
        values = vars(importlib.import_module(module.name)).values()
        found |= {v for v in values if isinstance(v, Kernel)}
    return found


def test_every_kernel_has_a_launch_here() -> None:
    assert {make().plan.kernel for make in LAUNCHES.values()} == all_kernels()


@pytest.mark.parametrize("name", LAUNCHES)
def test_bodies_keep_the_rules(name: str) -> None:
    assert lint(LAUNCHES[name]().plan.kernel) == []


@pytest.mark.parametrize("name", LAUNCHES)
def test_metal_text_has_no_type_errors(name: str) -> None:
    text = metal_text(LAUNCHES[name]())
    assert [type_errors(text, standard) for standard in ("c++14", "c++17")] == ["", ""]


@pytest.mark.parametrize("name", LAUNCHES)
def test_cuda_text_compiles_without_spills(name: str) -> None:
    compiled = compile_cuda(LAUNCHES[name]())
    assert compiled.spilled == 0 and compiled.registers < 255


BROKEN = {
    "CUDA intrinsic": "y[0] = __shfl_xor_sync(0xffffffffu, x[0], 1);",
    "Metal function": "y[0] = simd_sum(x[0]);",
    "address space": "const device float* p = x; y[0] = p[0];",
    "double literal": "y[0] = x[0] * 1.5;",
    "shared memory in a block": "if (x[0] > 0.0f) { TS_SHARED(float, s, 4); }",
    "return before a barrier": "if (x[0] > 0.0f) return;\n ts_barrier();",
    "long": "long n = 3; y[n] = x[n];",
    "infinity": "y[0] = -INFINITY;",
    "vector constructor": "y[0] = float4(x[0]).x;",
    "MLX's shape argument": "y[0] = float(x_shape[0]);",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    found = lint(Kernel("broken", ("x",), ("y",), BROKEN[name]))
    assert len(found) >= 1 and found[0].startswith("broken")


def test_a_helper_that_reads_thread_attributes_is_named() -> None:
    header = "TS_FN int ts_me() { return int(thread_index_in_simdgroup); }"
    assert lint(Kernel("broken", ("x",), ("y",), "y[0] = x[0];", header))
