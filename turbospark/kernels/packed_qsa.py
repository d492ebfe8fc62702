"""Block-sparse attention over packed rows: each row over its own list of key blocks.

In this order: the body, which is `qsa_attend`'s but for how a position is read, the launch, the
choice. The same in plain MLX is `packed_attention.packed_listed_reference`; partial sums are
combined and turned back as in `packed_decode`. Does not know how blocks were chosen.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.kernels import kv_codec, packed_decode, qsa_attend
from turbospark.kernels.choices import backend
from turbospark.kernels.decode_attention import HEADER
from turbospark.kernels.packed_attention import Near, Packed
from turbospark.kernels.source import Kernel, Launch, constant, constant_ints

PARTIAL_BYTES = 32 << 20
"""Partial sums of one launch at most; more rows are taken in turns."""
SPLITS = 24
"""Parts of a row's list, as of `qsa`."""

# A lane's 8 dims are four pairs of a key: codes of 4 bits fill a word, lower bits half a word, the
# third bits a quarter. A value's dims lie in words of their own, at its token's place in each.
LOAD = r"""
      const int limit = ts_max((seen - 1) / 32 - 1, 0) * 32;
      if (position < 4 || position >= limit) {
        const int64_t first = (int64_t(kv) * 4 + ts_min(position, 3)) * D + dim;
        const int64_t held = (int64_t(kv) * sizes[2] + ts_max(position - sizes[3], 0)) * D + dim;
        ts_load8(position < 4 ? first_keys + first : new_keys + held, kr[i]);
        ts_load8(position < 4 ? first_values + first : new_values + held, vr[i]);
      } else {
        const int capacity = sizes[0];
        const int64_t at = int64_t(kv) * capacity + position;
        const float by_key = float(key_scales[at]);
        const float by_value = float(value_scales[at]);
        auto key = keys + at * (D * KB / 32);
        const uint k_low = KB == 4 ? key[dim / 8] : key[dim / 16] >> (dim / 8 % 2 * 8);
        const uint k_high = KB == 3 ? key[D / 16 + dim / 32] >> (dim / 8 % 4 * 4) : 0u;
        const int inside = position % 32;
        const int pair = inside % 8 / 2 * 4 + inside / 8;
        const int side = inside % 2 * 16;
        auto value = values + (int64_t(kv) * (capacity / 32) + position / 32) * (VB * D) + dim;
        auto v_low = value + (VB == 4 ? pair / 4 : pair / 8) * D;
        const int v_down = side + (VB == 4 ? pair % 4 * 4 : pair % 8 * 2);
        TS_UNROLL
        for (int j = 0; j < 8; j++) {
          const int down = j / 2 * (KB == 4 ? 4 : 2) + j % 2 * 16;
          uint code = (k_low >> down) & (KB == 4 ? 15u : 3u);
          if (KB == 3) code |= ((k_high >> (j / 2 + j % 2 * 16)) & 1u) << 2;
          kr[i][j] = key_levels[code] * by_key;
          code = (v_low[j] >> v_down) & (VB == 4 ? 15u : 3u);
          if (VB == 3) code |= ((value[2 * D + j] >> (side + pair)) & 1u) << 2;
          vr[i][j] = value_levels[code] * by_value;
        }
      }
"""
PARTIAL_KERNEL = Kernel(
    "packed_qsa",
    (
        "q", "keys", "key_scales", "values", "value_scales", "new_keys", "new_values",
        "first_keys", "first_values", "key_levels", "value_levels", "ids", "start", "numbers",
        "sizes",
    ),
    ("o", "ml"),
    qsa_attend.LISTED.replace("LOAD", LOAD),
    HEADER,
    partial=("o",),
)  # fmt: skip


def launch_partial(
    q: mx.array,
    packed: Packed,
    near: Near,
    ids: mx.array,
    start: mx.array,
    ratio: int,
    splits: int,
) -> Launch:
    """Partial sums for turned, scaled queries float32 [T, H, D] of positions from `start` int32 [1]
    on, over blocks ids int32 [T, k] of `ratio` positions and the open one.
    """
    widths = (("KB", packed.key_bits), ("VB", packed.value_bits))
    kv, k = packed.keys.shape[0], ids.shape[1]
    p = qsa_attend.plan_partial(tuple(q.shape), kv, k, ratio, splits, PARTIAL_KERNEL, widths)
    sizes = constant_ints(packed.capacity, splits, near.keys.shape[1], near.start)
    levels = [kv_codec.codebook(bits) for _, bits in widths]
    inputs = [
        q, packed.keys, packed.key_scales, packed.values, packed.value_scales, near.keys,
        near.values, near.first_keys, near.first_values, *levels, ids, start, constant(1.0), sizes,
    ]  # fmt: skip
    return Launch(p, inputs)


def launch_combine(q: mx.array, o: mx.array, ml: mx.array, dtype: mx.Dtype, splits: int) -> Launch:
    """`packed_decode`'s, every row's heads as heads of one row -> [1, 1, T * H * D]."""
    alone = q.reshape(-1, 1, q.shape[-1])
    return packed_decode.launch_combine(
        alone, o, ml, None, dtype, packed_decode.Tuning(splits=splits - 1)
    )


def takes(heads: int, kv: int, dim: int) -> bool:
    """Whether the launches compute queries of `heads` heads here."""
    where = backend(mx.default_device())
    return where in packed_decode.BACKENDS and dim in qsa_attend.HEAD_DIMS and heads % kv == 0


def packed_qsa(
    q: mx.array,
    packed: Packed,
    near: Near,
    ids: mx.array,
    start: int,
    ratio: int,
    dtype: mx.Dtype,
) -> mx.array:
    """Attention of queries that `takes` accepts, turned back -> [T, H, D] of `dtype`."""
    where = backend(mx.default_device())
    step = max(1, PARTIAL_BYTES // (4 * SPLITS * q.shape[1] * q.shape[2]))
    out = []
    for at in range(0, len(q), step):
        part = q[at : at + step]
        first = launch_partial(
            part, packed, near, ids[at : at + step], constant_ints(start + at), ratio, SPLITS
        )
        o, ml = first.run(where)
        (found,) = launch_combine(part, o, ml, dtype, SPLITS).run(where)
        out.append(found.reshape(part.shape))
    return out[0] if len(out) == 1 else mx.concatenate(out)
