"""The best blocks of each row: an exact top-k in ascending order, the lower index among equals.

In this order: the same in plain MLX, the body, the launch. Knows scores that are at least 0. Does
not know attention.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.source import SIMD, Kernel, Launch, Plan, Value, constant_ints

# --- reference ------------------------------------------------------------------------------------


def select_blocks_reference(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """scores float32 [T, blocks], at least k per row not negative -> (ids, bad).

    ids int32 [T, k] ascend; bad bool [T] tells rows with a NaN, whose ids mean nothing.
    """
    blocks = scores.shape[-1]
    index = mx.arange(blocks)
    # Sorting alone would leave it to the back end which of equal scores come first.
    cut = mx.sort(scores, axis=-1)[:, blocks - k, None]
    above, equal = scores > cut, scores == cut
    room = k - mx.sum(above, axis=-1, keepdims=True)
    chosen = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))
    ids = mx.sort(mx.where(chosen, index, blocks + index), axis=-1)[:, :k]
    bad = mx.any(mx.isnan(scores), axis=-1)
    return mx.minimum(ids, blocks - 1).astype(mx.int32), bad


# --- kernel ---------------------------------------------------------------------------------------

# Scores are at least 0, so that their bits order as they do. The k-th largest is found three bits
# at a time by counting who reaches each of seven steps; then every thread counts what it owns of
# larger and of equal ones, and writes its part of the list.
HEADER = r"""
TS_FN uint ts_order(float x) { return x > 0.0f ? ts_as_uint(x) : 0u; }
// The sum over the lanes before this one.
TS_FN int ts_before(int v, int lane) {
  int sum = v;
  TS_UNROLL
  for (int d = 1; d < 32; d <<= 1) {
    const int other = ts_shuffle(sum, ts_max(lane - d, 0));
    if (lane >= d) sum += other;
  }
  return sum - v;
}
"""

BODY = r"""
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int row = int(threadgroup_position_in_grid.x);
  const int count = (start[0] + row + 1) / RATIO;
  auto mine = scores + int64_t(row) * sizes[0];
  TS_SHARED(int, sums, SG * 8);
  TS_SHARED(int, totals, 8);

  uint cut = 0u;
  int bad = 0;
  for (int shift = 28; shift > -3; shift -= 3) {
    const int at = ts_max(shift, 0);
    int reach[8];
    TS_UNROLL
    for (int d = 0; d < 8; d++) reach[d] = 0;
    for (int b = tid; b < count; b += 32 * SG) {
      const float x = mine[b];
      const uint bits = ts_order(x);
      if (!(x == x)) bad = 1;
      if (bits >= cut) {
        const int step = int(ts_min((bits - cut) >> uint(at), 7u));
        TS_UNROLL
        for (int d = 1; d < 8; d++) reach[d] += step >= d ? 1 : 0;
      }
    }
    reach[0] = bad;
    TS_UNROLL
    for (int d = 0; d < 8; d++) {
      const int sum = ts_simd_sum(reach[d]);
      if (lane == 0) sums[sg * 8 + d] = sum;
    }
    ts_barrier();
    if (tid < 8) {
      int total = 0;
      for (int i = 0; i < SG; i++) total += sums[i * 8 + tid];
      totals[tid] = total;
    }
    ts_barrier();
    int steps = 0;
    for (int d = 1; d < 8; d++) steps += totals[d] >= K ? 1 : 0;
    bad = totals[0] > 0 ? 1 : 0;
    cut += uint(steps) << uint(at);
  }
  // The first layer that met one is told.
  if (tid == 0) status[row] = fault[row] > 0 ? fault[row] : bad * sizes[1];

  const int each = (count + 32 * SG - 1) / (32 * SG);
  const int first = ts_min(tid * each, count);
  const int last = ts_min(first + each, count);
  int above = 0;
  int equal = 0;
  for (int b = first; b < last; b++) {
    const uint bits = ts_order(mine[b]);
    above += bits > cut ? 1 : 0;
    equal += bits == cut ? 1 : 0;
  }
  int above_before = ts_before(above, lane);
  int equal_before = ts_before(equal, lane);
  ts_barrier();
  if (lane == 31) {
    sums[sg * 8] = above_before + above;
    sums[sg * 8 + 1] = equal_before + equal;
  }
  ts_barrier();
  int all_above = 0;
  for (int i = 0; i < SG; i++) {
    all_above += sums[i * 8];
    if (i < sg) {
      above_before += sums[i * 8];
      equal_before += sums[i * 8 + 1];
    }
  }
  const int room = K - all_above;
  int slot = above_before + ts_min(equal_before, room);
  for (int b = first; b < last; b++) {
    const uint bits = ts_order(mine[b]);
    const bool fits = bits == cut && equal_before < room;
    if (bits == cut) equal_before++;
    if ((bits > cut || fits) && slot < K) ids[row * K + slot++] = b;
  }
"""

KERNEL = Kernel(
    "qsa_select", ("scores", "start", "fault", "sizes"), ("ids", "status"), BODY, HEADER
)


def simdgroups_on(where: str) -> int:
    """Of the one threadgroup that a row has; on CUDA 512 threads leave 128 registers to each."""
    return 16 if where == "cuda" else 8


def launch(
    scores: mx.array,
    start: mx.array,
    k: int,
    ratio: int,
    fault: mx.array,
    code: int = 1,
    simdgroups: int = 8,
) -> Launch:
    """(ids int32 [T, k], status int32 [T]) of scores [T, capacity].

    Row t reads its first (start + t + 1) / ratio scores, more than k of them. Its status is that of
    `fault` int32 [T] where that is above 0, else `code` where a NaN was seen, else 0.
    """
    p = plan(scores.shape[0], k, ratio, simdgroups)
    return Launch(p, [scores, start, fault, constant_ints(scores.shape[1], code)])


@lru_cache(maxsize=1024)
def plan(rows: int, k: int, ratio: int, simdgroups: int) -> Plan:
    """What the launch fixes for so many rows."""
    template: dict[str, Value] = {"K": k, "RATIO": ratio, "SG": simdgroups}
    outputs = (((rows, k), mx.int32), ((rows,), mx.int32))
    return Plan(KERNEL, template, (rows, 1, 1), SIMD * simdgroups, outputs)
