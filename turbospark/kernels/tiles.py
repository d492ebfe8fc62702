"""What kernels on the matrix unit share: 16 rows of packed codes times up to 8 rows of inputs.

Knows the fragments of `ts_mma` and how codes become 16-bit floats without a conversion: their bits
are put into the mantissa of a power of two. That offset is taken off once per group, times the sum
of the group's inputs. Does not know matrices.

A group's codes are shared by the four lanes of a row, so that one product never mixes two scales:
lane t of row g holds codes t * GROUP / 4 onwards. A word's codes are paired as one mask leaves
them, and inputs are stored in the same order.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.dtypes import Format, Quant

HEADER = r"""
// The codes of octet o of a lane, as four pairs of T; PLANE 1 holds the upper halves of bytes.
template <int BITS, bool FP4, bool HALF>
TS_FN void ts_pairs(TS_THREAD const uint* w, int o, int plane, TS_THREAD uint* p) {
  TS_UNROLL
  for (int i = 0; i < 4; i++) {
    if (FP4) {
      const uint v = w[o] >> (4 * i);
      p[i] = ts_and_or(v << (HALF ? 9 : 6), HALF ? 0x0E000E00u : 0x01C001C0u,
                       (v << 12) & 0x80008000u);
    } else if (BITS == 4) {
      p[i] = ts_and_or(w[o] >> (4 * i), 0x000F000Fu, HALF ? 0x64006400u : 0x43004300u);
    } else if (HALF) {
      p[i] = ts_and_or(w[2 * o + i / 2] >> (8 * (i % 2)), 0x00FF00FFu, 0x64006400u);
    } else {
      p[i] = ts_and_or(w[2 * o + i / 2] >> (8 * (i % 2) + 4 * plane), 0x000F000Fu,
                       plane == 0 ? 0x43004300u : 0x45004500u);
    }
  }
}

// Columns of the pairs of an octet: (0, 4), (1, 5), ... in a word of 8 codes, (0, 2), (1, 3), ...
// in words of 4.
template <int BITS>
TS_FN int ts_first_of_pair(int i) { return BITS == 4 ? i : i / 2 * 4 + i % 2; }
template <int BITS>
TS_FN int ts_second_of_pair(int i) { return ts_first_of_pair<BITS>(i) + (BITS == 4 ? 4 : 2); }

// What a code has been added to.
template <int BITS, bool FP4, bool HALF>
TS_FN float ts_offset() {
  if (FP4) return 0.0f;
  if (HALF) return 1024.0f;
  return BITS == 4 ? 128.0f : 128.0f + 2048.0f;
}

// An fp4 code is a small bfloat16 2^-126 times its value (a half, 2^-14): inputs are stored times
// 2^64, and scales make up for the rest.
template <bool FP4, bool HALF>
TS_FN float ts_input_factor() { return FP4 && !HALF ? 18446744073709551616.0f : 1.0f; }
template <bool FP4, bool HALF>
TS_FN float ts_scale_factor() {
  return !FP4 ? 1.0f : HALF ? 16384.0f : 4611686018427387904.0f;
}

// d += octet o of rows g and g + 8 times an octet of inputs.
template <typename T, int BITS, bool FP4, bool HALF>
TS_FN void ts_octet(TS_THREAD const uint* upper, TS_THREAD const uint* lower, int o, uint4 x,
                    int lane, TS_THREAD float* d) {
  const uint b[4] = {x.x, x.y, x.z, x.w};
  TS_UNROLL
  for (int plane = 0; plane < (BITS == 8 && !HALF ? 2 : 1); plane++) {
    uint p[4], q[4];
    ts_pairs<BITS, FP4, HALF>(upper, o, plane, p);
    ts_pairs<BITS, FP4, HALF>(lower, o, plane, q);
    TS_UNROLL
    for (int h = 0; h < 4; h += 2) {
      const uint a[4] = {p[h], q[h], p[h + 1], q[h + 1]};
      ts_mma(T, d, a, b + h);
    }
  }
}

// COUNT words, with the widest aligned loads.
template <int COUNT, typename P>
TS_FN void ts_words(P p, TS_THREAD uint* w) {
  if (COUNT % 4 == 0) {
    TS_UNROLL
    for (int i = 0; i < COUNT; i += 4) {
      const uint4 v = ts_stream_u32x4(p + i);
      w[i] = v.x;
      w[i + 1] = v.y;
      w[i + 2] = v.z;
      w[i + 3] = v.w;
    }
  } else if (COUNT == 2) {
    const uint2 v = ts_stream_u32x2(p);
    w[0] = v.x;
    w[1] = v.y;
  } else {
    w[0] = p[0];
  }
}

// U scales or biases; zeros where the format has none.
template <int U, bool PRESENT, typename P>
TS_FN void ts_scales(P p, TS_THREAD float* s) {
  if (!PRESENT) {
    TS_UNROLL
    for (int i = 0; i < U; i++) s[i] = 0.0f;
  } else if (U == 8) {
    ts_load8(p, s);
  } else {
    TS_UNROLL
    for (int i = 0; i < U; i++) s[i] = ts_scale(p[i]);
  }
}

// Octet i of a simdgroup's slice of x, paired as codes are; the lanes of a group sum it. The offset
// meets rounded values: so does the sum that takes it off. All 32 lanes.
template <typename T, int BITS, bool FP4, bool HALF, int OCTETS, typename PX, typename PS>
TS_FN void ts_put_pairs(TS_THREAD float* v, int i, bool live, PX x_s, PS sum_s) {
  float sum = 0.0f;
  uint p[4];
  TS_UNROLL
  for (int j = 0; j < 8; j++) v[j] *= ts_input_factor<FP4, HALF>();
  TS_UNROLL
  for (int j = 0; j < 4; j++) {
    p[j] = ts_pair<T>(v[ts_first_of_pair<BITS>(j)], v[ts_second_of_pair<BITS>(j)]);
    sum += ts_low<T>(p[j]) + ts_high<T>(p[j]);
  }
  if (live) ts_store_u32x4(x_s + i * 4, p[0], p[1], p[2], p[3]);
  if (!FP4) {
    TS_UNROLL
    for (int mask = 1; mask < OCTETS; mask <<= 1) sum += ts_shuffle_xor(sum, mask);
    if (live && i % OCTETS == 0) sum_s[i / OCTETS] = sum;
  }
}

// acc += RT tiles times U groups of M rows of x. w [2 RT, U, WORDS], s and b [2 RT, U]: rows g and
// g + 8 of each tile; x: the lane's first octet of its column; acc [2 RT, 2]: columns 2 t, 2 t + 1.
template <typename T, int BITS, bool FP4, bool HALF, int GROUP, int RT, int U, int M, typename PX,
          typename PS>
TS_FN void ts_tiles(TS_THREAD const uint* w, TS_THREAD const float* s, TS_THREAD const float* b,
                    PX x, PS sums, int lane, TS_THREAD float* acc) {
  constexpr int WORDS = GROUP * BITS / 128;
  const int t = lane % 4;
  TS_UNROLL
  for (int u = 0; u < U; u++) {
    float d[RT * 4];
    TS_UNROLL
    for (int i = 0; i < RT * 4; i++) d[i] = 0.0f;
    TS_UNROLL
    for (int o = 0; o < GROUP / 32; o++) {
      const uint4 xo = ts_load_u32x4(x + (u * (GROUP / 8) + o) * 4);
      TS_UNROLL
      for (int i = 0; i < RT; i++)
        ts_octet<T, BITS, FP4, HALF>(w + (2 * i * U + u) * WORDS, w + ((2 * i + 1) * U + u) * WORDS,
                                     o, xo, lane, d + i * 4);
    }
    float sum[2];
    TS_UNROLL
    for (int c = 0; c < 2; c++) sum[c] = FP4 ? 0.0f : sums[ts_min(2 * t + c, M - 1) * U + u];
    TS_UNROLL
    for (int i = 0; i < RT * 4; i++) {
      if (M > 1 || i % 2 == 0) {
        const float scale = s[i / 2 * U + u] * ts_scale_factor<FP4, HALF>();
        if (!FP4) {
          const float bias = ts_fma(-ts_offset<BITS, FP4, HALF>(), scale, b[i / 2 * U + u]);
          acc[i] = ts_fma(bias, sum[i % 2], acc[i]);
        }
        acc[i] = ts_fma(scale, d[i], acc[i]);
      }
    }
  }
}
"""


def on_matrix_unit(fmt: Format, dtype: mx.Dtype) -> bool:
    """Whether the helpers multiply codes of `fmt` with inputs of `dtype`."""
    if not isinstance(fmt, Quant) or dtype not in (mx.bfloat16, mx.float16):
        return False
    return fmt.mode == "mxfp4" or (fmt.mode == "affine" and fmt.bits in (4, 8))
