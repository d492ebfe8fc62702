"""The k best of a router's logits per token, with softmax weights; at most 512 experts.

In this order: the same in plain MLX, the body, the launch, the choice between them. Knows logits;
does not know experts.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.choices import backend
from turbospark.kernels.source import SIMD, Kernel, Launch, Plan, Value, constant

MAX_EXPERTS = 512
MAX_CHOSEN = 32
BACKENDS = ("cuda",)


# --- reference ------------------------------------------------------------------------------------


def router_topk_reference(
    logits: mx.array, k: int, normalize: bool = True, scale: float = 1.0
) -> tuple[mx.array, mx.array]:
    """Softmax in float32; the k largest, best first, the lower index first among equals.

    Shapes: logits [T, E] -> (ids int32 [T, k], weights float32 [T, k]). `normalize` divides by the
    sum of the chosen, which is a softmax over them alone; `scale` multiplies last.
    """
    scores = logits.astype(mx.float32)
    # argsort is not stable: equal logits are ordered by index here.
    above = scores[:, None, :] > scores[:, :, None]
    equal = scores[:, None, :] == scores[:, :, None]
    earlier = mx.arange(scores.shape[-1])[None, :] < mx.arange(scores.shape[-1])[:, None]
    rank = mx.sum(above | (equal & earlier), axis=-1)
    ids = mx.argsort(rank, axis=-1)[:, :k].astype(mx.int32)
    weights = mx.take_along_axis(mx.softmax(scores, axis=-1), ids, axis=-1)
    if normalize:
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    return ids, weights * scale


# --- kernel ---------------------------------------------------------------------------------------

HEADER = r"""
// Numbers in the order of the floats, the same for both zeros; 0 for a NaN.
TS_FN uint ts_order(float v) {
  const uint bits = ts_as_uint(v) == 0x80000000u ? 0u : ts_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0u;
  return (bits >> 31) > 0u ? ~bits : bits | 0x80000000u;
}
TS_FN float ts_of_order(uint order) {
  return ts_as_float((order >> 31) > 0u ? order & 0x7fffffffu : ~order);
}
"""

# One simdgroup per token. A lane holds logits lane, lane + 32, ...: each of k rounds takes the
# largest left, by value and then by index. Integers, because a GPU finds the largest of those of a
# simdgroup in one operation.
BODY = r"""
  constexpr int EACH = (E + 31) / 32;
  const int lane = int(thread_index_in_simdgroup);
  const int token = int(threadgroup_position_in_grid.x);
  uint left[EACH];
  uint first = 0u;
  float values[EACH];
  TS_UNROLL
  for (int i = 0; i < EACH; i++) {
    const int e = i * 32 + lane;
    values[i] = float(logits[token * E + ts_min(e, E - 1)]);
    left[i] = e < E ? ts_order(values[i]) : 0u;
    first = ts_max(first, left[i]);
  }
  const float top = ts_of_order(ts_simd_max(first));
  float total = 0.0f;
  TS_UNROLL
  for (int i = 0; i < EACH; i++)
    if (i * 32 + lane < E) total += ts_exp(values[i] - top);
  total = ts_simd_sum(total);

  float mine = 0.0f;
  float chosen = 0.0f;
  int my_id = 0;
  for (int rank = 0; rank < K; rank++) {
    uint best = 0u;
    int best_id = E - 1;
    TS_UNROLL
    for (int i = 0; i < EACH; i++) {
      if (left[i] > best) {
        best = left[i];
        best_id = i * 32 + lane;
      }
    }
    const uint largest = ts_simd_max(best);
    // A NaN is never larger: ids stay in range, and the weights are NaN.
    const int id = ts_simd_min(best == largest ? best_id : E - 1);
    TS_UNROLL
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == id) left[i] = 0u;
    const float weight = ts_exp(ts_of_order(largest) - top) / total;
    chosen += weight;
    if (lane == rank) {
      mine = weight;
      my_id = id;
    }
  }
  if (lane < K) {
    ids[token * K + lane] = my_id;
    weights[token * K + lane] = (NORMALIZE ? mine / chosen : mine) * scale[0];
  }
"""

KERNEL = Kernel("router_topk", ("logits", "scale"), ("ids", "weights"), BODY, HEADER)


def launch(logits: mx.array, k: int, normalize: bool, scale: float) -> Launch:
    """The kernel's launch for the arguments of the reference."""
    return Launch(plan(tuple(logits.shape), k, normalize), [logits, constant(scale)])


@lru_cache(maxsize=1024)
def plan(logits: tuple[int, ...], k: int, normalize: bool) -> Plan:
    """What the launch fixes for logits of that shape."""
    tokens, experts = logits
    template: dict[str, Value] = {"E": experts, "K": k, "NORMALIZE": normalize}
    outputs = (((tokens, k), mx.int32), ((tokens, k), mx.float32))
    return Plan(KERNEL, template, (tokens, 1, 1), SIMD, outputs)


# --- choice ---------------------------------------------------------------------------------------


def takes(experts: int, k: int) -> bool:
    """Whether the kernel chooses `k` of so many."""
    return experts <= MAX_EXPERTS and k <= MAX_CHOSEN


def router_topk(
    logits: mx.array, k: int, normalize: bool = True, scale: float = 1.0
) -> tuple[mx.array, mx.array]:
    """`router_topk_reference`, by the kernel where it wins."""
    where = backend(mx.default_device())
    if where not in BACKENDS or not takes(logits.shape[-1], k):
        return router_topk_reference(logits, k, normalize, scale)
    ids, weights = launch(logits, k, normalize, scale).run(where)
    return ids, weights
