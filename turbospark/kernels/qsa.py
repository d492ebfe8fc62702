"""Block-sparse attention of one pass: score, select, attend, combine; kernels or plain MLX.

Knows the three parts and which of them a back end takes. Does not know caches or layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Rule:
    """What a layer fixes: positions per block, blocks chosen per row, the scale of scores, and the
    `code` above 0 by which a row with a NaN among its block scores is told.
    """

    ratio: int
    chosen: int
    scale: float
    code: int = 1


def choose_and_attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    block_keys: mx.array,
    start: int,
    rule: Rule,
    fault: mx.array | None = None,
    kernels: bool = False,
) -> tuple[mx.array, mx.array]:
    """Each row over its best blocks and the open one -> (out, fault).

    Shapes: q [T, H, D] of positions from `start` on; keys, values [capacity, KV, D]; queries
    [T, heads, index D]; block_keys [blocks, index D] -> out [T, H, D]. fault int32 [T] is 0 for a
    row without a NaN, else the code of the first layer that met one. With `kernels`, four launches
    where the back end has them and they take the shapes.
    """
    where = backend(mx.default_device())
    if fault is None:
        fault = _no_fault(len(q))
    own = kernels and where != "cpu"
    own = own and qsa_score.takes(queries) and qsa_attend.takes(q, keys.shape[1])
    run = _by_kernels if own else _plainly
    row_bytes = _score_bytes(queries, block_keys, own)
    if own:
        row_bytes = max(row_bytes, 4 * SPLITS * q.shape[1] * q.shape[2])

    def turn(at: int, q: mx.array, queries: mx.array, fault: mx.array) -> tuple[mx.array, mx.array]:
        return run(q, keys, values, queries, block_keys, at, rule, fault)

    return _in_turns(turn, start, (q, queries, fault), row_bytes)


def choose(
    queries: mx.array,
    block_keys: mx.array,
    start: int,
    rule: Rule,
    fault: mx.array | None = None,
    kernels: bool = False,
) -> tuple[mx.array, mx.array]:
    """Each row's best blocks alone, int32 [T, chosen], ascending -> (ids, fault); see above."""
    if fault is None:
        fault = _no_fault(len(queries))
    own = kernels and backend(mx.default_device()) != "cpu" and qsa_score.takes(queries)
    run = _choose_by_kernels if own else _choose_plainly

    def turn(at: int, queries: mx.array, fault: mx.array) -> tuple[mx.array, mx.array]:
        return run(queries, block_keys, at, rule, fault)

    return _in_turns(turn, start, (queries, fault), _score_bytes(queries, block_keys, own))


def _no_fault(rows: int) -> mx.array:
    """Zeros [rows]; for a decode step they are there already, so that no launch fills them."""
    return constant_ints(0)[:1] if rows == 1 else mx.zeros((rows,), mx.int32)


def _score_bytes(queries: mx.array, block_keys: mx.array, kernels: bool) -> int:
    """Of one row: plain MLX makes the scores of every index head."""
    return 4 * block_keys.shape[0] * (1 if kernels else queries.shape[1])


def _in_turns(
    run: Callable[..., tuple[mx.array, mx.array]],
    start: int,
    arrays: tuple[mx.array, ...],
    row_bytes: int,
) -> tuple[mx.array, mx.array]:
    """`run` over parts of the rows of `arrays`, of positions from `start` on, that take SCORE_BYTES
    at most.
    """
    rows, step = len(arrays[0]), max(1, SCORE_BYTES // row_bytes)
    if step >= rows:
        return run(start, *arrays)
    parts = [run(start + at, *(a[at : at + step] for a in arrays)) for at in range(0, rows, step)]
    return mx.concatenate([out for out, _ in parts]), mx.concatenate([told for _, told in parts])


def _plainly(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    block_keys: mx.array,
    start: int,
    rule: Rule,
    fault: mx.array,
) -> tuple[mx.array, mx.array]:
    ids, fault = _choose_plainly(queries, block_keys, start, rule, fault)
    out = qsa_attend.attend_blocks_reference(q, keys, values, ids, start, rule.ratio, rule.scale)
    return out, fault


def _choose_plainly(
    queries: mx.array, block_keys: mx.array, start: int, rule: Rule, fault: mx.array
) -> tuple[mx.array, mx.array]:
    scores = qsa_score.block_scores_reference(queries, block_keys, start, rule.ratio)
    ids, bad = qsa_select.select_blocks_reference(scores, rule.chosen)
    return ids, mx.where((fault == 0) & bad, rule.code, fault)


def _by_kernels(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    queries: mx.array,
    block_keys: mx.array,
    start: int,
    rule: Rule,
    fault: mx.array,
) -> tuple[mx.array, mx.array]:
    where = backend(mx.default_device())
    first, ratio = constant_ints(start), rule.ratio
    ids, fault = _choose_by_kernels(queries, block_keys, start, rule, fault)
    attend = qsa_attend.launch_partial(q, keys, values, ids, first, ratio, rule.scale, SPLITS)
    o, ml = attend.run(where)
    (out,) = qsa_attend.launch_combine(q, o, ml, SPLITS).run(where)
    return out, fault


def _choose_by_kernels(
    queries: mx.array, block_keys: mx.array, start: int, rule: Rule, fault: mx.array
) -> tuple[mx.array, mx.array]:
    where = backend(mx.default_device())
    first, ratio = constant_ints(start), rule.ratio
    (scores,) = qsa_score.launch(queries, block_keys, first, ratio).run(where)
    select = qsa_select.launch(
        scores, first, rule.chosen, ratio, fault, rule.code, qsa_select.simdgroups_on(where)
    )
    ids, fault = select.run(where)
    return ids, fault
