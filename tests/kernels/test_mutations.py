"""Bugs planted one at a time in every kernel; each must be found by the emulator or the numbers."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import test_decode_attention as attention
import test_delta_rows as rows_of_delta
import test_delta_step as delta
import test_expert_mlp as experts
import test_kv_encode as encoding
import test_packed_decode as packed
import test_qmv as qmv
import test_rope_kv as rope
import test_router_topk as router
from cases import error, floats, normal
from emulator import EmulationError, emulate

from turbospark.dtypes import affine
from turbospark.kernels import (
    decode_attention,
    delta_rows,
    delta_step,
    expert_matrix,
    expert_scalar,
    kv_codec,
    kv_encode,
    likeliest,
    packed_decode,
    qmv_matrix,
    qmv_scalar,
    rope_kv,
    router_topk,
)
from turbospark.kernels.source import Launch


@dataclass(frozen=True)
class Trial:
    """A launch, what its outputs must come to, and how near."""

    launch: Launch
    want: np.ndarray
    tolerance: float
    finish: Callable[[list[np.ndarray]], np.ndarray] = operator.itemgetter(0)

    def passes(self, launch: Launch) -> bool:
        for seed in (0, 3):
            try:
                got = self.finish(emulate(launch, seed).outputs)
            except EmulationError:
                return False
            if not error(got, self.want) < self.tolerance:
                return False
        return True


def scalar() -> Trial:
    fmt, glu = affine(4, 32, "float32"), {"glu": "silu"}
    case = qmv.Case(3, 2 * 11, 1120, fmt, parts="norm bias glu residual", extra=glu)
    x, w, around = case.inputs()
    run = qmv_scalar.launch(x, w.fmt, w.weight, w.scales, w.biases, around, case.tuning)
    return Trial(run, qmv.loop(x, w, around), 1e-5)


def matrix() -> Trial:
    case = qmv.Case(3, 37, 1024, affine(4, 64), mx.bfloat16, parts="norm residual")
    x, w, around = case.inputs()
    tuning = qmv_matrix.Tuning(1, 2)
    run = qmv_matrix.launch(x, w.fmt, w.weight, w.scales, w.biases, around, tuning)
    return Trial(run, qmv.loop(x, w, around), 5e-3)


def partial() -> Trial:
    tuning = decode_attention.Tuning(2, 3)
    return merging(attention.Case(2, 2, 64, 70, 96, rows=2, window=50, tuning=tuning))


def ring() -> Trial:
    tuning = decode_attention.Tuning(2, 3)
    return merging(attention.Case(1, 2, 64, 300, 90, window=88, ring=True, tuning=tuning))


def merging(case: attention.Case) -> Trial:
    """The first launch, its splits merged in float64."""
    q, k, v = case.inputs()
    length = mx.array([case.length], dtype=mx.int32)
    run = decode_attention.launch_partial(q, k, v, length, case.rules, case.tuning)

    def merged(outputs: list[np.ndarray]) -> np.ndarray:
        o, ml = outputs
        weights = np.exp(ml[..., 0] - ml[..., 0].max(-1, keepdims=True))
        values = np.where(weights[..., None] > 0, o, 0.0) * weights[..., None]
        out = values.sum(1) / (weights * ml[..., 1]).sum(1)[:, None]
        heads = case.kv * case.group
        return out.reshape(heads, case.rows, 64).swapaxes(0, 1).reshape(1, case.rows, -1)

    return Trial(run, attention.loop(case), 1e-5, merged)


def combine() -> Trial:
    o, top = floats(normal((4, 40, 64), mx.float32, 1)), floats(normal((4, 40), mx.float32, 2))
    total = np.abs(floats(normal((4, 40), mx.float32, 3))) + 0.5
    top[:, 35:], total[:, 35:], o[:, 35:] = -1e30, 0.0, np.nan
    sinks = normal((4,), mx.float32, 4)
    ml = mx.array(np.stack([top, total], -1).astype(np.float32))
    q = mx.zeros((1, 4, 1, 64))
    tuning = decode_attention.Tuning(2, 40)
    parts = mx.array(o.astype(np.float32))
    run = decode_attention.launch_combine(q, parts, ml, 96, sinks, tuning)
    weights = np.exp(top)
    values = (weights[:, :35, None] * o[:, :35]).sum(1)
    sums = (weights * total).sum(1) + np.exp(floats(sinks))
    return Trial(run, (values / sums[:, None]).reshape(1, 1, -1), 1e-5)


def gate_up() -> Trial:
    case = experts.Case(2, 3, 288, 96, affine(4, 32, "float32"), parts="unused")
    return hidden(expert_scalar, case, expert_scalar.Tuning(10, 1), 1e-5)


def gate_up_matrix() -> Trial:
    case = experts.Case(2, 2, 256, 96, affine(4, 32), mx.bfloat16, parts="unused")
    return hidden(expert_matrix, case, expert_matrix.Tuning(), 5e-3)


def hidden(module: Any, case: experts.Case, tuning: Any, tolerance: float) -> Trial:
    """The first launch against gate and up in float64."""
    x, slots, _ = case.routed()
    run = module.launch_gate_up(x, slots, case.experts(), case.around(), tuning)
    gate, up, _ = (p.values for p in case.packed())
    want = np.zeros((case.tokens, case.ranks, case.inner))
    for t, row in enumerate(floats(x)):
        for rank, e in enumerate(np.array(slots)[t]):
            if e >= 0:
                want[t, rank] = experts.activation(case, gate[e] @ row, up[e] @ row)
    return Trial(run, want, tolerance)


def down() -> Trial:
    case = experts.Case(2, 3, 96, 160, affine(4, 32, "float32"), parts="unused residual bias")
    return summed(expert_scalar, case, 1e-5)


def down_matrix() -> Trial:
    case = experts.Case(2, 2, 96, 128, affine(4, 32), mx.bfloat16, parts="residual")
    return summed(expert_matrix, case, 5e-3)


def summed(module: Any, case: experts.Case, tolerance: float) -> Trial:
    """The second launch against float64 on random hidden values."""
    _, slots, weights = case.routed()
    h = normal((case.tokens, case.ranks, case.inner), mx.float32, 9)
    h = mx.where(slots[..., None] < 0, 0.0, h)
    args = (h, slots, weights, case.experts(), case.around(), case.dtype)
    run = module.launch_down(*args, module.Tuning())
    matrix, bias = case.packed()[2].values, case.linear_biases()[2]
    want = floats(case.around().residual).copy()
    for t in range(case.tokens):
        for rank, e in enumerate(np.array(slots)[t]):
            if e >= 0:
                y = matrix[e] @ floats(h)[t, rank] + (0 if bias is None else floats(bias)[e])
                want[t] += floats(weights)[t, rank] * y
    return Trial(run, want, tolerance)


def rotate() -> Trial:
    case = rope.Case(3, 1, 96, 40, dims=36, norms=True, interleaved=True)
    qkv, _, _, length = case.inputs()
    run = rope_kv.launch_rotate(qkv, length, case.heads(), case.turn())
    return Trial(run, rope.loop(case)[0], 1e-5)


def best() -> Trial:
    logits = mx.round(normal((2, 70), mx.float32, 0, 0.5))
    run = router_topk.launch(logits, 6, True, 1.0)
    return Trial(run, router.loop(floats(logits), 6, True, 1.0)[0], 1e-9)


def delta_token() -> Trial:
    return token_of(delta.Case(2, 4, 48, 20, taps=3))


def faint_token() -> Trial:
    return token_of(delta.CASES["faint inputs"])


def shut_token() -> Trial:
    return token_of(delta.CASES["strong rates of shut gates"])


def token_of(case: delta.Case) -> Trial:
    return Trial(delta_step.launch(*case.inputs()), all_of(delta.loop(case)), 1e-5, all_of)


def delta_pass() -> Trial:
    case = rows_of_delta.Case(2, 4, 48, 22, 5)
    want = all_of(rows_of_delta.loop(case))
    return Trial(delta_rows.launch(*case.inputs()), want, 1e-5, all_of)


def all_of(outputs: Sequence[np.ndarray]) -> np.ndarray:
    """One behind the other."""
    return np.concatenate([a.ravel() for a in outputs])


def shares() -> Trial:
    row = mx.clip(mx.round(normal((40_000,), mx.float32, 0)), -1, 1)
    row[5] = mx.inf
    values, part = floats(row), np.arange(40_000) // 256 % likeliest.SHARES
    want = [np.flatnonzero((part == s) & (values == values[part == s].max()))[0] for s in range(64)]
    want[0] = -1
    return Trial(likeliest.launch_shares(row), np.array(want), 1e-9, operator.itemgetter(1))


def best_share() -> Trial:
    values, ids = np.zeros(64, np.float32), np.arange(64, dtype=np.int32)[::-1].copy()
    values[:20] = -1.0
    run = likeliest.launch_best(mx.array(values), mx.array(ids))
    return Trial(run, np.array([0]) + ids[20:].min() + 1, 1e-9, lambda out: out[0] + 1)


def packed_sums() -> Trial:
    return joined(packed.Case(2, 3, 64, 289, (4, 4), rows=2, tuning=packed_decode.Tuning(2, 3)))


def packed_three_bits() -> Trial:
    return joined(packed.Case(1, 2, 64, 231, (3, 3), tuning=packed_decode.Tuning(2, 3)))


def joined(case: packed.Case) -> Trial:
    """The partial sums over packed rows, merged and turned back in float64."""
    length = mx.array([case.length], dtype=mx.int32)
    run = packed_decode.launch_partial(
        case.query(), case.packed(), case.near(), length, case.tuning
    )

    def merged(outputs: list[np.ndarray]) -> np.ndarray:
        o, ml = outputs
        weights = np.exp(ml[..., 0] - ml[..., 0].max(-1, keepdims=True))
        values = np.where(weights[..., None] > 0, o, 0.0) * weights[..., None]
        out = values.sum(1) / (weights * ml[..., 1]).sum(1)[:, None]
        rows = mx.array(out.reshape(case.heads, case.rows, -1).swapaxes(0, 1).astype(np.float32))
        return floats(kv_codec.turn_back(rows, kv_codec.VALUE_SEED)).reshape(1, case.rows, -1)

    return Trial(run, packed.loop(case), 2e-3, merged)


def packed_combined() -> Trial:
    splits, dim = 40, 64
    o, top = floats(normal((4, splits, dim), mx.float32, 1)), floats(normal((4, 40), mx.float32, 2))
    total = np.abs(floats(normal((4, splits), mx.float32, 3))) + 0.5
    top[:, 35:], total[:, 35:], o[:, 35:] = -1e30, 0.0, np.nan
    sinks, ml = normal((4, 1), mx.float32, 4), np.stack([top, total], -1).astype(np.float32)
    parts = [mx.array(o.astype(np.float32)), mx.array(ml)]
    tuning = packed_decode.Tuning(2, splits - 1)
    q = mx.zeros((4, 1, dim))
    run = packed_decode.launch_combine(q, *parts, sinks, mx.float32, tuning)
    weights = np.exp(top)
    values = (weights[:, :35, None] * o[:, :35]).sum(1)
    sums = (weights * total).sum(1) + np.exp(floats(sinks)[:, 0])
    turned = values / sums[:, None] @ packed.hadamard(dim)
    return Trial(run, (turned * floats(kv_codec.signs(dim, 1))).reshape(1, 1, -1), 1e-5)


def turned() -> Trial:
    case = packed.Rows(2, 2, 128, 3, 200, balanced=True)
    return Trial(case.launch(), packed.turned(case)[0], 1e-5)


def encode_keys() -> Trial:
    return encoded("keys of three bits")


def encode_values() -> Trial:
    return encoded("values of four bits")


def encoded(name: str) -> Trial:
    """The share of words that differ from the plain version's."""
    _, _, _, bits, keys = encoding.SHAPES[name]
    rows = encoding.rows_of(name)
    words, scales = (np.array(a) for a in kv_encode.encode_rows_reference(rows, bits, keys))

    def wrong(outputs: list[np.ndarray]) -> np.ndarray:
        far = np.abs(outputs[1] - scales) > 1e-3 * scales
        return np.array([1 + (outputs[0] != words).mean() + far.mean()])

    return Trial(kv_encode.launch_encode(rows, bits, keys), np.ones(1), 0.04, wrong)


BUGS: dict[str, tuple[Callable[[], Trial], str, str]] = {
    "scalar: no barrier before x is read": (
        scalar, "    ts_barrier();\n\n    TS_UNROLL", "    TS_UNROLL",
    ),
    "scalar: no barrier before x is overwritten": (scalar, "if (chunk0 > 0) ts_barrier();", ""),
    "scalar: rows past the end": (
        scalar, "ts_min(unit0 + r % PAIR, OUTS - 1)", "unit0 + r % PAIR",
    ),
    "scalar: columns past the end": (scalar, "if (column < K && token0 + t < M)", "if (true)"),
    "scalar: all lanes write": (scalar, "if (live && r < PAIR)", "if (live)"),
    "scalar: bias after the activation": (scalar, "if (BIAS && live) mine +=", "if (live) mine -="),
    "scalar: one simdgroup's squares": (
        scalar, "for (int i = 0; i < SG; i++) all +=", "for (int i = 0; i < 1; i++) all +=",
    ),
    "matrix: no barrier before x is read": (
        matrix, "    ts_simd_barrier();\n\n    // Rows of x", "    // Rows of x",
    ),
    "matrix: no barrier between simdgroups": (
        matrix, "  ts_barrier();\n  for (int i = tid", "  for (int i = tid",
    ),
    "matrix: rows of x that are not there": (matrix, "ts_min(g, M - 1) * ROW", "g * ROW"),
    "matrix: wrong column of the result": (
        matrix, "const int m = 2 * t + i % 2;", "const int m = t + 4 * (i % 2);",
    ),
    "partial: one slot too many": (ring, "slot < stop && position <= last", "position <= last"),
    "partial: window off by one": (
        partial, "position > last - WINDOW)", "position >= last - WINDOW)",
    ),
    "partial: no barrier before the merge": (
        partial, "  ts_barrier();\n  for (int i = tid", "  for (int i = tid",
    ),
    "partial: sums not faded": (partial, "sum = ts_fma(sum, fade, p);", "sum = sum + p;"),
    "partial: a simd operation in a branch": (
        partial,
        "const float p = live ? ts_fast_exp(score - top_new) : 0.0f;",
        "float p = 0.0f;\n    if (live) p = ts_simd_max(ts_fast_exp(score - top_new));",
    ),
    "partial: offsets of 32 bits": (
        partial, "keys + int64_t(kv) * capacity * D + dim", "keys + kv * capacity + dim",
    ),
    "combine: splits that wrote nothing": (combine, "if (w[i] > 0.0f) v[i] =", "v[i] ="),
    "combine: only 32 splits": (combine, "k0 < splits; k0 += 32", "k0 < 32; k0 += 32"),
    "combine: sink forgotten": (combine, "if (SINKS) total +=", "if (!SINKS) total +="),
    "gate and up: unused slot": (gate_up, "slot < 0 ? 0.0f : value", "value"),
    "gate and up: the same slot for all": (gate_up, "slots[token * RANKS + rank]", "slots[token]"),
    "gate and up: tail rows": (gate_up, "ts_min(unit0 + r % PAIR, F - 1)", "unit0 + r % PAIR"),
    "gate and up matrix: gate for up": (
        gate_up_matrix, "gate_w + word : up_w", "up_w + word : up_w",
    ),
    "gate and up matrix: unused slot": (gate_up_matrix, "slot < 0 ? 0.0f : value", "value"),
    "down: chunk of another rank": (down, "chunk % EACH) * BITS", "chunk % (EACH - 1)) * BITS"),
    "down: unused slot's bias": (down, "slot < 0 ? 0.0f : float(weights", "float(weights"),
    "down matrix: rank forgotten": (
        down_matrix, "float(weights[token * RANKS + rank]);\n    ts_await", "1.0f;\n    ts_await",
    ),
    "down matrix: no barrier between simdgroups": (
        down_matrix, "  ts_barrier();\n  for (int i = tid", "  for (int i = tid",
    ),
    "rope: norm over the rotated part only": (rotate, "if (d < D) square", "if (false) square"),
    "rope: wrong pair": (rotate, "INTERLEAVED ? 2 * p + 1 : p + HALF]", "p + HALF]"),
    "rope: position of the next row": (rotate, "length[0] - M + m", "length[0] - M + m + 1"),
    "packed: the first tokens read twice": (
        packed_sums, "live[2 * r + e] = p >= 4 && p", "live[2 * r + e] = p",
    ),
    "packed: a block too many": (packed_sums, "p >= 4 && p < limit", "p >= 4 && p < limit + 32"),
    "packed: key scale forgotten": (packed_sums, "d[r][1] *= ts_high<float16_t>(ks);", ""),
    "packed: value scale of the neighbour": (
        packed_sums, "by_value[2 * r + 1] = ts_high", "by_value[2 * r + 1] = ts_low",
    ),
    "packed: the split's scale forgotten": (packed_sums, "= value * unit;", "= value;"),
    "packed: tokens in pairs of another order": (
        packed_sums, "ts_codes<VB>(low, 2 * s + h, high", "ts_codes<VB>(low, 2 * h + s, high",
    ),
    "packed: no barrier before the merge": (
        packed_sums, "  ts_barrier();\n  for (int i = tid", "  for (int i = tid",
    ),
    "packed: future rows": (packed_sums, "p >= limit && p <= position", "p >= limit"),
    "packed: the ring's wrong slot": (
        packed_sums, "(kv * ring + (oldest + x - 4) % ring) * (D / 2)", "(kv * ring + x) * (D / 2)",
    ),
    "packed: words of another key": (
        packed_three_bits, "+ b * 32 + g) * K_ROW", "+ b * 32 + g / 2) * K_ROW",
    ),
    "packed: the high bit of a value's code": (
        packed_three_bits, "vh[held] >> (4 * t)", "vh[held] >> t",
    ),
    "packed combine: a barrier too few": (
        packed_combined, "    x_s[d] = x;\n    ts_barrier();", "    x_s[d] = x;",
    ),
    "packed combine: sink forgotten": (
        packed_combined, "if (SINKS) total +=", "if (!SINKS) total +=",
    ),
    "packed combine: a stage too few": (packed_combined, "mask < D; mask", "mask < D / 2; mask"),
    "turn: keys' signs for values": (
        turned, "is_q || is_k ? key_signs[d] : value_signs[d]", "value_signs[d]",
    ),
    "turn: the wrong group's balance": (turned, "head / (H / KV) : own", "head % KV : own"),
    "turn: a stage too few": (turned, "half_of < E; half_of", "half_of < E / 2; half_of"),
    "encode: no barrier before words": (encode_keys, "  ts_barrier();\n\n  for", "  for"),
    "encode: the last width wins": (encode_keys, "merit > best", "merit >= 0.0f"),
    "encode: planes swapped": (encode_keys, "upper ? 2 : 0", "upper ? 0 : 1"),
    "encode: tokens in another order": (
        encode_values, "pair % 4 * 8 + pair / 4 * 2 + e", "pair / 4 * 8 + pair % 4 * 2 + e",
    ),
    "encode: scales not unbiased": (
        encode_values, "norm * numbers[0] / ts_max(along", "norm / ts_max(numbers[0]",
    ),
    "delta: no barrier before the mixed inputs are read": (
        delta_token, "  ts_barrier();\n\n  float q[EACH]", "  float q[EACH]",
    ),
    "delta: no barrier before the gated norm": (
        delta_token, "  ts_barrier();\n\n  float square", "  float square",
    ),
    "delta: every head stores the inputs of its key head": (
        delta_token, "i >= 2 * DK || head % SHARING == 0", "true",
    ),
    "delta: some heads store no values": (
        delta_token, "i >= 2 * DK || head % SHARING == 0", "head % SHARING == 0",
    ),
    "delta: the digits that 1 + e loses": (shut_token, "e < 0.01f", "e < 0.0f"),
    "delta: epsilon of q's norm forgotten": (
        faint_token, "ts_simd_sum(q_square) + numbers[1]", "ts_simd_sum(q_square)",
    ),
    "delta: epsilon of k's norm forgotten": (
        faint_token, "ts_simd_sum(k_square) + numbers[1]", "ts_simd_sum(k_square)",
    ),
    "delta: the past does not move": (
        delta_token, "(t - 1) * C + c] = T(before)", "t * C + c] = T(before)",
    ),
    "delta: another head's keys": (delta_token, "head / SHARING;", "head % HK;"),
    "delta: decay forgotten": (delta_token, "held[r][e] *= decay;", ""),
    "delta: rows past the end": (
        delta_token, "if (dv < DV && d < DK) next_state", "if (d < DK) next_state",
    ),
    "delta: columns past the end are counted": (
        delta_token, "k[e] = d < DK ? mixed_s[DK + ts_min(d, DK - 1)] : 0.0f;",
        "k[e] = mixed_s[DK + ts_min(d, DK - 1)];",
    ),
    "delta: the mean of another width": (delta_token, "/ float(DV)", "/ float(DK)"),
    "delta: gates of a and b swapped": (
        delta_token, "float(row[C + VALUES + head])", "float(row[C + VALUES + HV + head])",
    ),
    "delta rows: the same row again": (
        delta_pass, "ts_min(t + 1, rows - 1)", "ts_min(t, rows - 1)",
    ),
    "delta rows: another head's keys": (delta_pass, "head / SHARING;", "head % HK;"),
    "delta rows: decay forgotten": (delta_pass, "held[r][e] *= decay_now;", ""),
    "delta rows: values of another row": (
        delta_pass, "v_now[r] = v_next[r]", "v_now[r] = v_next[0]",
    ),
    "delta rows: rows past the end": (
        delta_pass, "if (lane < R && first + lane < DV)", "if (lane < R)",
    ),
    "delta rows: columns past the end are counted": (
        delta_pass, "k_now[e] = d < DK ? k_next[e] : 0.0f", "k_now[e] = k_next[e]",
    ),
    "router: the higher index wins ties": (best, "left[i] > best", "left[i] >= best"),
    "router: the chosen one stays": (best, "== id) left[i] = 0u", "== id) left[i] = left[i]"),
    "likeliest: infinity passes": (shares, "<= 3.4028235e38f)) bad", ">= 0.0f)) bad"),
    "likeliest: the last of equals": (shares, "v > value || id", "v >= value || id"),
    "likeliest: no barrier": (shares, "  ts_barrier();\n", ""),
    "likeliest: shares in the order of lanes": (
        best_share, "v == value && i < best", "v == value && i > best",
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", BUGS)
def test_a_planted_bug_is_found(title: str) -> None:
    make, old, new = BUGS[title]
    trial = make()
    plan = trial.launch.plan
    texts = plan.kernel.body, plan.kernel.header
    assert sum(t.count(old) for t in texts) == 1, f"the bug cannot be planted: {old!r}"
    body, header = (t.replace(old, new) for t in texts)
    kernel = dataclasses.replace(plan.kernel, body=body, header=header)
    broken = dataclasses.replace(plan, kernel=kernel, _calls={})
    assert not trial.passes(Launch(broken, trial.launch.inputs))


@pytest.mark.parametrize("make", dict.fromkeys(make for make, _, _ in BUGS.values()))
def test_without_a_bug_the_trial_passes(make: Callable[[], Trial]) -> None:
    trial = make()
    assert trial.passes(trial.launch)
