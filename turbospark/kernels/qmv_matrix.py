"""`qmv` on the matrix unit: the body and launch for 16-bit inputs and codes of 4 or 8 bits.

Knows what `fused` describes; `qmv` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.kernels import tiles
from turbospark.kernels.fused import MAX_ROWS, Around, Parts, inputs
from turbospark.kernels.source import SIMD, Kernel, Launch, Plan, Value, ceil_div
from turbospark.kernels.unpack import HEADER

# A simdgroup multiplies RT tiles of 16 rows by its slices of K, U groups at a time; the KS
# simdgroups of a threadgroup share K and add up at the end. A simdgroup keeps its slice of x in
# shared memory of its own: octets of 8 values paired as codes are, one row of x after the other.
BODY = r"""
  constexpr int GROUPS = K / GROUP;
  constexpr int OCTETS = GROUP / 8;          // of a group
  constexpr int MINE = GROUP / 32;           // octets of a group that a lane holds
  constexpr int WORDS = GROUP * BITS / 128;  // words of a group that a lane holds
  constexpr int ROW = U * OCTETS * 4 + 4;    // words of one row of x in shared memory
  constexpr int OUTS = GLU > 0 ? N / 2 : N;
  constexpr int PER = GLU > 0 ? 8 : 16;      // outputs of a tile
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int g = lane / 4;
  const int t = lane % 4;
  const int unit0 = int(threadgroup_position_in_grid.x) * RT * PER;

  TS_SHARED(uint, x_s, KS * M * ROW);
  TS_SHARED(float, sum_s, KS * M * U);
  TS_SHARED(float, part_s, KS * RT * 16 * M);
  TS_SHARED(float, square_s, KS * M);
  auto my_x = x_s + sg * M * ROW;
  auto my_sum = sum_s + sg * M * U;

  // Rows past the end repeat the last one; they are not written.
  int row[RT * 2];
  for (int i = 0; i < RT * 2; i++) {
    const int unit = unit0 + i / 2 * PER + g + (GLU > 0 ? 0 : i % 2 * 8);
    row[i] = ts_min(unit, OUTS - 1) + (GLU > 0 ? i % 2 * OUTS : 0);
  }
  float acc[RT * 4], square[M];
  for (int i = 0; i < RT * 4; i++) acc[i] = 0.0f;
  for (int m = 0; m < M; m++) square[m] = 0.0f;

  for (int group0 = sg * U; group0 < GROUPS; group0 += KS * U) {
    uint w[RT * 2 * U * WORDS];
    float s[RT * 2 * U], b[RT * 2 * U];
    TS_UNROLL
    for (int i = 0; i < RT * 2; i++) {
      const int64_t at = int64_t(row[i]) * GROUPS + group0;
      TS_UNROLL
      for (int u = 0; u < U; u++)
        ts_words<WORDS>(weight + (at + u) * (WORDS * 4) + t * WORDS, w + (i * U + u) * WORDS);
      ts_scales<U, true>(scales + at, s + i * U);
      ts_scales<U, !FP4>(biases + at, b + i * U);
    }

    ts_await();
    ts_simd_barrier();
    TS_UNROLL
    for (int m = 0; m < M; m++) {
      for (int i0 = 0; i0 < U * OCTETS; i0 += 32) {
        const int i = i0 + lane;
        const bool live = i < U * OCTETS;
        const int column = group0 * GROUP + i * 8;
        float v[8];
        for (int j = 0; j < 8; j++) v[j] = 0.0f;
        if (live) {
          ts_load8(x + m * K + column, v);
          if (NORM) {
            float n[8];
            ts_load8(norm + column, n);
            TS_UNROLL
            for (int j = 0; j < 8; j++) {
              square[m] = ts_fma(v[j], v[j], square[m]);
              v[j] *= n[j];
            }
          }
        }
        ts_put_pairs<T, BITS, FP4, HALF, OCTETS>(v, i, live, my_x + m * ROW, my_sum + m * U);
      }
    }
    ts_simd_barrier();

    // Rows of x that are not there repeat the last one.
    auto lane_x = my_x + (ts_min(g, M - 1) * ROW + t * MINE * 4);
    ts_tiles<T, BITS, FP4, HALF, GROUP, RT, U, M>(w, s, b, lane_x, my_sum, lane, acc);
  }

  ts_await();
  // acc[i]: row i / 2 of row[], column 2 t + i % 2.
  TS_UNROLL
  for (int i = 0; i < RT * 4; i++) {
    const int m = 2 * t + i % 2;
    const int r = i / 4 * 16 + i % 4 / 2 * 8 + g;
    if (m < M) part_s[(sg * RT * 16 + r) * M + m] = acc[i];
  }
  if (NORM) {
    TS_UNROLL
    for (int m = 0; m < M; m++) {
      const float part = ts_simd_sum(square[m]);
      if (lane == 0) square_s[sg * M + m] = part;
    }
  }
  ts_barrier();
  for (int i = tid; i < RT * PER * M; i += 32 * KS) {
    const int m = i % M;
    const int unit = i / M;
    const int r = unit / PER * 16 + unit % PER;
    float value = 0.0f;
    float up = 0.0f;
    for (int k = 0; k < KS; k++) {
      value += part_s[(k * RT * 16 + r) * M + m];
      if (GLU > 0) up += part_s[(k * RT * 16 + r + 8) * M + m];
    }
    if (NORM) {
      float all = 0.0f;
      for (int k = 0; k < KS; k++) all += square_s[k * M + m];
      const float scale = ts_rsqrt(all / float(K) + eps[0]);
      value *= scale;
      up *= scale;
    }
    if (unit0 + unit < OUTS) {
      if (BIAS) {
        value += float(bias[unit0 + unit]);
        if (GLU > 0) up += float(bias[OUTS + unit0 + unit]);
      }
      if (GLU > 0) value = ts_glu<GLU>(value, up, 1.0f, 1.0f);
      const int at = m * OUTS + unit0 + unit;
      if (RESIDUAL) value += float(residual[at]);
      y[at] = T(value);
    }
  }
"""

KERNEL = Kernel(
    "qmv_matrix",
    ("x", "weight", "scales", "biases", "norm", "eps", "bias", "residual"),
    ("y",),
    BODY,
    HEADER + tiles.HEADER,
)
SHARED_BYTES = 24 << 10
CODE_WORDS = 64


@dataclass(frozen=True)
class Tuning:
    """`tiles` of 16 rows per threadgroup; `simdgroups` that share K, at most."""

    tiles: int = 1
    simdgroups: int = 8


def takes(fmt: Quant, dtype: mx.Dtype, k: int, m: int, parts: Parts) -> bool:
    """Whether the kernel computes m rows of k columns.

    A half times a norm's weight could overflow before it is divided: not on this unit.
    """
    fits = tiles.on_matrix_unit(fmt, dtype) and k % fmt.group_size == 0 and 1 <= m <= MAX_ROWS
    return fits and not (parts.norm and dtype == mx.float16)


def launch(
    x: mx.array,
    fmt: Quant,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    around: Around,
    tuning: Tuning,
) -> Launch:
    """The kernel's launch for the arguments of `qmv_reference`.

    x must begin at a multiple of 16 bytes.
    """
    p = plan(fmt, weight.shape[0], tuple(x.shape), x.dtype, around.parts, tuning)
    return Launch(p, inputs(x, weight, scales, biases, around))


@lru_cache(maxsize=1024)
def plan(
    fmt: Quant, n: int, x: tuple[int, ...], dtype: mx.Dtype, parts: Parts, tuning: Tuning
) -> Plan:
    """What `launch` fixes for inputs of shape `x` and `dtype`."""
    k = x[-1]
    m = math.prod(x[:-1])
    outs = n // 2 if parts.glu else n
    turn = most_groups(k // fmt.group_size, fmt, m, tuning)
    shared = simdgroups_for(k // fmt.group_size // turn, tuning.simdgroups)
    template: dict[str, Value] = {
        "T": dtype,
        "K": k,
        "N": n,
        "M": m,
        "U": turn,
        "RT": tuning.tiles,
        "KS": shared,
        "HALF": dtype == mx.float16,
        **parts.template(fmt),
    }
    groups = (ceil_div(outs, tuning.tiles * (8 if parts.glu else 16)), 1, 1)
    return Plan(KERNEL, template, groups, SIMD * shared, (((*x[:-1], outs), dtype),))


def most_groups(groups: int, fmt: Quant, m: int, tuning: Tuning) -> int:
    """Groups a simdgroup takes per turn: a divisor of `groups` that shared memory (for x) and
    registers (for codes) can hold.
    """
    for turn in (8, 4, 2):
        shared = tuning.simdgroups * m * turn * fmt.group_size * 2
        words = tuning.tiles * 2 * turn * fmt.group_size * fmt.bits // 128
        if groups % turn == 0 and shared <= SHARED_BYTES and words <= CODE_WORDS:
            return turn
    return 1


def simdgroups_for(turns: int, most: int) -> int:
    """How many simdgroups share `turns` so that none idles, as far as possible."""
    return max(range(1, most + 1), key=lambda n: (turns / n / ceil_div(turns, n) > 0.9, n))
