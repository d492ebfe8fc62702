"""The recurrence of a gated delta net over the rows of a pass.

In this order: its inputs, the same in plain MLX and by MLX's primitive, the body, the launch, the
choice. Knows the recurrence; does not know where its inputs come from (`delta_step` does, for one
row).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.choices import backend
from turbospark.kernels.source import (
    SIMD,
    Kernel,
    Launch,
    Plan,
    Value,
    ceil_div,
    constant_ints,
)

SIMDGROUPS = 4
# Rows of a head's memory in one simdgroup: their sums are on the way together.
HELD_ROWS = 4
# Twelve floats of each held row in a lane: more would spill.
MOST_KEYS = 384
BACKENDS = ("cuda",)


@dataclass(frozen=True)
class DeltaInputs:
    """What the recurrence reads in one pass, all float32.

    q, k [1, L, K, Dk], q scaled; v [1, L, V, Dv]; decay (0..1), beta [1, L, V]. Value heads
    h * V/K .. (h + 1) * V/K - 1 share key head h.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    decay: mx.array
    beta: mx.array

    def rows(self, part: slice) -> DeltaInputs:
        """The same for some of the rows."""
        return DeltaInputs(*(a[:, part] for a in (self.q, self.k, self.v, self.decay, self.beta)))


# --- reference ------------------------------------------------------------------------------------


def gated_delta_reference(x: DeltaInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """The recurrence row by row: S = decay S; S += beta (v - S k) k^T; o = S q.

    state float32 [1, V, Dv, Dk] -> (o [1, L, V, Dv], state after the last row).
    """
    group = x.v.shape[2] // x.k.shape[2]
    q, k = (mx.repeat(a, group, axis=2)[..., None, :] for a in (x.q, x.k))
    outputs = []
    for t in range(x.v.shape[1]):
        state = state * x.decay[:, t, :, None, None]
        missing = x.v[:, t] - mx.sum(state * k[:, t], axis=-1)
        state = state + (x.beta[:, t, :, None] * missing)[..., None] * k[:, t]
        outputs.append(mx.sum(state * q[:, t], axis=-1))
    return mx.stack(outputs, axis=1), state


def gated_delta_primitive(x: DeltaInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """`gated_delta_reference` through MLX's primitive; shapes as there."""
    out, state = mx.fast.gated_delta_update(x.q, x.k, x.v, x.decay, x.beta, state)
    return out, state


# --- kernel ---------------------------------------------------------------------------------------

# A simdgroup holds R rows of one head's memory through the whole pass, a lane columns lane,
# lane + 32, ... of them: nothing is shared with others. The inputs of the next row are on their
# way while one is computed.
BODY = r"""
  constexpr int SHARING = HV / HK;
  constexpr int EACH = (DK + 31) / 32;
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int head = int(threadgroup_position_in_grid.y);
  const int first = (int(threadgroup_position_in_grid.x) * SG + sg) * R;
  const int key_head = head / SHARING;
  const int rows = sizes[0];

  float held[R][EACH], q_next[EACH], k_next[EACH], v_next[R];
  TS_UNROLL
  for (int r = 0; r < R; r++) {
    const int64_t row_of = head * DV + ts_min(first + r, DV - 1);
    TS_UNROLL
    for (int e = 0; e < EACH; e++)
      held[r][e] = state[row_of * DK + ts_min(e * 32 + lane, DK - 1)];
    v_next[r] = v[head * DV + ts_min(first + r, DV - 1)];
  }
  TS_UNROLL
  for (int e = 0; e < EACH; e++) {
    const int at = key_head * DK + ts_min(e * 32 + lane, DK - 1);
    q_next[e] = q[at];
    k_next[e] = k[at];
  }
  float decay_next = decay[head];
  float beta_next = beta[head];

  for (int t = 0; t < rows; t++) {
    float q_now[EACH], k_now[EACH], v_now[R];
    const int64_t next = ts_min(t + 1, rows - 1);
    TS_UNROLL
    for (int e = 0; e < EACH; e++) {
      const int d = e * 32 + lane;
      q_now[e] = d < DK ? q_next[e] : 0.0f;
      k_now[e] = d < DK ? k_next[e] : 0.0f;
      const int64_t at = (next * HK + key_head) * DK + ts_min(d, DK - 1);
      q_next[e] = q[at];
      k_next[e] = k[at];
    }
    TS_UNROLL
    for (int r = 0; r < R; r++) {
      v_now[r] = v_next[r];
      v_next[r] = v[(next * HV + head) * DV + ts_min(first + r, DV - 1)];
    }
    const float decay_now = decay_next;
    const float beta_now = beta_next;
    decay_next = decay[next * HV + head];
    beta_next = beta[next * HV + head];

    float sums[R];
    TS_UNROLL
    for (int r = 0; r < R; r++) {
      sums[r] = 0.0f;
      TS_UNROLL
      for (int e = 0; e < EACH; e++) {
        held[r][e] *= decay_now;
        sums[r] = ts_fma(held[r][e], k_now[e], sums[r]);
      }
    }
    TS_UNROLL
    for (int r = 0; r < R; r++) sums[r] = ts_simd_sum(sums[r]);
    TS_UNROLL
    for (int r = 0; r < R; r++) {
      const float missing = (v_now[r] - sums[r]) * beta_now;
      sums[r] = 0.0f;
      TS_UNROLL
      for (int e = 0; e < EACH; e++) {
        held[r][e] = ts_fma(missing, k_now[e], held[r][e]);
        sums[r] = ts_fma(held[r][e], q_now[e], sums[r]);
      }
    }
    float mine = 0.0f;
    TS_UNROLL
    for (int r = 0; r < R; r++) {
      const float seen = ts_simd_sum(sums[r]);
      if (lane == r) mine = seen;
    }
    if (lane < R && first + lane < DV)
      out[(int64_t(t) * HV + head) * DV + first + lane] = mine;
  }

  TS_UNROLL
  for (int r = 0; r < R; r++) {
    TS_UNROLL
    for (int e = 0; e < EACH; e++) {
      const int d = e * 32 + lane;
      const int64_t at = int64_t(head * DV + first + r) * DK + d;
      if (first + r < DV && d < DK) next_state[at] = held[r][e];
    }
  }
"""

KERNEL = Kernel(
    "delta_rows",
    ("q", "k", "v", "decay", "beta", "state", "sizes"),
    ("out", "next_state"),
    BODY,
)


def launch(x: DeltaInputs, state: mx.array) -> Launch:
    """The kernel's launch for the arguments of the reference."""
    rows = x.v.shape[1]
    inputs = [x.q, x.k, x.v, x.decay, x.beta, state, constant_ints(rows)]
    return Launch(plan(rows, *x.k.shape[2:], *x.v.shape[2:]), inputs)


@lru_cache(maxsize=1024)
def plan(rows: int, key_heads: int, key_dim: int, value_heads: int, value_dim: int) -> Plan:
    """What a launch fixes; the number of rows is no part of the text."""
    template: dict[str, Value] = {
        "HK": key_heads,
        "HV": value_heads,
        "DK": key_dim,
        "DV": value_dim,
        "R": HELD_ROWS,
        "SG": SIMDGROUPS,
    }
    outputs = (
        ((1, rows, value_heads, value_dim), mx.float32),
        ((1, value_heads, value_dim, key_dim), mx.float32),
    )
    groups = (ceil_div(value_dim, HELD_ROWS * SIMDGROUPS), value_heads, 1)
    return Plan(KERNEL, template, groups, SIMD * SIMDGROUPS, outputs)


# --- choice ---------------------------------------------------------------------------------------


def takes(key_dim: int) -> bool:
    """Whether a simdgroup can hold its rows of the memory."""
    return key_dim <= MOST_KEYS


def gated_delta(
    x: DeltaInputs, state: mx.array, kernels: bool = False
) -> tuple[mx.array, mx.array]:
    """`gated_delta_reference`: with `kernels` by ours where it wins, else by MLX's primitive."""
    where = backend(mx.default_device())
    if kernels and where in BACKENDS and takes(x.k.shape[-1]):
        out, state = launch(x, state).run(where)
        return out, state
    return gated_delta_primitive(x, state)
