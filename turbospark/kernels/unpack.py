"""What kernels over packed matrices share: 32 codes of a row times 32 inputs, activations.

Knows how MLX packs codes (LSB first, 32 codes in `bits` words) and how a GPU turns them into
floats cheaply. Does not know matrices.

A code is made a float without a conversion, which would run at a quarter of the rate: its bits
are put into the mantissa of 2^23, and 2^23 is subtracted. Codes that stand higher in their word
stay there: they come out times a power of two, and `ts_unplace` divides the input by it.
"""

from __future__ import annotations

from turbospark.dtypes import Format, Quant
from turbospark.kernels.source import SIMD, ceil_div

CODES = 32
"""Codes handled at once; their words start at a 4-byte boundary for every width."""

HEADER = r"""
// The words of one chunk of 32 codes, with the widest aligned loads.
template <int BITS, typename P>
TS_FN void ts_chunk(P p, TS_THREAD uint* w) {
  if (BITS % 4 == 0) {
    TS_UNROLL
    for (int i = 0; i < BITS; i += 4) {
      const uint4 v = ts_stream_u32x4(p + i);
      w[i] = v.x;
      w[i + 1] = v.y;
      w[i + 2] = v.z;
      w[i + 3] = v.w;
    }
  } else if (BITS % 2 == 0) {
    TS_UNROLL
    for (int i = 0; i < BITS; i += 2) {
      const uint2 v = ts_load_u32x2(p + i);
      w[i] = v.x;
      w[i + 1] = v.y;
    }
  } else {
    TS_UNROLL
    for (int i = 0; i < BITS; i++) w[i] = p[i];
  }
}

// The masked bits of u as an integer, below 2^23.
TS_FN float ts_small(uint u, uint mask) {
  return ts_as_float(ts_and_or(u, mask, 0x4B000000u)) - 8388608.0f;
}

// What input i (0..7) of an octet is multiplied by, so that codes may stay where they stand.
template <int BITS>
TS_FN float ts_unplace(int i) {
  int shift = 0;
  if (BITS == 2) shift = 2 * i;
  if (BITS == 4) shift = 4 * (i % 5);
  if (BITS == 8) shift = 8 * (i % 2);
  return ts_as_float(uint(127 - shift) << 23);
}

// Code i of octet o, times the power of two that ts_unplace takes away.
template <int BITS>
TS_FN float ts_placed(TS_THREAD const uint* w, int o, int i) {
  if (BITS == 2) return ts_small(w[o / 2] >> (16 * (o % 2)), 3u << (2 * i));
  if (BITS == 4) return ts_small(w[o] >> (i < 5 ? 0 : 20), 15u << (4 * (i % 5)));
  if (BITS == 8) return ts_small(w[2 * o + i / 4] >> (16 * (i % 4 / 2)), 255u << (8 * (i % 2)));
  const int bit = (8 * o + i) * BITS;
  const int at = bit % 32;
  uint code = w[bit / 32] >> at;
  if (at + BITS > 32) code |= w[bit / 32 + 1] << (32 - at);
  return ts_small(code, (1u << BITS) - 1u);
}

// Nibble i of a word as e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
TS_FN float ts_e2m1(uint word, int i) {
  const uint nibble = (word >> (4 * i)) & 15u;
  const float v = 0.5f * ts_small(0xC8643210u >> (4u * (nibble & 7u)), 15u);
  return ts_as_float(ts_as_uint(v) ^ ((nibble & 8u) << 28));
}

// Adds the products of octet o's codes with x to d.
template <int BITS, bool FP4>
TS_FN float ts_dot8(TS_THREAD const uint* w, int o, TS_THREAD const float* x, float d) {
  TS_UNROLL
  for (int i = 0; i < 8; i++)
    d = ts_fma(FP4 ? ts_e2m1(w[o], i) : ts_placed<BITS>(w, o, i), x[i], d);
  return d;
}

// A stored scale as float; a byte is a power of two with bias 127.
template <typename S>
TS_FN float ts_scale(S s) { return float(s); }
TS_FN float ts_scale(uint8_t s) {
  return ts_as_float(s == 0 ? 0x00400000u : uint(s) << 23);
}

// --- a tile of x in shared memory: chunks of 32 floats, 4 of padding against bank conflicts ---

// Octet i of a tile, divided as ts_unplace says; 4 neighbouring lanes sum a chunk.
template <int BITS, bool FP4, typename PX, typename PS>
TS_FN void ts_put_octet(TS_THREAD float* v, int i, PX x_s, PS sum_s) {
  float sum = 0.0f;
  TS_UNROLL
  for (int j = 0; j < 8; j++) {
    sum += v[j];
    v[j] *= FP4 ? 1.0f : ts_unplace<BITS>(j);
  }
  sum += ts_shuffle_xor(sum, 1);
  sum += ts_shuffle_xor(sum, 2);
  auto to = x_s + (i / 4 * 36 + i % 4 * 8);
  ts_store_f32x4(to, v[0], v[1], v[2], v[3]);
  ts_store_f32x4(to + 4, v[4], v[5], v[6], v[7]);
  if (i % 4 == 0) sum_s[i / 4] = sum;
}

// Adds R rows' chunks times MT rows of x: w [R, BITS], s and b [R], tiles of TILE chunks in shared
// memory, chunk `at` of them; acc [R, MT].
template <int BITS, bool FP4, int R, int MT, int TILE, typename PX, typename PS>
TS_FN void ts_multiply(TS_THREAD const uint* w, TS_THREAD const float* s, TS_THREAD const float* b,
                       PX x_s, PS sum_s, int at, TS_THREAD float* acc) {
  float d[R * MT];
  TS_UNROLL
  for (int i = 0; i < R * MT; i++) d[i] = 0.0f;
  TS_UNROLL
  for (int o = 0; o < 4; o++) {
    TS_UNROLL
    for (int t = 0; t < MT; t++) {
      auto from = x_s + ((t * TILE + at) * 36 + o * 8);
      const float4 lo = ts_load_f32x4(from);
      const float4 hi = ts_load_f32x4(from + 4);
      const float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
      TS_UNROLL
      for (int r = 0; r < R; r++)
        d[r * MT + t] = ts_dot8<BITS, FP4>(w + r * BITS, o, v, d[r * MT + t]);
    }
  }
  TS_UNROLL
  for (int t = 0; t < MT; t++) {
    const float sum = sum_s[t * TILE + at];
    TS_UNROLL
    for (int r = 0; r < R; r++)
      acc[r * MT + t] = ts_fma(s[r], d[r * MT + t], ts_fma(b[r], sum, acc[r * MT + t]));
  }
}

// silu(gate) * up (1), gelu(gate) * up by the tanh approximation (2), or with both clamped to the
// limit, gate only above: (up + 1) * gate * sigmoid(alpha * gate) (3).
template <int GLU>
TS_FN float ts_glu(float g, float u, float alpha, float limit) {
  if (GLU == 2) {
    const float cubic = ts_fma(0.044715f * g * g, g, g);
    return 0.5f * g * (1.0f + ts_tanh(0.7978845608028654f * cubic)) * u;
  }
  if (GLU == 3) {
    g = ts_min(g, limit);
    u = ts_max(ts_min(u, limit), -limit) + 1.0f;
  }
  return g / (1.0f + ts_exp(GLU == 3 ? -alpha * g : -g)) * u;
}
"""

GLU = {None: 0, "silu": 1, "gelu": 2, "clamped": 3}
"""Gated activations by name: the template value of ts_glu, 0 for none."""

KERNEL_BITS = (2, 3, 4, 5, 6, 8)


def tile_turns(chunks: int, most: int) -> int:
    """Chunks a lane takes per tile, at most `most`, so that tiles are of about equal length."""
    turns = ceil_div(chunks, SIMD)
    return ceil_div(turns, ceil_div(turns, most))


def is_unpackable(fmt: Format) -> bool:
    """Whether the helpers read `fmt`: affine of most widths, and mxfp4."""
    if not isinstance(fmt, Quant):
        return False
    return fmt.mode == "mxfp4" or (fmt.mode == "affine" and fmt.bits in KERNEL_BITS)
