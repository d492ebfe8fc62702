"""Scores of key blocks for block-sparse attention: how much each query wants each block.

In this order: the same in plain MLX, the body, the launch. Knows index queries and whole-capacity
block keys. Does not know who made the keys or what is done with the scores.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.decode_attention import HEADER
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

INDEX_DIMS = (32, 64, 128, 256)
GROUPS = 256
SIMDGROUPS = 8


# --- reference ------------------------------------------------------------------------------------


def block_scores_reference(queries: mx.array, keys: mx.array, start: int, ratio: int) -> mx.array:
    """sum over heads of relu(q . k) / sqrt(D), and -1 for blocks not complete at a row.

    Shapes: queries [T, heads, D] of positions from `start` on; keys [capacity, D], one per `ratio`
    positions -> float32 [T, blocks], as many as are complete at the last row. The ReLU comes before
    the sum: a head that dislikes a block does not speak against it.
    """
    rows, heads, dim = queries.shape
    blocks = (start + rows) // ratio
    flat = queries.reshape(rows * heads, dim).astype(mx.float32)
    products = flat @ keys[:blocks].astype(mx.float32).T
    liked = mx.maximum(products.reshape(rows, heads, blocks), 0.0)
    scores = mx.sum(liked, axis=1) * dim**-0.5
    complete = (start + 1 + mx.arange(rows)) // ratio
    return mx.where(mx.arange(blocks) < complete[:, None], scores, -1.0)


# --- kernel ---------------------------------------------------------------------------------------

# LANES lanes hold 8 dims each of a block key; a simdgroup reads AT_ONCE * TURNS blocks in a turn.
# Products of all turns and heads are summed over a key's lanes together, so that a lane ends up
# with those of one (turn, head); the heads of a turn are neighbours.
BODY = r"""
  constexpr int LANES = D / 8;
  constexpr int AT_ONCE = 32 / LANES;
  constexpr int BLOCK = AT_ONCE * TURNS;
  constexpr int SAME = LANES / (TURNS * HP);  // lanes that end up with the same product
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int row = int(threadgroup_position_in_grid.y);
  const int count = (start[0] + row + 1) / RATIO;
  const int dim = lane % LANES * 8;
  const int part_of = lane / LANES;
  const int my_head = lane / SAME % HP;
  const int my_turn = lane % LANES / (SAME * HP);

  float qv[HEADS][8];
  for (int h = 0; h < HEADS; h++) ts_load8(queries + (row * HEADS + h) * D + dim, qv[h]);
  auto row_scores = scores + int64_t(row) * sizes[0];

  const int unit = BLOCK * SG * sizes[1];
  for (int b0 = (int(threadgroup_position_in_grid.x) * SG + sg) * BLOCK; b0 < count; b0 += unit) {
    float part[TURNS * HP];
    TS_UNROLL
    for (int i = 0; i < TURNS; i++) {
      float kv[8];
      ts_load8(keys + int64_t(ts_min(b0 + i * AT_ONCE + part_of, count - 1)) * D + dim, kv);
      TS_UNROLL
      for (int h = 0; h < HP; h++) {
        float d = 0.0f;
        if (h < HEADS) {
          TS_UNROLL
          for (int j = 0; j < 8; j++) d = ts_fma(qv[h < HEADS ? h : 0][j], kv[j], d);
        }
        part[i * HP + h] = d;
      }
    }
    const float product = ts_sum_apart<TURNS * HP, LANES>(part, lane);
    // A NaN passes, so that it is seen.
    float liked = my_head >= HEADS || product <= 0.0f ? 0.0f : product;
    TS_UNROLL
    for (int mask = SAME; mask < SAME * HP; mask <<= 1) liked += ts_shuffle_xor(liked, mask);
    const int block = b0 + my_turn * AT_ONCE + part_of;
    if (lane % (SAME * HP) == 0 && block < count) row_scores[block] = liked * numbers[0];
  }
"""

KERNEL = Kernel(
    "qsa_score",
    ("queries", "keys", "start", "numbers", "sizes"),
    ("scores",),
    BODY,
    HEADER,
    partial=("scores",),
)


def launch(queries: mx.array, keys: mx.array, start: mx.array, ratio: int) -> Launch:
    """Scores float32 [T, capacity]; blocks not complete at a row stay unwritten.

    start int32 [1] is the position of the first row.
    """
    p = plan(tuple(queries.shape), keys.shape[0], ratio)
    inputs = [queries, keys, start, constant(queries.shape[2] ** -0.5)]
    return Launch(p, [*inputs, constant_ints(keys.shape[0], p.groups[0])])


@lru_cache(maxsize=1024)
def plan(queries: tuple[int, ...], capacity: int, ratio: int) -> Plan:
    """What the launch fixes for queries of that shape."""
    rows, heads, dim = queries
    padded, lanes = 1 << (heads - 1).bit_length(), dim // 8
    turns = max(1, min(4, lanes // padded))
    per_group = SIMD // lanes * turns * SIMDGROUPS
    groups = max(1, min(GROUPS, ceil_div(capacity, per_group)))
    template: dict[str, Value] = {
        "D": dim, "HEADS": heads, "HP": padded, "TURNS": turns, "RATIO": ratio, "SG": SIMDGROUPS,
    }  # fmt: skip
    outputs = (((rows, capacity), mx.float32),)
    return Plan(KERNEL, template, (groups, rows, 1), SIMD * SIMDGROUPS, outputs)


def takes(queries: mx.array) -> bool:
    """Whether the kernel computes queries of this shape."""
    return queries.shape[2] in INDEX_DIMS and queries.shape[1] <= queries.shape[2] // 8
