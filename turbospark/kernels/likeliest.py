"""The id of the largest logit of one row, computed where the logits are: greedy decoding reads it
back instead of the row.

In this order: the same in plain MLX, the two bodies (the best of each share of the row, and of
those), the launches, the choice. Knows numbers; does not know tokens.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.choices import backend
from turbospark.kernels.source import SIMD, Kernel, Launch, Plan, constant_ints

BACKENDS = ("cuda",)
SHARES = 64
SIMDGROUPS = 8


# --- reference ------------------------------------------------------------------------------------


def likeliest_reference(logits: mx.array) -> mx.array:
    """logits [V] -> int32 [1]: the first id of the largest, or -1 if one is not finite."""
    finite = mx.all(mx.isfinite(logits))
    return mx.where(finite, mx.argmax(logits).astype(mx.int32), -1).reshape(1)


# --- kernels --------------------------------------------------------------------------------------

# id -1 says that a logit is not finite; the lower of equal ids is kept in each step.
HEADER = r"""
// The best of a simdgroup in every lane. All 32 lanes.
TS_FN void ts_best_of_lanes(TS_THREAD float& value, TS_THREAD int& id, TS_THREAD int& bad) {
  bad = ts_simd_max(bad);
  const float top = ts_simd_max(value);
  id = ts_simd_min(value == top ? id : 2147483647);
  value = top;
}
"""

SHARE = r"""
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int share = int(threadgroup_position_in_grid.x);
  const int count = sizes[0];
  TS_SHARED(float, value_s, SG);
  TS_SHARED(int, id_s, SG);
  TS_SHARED(int, bad_s, SG);

  float value = -3.4028235e38f;
  int id = 2147483647;
  int bad = 0;
  for (int i = share * 32 * SG + tid; i < count; i += SHARES * 32 * SG) {
    const float v = float(logits[i]);
    if (!(ts_abs(v) <= 3.4028235e38f)) bad = 1;
    if (v > value || id == 2147483647) {
      value = v;
      id = i;
    }
  }
  ts_best_of_lanes(value, id, bad);
  if (lane == 0) {
    value_s[sg] = value;
    id_s[sg] = id;
    bad_s[sg] = bad;
  }
  ts_barrier();
  if (sg == 0) {
    const int from = ts_min(lane, SG - 1);
    value = value_s[from];
    id = id_s[from];
    bad = bad_s[from];
    ts_best_of_lanes(value, id, bad);
    if (lane == 0) {
      values[share] = value;
      ids[share] = bad > 0 ? -1 : id;
    }
  }
"""

BEST = r"""
  const int lane = int(thread_index_in_simdgroup);
  float value = -3.4028235e38f;
  int best = 2147483647;
  int bad = 0;
  for (int k = lane; k < SHARES; k += 32) {
    const float v = values[k];
    const int i = ids[k];
    if (i < 0) bad = 1;
    if (v > value || (v == value && i < best)) {
      value = v;
      best = i;
    }
  }
  ts_best_of_lanes(value, best, bad);
  if (lane == 0) id[0] = bad > 0 ? -1 : best;
"""

SHARE_KERNEL = Kernel("likeliest_share", ("logits", "sizes"), ("values", "ids"), SHARE, HEADER)
BEST_KERNEL = Kernel("likeliest_best", ("values", "ids"), ("id",), BEST, HEADER)


def launch_shares(logits: mx.array) -> Launch:
    """The first launch: logits [V] -> the best value float32 [SHARES] and id of each share."""
    return Launch(plan_shares(), [logits, constant_ints(logits.size)])


def launch_best(values: mx.array, ids: mx.array) -> Launch:
    """The second launch, over the first one's outputs -> int32 [1]."""
    return Launch(plan_best(), [values, ids])


@lru_cache(maxsize=1)
def plan_shares() -> Plan:
    """What the first launch fixes."""
    outputs = (((SHARES,), mx.float32), ((SHARES,), mx.int32))
    template = {"SG": SIMDGROUPS, "SHARES": SHARES}
    return Plan(SHARE_KERNEL, dict(template), (SHARES, 1, 1), SIMD * SIMDGROUPS, outputs)


@lru_cache(maxsize=1)
def plan_best() -> Plan:
    """What the second launch fixes."""
    return Plan(BEST_KERNEL, {"SHARES": SHARES}, (1, 1, 1), SIMD, (((1,), mx.int32),))


# --- choice ---------------------------------------------------------------------------------------


def likeliest(logits: mx.array) -> mx.array:
    """`likeliest_reference`, by the kernels where they are used."""
    where = backend(mx.default_device())
    if where not in BACKENDS:
        return likeliest_reference(logits)
    return launch_best(*launch_shares(logits).run(where)).run(where)[0]
