"""Packing turned rows into words: TurboQuant's encoder, a block of 32 tokens at a time.

In this order: the same in plain MLX, the body, the launch, the choice. Knows rows and words; does
not know caches.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import pairwise

import mlx.core as mx

from turbospark.kernels import kv_codec
from turbospark.kernels.choices import backend
from turbospark.kernels.kv_codec import BLOCK
from turbospark.kernels.source import SIMD, Kernel, Launch, Plan, Value

SIMDGROUPS = 8
BACKENDS = ("cuda",)
"""Back ends on which the kernel replaces some 160 launches of MLX's operations."""


# --- reference ------------------------------------------------------------------------------------


def encode_rows_reference(rows: mx.array, bits: int, keys: bool) -> tuple[mx.array, mx.array]:
    """Words and scales of turned rows [KV, n, D], n a multiple of 32.

    Shapes: keys uint32 [KV, n, D * bits / 32], values uint32 [KV, n / 32, bits, D]; scales float16
    [KV, n].
    """
    codes, scales = kv_codec.quantize_rows(rows, bits)
    pack = kv_codec.pack_keys if keys else kv_codec.pack_values
    return pack(codes, bits), scales


# --- kernel ---------------------------------------------------------------------------------------

# A simdgroup takes a token at a time, a lane D / 32 dims of it; then threads assemble words.
ENCODE = r"""
  constexpr int E = D / 32;
  constexpr int UPPER = 1 << (BITS - 1);
  constexpr int LOW = BITS == 4 ? 4 : 2;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int block = int(threadgroup_position_in_grid.x);
  const int kv = int(threadgroup_position_in_grid.y);
  const int tokens = sizes[0];
  const int64_t first = int64_t(kv) * tokens + block * 32;
  TS_SHARED(uint8_t, codes_s, 32 * D);

  for (int token = sg; token < 32; token += SG) {
    float x[E];
    float square = 0.0f;
    TS_UNROLL
    for (int e = 0; e < E; e++) {
      x[e] = float(rows[(first + token) * D + e * 32 + lane]);
      square = ts_fma(x[e], x[e], square);
    }
    square = ts_simd_sum(square);
    const float norm = ts_sqrt(square);
    const float factor = numbers[0] / ts_max(norm, 1e-30f);
    float best = -1.0f;
    float along = 0.0f;
    int chosen[E];
    TS_UNROLL
    for (int e = 0; e < E; e++) chosen[e] = 0;
    for (int w = 0; w < 5; w++) {
      const float width = 0.86f + 0.07f * float(w);
      float inner = 0.0f;
      float own = 0.0f;
      int magnitude[E];
      TS_UNROLL
      for (int e = 0; e < E; e++) {
        const float size = ts_abs(x[e] * factor);
        int code = 0;
        TS_UNROLL
        for (int i = 0; i + 1 < UPPER; i++) code += size > middles[i] * width ? 1 : 0;
        const float level = levels[code];
        inner = ts_fma(size, level, inner);
        own = ts_fma(level, level, own);
        magnitude[e] = code;
      }
      inner = ts_simd_sum(inner);
      own = ts_simd_sum(own);
      const float merit = inner * inner / own;
      if (merit > best) {
        best = merit;
        along = inner;
        TS_UNROLL
        for (int e = 0; e < E; e++) chosen[e] = magnitude[e];
      }
    }
    TS_UNROLL
    for (int e = 0; e < E; e++) {
      const int code = x[e] > 0.0f ? UPPER + chosen[e] : UPPER - 1 - chosen[e];
      codes_s[token * D + e * 32 + lane] = uint8_t(norm > 0.0f ? code : 0);
    }
    const float scale = norm > 0.0f ? norm * numbers[0] / ts_max(along, 1e-30f) : 0.0f;
    if (lane == 0) scales[first + token] = float16_t(ts_min(scale, 65504.0f));
  }
  ts_barrier();

  for (int i = tid; i < BITS * D; i += 32 * SG) {
    // Keys: word i % (BITS * D / 32) of a token; values: dim i % D of a row of words.
    const int word = KEYS ? i % (BITS * D / 32) : i / D;
    const int plane_words = KEYS ? LOW * D / 32 : LOW;
    const bool upper = word >= plane_words;
    const int plane = upper ? 1 : LOW;
    const int below = upper ? 2 : 0;
    const int per = 16 / plane;
    const int pair0 = (upper ? word - plane_words : word) * per;
    uint packed = 0u;
    for (int j = 0; j < per; j++) {
      for (int e = 0; e < 2; e++) {
        const int pair = pair0 + j;
        const int token = KEYS ? i / (BITS * D / 32) : pair % 4 * 8 + pair / 4 * 2 + e;
        const int dim = KEYS ? 2 * pair + e : i % D;
        const uint code = uint(codes_s[token * D + dim]) >> below;
        packed |= (code & ((1u << plane) - 1u)) << (j * plane + 16 * e);
      }
    }
    words[(int64_t(kv) * (tokens / 32) + block) * (BITS * D) + i] = packed;
  }
"""
ENCODE_KERNEL = Kernel(
    "kv_encode", ("rows", "levels", "middles", "numbers", "sizes"), ("words", "scales"), ENCODE
)


def launch_encode(rows: mx.array, bits: int, keys: bool) -> Launch:
    """Words and scales of float16 rows [KV, n, D]."""
    kv, count, dim = rows.shape
    levels, middles = _tables(bits)
    sizes = mx.array([count], dtype=mx.int32)
    numbers = mx.array([dim**0.5], dtype=mx.float32)
    return Launch(_plan(kv, count, dim, bits, keys), [rows, levels, middles, numbers, sizes])


@cache
def _tables(bits: int) -> tuple[mx.array, mx.array]:
    """The codebook's upper half and the middles between its levels, 8 each."""
    upper = kv_codec.levels(bits)[1 << (bits - 1) :].tolist()
    middles = [(a + b) / 2 for a, b in pairwise(upper)]
    padded = [(v + [0.0] * 8)[:8] for v in (upper, middles)]
    return mx.array(padded[0], dtype=mx.float32), mx.array(padded[1], dtype=mx.float32)


@lru_cache(maxsize=1024)
def _plan(kv: int, count: int, dim: int, bits: int, keys: bool) -> Plan:
    template: dict[str, Value] = {"D": dim, "BITS": bits, "KEYS": keys, "SG": SIMDGROUPS}
    words = (kv, count, dim * bits // 32) if keys else (kv, count // BLOCK, bits, dim)
    outputs = ((words, mx.uint32), ((kv, count), mx.float16))
    return Plan(ENCODE_KERNEL, template, (count // BLOCK, kv, 1), SIMD * SIMDGROUPS, outputs)


# --- choice ---------------------------------------------------------------------------------------


def encode_rows(rows: mx.array, bits: int, keys: bool) -> tuple[mx.array, mx.array]:
    """`encode_rows_reference`, by the kernel where it wins and takes the shapes."""
    where = backend(mx.default_device())
    if where not in BACKENDS or rows.shape[-1] % 32 or rows.shape[-1] > 512:
        return encode_rows_reference(rows, bits, keys)
    words, scales = launch_encode(rows, bits, keys).run(where)
    return words, scales
