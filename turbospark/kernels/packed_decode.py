"""Attention of 1 to 8 new rows over packed keys and values: the launches.

In this order: partial sums of each split of the codes, and of the exact rows; their combination,
turned back. The same in plain MLX is `packed_attention`. Products run on the matrix unit in half
precision with float32 sums: codes become pairs of halves by one mask and the codebook's cubic, row
scales are applied to scores and weights.

Of a query group of 8, lane 4 g + t holds query g. A block's keys are read as rows g, g + 8, ...
with the t-th quarter of their dims, its values as dims by tokens 2 t, 2 t + 1 of every 8: the
orders in which `kv_codec` packs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from turbospark.kernels import kv_codec, tiles
from turbospark.kernels.choices import backend
from turbospark.kernels.decode_attention import WEIGH
from turbospark.kernels.packed_attention import Near, Packed
from turbospark.kernels.source import (
    SIMD,
    Kernel,
    Launch,
    Plan,
    Value,
    ceil_div,
    constant,
    constant_ints,
)

HEAD_DIMS = (64, 128, 256)
MAX_ROWS = 8
QUERIES = 8
BACKENDS = ("cuda",)
"""Back ends on which the launches win; on Metal the matrix unit is used through shuffles."""


@dataclass(frozen=True)
class Tuning:
    """`simdgroups` per threadgroup; `splits` of the codes, besides the one of exact rows."""

    simdgroups: int = 4
    splits: int = 64


RESIDENT = {64: 528, 128: 660, 256: 528}
"""Threadgroups that one H200 holds at once, by the registers they take."""


def tuned(dim: int, kv: int) -> Tuning:
    """How the partial sums run for `kv` key heads of `dim`: one wave of threadgroups."""
    splits = max(8, min(128, RESIDENT[dim] // kv - 1))
    return Tuning(4 if dim == 64 else 2, splits)


# --- partial sums ---------------------------------------------------------------------------------

HEADER = (
    tiles.HEADER
    + r"""
// w moved down by `by` bits, up where that is below 0.
TS_FN uint ts_down(uint w, int by) { return by >= 0 ? w >> by : w << -by; }

// Pair i of a word of low bits, with bit j of a word of high bits: two halves 512 + code.
template <int BITS>
TS_FN uint ts_codes(uint low, int i, uint high, int j) {
  if (BITS == 4) return ts_and_or(ts_down(low, 4 * i - 1), 0x001E001Eu, 0x60006000u);
  const uint x = ts_and_or(ts_down(low, 2 * i - 1), 0x00060006u, 0x60006000u);
  return BITS == 3 ? ts_and_or(ts_down(high, j - 3), 0x00080008u, x) : x;
}

// Lane t's words of a key, low bits and high ones.
template <int D, int BITS, typename P>
TS_FN void ts_key_words(P row, int t, TS_THREAD uint* low, TS_THREAD uint* high) {
  constexpr int PAIRS = D / 8;
  constexpr int LOW = PAIRS * (BITS == 4 ? 4 : 2) / 16;
  ts_words<LOW>(row + t * LOW, low);
  high[0] = 0u;
  if (BITS == 3) {
    ts_words<(PAIRS + 15) / 16>(row + D / 16 + t * PAIRS / 16, high);
    high[0] >>= t * PAIRS % 16;
  }
}

// What two codes stand for: u (A + B u^2), u counted from the middle code.
template <int BITS>
TS_FN uint ts_levels(uint codes, uint a, uint b) {
  const uint middle = BITS == 4 ? 0xE00FE00Fu : BITS == 3 ? 0xE007E007u : 0xE003E003u;
  const uint u = ts_h2_add(codes, middle);
  return ts_h2_mul(u, ts_h2_fma(ts_h2_mul(u, u), b, a));
}
"""
)

# The new maximum and weights of a block; d [4][2] are scores of tokens 8 r + 2 t + e.
SOFTMAX = r"""
      float top_new = top;
      TS_UNROLL
      for (int i = 0; i < 8; i++) {
        if (CAPPED) d[i / 2][i % 2] = numbers[0] * ts_tanh(d[i / 2][i % 2] / numbers[0]);
        if (live[i]) top_new = ts_max(top_new, d[i / 2][i % 2]);
      }
      top_new = ts_max(top_new, ts_shuffle_xor(top_new, 1));
      top_new = ts_max(top_new, ts_shuffle_xor(top_new, 2));
      const float fade = ts_fast_exp(top - top_new);
      top = top_new;
      sum *= fade;
      TS_UNROLL
      for (int i = 0; i < 8; i++) {
        const float p = live[i] ? ts_fast_exp(d[i / 2][i % 2] - top_new) : 0.0f;
        sum += p;
        d[i / 2][i % 2] = p;
      }
      TS_UNROLL
      for (int n = 0; n < D / 8; n++) {
        acc[n][0] *= fade;
        acc[n][1] *= fade;
      }
"""

PARTIAL = r"""
  constexpr int PAIRS = D / 8;  // of dims that a lane holds of a key
  constexpr int STEPS = D / 16;
  constexpr int KL = KB == 4 ? 4 : 2;
  constexpr int VL = VB == 4 ? 4 : 2;
  constexpr int K_ROW = D * KB / 32;
  constexpr int K_LOW = PAIRS * KL / 16;
  constexpr int K_HIGH = (PAIRS + 15) / 16;
  constexpr int K_PER = 16 / KL;
  constexpr bool EARLY = D <= 128;  // values are on their way while scores are computed
  constexpr int HELD = EARLY ? D / 8 : 4;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int split = int(threadgroup_position_in_grid.x);
  const int kv = int(threadgroup_position_in_grid.y);
  const int q0 = int(threadgroup_position_in_grid.z) * 8;
  const int g = lane / 4;
  const int t = lane % 4;
  const int capacity = sizes[0];
  const int splits = sizes[1];
  const int ring = sizes[2];
  const int count = length[0];

  TS_SHARED(float, acc_s, SG * 8 * D);
  TS_SHARED(float, max_s, SG * 8);
  TS_SHARED(float, sum_s, SG * 8);

  const int query = ts_min(q0 + g, NQ - 1);
  const int position = count - M + query % M;
  const int limit = ts_max(position / 32 - 1, 0) * 32;  // packed before, exact from here on
  uint qf[STEPS][2];
  for (int s = 0; s < STEPS; s++) {
    auto row = q + (kv * NQ + query) * D + 2 * (t * PAIRS + 2 * s);
    qf[s][0] = ts_pair<float16_t>(row[0], row[1]);
    qf[s][1] = ts_pair<float16_t>(row[2], row[3]);
  }
  float acc[D / 8][2];
  for (int n = 0; n < D / 8; n++) {
    acc[n][0] = 0.0f;
    acc[n][1] = 0.0f;
  }
  float top = -1e30f;
  float sum = 0.0f;
  float unit = 1.0f;
  bool present = true;

  if (split < splits) {
    const int blocks = ts_max((count - 1) / 32 - 1, 0);
    const int each = (blocks + splits - 1) / splits;
    const int begin = split * each;
    const int stop = ts_min(begin + each, blocks);
    present = begin < stop;
    // Weights times value scales are halves: one scale of the split is taken out.
    const int64_t at0 = (int64_t(kv) * capacity + ts_min(begin, stop) * 32) / 2;
    const float scale = present ? ts_low<float16_t>(value_scales[at0]) : 1.0f;
    unit = scale > 0.0f ? scale : 1.0f;
    for (int b = begin + sg; b < stop; b += SG) {
      uint kw[EARLY ? 4 : 1][K_LOW], kh[EARLY ? 4 : 1][K_HIGH], vw[HELD], vh[HELD];
      auto rows = keys + (int64_t(kv) * capacity + b * 32 + g) * K_ROW;
      TS_UNROLL
      for (int r = 0; r < (EARLY ? 4 : 0); r++)
        ts_key_words<D, KB>(rows + r * 8 * K_ROW, t, kw[r], kh[r]);
      auto block = values + (int64_t(kv) * (capacity / 32) + b) * (VB * D) + g * 4;
      const int row = (VL == 4 ? t : t / 2) * D;
      TS_UNROLL
      for (int j = 0; j < (EARLY ? D / 32 : 0); j++) {
        ts_words<4>(block + row + j * 32, vw + j * 4);
        if (VB == 3) ts_words<4>(block + 2 * D + j * 32, vh + j * 4);
      }
      float d[4][2];
      TS_UNROLL
      for (int r = 0; r < 4; r++) {
        const int held = EARLY ? r : 0;
        if (!EARLY) ts_key_words<D, KB>(rows + r * 8 * K_ROW, t, kw[held], kh[held]);
        d[r][0] = 0.0f;
        d[r][1] = 0.0f;
        TS_UNROLL
        for (int s = 0; s < STEPS; s++) {
          uint key[2];
          TS_UNROLL
          for (int h = 0; h < 2; h++) {
            const int pair = 2 * s + h;
            const uint codes = ts_codes<KB>(kw[held][pair / K_PER], pair % K_PER,
                                            kh[held][KB == 3 ? pair / 16 : 0], pair % 16);
            key[h] = ts_levels<KB>(codes, uint(KEY_A), uint(KEY_B));
          }
          ts_mma_top(d[r], qf[s], key);
        }
      }
      bool live[8];
      float by_value[8];
      TS_UNROLL
      for (int r = 0; r < 4; r++) {
        const int64_t at = (int64_t(kv) * capacity + b * 32) / 2 + r * 4 + t;
        const uint ks = key_scales[at];
        const uint vs = value_scales[at];
        d[r][0] *= ts_low<float16_t>(ks);
        d[r][1] *= ts_high<float16_t>(ks);
        by_value[2 * r] = ts_low<float16_t>(vs) / unit;
        by_value[2 * r + 1] = ts_high<float16_t>(vs) / unit;
        TS_UNROLL
        for (int e = 0; e < 2; e++) {
          const int p = b * 32 + r * 8 + 2 * t + e;
          live[2 * r + e] = p >= 4 && p < limit;
        }
      }
SOFTMAX
      uint weights[2][2];
      TS_UNROLL
      for (int r = 0; r < 4; r++) {
        weights[r / 2][r % 2] =
            ts_pair<float16_t>(ts_min(d[r][0] * by_value[2 * r], 65504.0f),
                               ts_min(d[r][1] * by_value[2 * r + 1], 65504.0f));
      }
      TS_UNROLL
      for (int n = 0; n < D / 8; n++) {
        if (!EARLY && n % 4 == 0) {
          ts_words<4>(block + row + n * 8, vw);
          if (VB == 3) ts_words<4>(block + 2 * D + n * 8, vh);
        }
        const int held = EARLY ? n : n % 4;
        const uint low = VL == 4 ? vw[held] : vw[held] >> (8 * (t % 2));
        const uint high = VB == 3 ? vh[held] >> (4 * t) : 0u;
        TS_UNROLL
        for (int s = 0; s < 2; s++) {
          uint value[2];
          TS_UNROLL
          for (int h = 0; h < 2; h++)
            value[h] = ts_levels<VB>(ts_codes<VB>(low, 2 * s + h, high, 2 * s + h),
                                     uint(VALUE_A), uint(VALUE_B));
          ts_mma_top(acc[n], weights[s], value);
        }
      }
    }
  } else {
    const int oldest = ts_max((count - M) / 32 - 1, 0) * 32;
    const int all = 4 + count - oldest;  // the first four, then positions from the oldest on
    for (int b = sg; b * 32 < all; b += SG) {
      float d[4][2];
      TS_UNROLL
      for (int r = 0; r < 4; r++) {
        const int x = ts_min(b * 32 + r * 8 + g, all - 1);
        auto row = x < 4 ? first_keys + (kv * 4 + x) * (D / 2)
                         : new_keys + (kv * ring + (oldest + x - 4) % ring) * (D / 2);
        d[r][0] = 0.0f;
        d[r][1] = 0.0f;
        TS_UNROLL
        for (int s = 0; s < STEPS; s++) {
          uint key[2];
          key[0] = row[t * PAIRS + 2 * s];
          key[1] = row[t * PAIRS + 2 * s + 1];
          ts_mma_top(d[r], qf[s], key);
        }
      }
      bool live[8];
      TS_UNROLL
      for (int i = 0; i < 8; i++) {
        const int x = b * 32 + i / 2 * 8 + 2 * t + i % 2;
        const int p = oldest + x - 4;
        live[i] = x < 4 ? limit > 0 : x < all && p >= limit && p <= position;
      }
SOFTMAX
      TS_UNROLL
      for (int s = 0; s < 2; s++) {
        uint weights[2];
        weights[0] = ts_pair<float16_t>(d[2 * s][0], d[2 * s][1]);
        weights[1] = ts_pair<float16_t>(d[2 * s + 1][0], d[2 * s + 1][1]);
        TS_UNROLL
        for (int n = 0; n < D / 8; n++) {
          const int dim = n / 4 * 32 + g * 4 + n % 4;
          float part[4];
          TS_UNROLL
          for (int i = 0; i < 4; i++) {
            const int x = ts_min(b * 32 + s * 16 + i / 2 * 8 + 2 * t + i % 2, all - 1);
            part[i] = x < 4 ? float(first_values[(kv * 4 + x) * D + dim])
                            : float(new_values[(kv * ring + (oldest + x - 4) % ring) * D + dim]);
          }
          uint value[2];
          value[0] = ts_pair<float16_t>(part[0], part[1]);
          value[1] = ts_pair<float16_t>(part[2], part[3]);
          ts_mma_top(acc[n], weights, value);
        }
      }
    }
  }

  sum += ts_shuffle_xor(sum, 1);
  sum += ts_shuffle_xor(sum, 2);
  TS_UNROLL
  for (int n = 0; n < D / 8; n++) {
    const int at = (sg * 8 + g) * D + n / 4 * 32 + 8 * t + n % 4;
    acc_s[at] = acc[n][0];
    acc_s[at + 4] = acc[n][1];
  }
  if (t == 0) {
    max_s[sg * 8 + g] = top;
    sum_s[sg * 8 + g] = sum;
  }
  ts_barrier();
  for (int i = tid; i < 8 * D; i += 32 * SG) {
    const int own = i / D;
    float best = -1e30f;
    for (int j = 0; j < SG; j++) best = ts_max(best, max_s[j * 8 + own]);
    float total = 0.0f;
    float value = 0.0f;
    for (int j = 0; j < SG; j++) {
      const float f = ts_fast_exp(max_s[j * 8 + own] - best);
      total = ts_fma(f, sum_s[j * 8 + own], total);
      value = ts_fma(f, acc_s[(j * 8 + own) * D + i % D], value);
    }
    if (q0 + own < NQ) {
      const int64_t at = int64_t(kv * NQ + q0 + own) * (splits + 1) + split;
      if (present) o[at * D + i % D] = value * unit;
      if (i % D == 0) {
        ml[at * 2] = best;
        ml[at * 2 + 1] = total;
      }
    }
  }
""".replace("SOFTMAX", SOFTMAX)

PARTIAL_KERNEL = Kernel(
    "packed_partial",
    (
        "q", "keys", "key_scales", "values", "value_scales", "new_keys", "new_values",
        "first_keys", "first_values", "length", "numbers", "sizes",
    ),
    ("o", "ml"),
    PARTIAL,
    HEADER,
    partial=("o",),
)  # fmt: skip


def launch_partial(
    q: mx.array,
    packed: Packed,
    near: Near,
    length: mx.array,
    tuning: Tuning,
    soft_cap: float = 0.0,
) -> Launch:
    """Partial sums for turned queries float32 [H, M, D]; `near` holds the whole ring."""
    heads, rows, dim = q.shape
    kv = packed.keys.shape[0]
    p = _plan_partial(
        heads, kv, rows, dim, packed.key_bits, packed.value_bits, soft_cap > 0, tuning
    )
    words = [
        a.view(mx.uint32)
        for a in (packed.key_scales, packed.value_scales, near.keys, near.first_keys)
    ]
    sizes = constant_ints(packed.capacity, tuning.splits, near.keys.shape[1])
    inputs = [
        q, packed.keys, words[0], packed.values, words[1], words[2], near.values,
        words[3], near.first_values, length, constant(soft_cap, 0.0), sizes,
    ]  # fmt: skip
    return Launch(p, inputs)


@lru_cache(maxsize=1024)
def _plan_partial(
    heads: int, kv: int, rows: int, dim: int, kb: int, vb: int, capped: bool, tuning: Tuning
) -> Plan:
    queries = heads // kv * rows
    (key_a, key_b), (value_a, value_b) = (_halves(b) for b in (kb, vb))
    template: dict[str, Value] = {
        "D": dim, "M": rows, "NQ": queries, "KB": kb, "VB": vb, "SG": tuning.simdgroups,
        "CAPPED": capped, "KEY_A": key_a, "KEY_B": key_b, "VALUE_A": value_a, "VALUE_B": value_b,
    }  # fmt: skip
    groups = (tuning.splits + 1, kv, ceil_div(queries, QUERIES))
    outputs = (
        ((heads * rows, tuning.splits + 1, dim), mx.float32),
        ((heads * rows, tuning.splits + 1, 2), mx.float32),
    )
    return Plan(PARTIAL_KERNEL, template, groups, SIMD * tuning.simdgroups, outputs)


def _halves(bits: int) -> list[int]:
    """The codebook's A and B, each twice in a word."""
    return [int(np.float16(x).view(np.uint16)) * 0x10001 for x in kv_codec.cubic(bits)]


# --- combination ----------------------------------------------------------------------------------

# One threadgroup per query: a lane weighs a split, a thread sums a dim, then all turn it back.
COMBINE = r"""
  const int d = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int query = int(threadgroup_position_in_grid.x);
  const int splits = sizes[0];
  const float sink = SINKS ? float(sinks[query]) : -1e30f;
  TS_SHARED(float, x_s, D);
"""
COMBINE += WEIGH
COMBINE += r"""
  float x = value / total * numbers[0];
  TS_UNROLL
  for (int mask = 1; mask < 32; mask <<= 1) {
    const float other = ts_shuffle_xor(x, mask);
    x = (lane & mask) != 0 ? other - x : x + other;
  }
  for (int mask = 32; mask < D; mask <<= 1) {
    x_s[d] = x;
    ts_barrier();
    const float other = x_s[d ^ mask];
    x = (d & mask) != 0 ? other - x : x + other;
    ts_barrier();
  }
  out[(query % M * H + query / M) * D + d] = T(x * signs[d]);
"""
COMBINE_KERNEL = Kernel(
    "packed_combine", ("o", "ml", "sinks", "signs", "numbers", "sizes"), ("out",), COMBINE
)


def launch_combine(
    q: mx.array, o: mx.array, ml: mx.array, sinks: mx.array | None, dtype: mx.Dtype, tuning: Tuning
) -> Launch:
    """The result [1, M, H * D] of `dtype`, turned back; sinks float32 [H, M]."""
    heads, rows, dim = q.shape
    p = _plan_combine(heads, rows, dim, dtype, sinks is not None)
    signs = kv_codec.signs(dim, kv_codec.VALUE_SEED)
    sizes = constant_ints(tuning.splits + 1)
    return Launch(p, [o, ml, o if sinks is None else sinks, signs, constant(dim**-0.5), sizes])


@lru_cache(maxsize=1024)
def _plan_combine(heads: int, rows: int, dim: int, dtype: mx.Dtype, sinks: bool) -> Plan:
    template: dict[str, Value] = {"T": dtype, "D": dim, "M": rows, "H": heads, "SINKS": sinks}
    outputs = (((1, rows, heads * dim), dtype),)
    return Plan(COMBINE_KERNEL, template, (heads * rows, 1, 1), dim, outputs)


# --- choice ---------------------------------------------------------------------------------------


def takes(dim: int) -> bool:
    """Whether the launches compute heads of `dim` here, for up to MAX_ROWS rows."""
    return backend(mx.default_device()) in BACKENDS and dim in HEAD_DIMS


def packed_decode(
    q: mx.array,
    packed: Packed,
    near: Near,
    length: mx.array,
    sinks: mx.array | None,
    dtype: mx.Dtype,
) -> mx.array:
    """Attention of turned queries [H, M, D], for heads that `takes` accepts -> [1, M, H * D]."""
    where = backend(mx.default_device())
    tuning = tuned(q.shape[-1], packed.keys.shape[0])
    o, ml = launch_partial(q, packed, near, length, tuning).run(where)
    return launch_combine(q, o, ml, sinks, dtype, tuning).run(where)[0]
