"""One or two launches of every kernel, for the checks that read text instead of numbers."""

from __future__ import annotations

import mlx.core as mx
from cases import normal, packed

from turbospark.dtypes import MXFP4, Quant, affine
from turbospark.kernels import (
    decode_attention,
    delta_rows,
    delta_step,
    expert_matrix,
    expert_scalar,
    experts,
    kv_codec,
    kv_encode,
    likeliest,
    packed_attention,
    packed_decode,
    packed_qsa,
    packed_turn,
    qmv_matrix,
    qmv_scalar,
    qsa_attend,
    qsa_score,
    qsa_select,
    rope_kv,
    router_topk,
)
from turbospark.kernels.fused import Around
from turbospark.kernels.source import Launch


def qmv_fused() -> Launch:
    w = packed((64, 2048), affine(4, 64))
    around = Around(norm=normal((2048,), mx.bfloat16, 0), eps=1e-5, glu="silu")
    x = normal((2, 2048), mx.bfloat16, 1)
    return qmv_scalar.launch(x, w.fmt, w.weight, w.scales, w.biases, around, qmv_scalar.Tuning())


def qmv_plain() -> Launch:
    w = packed((48, 1024), MXFP4)
    x = normal((1, 1024), mx.float16, 1)
    around = Around(bias=normal((48,), mx.float16, 2), residual=normal((1, 48), mx.float16, 3))
    return qmv_scalar.launch(
        x, w.fmt, w.weight, w.scales, w.biases, around, qmv_scalar.Tuning(4, 4)
    )


def matrix_fused() -> Launch:
    w = packed((64, 1024), affine(4, 64))
    around = Around(norm=normal((1024,), mx.bfloat16, 0), eps=1e-5, glu="silu")
    x = normal((1, 1024), mx.bfloat16, 1)
    return qmv_matrix.launch(x, w.fmt, w.weight, w.scales, w.biases, around, qmv_matrix.Tuning())


def matrix_bytes() -> Launch:
    w = packed((48, 512), affine(8, 32, "float16"))
    x = normal((4, 512), mx.float16, 1)
    around = Around(bias=normal((48,), mx.float16, 2), residual=normal((4, 48), mx.float16, 3))
    return qmv_matrix.launch(x, w.fmt, w.weight, w.scales, w.biases, around, qmv_matrix.Tuning(2))


def expert_parts(fmt: Quant, bias: bool) -> tuple[mx.array, mx.array, experts.Experts]:
    matrices = []
    for seed, shape in enumerate([(96, 256), (96, 256), (256, 96)]):
        p = packed((4, *shape), fmt, seed)
        planes = [None if a is None else experts.stacked(a) for a in (p.scales, p.biases)]
        own = normal((4, shape[0]), mx.bfloat16, seed) if bias else None
        vector = None if own is None else experts.stacked(own)
        weight = experts.stacked(p.weight)
        matrices.append(experts.Matrix(fmt, *shape, weight, *planes, vector))
    x = normal((2, 256), mx.bfloat16, 3)
    slots = mx.array([[0, 2], [1, 3]], dtype=mx.int32)
    return x, slots, experts.Experts(*matrices, glu="clamped" if bias else "silu")


def expert_gate_up() -> Launch:
    x, slots, mlp = expert_parts(affine(4, 32), bias=False)
    around = experts.Around(norm=normal((256,), mx.float32, 4), eps=1e-5)
    return expert_scalar.launch_gate_up(x, slots, mlp, around, expert_scalar.Tuning())


def expert_down() -> Launch:
    x, slots, mlp = expert_parts(MXFP4, bias=True)
    around = experts.Around(residual=x, beside=x)
    h, weights = normal((2, 2, 96), mx.float32, 5), normal((2, 2), mx.float32, 6)
    tuning = expert_scalar.Tuning()
    return expert_scalar.launch_down(h, slots, weights, mlp, around, x.dtype, tuning)


def expert_gate_up_matrix() -> Launch:
    x, slots, mlp = expert_parts(affine(4, 32), bias=False)
    around = experts.Around(norm=normal((256,), mx.float32, 4), eps=1e-5)
    return expert_matrix.launch_gate_up(x, slots, mlp, around, expert_matrix.Tuning())


def expert_down_matrix() -> Launch:
    x, slots, mlp = expert_parts(MXFP4, bias=True)
    around = experts.Around(residual=x, beside=x)
    h, weights = normal((2, 2, 96), mx.float32, 5), normal((2, 2), mx.float32, 6)
    tuning = expert_matrix.Tuning()
    return expert_matrix.launch_down(h, slots, weights, mlp, around, x.dtype, tuning)


def attention_parts() -> tuple[mx.array, mx.array, mx.array]:
    q = normal((1, 8, 2, 128), mx.bfloat16, 0)
    return q, normal((1, 2, 64, 128), mx.bfloat16, 1), mx.array([40], dtype=mx.int32)


def attention_partial() -> Launch:
    q, k, length = attention_parts()
    rules = decode_attention.Rules(0.1, window=20, ring=True, soft_cap=30.0)
    return decode_attention.launch_partial(q, k, k, length, rules, decode_attention.Tuning())


def attention_combine() -> Launch:
    q, _, _ = attention_parts()
    o, ml = normal((16, 32, 128), mx.float32, 2), normal((16, 32, 2), mx.float32, 3)
    tuning = decode_attention.Tuning()
    return decode_attention.launch_combine(q, o, ml, 64, normal((8,), mx.float32, 4), tuning)


def rope_parts() -> tuple[mx.array, mx.array, rope_kv.Heads, rope_kv.Turn]:
    norm = normal((64,), mx.bfloat16, 0)
    heads = rope_kv.Heads(4, 2, 64, norm, norm, 1e-6)
    length = mx.array([9], dtype=mx.int32)
    return normal((1, 1, 512), mx.bfloat16, 1), length, heads, rope_kv.Turn(48, mx.ones((24,)))


def rope() -> Launch:
    return rope_kv.launch_rotate(*rope_parts())


def rope_store() -> Launch:
    qkv, length, heads, turn = rope_parts()
    buffer = normal((1, 2, 32, 64), mx.bfloat16, 2)
    return rope_kv.launch_store(qkv, buffer, buffer, length, heads, turn, ring=True)


def packed_parts(bits: tuple[int, int]) -> tuple[packed_attention.Packed, packed_attention.Near]:
    rows = normal((2, 160, 64), mx.float16, 0)
    parts = []
    for width, pack in zip(bits, (kv_codec.pack_keys, kv_codec.pack_values), strict=True):
        codes, scales = kv_codec.quantize_rows(rows, width)
        parts += [mx.contiguous(pack(codes, width)), scales]
    ring, first = rows[:, :128], rows[:, :4]
    return packed_attention.Packed(*parts), packed_attention.Near(0, ring, ring, first, first)


def packed_partial() -> Launch:
    q, length = normal((8, 2, 64), mx.float32, 1), mx.array([150], dtype=mx.int32)
    return packed_decode.launch_partial(
        q, *packed_parts((4, 3)), length, packed_decode.Tuning(), soft_cap=30.0
    )


def packed_partial_of(dim: int) -> Launch:
    rows = normal((1, 160, dim), mx.float16, 0)
    codes, scales = kv_codec.quantize_rows(rows, 4)
    keys, values = kv_codec.pack_keys(codes, 4), mx.contiguous(kv_codec.pack_values(codes, 4))
    near = packed_attention.Near(0, rows[:, :128], rows[:, :128], rows[:, :4], rows[:, :4])
    packed = packed_attention.Packed(keys, scales, values, scales)
    q, length = normal((8, 1, dim), mx.float32, 1), mx.array([150], dtype=mx.int32)
    return packed_decode.launch_partial(q, packed, near, length, packed_decode.tuned(dim, 1))


def packed_partial_128() -> Launch:
    return packed_partial_of(128)


def packed_combine() -> Launch:
    q, o = normal((8, 2, 128), mx.float32, 1), normal((16, 65, 128), mx.float32, 2)
    ml, sinks = normal((16, 65, 2), mx.float32, 3), normal((8, 2), mx.float32, 4)
    return packed_decode.launch_combine(q, o, ml, sinks, mx.bfloat16, packed_decode.Tuning())


def packed_turned() -> Launch:
    q, k = normal((1, 8, 2, 64), mx.bfloat16, 1), normal((1, 2, 2, 64), mx.bfloat16, 2)
    table = mx.abs(normal((2, 64), mx.float32, 3)) + 0.5
    _, near = packed_parts((4, 4))
    length = mx.array([150], dtype=mx.int32)
    return packed_turn.launch_turn(q, k, k, table, table, length, 0.1, near)


def encoded_keys() -> Launch:
    return kv_encode.launch_encode(normal((2, 64, 128), mx.float16, 0), 4, keys=True)


def encoded_values() -> Launch:
    return kv_encode.launch_encode(normal((2, 64, 64), mx.float16, 0), 3, keys=False)


def router() -> Launch:
    return router_topk.launch(normal((2, 128), mx.float32, 0), 8, True, 1.0)


def likeliest_shares() -> Launch:
    return likeliest.launch_shares(normal((1000,), mx.float32, 0))


def likeliest_best() -> Launch:
    values, ids = normal((64,), mx.float32, 0), mx.arange(64).astype(mx.int32)
    return likeliest.launch_best(values, ids)


def block_scores() -> Launch:
    queries, keys = normal((2, 4, 128), mx.bfloat16, 0), normal((64, 128), mx.bfloat16, 1)
    return qsa_score.launch(queries, keys, mx.array([200], dtype=mx.int32), 4)


def block_choice() -> Launch:
    scores, start = normal((2, 64), mx.float32, 0), mx.array([200], dtype=mx.int32)
    return qsa_select.launch(scores, start, 8, 4, mx.zeros((2,), dtype=mx.int32))


def block_attention() -> Launch:
    q, keys = normal((2, 8, 256), mx.bfloat16, 0), normal((64, 2, 256), mx.bfloat16, 1)
    ids, start = mx.zeros((2, 8), dtype=mx.int32), mx.array([60], dtype=mx.int32)
    return qsa_attend.launch_partial(q, keys, keys, ids, start, 4, 0.1, 8)


def packed_block_attention() -> Launch:
    """Of `packed_parts`, the ring taken for the newest rows."""
    packed, near = packed_parts((3, 3))
    q, ids = normal((2, 8, 64), mx.float32, 0), mx.zeros((2, 8), dtype=mx.int32)
    start = mx.array([150], dtype=mx.int32)
    return packed_qsa.launch_partial(q, packed, near, ids, start, 4, 8)


def delta_row_of(key_dim: int, value_dim: int) -> Launch:
    ones, values, channels = mx.ones((4,)), 4 * value_dim, 4 * (key_dim + value_dim)
    taps, norm = normal((4, channels), mx.float32, 0), mx.ones((value_dim,))
    delta = delta_step.Delta(2, 4, key_dim, value_dim, taps, -ones, ones, norm, 1e-6, False)
    row = normal((1, 1, channels + values + 8), mx.bfloat16, 1)
    past, state = normal((1, 3, channels), mx.bfloat16, 2), mx.zeros((1, 4, value_dim, key_dim))
    return delta_step.launch(row, past, state, delta)


def delta_row() -> Launch:
    return delta_row_of(128, 128)


def delta_row_of_wide_keys() -> Launch:
    return delta_row_of(384, 64)


def delta_row_of_wide_values() -> Launch:
    return delta_row_of(32, 768)


def delta_pass() -> Launch:
    q, v = normal((1, 5, 2, 128), mx.float32, 0), normal((1, 5, 4, 128), mx.float32, 1)
    gates = mx.ones((1, 5, 4))
    inputs = delta_rows.DeltaInputs(q, q, v, gates, gates)
    return delta_rows.launch(inputs, mx.zeros((1, 4, 128, 128)))


LAUNCHES = {
    make.__name__: make
    for make in (
        qmv_fused,
        qmv_plain,
        matrix_fused,
        matrix_bytes,
        expert_gate_up,
        expert_down,
        expert_gate_up_matrix,
        expert_down_matrix,
        attention_partial,
        attention_combine,
        rope,
        rope_store,
        packed_partial,
        packed_partial_128,
        packed_combine,
        packed_turned,
        encoded_keys,
        encoded_values,
        router,
        delta_row,
        delta_row_of_wide_keys,
        delta_row_of_wide_values,
        delta_pass,
        block_scores,
        block_choice,
        block_attention,
        packed_block_attention,
        likeliest_shares,
        likeliest_best,
    )
}
