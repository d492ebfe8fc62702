"""One token through a gated delta net, all that lies between its projections.

In this order: a layer's constants, the same in plain MLX, the body, the launch, the choice. Knows
the convolution, the recurrence and the gated norm; does not know projections or caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.choices import backend
from turbospark.kernels.delta_rows import MOST_KEYS, DeltaInputs, gated_delta_reference
from turbospark.kernels.source import SIMD, Kernel, Launch, Plan, Value, ceil_div, constant

L2_EPS = 1e-6
SIMDGROUPS = 8
# Floats of the memory that one thread may hold: more would spill.
MOST_HELD = 96
BACKENDS = ("cuda",)


@dataclass(frozen=True)
class Delta:
    """One layer's constants, all float32.

    taps [T, C], oldest first, over the C = 2 K Dk + V Dv channels of q | k | v; rate = -exp(A_log)
    and dt_bias [V]; norm [Dv]. Value heads h * V/K .. (h + 1) * V/K - 1 share key head h. `sigmoid`
    says that the output's gate is sigmoid(z), not silu(z).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: mx.array
    rate: mx.array
    dt_bias: mx.array
    norm: mx.array
    eps: float
    sigmoid: bool

    @property
    def kind(self) -> tuple[int, int, int, int, int, bool]:
        """What a kernel is compiled for."""
        heads = (self.key_heads, self.value_heads)
        return (*heads, self.key_dim, self.value_dim, self.taps.shape[0], self.sigmoid)

    def gate(self, z: mx.array) -> mx.array:
        """What multiplies the normed output."""
        return mx.sigmoid(z) if self.sigmoid else z * mx.sigmoid(z)


# --- reference ------------------------------------------------------------------------------------


def decay_of(a: mx.array, rate: mx.array, dt_bias: mx.array) -> mx.array:
    """exp(rate * softplus(a + dt_bias)) in float32, where rate = -exp(A_log)."""
    return mx.exp(rate * mx.logaddexp(a.astype(mx.float32) + dt_bias, 0.0))


def delta_step_reference(
    row: mx.array, past: mx.array, state: mx.array, d: Delta
) -> tuple[mx.array, mx.array, mx.array]:
    """The gated output of one token, and the memory it leaves; computed in float32.

    Shapes: row [1, 1, C + V Dv + 2 V], q | k | v | z | b | a side by side; past [1, T - 1, C], the
    rows of q | k | v before it; state float32 [1, V, Dv, Dk] -> (out [1, 1, V Dv] and the next
    past, both of row's dtype, the next state).
    """
    keys, values = d.key_heads * d.key_dim, d.value_heads * d.value_dim
    sizes = [2 * keys + values, 2 * keys + 2 * values, 2 * keys + 2 * values + d.value_heads]
    mixed, z, b, a = mx.split(row, sizes, axis=-1)
    window = mx.concatenate([past.astype(row.dtype), mixed], axis=1)
    mixed = mx.sum(window.astype(mx.float32) * d.taps, axis=1)
    mixed = mixed * mx.sigmoid(mixed)
    q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)

    def unit(x: mx.array, scale: float) -> mx.array:
        x = x.reshape(1, 1, d.key_heads, d.key_dim)
        return x * (scale * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + L2_EPS))

    inputs = DeltaInputs(
        unit(q, d.key_dim**-0.5),
        unit(k, 1.0),
        v.reshape(1, 1, d.value_heads, d.value_dim),
        decay_of(a, d.rate, d.dt_bias),
        mx.sigmoid(b.astype(mx.float32)),
    )
    out, state = gated_delta_reference(inputs, state)
    out = mx.fast.rms_norm(out, d.norm, d.eps).reshape(1, 1, values)
    out = out * d.gate(z.astype(mx.float32))
    return out.astype(row.dtype), window[:, 1:], state


# --- kernel ---------------------------------------------------------------------------------------

HEADER = r"""
TS_FN float ts_sigmoid(float x) { return 1.0f / (1.0f + ts_exp(-x)); }
// log(1 + exp(x)); the series keeps the digits that 1 + e loses.
TS_FN float ts_softplus(float x) {
  const float e = ts_exp(-ts_abs(x));
  const float log1p = e < 0.01f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f))) : ts_log(1.0f + e);
  return ts_max(x, 0.0f) + log1p;
}
"""

# One threadgroup per value head. A simdgroup holds rows sg, sg + SG, ... of the head's memory, a
# lane columns lane, lane + 32, ...: the memory is read and written once, all of it in flight
# together. The first head of those that share a key head stores the newest inputs of q and k.
BODY = r"""
  constexpr int KEYS = HK * DK;
  constexpr int VALUES = HV * DV;
  constexpr int C = 2 * KEYS + VALUES;
  constexpr int SHARING = HV / HK;
  constexpr int ROWS = (DV + SG - 1) / SG;
  constexpr int EACH = (DK + 31) / 32;
  constexpr int VEACH = (DV + 31) / 32;
  TS_SHARED(float, mixed_s, 2 * DK + DV);
  TS_SHARED(float, out_s, DV);
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int head = int(threadgroup_position_in_grid.x);
  const int key_head = head / SHARING;

  float held[ROWS][EACH];
  TS_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int row_of = head * DV + ts_min(r * SG + sg, DV - 1);
    TS_UNROLL
    for (int e = 0; e < EACH; e++)
      held[r][e] = state[int64_t(row_of) * DK + ts_min(e * 32 + lane, DK - 1)];
  }

  for (int i = tid; i < 2 * DK + DV; i += 32 * SG) {
    const int of_key = key_head * DK + (i < DK ? i : KEYS + i - DK);
    const int c = i < 2 * DK ? of_key : 2 * KEYS + head * DV + i - 2 * DK;
    const bool mine = i >= 2 * DK || head % SHARING == 0;
    const float newest = float(row[c]);
    float sum = 0.0f;
    for (int t = 0; t < TAPS - 1; t++) {
      const float before = float(T(float(past[t * C + c])));
      sum = ts_fma(before, taps[t * C + c], sum);
      if (mine && t > 0) next_past[(t - 1) * C + c] = T(before);
    }
    if (mine) next_past[(TAPS - 2) * C + c] = T(newest);
    sum = ts_fma(newest, taps[(TAPS - 1) * C + c], sum);
    mixed_s[i] = sum * ts_sigmoid(sum);
  }
  ts_barrier();

  float q[EACH], k[EACH];
  float q_square = 0.0f;
  float k_square = 0.0f;
  TS_UNROLL
  for (int e = 0; e < EACH; e++) {
    const int d = e * 32 + lane;
    q[e] = d < DK ? mixed_s[ts_min(d, DK - 1)] : 0.0f;
    k[e] = d < DK ? mixed_s[DK + ts_min(d, DK - 1)] : 0.0f;
    q_square = ts_fma(q[e], q[e], q_square);
    k_square = ts_fma(k[e], k[e], k_square);
  }
  const float q_scale = ts_rsqrt(ts_simd_sum(q_square) + numbers[1]) * ts_rsqrt(float(DK));
  const float k_scale = ts_rsqrt(ts_simd_sum(k_square) + numbers[1]);
  TS_UNROLL
  for (int e = 0; e < EACH; e++) {
    q[e] *= q_scale;
    k[e] *= k_scale;
  }
  const float beta = ts_sigmoid(float(row[C + VALUES + head]));
  const float a = float(row[C + VALUES + HV + head]);
  const float decay = ts_exp(rate[head] * ts_softplus(a + dt_bias[head]));

  TS_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int dv = r * SG + sg;
    float known = 0.0f;
    TS_UNROLL
    for (int e = 0; e < EACH; e++) {
      held[r][e] *= decay;
      known = ts_fma(held[r][e], k[e], known);
    }
    const float missing = (mixed_s[2 * DK + ts_min(dv, DV - 1)] - ts_simd_sum(known)) * beta;
    float seen = 0.0f;
    TS_UNROLL
    for (int e = 0; e < EACH; e++) {
      const int d = e * 32 + lane;
      held[r][e] = ts_fma(missing, k[e], held[r][e]);
      seen = ts_fma(held[r][e], q[e], seen);
      if (dv < DV && d < DK) next_state[int64_t(head * DV + dv) * DK + d] = held[r][e];
    }
    seen = ts_simd_sum(seen);
    if (lane == 0 && dv < DV) out_s[dv] = seen;
  }
  ts_barrier();

  float square = 0.0f;
  TS_UNROLL
  for (int e = 0; e < VEACH; e++) {
    const int dv = e * 32 + lane;
    const float o = dv < DV ? out_s[ts_min(dv, DV - 1)] : 0.0f;
    square = ts_fma(o, o, square);
  }
  const float scale = ts_rsqrt(ts_simd_sum(square) / float(DV) + numbers[0]);
  for (int dv = tid; dv < DV; dv += 32 * SG) {
    const float z = float(row[C + head * DV + dv]);
    const float gate = SIGMOID ? ts_sigmoid(z) : z * ts_sigmoid(z);
    out[head * DV + dv] = T(out_s[dv] * scale * norm[dv] * gate);
  }
"""

KERNEL = Kernel(
    "delta_step",
    ("row", "past", "state", "taps", "rate", "dt_bias", "norm", "numbers"),
    ("out", "next_past", "next_state"),
    BODY,
    HEADER,
)


def launch(row: mx.array, past: mx.array, state: mx.array, d: Delta) -> Launch:
    """The kernel's launch for the arguments of the reference."""
    inputs = [row, past, state, d.taps, d.rate, d.dt_bias, d.norm, constant(d.eps, L2_EPS)]
    return Launch(plan(row.dtype, d.kind), inputs)


@lru_cache(maxsize=1024)
def plan(dtype: mx.Dtype, kind: tuple[int, int, int, int, int, bool]) -> Plan:
    """What the launch fixes for a layer of that kind."""
    key_heads, value_heads, key_dim, value_dim, taps, sigmoid = kind
    template: dict[str, Value] = {
        "T": dtype,
        "HK": key_heads,
        "HV": value_heads,
        "DK": key_dim,
        "DV": value_dim,
        "TAPS": taps,
        "SG": SIMDGROUPS,
        "SIGMOID": sigmoid,
    }
    values = value_heads * value_dim
    outputs = (
        ((1, 1, values), dtype),
        ((1, taps - 1, 2 * key_heads * key_dim + values), dtype),
        ((1, value_heads, value_dim, key_dim), mx.float32),
    )
    return Plan(KERNEL, template, (value_heads, 1, 1), SIMD * SIMDGROUPS, outputs)


# --- choice ---------------------------------------------------------------------------------------


def takes(key_dim: int, value_dim: int) -> bool:
    """Whether a threadgroup can hold the memory of one head."""
    held = ceil_div(value_dim, SIMDGROUPS) * ceil_div(key_dim, SIMD)
    return key_dim <= MOST_KEYS and held <= MOST_HELD


def delta_step(
    row: mx.array, past: mx.array, state: mx.array, d: Delta
) -> tuple[mx.array, mx.array, mx.array]:
    """`delta_step_reference`, by the kernel where it wins."""
    where = backend(mx.default_device())
    if where not in BACKENDS or not takes(d.key_dim, d.value_dim):
        return delta_step_reference(row, past, state, d)
    out, following, state = launch(row, past, state, d).run(where)
    return out, following, state
