"""New rows of a packed cache: balanced, turned by signs and a Hadamard matrix, stored exactly.

In this order: the body, the launch, the choice. The same in plain MLX is in `kv_codec`, put
together in `cache.packed`. Knows rows and the ring of exact ones; does not know codes.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark.kernels import kv_codec
from turbospark.kernels.choices import backend
from turbospark.kernels.packed_attention import Near
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

# --- kernel ---------------------------------------------------------------------------------------

# One simdgroup per row; element e of a lane is dim 32 e + lane.
TURN = r"""
  constexpr int E = D / 32;
  const int lane = int(thread_index_in_simdgroup);
  const int row = int(threadgroup_position_in_grid.x) * SG + int(simdgroup_index_in_threadgroup);
  const int rows = (H + 2 * KV) * M;
  const int head = ts_min(row, rows - 1) / M;
  const int m = ts_min(row, rows - 1) % M;
  const bool is_q = head < H;
  const bool is_k = head >= H && head < H + KV;
  const int own = is_q ? head : is_k ? head - H : head - H - KV;
  const int kv = is_q ? head / (H / KV) : own;
  const int position = length[0] - M + m;
  float x[E];
  TS_UNROLL
  for (int e = 0; e < E; e++) {
    const int d = e * 32 + lane;
    const int at = (own * M + m) * D + d;
    float value = is_q ? float(q[at]) : is_k ? float(k[at]) : float(v[at]);
    if (BALANCED && is_q) value = value / by[kv * D + d];
    if (BALANCED && is_k) value = (value - mean[kv * D + d]) * by[kv * D + d];
    x[e] = value * (is_q || is_k ? key_signs[d] : value_signs[d]);
  }
  TS_UNROLL
  for (int mask = 1; mask < 32; mask <<= 1) {
    TS_UNROLL
    for (int e = 0; e < E; e++) {
      const float other = ts_shuffle_xor(x[e], mask);
      x[e] = (lane & mask) != 0 ? other - x[e] : x[e] + other;
    }
  }
  TS_UNROLL
  for (int half_of = 1; half_of < E; half_of <<= 1) {
    TS_UNROLL
    for (int e = 0; e < E; e++) {
      if ((e & half_of) == 0) {
        const float low = x[e];
        const float high = x[e + half_of];
        x[e] = low + high;
        x[e + half_of] = low - high;
      }
    }
  }
  const int ring = sizes[0];
  const float factor = is_q ? numbers[0] * numbers[1] : numbers[1];
  auto new_k = ts_writable(new_keys);
  auto new_v = ts_writable(new_values);
  auto first_k = ts_writable(first_keys);
  auto first_v = ts_writable(first_values);
  TS_UNROLL
  for (int e = 0; e < E; e++) {
    const int d = e * 32 + lane;
    const float value = x[e] * factor;
    if (row < rows && is_q) out[(head * M + m) * D + d] = value;
    if (row < rows && !is_q) {
      const float kept = ts_min(ts_max(value, -65504.0f), 65504.0f);
      const int slot = (kv * ring + position % ring) * D + d;
      const int first = (kv * 4 + position) * D + d;
      if (is_k) new_k[slot] = float16_t(kept);
      if (!is_k) new_v[slot] = float16_t(kept);
      if (is_k && position < 4) first_k[first] = float16_t(kept);
      if (!is_k && position < 4) first_v[first] = float16_t(kept);
    }
  }
"""
TURN_KERNEL = Kernel(
    "packed_turn",
    (
        "q", "k", "v", "mean", "by", "key_signs", "value_signs", "length", "numbers", "sizes",
        "new_keys", "new_values", "first_keys", "first_values",
    ),
    ("out",),
    TURN,
    updates=("new_keys", "new_values", "first_keys", "first_values"),
)  # fmt: skip


def launch_turn(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mean: mx.array | None,
    by: mx.array | None,
    length: mx.array,
    scale: float,
    near: Near,
) -> Launch:
    """Turn q [1, H, M, D] -> float32 [H, M, D], scaled; k, v [1, KV, M, D] into the ring.

    `near` holds the whole ring, position p in row p % ring; length int32 [1] counts these M rows.
    """
    _, heads, rows, dim = q.shape
    p = _plan_turn(heads, k.shape[1], rows, dim, mean is not None)
    numbers = constant(scale, dim**-0.5)
    signs = [kv_codec.signs(dim, s) for s in (kv_codec.KEY_SEED, kv_codec.VALUE_SEED)]
    tables = [signs[0] if t is None else t for t in (mean, by)]
    buffers = [near.keys, near.values, near.first_keys, near.first_values]
    sizes = constant_ints(near.keys.shape[1])
    return Launch(p, [q, k, v, *tables, *signs, length, numbers, sizes, *buffers])


@lru_cache(maxsize=1024)
def _plan_turn(heads: int, kv: int, rows: int, dim: int, balanced: bool) -> Plan:
    template: dict[str, Value] = {
        "H": heads, "KV": kv, "M": rows, "D": dim, "SG": 4, "BALANCED": balanced,
    }  # fmt: skip
    groups = (ceil_div((heads + 2 * kv) * rows, 4), 1, 1)
    return Plan(TURN_KERNEL, template, groups, SIMD * 4, (((heads, rows, dim), mx.float32),))


# --- choice ---------------------------------------------------------------------------------------


def turn_rows(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mean: mx.array | None,
    by: mx.array | None,
    length: mx.array,
    scale: float,
    near: Near,
) -> mx.array:
    """`launch_turn` here; on the back ends and for the heads of `packed_decode.takes`."""
    where = backend(mx.default_device())
    return launch_turn(q, k, v, mean, by, length, scale, near).run(where)[0]
