"""`expert_mlp` on the matrix unit: bodies and launches for 16-bit inputs, codes of 4 or 8 bits.

Knows what `experts` describes; `expert_mlp` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.kernels import tiles
from turbospark.kernels.experts import Around, Experts, Kind, down_inputs, gate_up_inputs
from turbospark.kernels.qmv_matrix import CODE_WORDS, simdgroups_for
from turbospark.kernels.source import (
    SIMD,
    Kernel,
    Launch,
    Plan,
    Value,
    ceil_div,
)
from turbospark.kernels.unpack import GLU, HEADER

# As `qmv_matrix`, for one (token, rank): a tile is 8 rows of gate and the same 8 of up.
GATE_UP = r"""
  constexpr int GROUPS = K / GROUP;
  constexpr int OCTETS = GROUP / 8;
  constexpr int WORDS = GROUP * BITS / 128;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int unit0 = int(threadgroup_position_in_grid.x) * RT * 8;
  const int rank = int(threadgroup_position_in_grid.y);
  const int token = int(threadgroup_position_in_grid.z);
  const int slot = int(slots[token * RANKS + rank]);
  const int64_t e = ts_max(slot, 0);

  TS_SHARED(uint, x_s, KS * U * OCTETS * 4);
  TS_SHARED(float, sum_s, KS * U);
  TS_SHARED(float, part_s, KS * RT * 16);
  TS_SHARED(float, square_s, KS);
  auto my_x = x_s + sg * U * OCTETS * 4;
  auto my_sum = sum_s + sg * U;

  auto gate_w = gw + e * sizes[1] + sizes[0];
  auto gate_s = gs + e * sizes[3] + sizes[2];
  auto gate_b = gb + e * sizes[5] + sizes[4];
  auto up_w = uw + e * sizes[9] + sizes[8];
  auto up_s = us + e * sizes[11] + sizes[10];
  auto up_b = ub + e * sizes[13] + sizes[12];
  float acc[RT * 4];
  for (int i = 0; i < RT * 4; i++) acc[i] = 0.0f;
  float square = 0.0f;

  for (int group0 = sg * U; group0 < GROUPS; group0 += KS * U) {
    uint w[RT * 2 * U * WORDS];
    float s[RT * 2 * U], b[RT * 2 * U];
    TS_UNROLL
    for (int i = 0; i < RT * 2; i++) {
      const int at = ts_min(unit0 + i / 2 * 8 + lane / 4, F - 1) * GROUPS + group0;
      TS_UNROLL
      for (int u = 0; u < U; u++) {
        const int word = (at + u) * (WORDS * 4) + lane % 4 * WORDS;
        ts_words<WORDS>(i % 2 == 0 ? gate_w + word : up_w + word, w + (i * U + u) * WORDS);
      }
      ts_scales<U, true>(i % 2 == 0 ? gate_s + at : up_s + at, s + i * U);
      ts_scales<U, !FP4>(i % 2 == 0 ? gate_b + at : up_b + at, b + i * U);
    }

    ts_simd_barrier();
    for (int i0 = 0; i0 < U * OCTETS; i0 += 32) {
      const int i = i0 + lane;
      const bool live = i < U * OCTETS;
      const int column = group0 * GROUP + i * 8;
      float v[8];
      for (int j = 0; j < 8; j++) v[j] = 0.0f;
      if (live) {
        ts_load8(x + token * K + column, v);
        if (NORM) {
          float n[8];
          ts_load8(norm + column, n);
          TS_UNROLL
          for (int j = 0; j < 8; j++) {
            square = ts_fma(v[j], v[j], square);
            v[j] *= n[j];
          }
        }
      }
      ts_put_pairs<T, BITS, FP4, HALF, OCTETS>(v, i, live, my_x, my_sum);
    }
    ts_simd_barrier();
    ts_tiles<T, BITS, FP4, HALF, GROUP, RT, U, 1>(w, s, b, my_x + lane % 4 * (OCTETS / 4) * 4,
                                                  my_sum, lane, acc);
  }

  TS_UNROLL
  for (int i = 0; i < RT * 4; i += 2)
    if (lane % 4 == 0) part_s[sg * RT * 16 + i / 2 * 8 + lane / 4] = acc[i];
  if (NORM) {
    const float part = ts_simd_sum(square);
    if (lane == 0) square_s[sg] = part;
  }
  ts_barrier();
  for (int i = tid; i < RT * 8; i += 32 * KS) {
    const int unit = unit0 + i;
    float gate = 0.0f;
    float up = 0.0f;
    for (int k = 0; k < KS; k++) {
      gate += part_s[k * RT * 16 + i / 8 * 16 + i % 8];
      up += part_s[k * RT * 16 + i / 8 * 16 + 8 + i % 8];
    }
    if (NORM) {
      float all = 0.0f;
      for (int k = 0; k < KS; k++) all += square_s[k];
      const float scale = ts_rsqrt(all / float(K) + numbers[0]);
      gate *= scale;
      up *= scale;
    }
    if (unit < F) {
      if (BIAS) {
        gate += float(gate_bias[e * sizes[7] + sizes[6] + unit]);
        up += float(up_bias[e * sizes[15] + sizes[14] + unit]);
      }
      const float value = ts_glu<GLU>(gate, up, numbers[1], numbers[2]);
      h[(token * RANKS + rank) * F + unit] = slot < 0 ? 0.0f : value;
    }
  }
"""

# Simdgroups share the ranks' groups; those of one turn belong to one rank.
DOWN = r"""
  constexpr int EACH = F / GROUP;  // groups of one rank
  constexpr int GROUPS = EACH * RANKS;
  constexpr int OCTETS = GROUP / 8;
  constexpr int WORDS = GROUP * BITS / 128;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int row0 = int(threadgroup_position_in_grid.x) * RT * 16;
  const int token = int(threadgroup_position_in_grid.y);

  TS_SHARED(uint, x_s, KS * U * OCTETS * 4);
  TS_SHARED(float, sum_s, KS * U);
  TS_SHARED(float, part_s, KS * RT * 16);
  auto my_x = x_s + sg * U * OCTETS * 4;
  auto my_sum = sum_s + sg * U;
  float acc[RT * 4];
  for (int i = 0; i < RT * 4; i++) acc[i] = 0.0f;

  for (int group0 = sg * U; group0 < GROUPS; group0 += KS * U) {
    const int rank = group0 / EACH;
    // An unused rank has hidden values of zero: any slot's weights will do.
    const int64_t e = ts_max(int(slots[token * RANKS + rank]), 0);
    auto w_e = dw + e * sizes[1] + sizes[0];
    auto s_e = ds + e * sizes[3] + sizes[2];
    auto b_e = db + e * sizes[5] + sizes[4];
    uint w[RT * 2 * U * WORDS];
    float s[RT * 2 * U], b[RT * 2 * U];
    TS_UNROLL
    for (int i = 0; i < RT * 2; i++) {
      const int at = ts_min(row0 + i * 8 + lane / 4, H - 1) * EACH + group0 % EACH;
      TS_UNROLL
      for (int u = 0; u < U; u++) {
        const int word = (at + u) * (WORDS * 4) + lane % 4 * WORDS;
        ts_words<WORDS>(w_e + word, w + (i * U + u) * WORDS);
      }
      ts_scales<U, true>(s_e + at, s + i * U);
      ts_scales<U, !FP4>(b_e + at, b + i * U);
    }

    const float share = float(weights[token * RANKS + rank]);
    ts_await();
    ts_simd_barrier();
    for (int i0 = 0; i0 < U * OCTETS; i0 += 32) {
      const int i = i0 + lane;
      const bool live = i < U * OCTETS;
      float v[8];
      for (int j = 0; j < 8; j++) v[j] = 0.0f;
      if (live) ts_load8(h + token * RANKS * F + group0 * GROUP + i * 8, v);
      TS_UNROLL
      for (int j = 0; j < 8; j++) v[j] *= share;
      ts_put_pairs<T, BITS, FP4, HALF, OCTETS>(v, i, live, my_x, my_sum);
    }
    ts_simd_barrier();
    ts_tiles<T, BITS, FP4, HALF, GROUP, RT, U, 1>(w, s, b, my_x + lane % 4 * (OCTETS / 4) * 4,
                                                  my_sum, lane, acc);
  }

  ts_await();
  TS_UNROLL
  for (int i = 0; i < RT * 4; i += 2)
    if (lane % 4 == 0) part_s[sg * RT * 16 + i / 2 * 8 + lane / 4] = acc[i];
  ts_barrier();
  for (int i = tid; i < RT * 16; i += 32 * KS) {
    const int row = row0 + i;
    float value = 0.0f;
    for (int k = 0; k < KS; k++) value += part_s[k * RT * 16 + i];
    if (row < H) {
      if (BIAS) {
        for (int rank = 0; rank < RANKS; rank++) {
          const int slot = int(slots[token * RANKS + rank]);
          const float share = slot < 0 ? 0.0f : float(weights[token * RANKS + rank]);
          const int64_t e = ts_max(slot, 0);
          value = ts_fma(share, float(down_bias[e * sizes[7] + sizes[6] + row]), value);
        }
      }
      if (RESIDUAL) value += float(residual[token * H + row]);
      if (BESIDE) value += float(beside[token * H + row]);
      y[token * H + row] = T(value);
    }
  }
"""

GATE_UP_KERNEL = Kernel(
    "expert_gate_up_matrix",
    (
        *("x", "slots", "gw", "gs", "gb", "gate_bias", "uw", "us", "ub", "up_bias"),
        *("norm", "numbers", "sizes"),
    ),
    ("h",),
    GATE_UP,
    HEADER + tiles.HEADER,
)
DOWN_KERNEL = Kernel(
    "expert_down_matrix",
    ("h", "slots", "weights", "dw", "ds", "db", "down_bias", "residual", "beside", "sizes"),
    ("y",),
    DOWN,
    HEADER + tiles.HEADER,
    early=("slots", "weights"),
)


@dataclass(frozen=True)
class Tuning:
    """`tiles` of 16 rows per threadgroup; `simdgroups` that share the columns, at most."""

    tiles: int = 1
    simdgroups: int = 8


def takes(experts: Experts, dtype: mx.Dtype, norm: bool) -> bool:
    """Whether the kernels compute experts that `expert_mlp` takes, on inputs of `dtype`."""
    matrices = (experts.gate, experts.up, experts.down)
    fits = all(
        tiles.on_matrix_unit(m.fmt, dtype) and m.columns % m.fmt.group_size == 0 for m in matrices
    )
    scales = [p for m in matrices for p in (m.scales, m.biases) if p is not None]
    aligned = all(n * p.array.itemsize % 16 == 0 for p in scales for n in (p.offset, p.stride))
    return fits and aligned and not (norm and dtype == mx.float16)


def launch_gate_up(
    x: mx.array, slots: mx.array, experts: Experts, around: Around, tuning: Tuning
) -> Launch:
    """The first launch for the arguments of the reference."""
    norm = around.norm is not None
    p = plan_gate_up(tuple(slots.shape), experts.gate.kind, experts.glu, norm, x.dtype, tuning)
    return Launch(p, gate_up_inputs(x, slots, experts, around))


@lru_cache(maxsize=1024)
def plan_gate_up(
    slots: tuple[int, ...], gate: Kind, glu: str, norm: bool, dtype: mx.Dtype, tuning: Tuning
) -> Plan:
    """What the first launch fixes for slots of that shape."""
    tokens, ranks = slots
    groups = gate.columns // gate.fmt.group_size
    turn = turn_of(groups, gate.fmt, tuning)
    shared = simdgroups_for(groups // turn, tuning.simdgroups)
    template: dict[str, Value] = {
        "T": dtype,
        "K": gate.columns,
        "F": gate.rows,
        "RANKS": ranks,
        "U": turn,
        "RT": tuning.tiles,
        "KS": shared,
        **gate.template,
        "HALF": dtype == mx.float16,
        "GLU": GLU[glu],
        "NORM": norm,
    }
    count = (ceil_div(gate.rows, 8 * tuning.tiles), ranks, tokens)
    outputs = (((tokens, ranks, gate.rows), mx.float32),)
    return Plan(GATE_UP_KERNEL, template, count, SIMD * shared, outputs)


def launch_down(
    h: mx.array,
    slots: mx.array,
    weights: mx.array,
    experts: Experts,
    around: Around,
    dtype: mx.Dtype,
    tuning: Tuning,
) -> Launch:
    """The second launch: h float32 [T, k, F] -> `dtype` [T, H]."""
    added = (around.residual is not None, around.beside is not None)
    p = plan_down(tuple(slots.shape), experts.down.kind, added, dtype, tuning)
    return Launch(p, down_inputs(h, slots, weights, experts, around))


@lru_cache(maxsize=1024)
def plan_down(
    slots: tuple[int, ...], down: Kind, added: tuple[bool, bool], dtype: mx.Dtype, tuning: Tuning
) -> Plan:
    """What the second launch fixes for slots of that shape."""
    tokens, ranks = slots
    groups = down.columns // down.fmt.group_size
    turn = turn_of(groups, down.fmt, tuning)
    shared = simdgroups_for(groups // turn * ranks, tuning.simdgroups)
    template: dict[str, Value] = {
        "T": dtype,
        "H": down.rows,
        "F": down.columns,
        "RANKS": ranks,
        "U": turn,
        "RT": tuning.tiles,
        "KS": shared,
        **down.template,
        "HALF": dtype == mx.float16,
        "RESIDUAL": added[0],
        "BESIDE": added[1],
    }
    count = (ceil_div(down.rows, 16 * tuning.tiles), tokens, 1)
    return Plan(DOWN_KERNEL, template, count, SIMD * shared, (((tokens, down.rows), dtype),))


def turn_of(groups: int, fmt: Quant, tuning: Tuning) -> int:
    """Groups a simdgroup takes per turn: a divisor of `groups` whose codes fit registers."""
    for turn in (12, 8, 4, 2):
        words = tuning.tiles * 2 * turn * fmt.group_size * fmt.bits // 128
        if groups % turn == 0 and words <= CODE_WORDS:
            return turn
    return 1
