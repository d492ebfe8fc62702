"""Helpers that kernels over packed matrices share: 32 codes of a row times 32 inputs.

Knows how MLX packs codes (LSB first, 32 codes in `bits` words) and how a GPU turns them into
floats cheaply. Does not know matrices.

A code is made a float without a conversion, which would run at a quarter of the rate: its bits
are put into the mantissa of 2^23, and 2^23 is subtracted. Codes that stand higher in their word
stay there: they come out times a power of two, and `ts_unplace` divides the input by it.
"""

from __future__ import annotations

from turbospark.dtypes import Format, Quant

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

// silu(gate) * up, or gelu(gate) * up by the tanh approximation.
TS_FN float ts_silu_glu(float g, float u) { return g / (1.0f + ts_exp(-g)) * u; }
TS_FN float ts_gelu_glu(float g, float u) {
  const float cubic = ts_fma(0.044715f * g * g, g, g);
  return 0.5f * g * (1.0f + ts_tanh(0.7978845608028654f * cubic)) * u;
}
"""

KERNEL_BITS = (2, 3, 4, 5, 6, 8)


def is_unpackable(fmt: Format) -> bool:
    """Whether the helpers read `fmt`: affine of most widths, and mxfp4."""
    if not isinstance(fmt, Quant):
        return False
    return fmt.mode == "mxfp4" or (fmt.mode == "affine" and fmt.bits in KERNEL_BITS)
