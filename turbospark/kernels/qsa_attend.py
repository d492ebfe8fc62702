"""Attention of each row over its own list of key blocks and the open block after them.

In this order: the same in plain MLX, the body (partial sums of each split of a row's list; they are
combined as in `decode_attention`), the launch. Knows whole-capacity key/value buffers in token
order. Does not know how blocks were chosen.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.decode_attention import ACCUMULATE, COMBINE_KERNEL, HEADER
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
SIMDGROUPS = 4
PARTIAL_BYTES = 32 << 20
"""Partial sums of one launch at most; more rows are taken in turns."""

# --- reference ------------------------------------------------------------------------------------

GATHERED_BYTES = 64 << 20
"""Keys and values gathered at once; more rows are taken in turns."""


def attend_blocks_reference(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    ids: mx.array,
    start: int,
    ratio: int,
    scale: float,
) -> mx.array:
    """softmax(scale q K^T) V over the chosen blocks' positions and those after the last full block.

    Shapes: q [T, H, D] of positions from `start` on; keys, values [capacity, KV, D]; ids int32
    [T, k] ascending blocks of `ratio` positions -> [T, H, D].
    """
    rows, width = q.shape[0], (ids.shape[1] + 1) * ratio - 1
    row_bytes = 2 * width * keys.shape[1] * keys.shape[2] * keys.itemsize
    step = max(1, GATHERED_BYTES // row_bytes)
    outputs = []
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        tokens, seen = listed_tokens(ids[part], start + at, ratio)
        k, v = (a[tokens].swapaxes(1, 2) for a in (keys, values))
        mask = seen[:, None, None]
        out = mx.fast.scaled_dot_product_attention(
            q[part][:, :, None], k, v, scale=scale, mask=mask
        )
        outputs.append(out[:, :, 0])
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def listed_tokens(ids: mx.array, start: int, ratio: int) -> tuple[mx.array, mx.array]:
    """Blocks [T, k] of rows from `start` on -> positions [T, k * ratio + ratio - 1], which count.

    All rows have one width, so that a row is summed alike alone and among others.
    """
    rows = ids.shape[0]
    chosen = (ids[..., None] * ratio + mx.arange(ratio)).reshape(rows, -1)
    visible = (start + 1 + mx.arange(rows))[:, None]
    tail = visible // ratio * ratio + mx.arange(ratio - 1)
    tokens = mx.concatenate([chosen, mx.minimum(tail, visible - 1)], axis=-1)
    seen = mx.concatenate([mx.ones(chosen.shape, mx.bool_), tail < visible], axis=-1)
    return tokens, seen


# --- kernel ---------------------------------------------------------------------------------------

# As `decode_attention`'s: a lane owns 8 dims, LANES lanes a position. Entry i of a row's list is a
# position of a chosen block, and after all of those one of the open block. LOAD reads `position`
# into kr[i] and vr[i].
LISTED = r"""
  constexpr int LANES = D / 8;
  constexpr int AT_ONCE = 32 / LANES;
  constexpr int BLOCK = AT_ONCE * TURNS;
  constexpr int SAME = LANES / (TURNS * GP);  // lanes that end up with the same score
  constexpr int TURN_BIT = SAME * GP;
  constexpr int TILES = (NQ + GQ - 1) / GQ;
  const int tid = int(thread_index_in_threadgroup);
  const int lane = int(thread_index_in_simdgroup);
  const int sg = int(simdgroup_index_in_threadgroup);
  const int split = int(threadgroup_position_in_grid.x);
  const int kv = int(threadgroup_position_in_grid.y);
  const int row = int(threadgroup_position_in_grid.z) / TILES;
  const int q0 = int(threadgroup_position_in_grid.z) % TILES * GQ;
  const int query0 = (row * KV + kv) * NQ + q0;
  const int splits = sizes[1];
  const int seen = start[0] + row + 1;
  const int open = seen / RATIO * RATIO;
  const int count = K * RATIO + seen - open;

  TS_SHARED(float, acc_s, SG * GQ * D);
  TS_SHARED(float, max_s, SG * GP);
  TS_SHARED(float, sum_s, SG * GP);

  const int unit = BLOCK * SG;
  const int each = ((count + splits - 1) / splits + unit - 1) / unit * unit;
  const int begin = split * each;
  const int stop = ts_min(begin + each, count);
  const int dim = lane % LANES * 8;
  const int row_of_lane = lane / LANES;
  const int my_query = lane / SAME % GP;
  const int my_turn = lane % LANES / TURN_BIT;

  float qv[GQ][8], acc[GQ][8];
  for (int g = 0; g < GQ; g++) {
    const int head = kv * NQ + ts_min(q0 + g, NQ - 1);
    ts_load8(q + int64_t(row * KV * NQ + head) * D + dim, qv[g]);
    for (int j = 0; j < 8; j++) {
      qv[g][j] *= numbers[0];
      acc[g][j] = 0.0f;
    }
  }
  float top = -1e30f;
  float sum = 0.0f;

  for (int t0 = begin + sg * BLOCK; t0 < stop; t0 += unit) {
    float kr[TURNS][8], vr[TURNS][8];
    TS_UNROLL
    for (int i = 0; i < TURNS; i++) {
      const int entry = ts_min(t0 + i * AT_ONCE + row_of_lane, stop - 1);
      const int listed = ids[row * K + ts_min(entry / RATIO, K - 1)] * RATIO + entry % RATIO;
      const int position = entry < K * RATIO ? listed : open + entry - K * RATIO;
LOAD    }
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
    const float score = ts_sum_apart<TURNS * GP, LANES>(part, lane);
    const bool live = t0 + my_turn * AT_ONCE + row_of_lane < stop;
"""
LISTED += ACCUMULATE
PARTIAL = LISTED.replace(
    "LOAD",
    """
      const int64_t at = (int64_t(position) * KV + kv) * D + dim;
      ts_load8(keys + at, kr[i]);
      ts_load8(values + at, vr[i]);
""",
)

PARTIAL_KERNEL = Kernel(
    "qsa_attend",
    ("q", "keys", "values", "ids", "start", "numbers", "sizes"),
    ("o", "ml"),
    PARTIAL,
    HEADER,
    partial=("o",),
)


def launch_partial(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    ids: mx.array,
    start: mx.array,
    ratio: int,
    scale: float,
    splits: int,
) -> Launch:
    """The first launch for the arguments of the reference; start int32 [1]."""
    p = plan_partial(tuple(q.shape), keys.shape[1], ids.shape[1], ratio, splits)
    sizes = constant_ints(0, splits)
    return Launch(p, [q, keys, values, ids, start, constant(scale), sizes])


@lru_cache(maxsize=1024)
def plan_partial(
    q: tuple[int, ...],
    kv: int,
    k: int,
    ratio: int,
    splits: int,
    kernel: Kernel = PARTIAL_KERNEL,
    more: tuple[tuple[str, Value], ...] = (),
) -> Plan:
    """What the first launch fixes for queries of shape `q`; `more` of a kernel of packed rows."""
    rows, heads, dim = q
    queries = heads // kv
    at_once = min(queries, 4 if dim == 256 else 8)
    padded = 1 << (at_once - 1).bit_length()
    template: dict[str, Value] = {
        "D": dim, "KV": kv, "NQ": queries, "GQ": at_once, "GP": padded, "K": k, "RATIO": ratio,
        "TURNS": max(1, min(4, dim // 8 // padded)), "SG": SIMDGROUPS, **dict(more),
    }  # fmt: skip
    groups = (splits, kv, rows * ceil_div(queries, at_once))
    outputs = (
        ((rows * heads, splits, dim), mx.float32),
        ((rows * heads, splits, 2), mx.float32),
    )
    return Plan(kernel, template, groups, SIMD * SIMDGROUPS, outputs)


def launch_combine(q: mx.array, o: mx.array, ml: mx.array, splits: int) -> Launch:
    """The second launch: `decode_attention`'s, every row's heads as heads of one row."""
    p = plan_combine(tuple(q.shape), q.dtype)
    return Launch(p, [o, ml, o, constant_ints(0, splits)])


@lru_cache(maxsize=1024)
def plan_combine(q: tuple[int, ...], dtype: mx.Dtype) -> Plan:
    """What the second launch fixes; the number of rows is no part of the compiled text."""
    rows, heads, dim = q
    template: dict[str, Value] = {"T": dtype, "D": dim, "M": 1, "H": 1, "SINKS": False}
    return Plan(COMBINE_KERNEL, template, (rows * heads, 1, 1), dim, ((q, dtype),))


def takes(q: mx.array, kv: int) -> bool:
    """Whether the kernels compute queries of this shape over `kv` key heads."""
    return q.shape[2] in HEAD_DIMS and q.shape[1] % kv == 0
