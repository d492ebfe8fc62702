"""Attention of 1 to 8 new rows over a whole-capacity key/value buffer, its length an argument.

In this order: the same in plain MLX, the two bodies (partial sums of each split of the keys, and
their combination), the launches, the choice between them. Knows linear and ring buffers, windows,
sinks and soft caps; does not know rope or who wrote the rows.
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
    constant,
    constant_ints,
)

HEAD_DIMS = (64, 128, 256)
MAX_ROWS = 8


@dataclass(frozen=True)
class Rules:
    """What a layer fixes about its attention.

    window 0 sees every position. A ring keeps position p in row p % capacity; otherwise position p
    is row p. soft_cap 0 leaves scores as they are.
    """

    scale: float
    window: int = 0
    ring: bool = False
    soft_cap: float = 0.0


@dataclass(frozen=True)
class Tuning:
    """`simdgroups` per threadgroup; `splits` of the keys, fixed so that a graph can be kept."""

    simdgroups: int = 4
    splits: int = 32


def tuned(where: str, kv: int) -> Tuning | None:
    """How the kernels run for `kv` key heads on back end `where`; None where they are not used.

    One H200, GPU time of both launches: 8 heads of 128, groups of 4: 512 keys 8 us, 8k 21, 32k 63,
    128k 225 with 32 splits; 4 heads, groups of 8: 4k 15 us with 64 splits, 19 with 32.
    """
    return Tuning(4, max(16, min(64, 256 // kv))) if where == "cuda" else None


# --- reference ------------------------------------------------------------------------------------


def decode_attention_reference(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    length: mx.array,
    rules: Rules,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(cap(scale q K^T) with sinks) V, each row over the positions it sees.

    Shapes: q [1, H, M, D]; keys, values [1, KV, capacity, D], this step's M rows written;
    length int32 [1], positions so far with this step's; sinks [H] -> [1, M, H * D].
    """
    heads, rows, capacity = q.shape[1], q.shape[2], keys.shape[2]
    slots = mx.arange(capacity)
    position = slots + (length - 1 - slots) // capacity * capacity if rules.ring else slots
    last = (length - rows + mx.arange(rows))[:, None]
    seen = (position <= last) & (slots < length)
    if rules.window:
        seen = seen & (position > last - rules.window)
    group = heads // keys.shape[1]
    k, v = (mx.repeat(a, group, axis=1).astype(mx.float32) for a in (keys, values))
    scores = (q.astype(mx.float32) * rules.scale) @ k.swapaxes(-1, -2)
    if rules.soft_cap:
        scores = rules.soft_cap * mx.tanh(scores / rules.soft_cap)
    scores = mx.where(seen, scores, -mx.inf)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (1, heads, rows, 1))
        scores = mx.concatenate([scores, sink], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :capacity]
    # Rows never written may hold anything.
    out = weights @ mx.where((slots < length)[:, None], v, 0.0)
    return out.astype(q.dtype).swapaxes(1, 2).reshape(1, rows, -1)


# --- kernel ---------------------------------------------------------------------------------------

HEADER = r"""
// v[0..N) of each of L neighbouring lanes -> their sums over those lanes; lane j of them gets value
// j / (L / N). Each step halves what a lane still carries.
template <int N, int L>
TS_FN float ts_sum_apart(TS_THREAD float* v, int lane) {
  TS_UNROLL
  for (int step = 1; step < 2 * L; step <<= 1) {
    const int mask = L / 2 / step;
    const int half_of = N / 2 / step;
    if (half_of > 0) {
      const bool upper = (lane & mask) != 0;
      TS_UNROLL
      for (int i = 0; i < half_of; i++) {
        const float kept = upper ? v[i + half_of] : v[i];
        const float sent = upper ? v[i] : v[i + half_of];
        v[i] = kept + ts_shuffle_xor(sent, mask);
      }
    } else if (mask > 0) {
      v[0] += ts_shuffle_xor(v[0], mask);
    }
  }
  return v[0];
}
"""

# How a body ends that has set `live`, `score` and `vr` of its turn: the running softmax of a
# simdgroup, then its rows and the threadgroup's simdgroups together. `query0` numbers its queries.
ACCUMULATE = r"""
    float top_new = live ? score : -1e30f;
    TS_UNROLL
    for (int mask = TURN_BIT; mask < 32; mask <<= 1)
      top_new = ts_max(top_new, ts_shuffle_xor(top_new, mask));
    top_new = ts_max(top, top_new);
    const float fade = ts_fast_exp(top - top_new);
    const float p = live ? ts_fast_exp(score - top_new) : 0.0f;
    top = top_new;
    sum = ts_fma(sum, fade, p);

    TS_UNROLL
    for (int g = 0; g < GQ; g++) {
      const float f = ts_shuffle(fade, g * SAME);
      TS_UNROLL
      for (int j = 0; j < 8; j++) acc[g][j] *= f;
      TS_UNROLL
      for (int i = 0; i < TURNS; i++) {
        const float w = ts_shuffle(p, row_of_lane * LANES + i * TURN_BIT + g * SAME);
        TS_UNROLL
        for (int j = 0; j < 8; j++) acc[g][j] = ts_fma(w, vr[i][j], acc[g][j]);
      }
    }
  }

  // Rows that a simdgroup read at once, then the simdgroups.
  TS_UNROLL
  for (int mask = TURN_BIT; mask < 32; mask <<= 1) sum += ts_shuffle_xor(sum, mask);
  if (begin < stop) {
    for (int g = 0; g < GQ; g++) {
      for (int j = 0; j < 8; j++) {
        TS_UNROLL
        for (int mask = LANES; mask < 32; mask <<= 1) acc[g][j] += ts_shuffle_xor(acc[g][j], mask);
        if (lane < LANES) acc_s[(sg * GQ + g) * D + dim + j] = acc[g][j];
      }
    }
  }
  if (lane < TURN_BIT && lane % SAME == 0) {
    max_s[sg * GP + my_query] = top;
    sum_s[sg * GP + my_query] = sum;
  }
  ts_barrier();
  for (int i = tid; i < GQ * D; i += 32 * SG) {
    const int g = i / D;
    float all = -1e30f;
    for (int k = 0; k < SG; k++) all = ts_max(all, max_s[k * GP + g]);
    float total = 0.0f;
    float value = 0.0f;
    for (int k = 0; k < SG; k++) {
      const float f = ts_fast_exp(max_s[k * GP + g] - all);
      total = ts_fma(f, sum_s[k * GP + g], total);
      if (begin < stop) value = ts_fma(f, acc_s[(k * GQ + g) * D + i % D], value);
    }
    if (q0 + g < NQ) {
      const int64_t at = int64_t(query0 + g) * splits + split;
      if (begin < stop) o[at * D + i % D] = value;
      if (i % D == 0) {
        ml[at * 2] = all;
        ml[at * 2 + 1] = total;
      }
    }
  }
"""

# A lane owns 8 dims of a row; LANES lanes hold a row, a simdgroup AT_ONCE rows. Scores of TURNS
# turns and GQ queries are summed over a row's lanes together, so that every lane ends up with the
# score of one (turn, query), and takes its exponential.
PARTIAL = r"""
  constexpr int LANES = D / 8;
  constexpr int AT_ONCE = 32 / LANES;
  constexpr int BLOCK = AT_ONCE * TURNS;
  constexpr int SAME = LANES / (TURNS * GP);  // lanes that end up with the same score
  constexpr int TURN_BIT = SAME * GP;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int split = int(threadgroup_position_in_grid.x);
  const int kv = int(threadgroup_position_in_grid.y);
  const int q0 = int(threadgroup_position_in_grid.z) * GQ;
  const int query0 = kv * NQ + q0;
  const int capacity = sizes[0];
  const int splits = sizes[1];
  const int count = length[0];

  TS_SHARED(float, acc_s, SG * GQ * D);
  TS_SHARED(float, max_s, SG * GP);
  TS_SHARED(float, sum_s, SG * GP);

  const int first = RING || WINDOW == 0 ? 0 : ts_max(0, count - M + 1 - WINDOW);
  const int end = ts_min(count, capacity);
  const int unit = BLOCK * SG;
  const int each = ((end - first + splits - 1) / splits + unit - 1) / unit * unit;
  const int begin = first + split * each;
  const int stop = ts_min(begin + each, end);

  const int dim = lane % LANES * 8;
  const int row_of_lane = lane / LANES;
  const int my_query = lane / SAME % GP;
  const int my_turn = lane % LANES / TURN_BIT;
  // The newest position that my query sees.
  const int last = count - M + (q0 + my_query) % M;

  float qv[GQ][8], acc[GQ][8];
  for (int g = 0; g < GQ; g++) {
    ts_load8(q + (kv * NQ + ts_min(q0 + g, NQ - 1)) * D + dim, qv[g]);
    for (int j = 0; j < 8; j++) {
      qv[g][j] *= numbers[0];
      acc[g][j] = 0.0f;
    }
  }
  float top = -1e30f;
  float sum = 0.0f;
  auto k_rows = keys + int64_t(kv) * capacity * D + dim;
  auto v_rows = values + int64_t(kv) * capacity * D + dim;

  for (int t0 = begin + sg * BLOCK; t0 < stop; t0 += unit) {
    float kr[TURNS][8], vr[TURNS][8];
    TS_UNROLL
    for (int i = 0; i < TURNS; i++) {
      const int64_t at = int64_t(ts_min(t0 + i * AT_ONCE + row_of_lane, stop - 1)) * D;
      ts_load8(k_rows + at, kr[i]);
      ts_load8(v_rows + at, vr[i]);
    }
    float part[TURNS * GP];
    TS_UNROLL
    for (int i = 0; i < TURNS; i++) {
      TS_UNROLL
      for (int g = 0; g < GP; g++) {
        float d = 0.0f;
        if (g < GQ) {
          TS_UNROLL
          for (int j = 0; j < 8; j++) d = ts_fma(qv[g < GQ ? g : 0][j], kr[i][j], d);
        }
        part[i * GP + g] = d;
      }
    }
    float score = ts_sum_apart<TURNS * GP, LANES>(part, lane);

    const int slot = t0 + my_turn * AT_ONCE + row_of_lane;
    const int position = RING ? slot + (count - 1 - slot) / capacity * capacity : slot;
    const bool live =
        slot < stop && position <= last && (WINDOW == 0 || position > last - WINDOW);
    if (CAPPED) score = numbers[1] * ts_tanh(score / numbers[1]);
"""
PARTIAL += ACCUMULATE

# The sums of all splits of one query: `value` / `total`. `sink` is a logit without a value.
WEIGH = r"""
  auto ml_q = ml + int64_t(query) * splits * 2;
  auto o_q = o + int64_t(query) * splits * D;
  float all = sink;
  for (int k = lane; k < splits; k += 32) all = ts_max(all, ml_q[2 * k]);
  all = ts_simd_max(all);
  float total = 0.0f;
  float value = 0.0f;
  for (int k0 = 0; k0 < splits; k0 += 32) {
    const int k = k0 + lane;
    float f = 0.0f;
    if (k < splits) {
      f = ts_fast_exp(ml_q[2 * k] - all);
      total = ts_fma(f, ml_q[2 * k + 1], total);
    }
    // All loads of a turn are on their way at once.
    float w[32], v[32];
    TS_UNROLL
    for (int i = 0; i < 32; i++) {
      w[i] = ts_shuffle(f, i);
      // Splits without keys wrote no values.
      v[i] = 0.0f;
      if (w[i] > 0.0f) v[i] = o_q[(k0 + i) * D + d];
    }
    TS_UNROLL
    for (int i = 0; i < 32; i++) value = ts_fma(w[i], v[i], value);
  }
  total = ts_simd_sum(total);
  if (SINKS) total += ts_fast_exp(sink - all);
"""
# One threadgroup per query: a lane weighs a split, a thread sums a dim.
COMBINE = r"""
  const int d = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int query = int(threadgroup_position_in_grid.x);
  const int splits = sizes[1];
  const int head = query / M;
  const float sink = SINKS ? float(sinks[head]) : -1e30f;
"""
COMBINE += WEIGH
COMBINE += r"""
  out[(query % M * (H) + head) * D + d] = T(value / total);
"""

PARTIAL_KERNEL = Kernel(
    "attention_partial",
    ("q", "keys", "values", "length", "numbers", "sizes"),
    ("o", "ml"),
    PARTIAL,
    HEADER,
    partial=("o",),
)
COMBINE_KERNEL = Kernel("attention_combine", ("o", "ml", "sinks", "sizes"), ("out",), COMBINE)


def launch_partial(
    q: mx.array, keys: mx.array, values: mx.array, length: mx.array, rules: Rules, tuning: Tuning
) -> Launch:
    """The first launch for the arguments of the reference."""
    p = plan_partial(tuple(q.shape), keys.shape[1], rules, tuning)
    numbers = constant(rules.scale, rules.soft_cap)
    sizes = constant_ints(keys.shape[2], tuning.splits)
    return Launch(p, [q, keys, values, length, numbers, sizes])


@lru_cache(maxsize=1024)
def plan_partial(q: tuple[int, ...], kv: int, rules: Rules, tuning: Tuning) -> Plan:
    """What the first launch fixes for queries of shape `q`."""
    _, heads, rows, dim = q
    queries = heads // kv * rows
    at_once = min(queries, 4 if dim == 256 else 8)
    padded = 1 << (at_once - 1).bit_length()
    template: dict[str, Value] = {
        "D": dim,
        "M": rows,
        "NQ": queries,
        "GQ": at_once,
        "GP": padded,
        "TURNS": max(1, min(4, dim // 8 // padded)),
        "SG": tuning.simdgroups,
        "RING": rules.ring,
        "WINDOW": rules.window,
        "CAPPED": rules.soft_cap > 0,
    }
    groups = (tuning.splits, kv, ceil_div(queries, at_once))
    outputs = (
        ((heads * rows, tuning.splits, dim), mx.float32),
        ((heads * rows, tuning.splits, 2), mx.float32),
    )
    return Plan(PARTIAL_KERNEL, template, groups, SIMD * tuning.simdgroups, outputs)


def launch_combine(
    q: mx.array, o: mx.array, ml: mx.array, capacity: int, sinks: mx.array | None, tuning: Tuning
) -> Launch:
    """The second launch, over the first one's outputs."""
    p = plan_combine(tuple(q.shape), q.dtype, sinks is not None)
    sizes = constant_ints(capacity, tuning.splits)
    return Launch(p, [o, ml, o if sinks is None else sinks, sizes])


@lru_cache(maxsize=1024)
def plan_combine(q: tuple[int, ...], dtype: mx.Dtype, sinks: bool) -> Plan:
    """What the second launch fixes for queries of shape `q`."""
    _, heads, rows, dim = q
    template: dict[str, Value] = {"T": dtype, "D": dim, "M": rows, "H": heads, "SINKS": sinks}
    outputs = (((1, rows, heads * dim), dtype),)
    return Plan(COMBINE_KERNEL, template, (heads * rows, 1, 1), dim, outputs)


# --- choice ---------------------------------------------------------------------------------------


def takes(q: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernels compute these shapes."""
    return (
        q.shape[-1] in HEAD_DIMS
        and values.shape == keys.shape
        and q.shape[0] == 1
        and q.shape[2] <= MAX_ROWS
    )


def decode_attention(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    length: mx.array,
    rules: Rules,
    sinks: mx.array | None = None,
) -> mx.array:
    """`decode_attention_reference`, by the kernels where they are tuned and take the shapes."""
    where = backend(mx.default_device())
    tuning = tuned(where, keys.shape[1])
    if tuning is None or not takes(q, keys, values):
        return decode_attention_reference(q, keys, values, length, rules, sinks)
    o, ml = launch_partial(q, keys, values, length, rules, tuning).run(where)
    return launch_combine(q, o, ml, keys.shape[2], sinks, tuning).run(where)[0]
