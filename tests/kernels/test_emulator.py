"""The emulator itself: legal patterns pass, and every kind of mistake is named."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from emulator import EmulationError, emulate
from emulator.build import is_clang

from turbospark.kernels.source import Kernel, Launch, Plan

WHO = """
  const int t = int(thread_index_in_threadgroup);
  const int g = int(threadgroup_position_in_grid.x);
  const int lane = int(thread_index_in_simdgroup);
"""


def launched(
    kernel: Kernel, inputs: list[mx.array], groups: int, threads: int, outputs: list
) -> Launch:
    return Launch(Plan(kernel, {}, (groups, 1, 1), threads, tuple(outputs)), inputs)


def run(body: str, groups: int = 1, seed: int = 0) -> np.ndarray:
    """`body` on 64 threads per group, reading a[256] = 0, 1, ... and writing out[64 * groups]."""
    kernel = Kernel("probe", ("a",), ("out",), WHO + body)
    outputs = [((64 * groups,), mx.float32)]
    a = mx.arange(256).astype(mx.float32)
    return emulate(launched(kernel, [a], groups, 64, outputs), seed).outputs[0]


EVEN = np.arange(64)
LEGAL = {
    "tree reduction": (
        "TS_SHARED(float, s, 64); s[t] = a[t]; ts_barrier();"
        "for (int n = 32; n > 0; n >>= 1) { if (t < n) s[t] = s[t] + s[t + n]; ts_barrier(); }"
        "out[t] = s[0];",
        np.full(64, 2016.0),
    ),
    "shared memory reused after barriers": (
        "TS_SHARED(float, s, 64); for (int k = 0; k < 3; k++) { s[t] = a[t + k]; ts_barrier();"
        "const float v = s[63 - t]; ts_barrier(); if (k == 2) out[t] = v; }",
        65 - EVEN,
    ),
    "exchange within a simdgroup": (
        "TS_SHARED(float, s, 64); s[t] = a[t]; ts_simd_barrier(); out[t] = s[t ^ 1];",
        EVEN ^ 1,
    ),
    "lanes read one word, their simdgroup writes it after a simd barrier": (
        "TS_SHARED(float, s, 2); const int w = t / 32; float v = 0.0f; if (lane == 0) s[w] = 1.0f;"
        "ts_simd_barrier(); v = s[w]; ts_simd_barrier(); if (lane == 1) s[w] = 2.0f;"
        "ts_simd_barrier(); out[t] = v + s[w];",
        np.full(64, 3.0),
    ),
    "exchange through an output": (
        "out[t] = a[t]; ts_barrier_device(); const float v = out[63 - t]; ts_barrier_device();"
        "out[t] = v;",
        63 - EVEN,
    ),
    "max, shuffle and xor": (
        "out[t] = ts_simd_max(a[t]) + ts_shuffle(a[t], 3) + ts_shuffle_xor(a[t], 16);",
        np.repeat([31 + 3, 63 + 35], 32) + (EVEN ^ 16),
    ),
    "a whole simdgroup leaves before any barrier": (
        "if (t >= 32) { out[t] = 0.0f; return; } out[t] = ts_simd_sum(a[t]);",
        np.repeat([496, 0], 32),
    ),
}
SHARE = "TS_SHARED(float, s, 64); s[t] = a[t]; "
WRONG = {
    "write after read": (
        "race",
        SHARE + "ts_barrier(); const float v = s[63 - t]; s[t] = v; ts_barrier(); out[t] = s[t];",
    ),
    "exchange without a simd barrier": (
        "race",
        SHARE + "const float z = ts_simd_sum(0.0f); ts_simd_max(z); out[t] = s[t ^ 1];",
    ),
    "a simd barrier does not order other simdgroups": (
        "race|unwritten",
        SHARE + "ts_simd_barrier(); out[t] = s[63 - t];",
    ),
    "output exchanged behind a threadgroup barrier": (
        "race",
        "out[t] = a[t]; ts_barrier(); const float v = out[63 - t]; ts_barrier(); out[t] = v;",
    ),
    "lanes read one word, their simdgroup writes it without a barrier": (
        "race",
        "TS_SHARED(float, s, 2); const int w = t / 32; if (lane == 0) s[w] = 1.0f;"
        "ts_simd_barrier(); const float v = s[w]; if (lane == 1) s[w] = 2.0f; out[t] = v;",
    ),
    "two simdgroups read one word, one writes it after a simd barrier": (
        "race",
        "TS_SHARED(float, s, 1); if (t == 0) s[0] = 1.0f; ts_barrier(); const float v = s[0];"
        "ts_simd_barrier(); if (t == 1) s[0] = 2.0f; out[t] = v;",
    ),
    "two writers": (
        "race",
        "TS_SHARED(float, s, 64); s[t / 2] = a[t]; ts_barrier(); out[t] = s[t / 2];",
    ),
    "exchange between threadgroups": (
        "race|unwritten",
        "out[g * 64 + t] = a[t]; ts_barrier_device(); if (g == 1) out[64 + t] = out[t];",
    ),
    "half the threads at a barrier": (
        "dead lock|barrier",
        "if (t < 32) ts_barrier(); out[t] = a[t];",
    ),
    "two barriers": (
        "divergent barrier",
        "if (t < 32) {\n ts_barrier();\n } else {\n ts_barrier();\n }\n out[t] = a[t];",
    ),
    "a loop of different length": (
        "simd op|returned|divergent|dead lock",
        "float v = 0.0f; for (int k = 0; k <= lane; k++) v += ts_simd_sum(a[k]);\n out[t] = v;",
    ),
    "shuffle from lane -1": ("shuffle from lane", "out[t] = ts_shuffle(a[t], lane - 1);"),
    "read past an input": ("out of bounds", "out[t] = a[t + 200];"),
    "negative index": ("out of bounds", "out[t] = a[t - 1];"),
    "an output never written": ("never written", "if (t < 60) out[t] = a[t];"),
    "write past an output": ("out of bounds", "out[t] = a[t]; if (t == 63) out[t + 1] = 0.0f;"),
    "write to an input": ("an input", "ts_writable(a)[t] = 0.0f; out[t] = a[t];"),
    "misaligned vector": ("misaligned", "out[t] = ts_load_f32x4(a + t + 1).x;"),
    "too much shared memory": (
        "limit",
        "TS_SHARED(float, s, 8193); s[t] = a[t]; out[t] = s[t];",
    ),
    "local array overrun": (
        "local array",
        "float v[4]; for (int i = 0; i < 4; i++) v[i] = 0.0f; out[t] = v[t];",
    ),
    "shift by too much": ("shift by", "out[t] = float(1 << t);"),
    "an implicit double": ("compile", "const float x = a[t]; out[t] = float(x * 1.5);"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_patterns_pass_in_every_order(name: str) -> None:
    body, want = LEGAL[name]
    for seed in (0, 1, 2):
        assert np.array_equal(run(body, seed=seed), want)


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_found(name: str) -> None:
    words, body = WRONG[name]
    with pytest.raises(EmulationError, match=words):
        for seed in (0, 1, 2):
            run(body, groups=2 if "threadgroups" in name else 1, seed=seed)


def test_shuffle_down_past_the_end_is_poison() -> None:
    assert np.isnan(run("out[t] = ts_shuffle_down(a[t], 1);")[[31, 63]]).all()


def test_uninitialised_locals_show_up_as_nonsense() -> None:
    if not is_clang():
        pytest.skip("g++ does not fill scalars that it can keep in registers")
    assert not np.abs(run("float v[2]; out[t] = v[t % 2];")).max() < 1e30


def test_every_half_converts_exactly() -> None:
    bits = mx.arange(65536).astype(mx.uint16).view(mx.float16)
    body = "const int i = int(thread_position_in_grid.x); out[i] = float(a[i]);"
    kernel = Kernel("widen", ("a",), ("out",), body)
    got = emulate(launched(kernel, [bits], 256, 256, [((65536,), mx.float32)]))
    want = np.array(bits).astype(np.float64)
    assert np.array_equal(got.outputs[0], want, equal_nan=True)


def test_floats_round_to_16_bits_as_numpy_and_mlx_do() -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal(32758) * 10.0 ** random.integers(-9, 6, 32758)
    edges = [65504, 65519.9, 65520, 1e-8, 6e-8, 2.98e-8, 0, -0.0, np.inf, -np.inf]
    x = np.concatenate([values, edges]).astype(np.float32)
    body = """
      const int i = int(thread_position_in_grid.x);
      h[i] = float16_t(a[i]);
      b[i] = bfloat16_t(a[i]);
    """
    kernel = Kernel("narrow", ("a",), ("h", "b"), body)
    outputs = [((32768,), mx.float16), ((32768,), mx.bfloat16)]
    half, brain = emulate(launched(kernel, [mx.array(x)], 128, 256, outputs)).outputs
    with np.errstate(over="ignore"):
        assert np.array_equal(half, x.astype(np.float16))
    assert np.array_equal(brain, np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)))


def test_an_updated_input_is_written_in_place() -> None:
    body = WHO + "ts_writable(a)[t + 1] = 7.0f; out[t] = 1.0f;"
    kernel = Kernel("update", ("a",), ("out",), body, updates=("a",))
    a = mx.arange(256).astype(mx.float32)
    done = emulate(launched(kernel, [a], 1, 64, [((64,), mx.float32)]))
    assert done.updated["a"][:66].tolist() == [0.0, *[7.0] * 64, 65.0]
    assert a[1].item() == 1.0
