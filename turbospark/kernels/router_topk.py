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

# One simdgroup per token. A lane holds logits lane, lane + 32, ...: each of k rounds takes the
# largest left, by value and then by index.
BODY = r"""
  constexpr int EACH = (E + 31) / 32;
  const int lane = int(thread_index_in_simdgroup);
  const int token = int(threadgroup_position_in_grid.x);
  float left[EACH];
  float top = -1e30f;
  TS_UNROLL
  for (int i = 0; i < EACH; i++) {
    const int e = i * 32 + lane;
    left[i] = e < E ? float(logits[token * E + e]) : -1e30f;
    top = ts_max(top, left[i]);
  }
  top = ts_simd_max(top);
  float total = 0.0f;
  TS_UNROLL
  for (int i = 0; i < EACH; i++)
    if (i * 32 + lane < E) total += ts_exp(left[i] - top);
  total = ts_simd_sum(total);

  float mine = 0.0f;
  float chosen = 0.0f;
  int my_id = 0;
  for (int rank = 0; rank < K; rank++) {
    float best = -2e30f;
    int best_id = E - 1;
    TS_UNROLL
    for (int i = 0; i < EACH; i++) {
      if (left[i] > best) {
        best = left[i];
        best_id = i * 32 + lane;
      }
    }
    const float largest = ts_simd_max(best);
    // A NaN is never larger: ids stay in range, and the weights are NaN.
    const int id = ts_min(ts_simd_min(best == largest ? best_id : 2 * E), E - 1);
    TS_UNROLL
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == id) left[i] = -3e30f;
    const float weight = ts_exp(largest - top) / total;
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

KERNEL = Kernel("router_topk", ("logits", "scale"), ("ids", "weights"), BODY)


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


def router_topk(
    logits: mx.array, k: int, normalize: bool = True, scale: float = 1.0
) -> tuple[mx.array, mx.array]:
    """`router_topk_reference`, by the kernel where it wins."""
    where = backend(mx.default_device())
    if where not in BACKENDS or logits.shape[-1] > MAX_EXPERTS or k > MAX_CHOSEN:
        return router_topk_reference(logits, k, normalize, scale)
    ids, weights = launch(logits, k, normalize, scale).run(where)
    return ids, weights
