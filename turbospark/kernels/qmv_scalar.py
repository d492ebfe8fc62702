"""`qmv` without a matrix unit: any input dtype, codes of 2 to 8 bits, every back end.

Knows what `fused` describes; `qmv` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.kernels.fused import MAX_ROWS, Around, Parts, inputs
from turbospark.kernels.source import SIMD, Kernel, Launch, Plan, Value, ceil_div
from turbospark.kernels.unpack import CODES, HEADER, is_unpackable, tile_turns


@dataclass(frozen=True)
class Tuning:
    """`rows` of the matrix per simdgroup, `simdgroups` per threadgroup."""

    rows: int = 2
    simdgroups: int = 8


# One simdgroup computes R rows of the matrix for MT rows of x. x goes through shared memory as
# float, divided as ts_unplace says, in tiles of U * 32 chunks of 32 columns; a lane owns a chunk of
# a tile and starts all its loads of the matrix before x is there.
BODY = r"""
  constexpr int CHUNKS = K / 32;
  constexpr int TILE = 32 * U;
  constexpr int GROUPS = K / GROUP;
  constexpr int PAIR = GLU > 0 ? R / 2 : R;  // outputs of a simdgroup
  constexpr int OUTS = GLU > 0 ? N / 2 : N;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int unit0 = (int(threadgroup_position_in_grid.x) * SG + sg) * PAIR;
  const int token0 = int(threadgroup_position_in_grid.y) * MT;

  TS_SHARED(float, x_s, MT * TILE * 36);
  TS_SHARED(float, sum_s, MT * TILE);
  TS_SHARED(float, square_s, MT * SG);

  // Rows past the end repeat the last one; they are not written.
  int row[R];
  for (int r = 0; r < R; r++) {
    const int unit = ts_min(unit0 + r % PAIR, OUTS - 1);
    row[r] = r < PAIR ? unit : OUTS + unit;
  }
  float acc[R * MT], square[MT];
  for (int i = 0; i < R * MT; i++) acc[i] = 0.0f;
  for (int t = 0; t < MT; t++) square[t] = 0.0f;

  for (int chunk0 = 0; chunk0 < CHUNKS; chunk0 += TILE) {
    uint w[U * R * BITS];
    float s[U * R], b[U * R];
    TS_UNROLL
    for (int u = 0; u < U; u++) {
      const int chunk = ts_min(chunk0 + u * 32 + lane, CHUNKS - 1);
      TS_UNROLL
      for (int r = 0; r < R; r++) {
        ts_chunk<BITS>(weight + (int64_t(row[r]) * CHUNKS + chunk) * BITS, w + (u * R + r) * BITS);
        const int64_t at = int64_t(row[r]) * GROUPS + chunk * 32 / GROUP;
        s[u * R + r] = ts_scale(scales[at]);
        b[u * R + r] = FP4 ? 0.0f : ts_scale(biases[at]);
      }
    }

    if (chunk0 > 0) ts_barrier();
    TS_UNROLL
    for (int t = 0; t < MT; t++) {
      for (int i = tid; i < TILE * 4; i += 32 * SG) {
        const int column = chunk0 * 32 + i * 8;
        float v[8];
        for (int j = 0; j < 8; j++) v[j] = 0.0f;
        if (column < K && token0 + t < M) {
          ts_load8(x + (token0 + t) * K + column, v);
          if (NORM) {
            float g[8];
            ts_load8(norm + column, g);
            TS_UNROLL
            for (int j = 0; j < 8; j++) {
              square[t] = ts_fma(v[j], v[j], square[t]);
              v[j] *= g[j];
            }
          }
        }
        ts_put_octet<BITS, FP4>(v, i, x_s + t * TILE * 36, sum_s + t * TILE);
      }
    }
    ts_barrier();

    TS_UNROLL
    for (int u = 0; u < U; u++) {
      const int at = u * 32 + lane;
      if (chunk0 + at < CHUNKS)
        ts_multiply<BITS, FP4, R, MT, TILE>(w + u * R * BITS, s + u * R, b + u * R, x_s, sum_s, at,
                                            acc);
    }
  }

  if (NORM) {
    for (int t = 0; t < MT; t++) {
      const float part = ts_simd_sum(square[t]);
      if (lane == 0) square_s[t * SG + sg] = part;
    }
    ts_barrier();
  }

  // Lane r * MT + t finishes row r of token t.
  float mine = 0.0f;
  TS_UNROLL
  for (int i = 0; i < R * MT; i++) {
    const float all = ts_simd_sum(acc[i]);
    if (lane == i) mine = all;
  }
  const int t = lane % MT;
  const int r = lane / MT;
  if (NORM) {
    float all = 0.0f;
    for (int i = 0; i < SG; i++) all += square_s[t * SG + i];
    mine *= ts_rsqrt(all / float(K) + eps[0]);
  }
  const int unit = unit0 + r % PAIR;
  const bool live = r < R && unit < OUTS && token0 + t < M;
  if (BIAS && live) mine += float(bias[r < PAIR ? unit : OUTS + unit]);
  if (GLU > 0) {
    const float up = ts_shuffle(mine, (lane + PAIR * MT) % 32);
    mine = ts_glu<GLU>(mine, up, 1.0f, 1.0f);
  }
  if (live && r < PAIR) {
    const int at = (token0 + t) * OUTS + unit;
    if (RESIDUAL) mine += float(residual[at]);
    y[at] = T(mine);
  }
"""

KERNEL = Kernel(
    "qmv_scalar",
    ("x", "weight", "scales", "biases", "norm", "eps", "bias", "residual"),
    ("y",),
    BODY,
    HEADER,
)


def launch(
    x: mx.array,
    fmt: Quant,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    around: Around,
    tuning: Tuning,
) -> Launch:
    """The kernel's launch for the arguments of `qmv_reference`, at most `MAX_ROWS` rows of x.

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
    rows = max(tuning.rows, 2) if parts.glu else tuning.rows
    outs = n // 2 if parts.glu else n
    per_group = tuning.simdgroups * (rows // 2 if parts.glu else rows)
    tokens = min(m, 4)
    template: dict[str, Value] = {
        "T": dtype,
        "K": k,
        "N": n,
        "M": m,
        "MT": tokens,
        "U": tile_turns(k // CODES, max(1, 4 // tokens)),
        "R": rows,
        "SG": tuning.simdgroups,
        **parts.template(fmt),
    }
    groups = (ceil_div(outs, per_group), ceil_div(m, tokens), 1)
    outputs = (((*x[:-1], outs), dtype),)
    return Plan(KERNEL, template, groups, SIMD * tuning.simdgroups, outputs)


def takes(fmt: Quant, k: int, m: int) -> bool:
    """Whether the kernel computes m rows of k columns stored as `fmt`."""
    return 1 <= m <= MAX_ROWS and is_unpackable(fmt) and k % CODES == 0
