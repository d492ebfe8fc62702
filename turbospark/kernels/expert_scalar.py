"""`expert_mlp` without a matrix unit: any input dtype, codes of 2 to 8 bits, every back end.

Knows what `experts` describes; `expert_mlp` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.experts import Around, Experts, Kind, down_inputs, gate_up_inputs
from turbospark.kernels.source import (
    SIMD,
    Kernel,
    Launch,
    Plan,
    Value,
    ceil_div,
)
from turbospark.kernels.unpack import CODES, GLU, HEADER, is_unpackable, tile_turns


@dataclass(frozen=True)
class Tuning:
    """Rows per simdgroup (of gate and up together) and simdgroups per threadgroup."""

    rows: int = 2
    simdgroups: int = 4


# One simdgroup computes R / 2 hidden values of one (token, rank): rows of gate, then of up.
GATE_UP = r"""
  constexpr int CHUNKS = K / 32;
  constexpr int TILE = 32 * U;
  constexpr int GROUPS = K / GROUP;
  constexpr int PAIR = R / 2;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int unit0 = (int(threadgroup_position_in_grid.x) * SG + sg) * PAIR;
  const int rank = int(threadgroup_position_in_grid.y);
  const int token = int(threadgroup_position_in_grid.z);
  const int slot = int(slots[token * RANKS + rank]);
  const int64_t e = ts_max(slot, 0);

  TS_SHARED(float, x_s, TILE * 36);
  TS_SHARED(float, sum_s, TILE);
  TS_SHARED(float, square_s, SG);

  auto gate_w = gw + e * sizes[1] + sizes[0];
  auto gate_s = gs + e * sizes[3] + sizes[2];
  auto gate_b = gb + e * sizes[5] + sizes[4];
  auto up_w = uw + e * sizes[9] + sizes[8];
  auto up_s = us + e * sizes[11] + sizes[10];
  auto up_b = ub + e * sizes[13] + sizes[12];
  float acc[R];
  for (int r = 0; r < R; r++) acc[r] = 0.0f;
  float square = 0.0f;

  for (int chunk0 = 0; chunk0 < CHUNKS; chunk0 += TILE) {
    uint w[U * R * BITS];
    float s[U * R], b[U * R];
    TS_UNROLL
    for (int u = 0; u < U; u++) {
      const int chunk = ts_min(chunk0 + u * 32 + lane, CHUNKS - 1);
      TS_UNROLL
      for (int r = 0; r < R; r++) {
        const int row = ts_min(unit0 + r % PAIR, F - 1);
        const int word = (row * CHUNKS + chunk) * BITS;
        ts_chunk<BITS>(r < PAIR ? gate_w + word : up_w + word, w + (u * R + r) * BITS);
        const int at = row * GROUPS + chunk * 32 / GROUP;
        s[u * R + r] = ts_scale(r < PAIR ? gate_s[at] : up_s[at]);
        b[u * R + r] = FP4 ? 0.0f : ts_scale(r < PAIR ? gate_b[at] : up_b[at]);
      }
    }

    if (chunk0 > 0) ts_barrier();
    for (int i = tid; i < TILE * 4; i += 32 * SG) {
      const int column = chunk0 * 32 + i * 8;
      float v[8];
      for (int j = 0; j < 8; j++) v[j] = 0.0f;
      if (column < K) {
        ts_load8(x + token * K + column, v);
        if (NORM) {
          float g[8];
          ts_load8(norm + column, g);
          TS_UNROLL
          for (int j = 0; j < 8; j++) {
            square = ts_fma(v[j], v[j], square);
            v[j] *= g[j];
          }
        }
      }
      ts_put_octet<BITS, FP4>(v, i, x_s, sum_s);
    }
    ts_barrier();

    TS_UNROLL
    for (int u = 0; u < U; u++) {
      const int at = u * 32 + lane;
      if (chunk0 + at < CHUNKS)
        ts_multiply<BITS, FP4, R, 1, TILE>(w + u * R * BITS, s + u * R, b + u * R, x_s, sum_s, at,
                                           acc);
    }
  }

  float scale = 1.0f;
  if (NORM) {
    const float part = ts_simd_sum(square);
    if (lane == 0) square_s[sg] = part;
    ts_barrier();
    float all = 0.0f;
    for (int i = 0; i < SG; i++) all += square_s[i];
    scale = ts_rsqrt(all / float(K) + numbers[0]);
  }
  TS_UNROLL
  for (int r = 0; r < PAIR; r++) {
    float gate = ts_simd_sum(acc[r]) * scale;
    float up = ts_simd_sum(acc[PAIR + r]) * scale;
    const int row = unit0 + r;
    if (lane == r && row < F) {
      if (BIAS) {
        gate += float(gate_bias[e * sizes[7] + sizes[6] + row]);
        up += float(up_bias[e * sizes[15] + sizes[14] + row]);
      }
      const float value = ts_glu<GLU>(gate, up, numbers[1], numbers[2]);
      h[(token * RANKS + rank) * F + row] = slot < 0 ? 0.0f : value;
    }
  }
"""

# One simdgroup computes R outputs of one token: the hidden values of all ranks, times their
# weights, are one long row.
DOWN = r"""
  constexpr int EACH = F / 32;  // chunks of one rank
  constexpr int CHUNKS = EACH * RANKS;
  constexpr int TILE = 32 * U;
  constexpr int GROUPS = F / GROUP;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int row0 = (int(threadgroup_position_in_grid.x) * SG + sg) * R;
  const int token = int(threadgroup_position_in_grid.y);

  TS_SHARED(float, x_s, TILE * 36);
  TS_SHARED(float, sum_s, TILE);

  float acc[R];
  for (int r = 0; r < R; r++) acc[r] = 0.0f;
  for (int chunk0 = 0; chunk0 < CHUNKS; chunk0 += TILE) {
    uint w[U * R * BITS];
    float s[U * R], b[U * R];
    TS_UNROLL
    for (int u = 0; u < U; u++) {
      const int chunk = ts_min(chunk0 + u * 32 + lane, CHUNKS - 1);
      // Unused ranks have hidden values of zero: any slot's weights will do.
      const int64_t e = ts_max(int(slots[token * RANKS + chunk / EACH]), 0);
      TS_UNROLL
      for (int r = 0; r < R; r++) {
        const int row = ts_min(row0 + r, H - 1);
        const int word = (row * EACH + chunk % EACH) * BITS;
        ts_chunk<BITS>(dw + e * sizes[1] + sizes[0] + word, w + (u * R + r) * BITS);
        const int at = row * GROUPS + chunk % EACH * 32 / GROUP;
        s[u * R + r] = ts_scale(ds[e * sizes[3] + sizes[2] + at]);
        b[u * R + r] = FP4 ? 0.0f : ts_scale(db[e * sizes[5] + sizes[4] + at]);
      }
    }

    if (chunk0 > 0) ts_barrier();
    for (int i = tid; i < TILE * 4; i += 32 * SG) {
      const int chunk = chunk0 + i / 4;
      float v[8];
      for (int j = 0; j < 8; j++) v[j] = 0.0f;
      if (chunk < CHUNKS) {
        ts_load8(h + token * RANKS * F + chunk0 * 32 + i * 8, v);
        const float share = float(weights[token * RANKS + chunk / EACH]);
        TS_UNROLL
        for (int j = 0; j < 8; j++) v[j] *= share;
      }
      ts_put_octet<BITS, FP4>(v, i, x_s, sum_s);
    }
    ts_barrier();

    TS_UNROLL
    for (int u = 0; u < U; u++) {
      const int at = u * 32 + lane;
      if (chunk0 + at < CHUNKS)
        ts_multiply<BITS, FP4, R, 1, TILE>(w + u * R * BITS, s + u * R, b + u * R, x_s, sum_s, at,
                                           acc);
    }
  }

  TS_UNROLL
  for (int r = 0; r < R; r++) {
    float value = ts_simd_sum(acc[r]);
    const int row = row0 + r;
    if (lane == r && row < H) {
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
    "expert_gate_up",
    (
        *("x", "slots", "gw", "gs", "gb", "gate_bias", "uw", "us", "ub", "up_bias"),
        *("norm", "numbers", "sizes"),
    ),
    ("h",),
    GATE_UP,
    HEADER,
)
DOWN_KERNEL = Kernel(
    "expert_down",
    ("h", "slots", "weights", "dw", "ds", "db", "down_bias", "residual", "beside", "sizes"),
    ("y",),
    DOWN,
    HEADER,
)


def launch_gate_up(
    x: mx.array, slots: mx.array, experts: Experts, around: Around, tuning: Tuning
) -> Launch:
    """The first launch for the arguments of the reference."""
    norm = around.norm is not None
    p = plan_gate_up(tuple(slots.shape), experts.gate.kind, experts.glu, norm, tuning)
    return Launch(p, gate_up_inputs(x, slots, experts, around))


@lru_cache(maxsize=1024)
def plan_gate_up(slots: tuple[int, ...], gate: Kind, glu: str, norm: bool, tuning: Tuning) -> Plan:
    """What the first launch fixes for slots of that shape."""
    tokens, ranks = slots
    rows = max(2, tuning.rows)
    template: dict[str, Value] = {
        "K": gate.columns,
        "F": gate.rows,
        "RANKS": ranks,
        "U": tile_turns(gate.columns // CODES, 4),
        "R": rows,
        "SG": tuning.simdgroups,
        **gate.template,
        "GLU": GLU[glu],
        "NORM": norm,
    }
    groups = (ceil_div(gate.rows, rows // 2 * tuning.simdgroups), ranks, tokens)
    outputs = (((tokens, ranks, gate.rows), mx.float32),)
    return Plan(GATE_UP_KERNEL, template, groups, SIMD * tuning.simdgroups, outputs)


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
    template: dict[str, Value] = {
        "T": dtype,
        "H": down.rows,
        "F": down.columns,
        "RANKS": ranks,
        "U": tile_turns(down.columns // CODES * ranks, 4),
        "R": tuning.rows,
        "SG": tuning.simdgroups,
        **down.template,
        "RESIDUAL": added[0],
        "BESIDE": added[1],
    }
    groups = (ceil_div(down.rows, tuning.rows * tuning.simdgroups), tokens, 1)
    outputs = (((tokens, down.rows), dtype),)
    return Plan(DOWN_KERNEL, template, groups, SIMD * tuning.simdgroups, outputs)


def takes(experts: Experts) -> bool:
    """Whether the kernels read these formats."""
    matrices = (experts.gate, experts.up, experts.down)
    return all(is_unpackable(m.fmt) and m.columns % CODES == 0 for m in matrices)
