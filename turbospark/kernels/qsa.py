"""Block-sparse attention of one pass: score, select, attend, combine; kernels or plain MLX.

Knows the three parts and which of them a back end takes. Does not know caches or layers.
"""

from __future__ import annotations

import mlx.core as mx

from turbospark.kernels import qsa_attend, qsa_score, qsa_select
from turbospark.kernels.choices import backend
from turbospark.kernels.source import constant_ints

SCORE_BYTES = 32 << 20
"""Block scores of one turn at most, of every index head in plain MLX."""
SPLITS = 24
"""Parts of a row's list: with two key heads and three groups of queries, a threadgroup or so for
each of an H200's 132 processors.
"""


def choose_and_attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    block_keys: mx.array,
    start: int,
    ratio: int,
    chosen: int,
    scale: float,
    kernels: bool = False,
) -> tuple[mx.array, mx.array]:
    """Each row over its `chosen` best blocks and the open one -> (out, bad).

    Shapes: q [T, H, D] of positions from `start` on; keys, values [capacity, KV, D]; queries
    [T, heads, index D]; block_keys [blocks, index D] -> out [T, H, D], bad bool [T]: a row with a
    NaN among its scores.
    """
    where = backend(mx.default_device())
    own = kernels and where != "cpu"
    own = own and qsa_score.takes(queries) and qsa_attend.takes(q, keys.shape[1])
    rows, outputs, bad = q.shape[0], [], []
    row_bytes = 4 * block_keys.shape[0]
    if own:
        row_bytes = max(row_bytes, 4 * SPLITS * q.shape[1] * q.shape[2])
    else:
        row_bytes *= queries.shape[1]
    step = max(1, SCORE_BYTES // row_bytes)
    for at in range(0, rows, step):
        part = slice(at, min(at + step, rows))
        if own:
            first = constant_ints(start + at)
            (scores,) = qsa_score.launch(queries[part], block_keys, first, ratio).run(where)
            simdgroups = 32 if where == "cuda" else 8
            select = qsa_select.launch(scores, first, chosen, ratio, simdgroups)
            ids, status = select.run(where)
            attend = qsa_attend.launch_partial(
                q[part], keys, values, ids, first, ratio, scale, SPLITS
            )
            o, ml = attend.run(where)
            (out,) = qsa_attend.launch_combine(q[part], o, ml, SPLITS).run(where)
            outputs.append(out.reshape(-1, *q.shape[1:]))
            bad.append(status > 0)
        else:
            scores = qsa_score.block_scores_reference(queries[part], block_keys, start + at, ratio)
            ids, status = qsa_select.select_blocks_reference(scores, chosen)
            outputs.append(
                qsa_attend.attend_blocks_reference(
                    q[part], keys, values, ids, start + at, ratio, scale
                )
            )
            bad.append(status)
    if len(outputs) == 1:
        return outputs[0], bad[0]
    return mx.concatenate(outputs), mx.concatenate(bad)
