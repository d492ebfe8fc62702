"""Runs every kernel on the GPU at hand and compares it with float64 and with MLX's own operations.

    python -m turbospark.kernels.check [--kernel NAME ...]

Knows shapes of real layers and how to print a table. On a machine without a GPU it says so. A
kernel is wrong when its error exceeds one and a half times that of MLX's operations in the same
dtype and what one rounding explains. "us" is the time per launch of 20 that do not wait for each
other, so that it can be host time; GB/s counts the bytes that a launch must read.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.dtypes import MXFP4, Quant, affine
from turbospark.kernels import (
    expert_matrix,
    expert_scalar,
    qmv_matrix,
    qmv_scalar,
)
from turbospark.kernels.check_base import Check, Planes, dense, floats, nbytes, normal, packed
from turbospark.kernels.check_chain import chain_checks
from turbospark.kernels.check_delta import delta_checks
from turbospark.kernels.check_packed import packed_checks
from turbospark.kernels.choices import backend
from turbospark.kernels.decode_attention import (
    Rules,
    decode_attention_reference,
    launch_combine,
    launch_partial,
)
from turbospark.kernels.decode_attention import Tuning as AttentionTuning
from turbospark.kernels.experts import Around as ExpertAround
from turbospark.kernels.experts import Experts, Matrix, stacked
from turbospark.kernels.fused import Around, qmv_reference
from turbospark.kernels.likeliest import launch_best, launch_shares, likeliest_reference
from turbospark.kernels.qsa import Rule, choose_and_attend
from turbospark.kernels.rope_kv import Heads, Turn, launch_store, rope_kv_reference
from turbospark.kernels.router_topk import launch as launch_router
from turbospark.kernels.router_topk import router_topk_reference

ROUNDING = {mx.float32: 5e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
IN_FLIGHT = 20


@dataclass(frozen=True)
class Row:
    """What a check found; errors are the largest difference over the largest value."""

    check: Check
    error: float
    own_error: float
    microseconds: float
    own_microseconds: float

    @property
    def right(self) -> bool:
        """Whether the kernel may be trusted."""
        return self.error <= max(1.5 * self.own_error, ROUNDING[self.check.dtype])

    def __str__(self) -> str:
        c = self.check
        dtype = str(c.dtype).removeprefix("mlx.core.")
        rate = c.nbytes / self.microseconds / 1e3
        verdict = "" if self.right else "  WRONG"
        return (
            f"{c.kernel:22} {c.shape:34} {dtype:9} {self.error:9.1e} {self.own_error:9.1e} "
            f"{self.microseconds:9.1f} {self.own_microseconds:9.1f} {rate:7.0f}{verdict}"
        )


HEADING = (
    f"{'kernel':22} {'shape':34} {'dtype':9} {'error':>9} {'MLX error':>9} "
    f"{'us':>9} {'MLX us':>9} {'GB/s':>7}"
)


TIMES = (
    "us: wall time per launch, 20 in flight, mostly the host's time to launch. A small kernel\n"
    "slower than MLX's here can win inside a traced step; only errors decide what is right."
)


# --- checks ---------------------------------------------------------------------------------------


def qmv_checks() -> Iterator[Check]:
    """Products of one and of four rows, plain and with everything around."""
    q4, bf16 = affine(4, 64), mx.bfloat16
    yield _qmv(qmv_matrix, 1, (4096, 4096), q4, bf16, fused=False)
    yield _qmv(qmv_matrix, 1, (6144, 4096), q4, bf16, fused=True)
    yield _qmv(qmv_matrix, 4, (4096, 2048), q4, bf16, fused=True)
    yield _qmv(qmv_matrix, 8, (2048, 4096), affine(8, 64), bf16, fused=False)
    yield _qmv(qmv_matrix, 1, (4096, 2880), MXFP4, bf16, fused=False)
    yield _qmv(qmv_matrix, 2, (4096, 4096), affine(4, 64, "float16"), mx.float16, fused=False)
    yield _qmv(qmv_scalar, 1, (4096, 4096), q4, bf16, fused=True)
    yield _qmv(qmv_scalar, 3, (2048, 2048), affine(4, 32, "float32"), mx.float32, fused=True)
    for bits in (2, 3, 5, 6, 8):
        yield _qmv(qmv_scalar, 1, (2048, 2048), affine(bits, 64), bf16, fused=False)
    yield _qmv(qmv_scalar, 1, (2048, 2880), MXFP4, mx.float16, fused=False)


def _qmv(
    module: Any, m: int, shape: tuple[int, int], fmt: Quant, dtype: mx.Dtype, fused: bool
) -> Check:
    n, k = shape
    x, planes = normal((m, k), dtype, 0), packed(shape, fmt, dtype, 1)
    around = Around()
    if fused:
        norm, residual = normal((k,), dtype, 2), normal((m, n // 2), dtype, 3)
        around = Around(norm, 1e-5, normal((n,), dtype, 4), "silu", residual)
    rows = floats(x)
    if around.norm is not None:
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * floats(around.norm)
    want = rows @ dense(planes, fmt).T
    if around.bias is not None and around.residual is not None:
        gate, up = np.split(want + floats(around.bias), 2, axis=-1)
        want = gate / (1 + np.exp(-gate)) * up + floats(around.residual)
    weight, scales, biases = planes
    launch = module.launch(x, fmt, weight, scales, biases, around, module.Tuning())
    return Check(
        launch.plan.kernel.name,
        f"{m} x {n}x{k} {_name(fmt)}" + (" fused" if fused else ""),
        dtype,
        lambda where: launch.run(where)[0],
        lambda: qmv_reference(x, fmt, weight, scales, biases, around),
        want,
        nbytes(planes),
    )


def _name(fmt: Quant) -> str:
    """mxfp4 says its bits itself."""
    return f"affine{fmt.bits}" if fmt.mode == "affine" else fmt.mode


def attention_checks() -> Iterator[Check]:
    """Short and long caches, a ring with sinks, soft-capped scores."""
    yield _attention(8, 4, 128, 512, 1024, Rules(128**-0.5))
    yield _attention(8, 4, 128, 8192, 8192, Rules(128**-0.5))
    yield _attention(4, 8, 128, 4000, 4096, Rules(128**-0.5))
    yield _attention(8, 8, 64, 3000, 256, Rules(0.125, window=128, ring=True), sinks=True)
    yield _attention(4, 2, 256, 2000, 2048, Rules(1 / 16, soft_cap=50.0))


def _attention(
    kv: int, group: int, dim: int, length: int, capacity: int, rules: Rules, sinks: bool = False
) -> Check:
    dtype = mx.bfloat16
    q = normal((1, kv * group, 1, dim), dtype, 0)
    k, v = (normal((1, kv, capacity, dim), dtype, seed) for seed in (1, 2))
    count = mx.array([length], dtype=mx.int32)
    logits = normal((kv * group,), mx.float32, 3) if sinks else None
    want = attended(floats(q)[0, :, 0], floats(k)[0], floats(v)[0], length, rules, logits)
    tuning = AttentionTuning()

    def run(where: str) -> mx.array:
        o, ml = launch_partial(q, k, v, count, rules, tuning).run(where)
        return launch_combine(q, o, ml, capacity, logits, tuning).run(where)[0]

    def own() -> mx.array:
        if rules.ring or rules.soft_cap:
            return decode_attention_reference(q, k, v, count, rules, logits)
        out = mx.fast.scaled_dot_product_attention(
            q, k[:, :, :length], v[:, :, :length], scale=rules.scale
        )
        return out.reshape(1, 1, -1)

    read = 2 * kv * min(length, capacity) * dim * 2
    shape = f"{kv}x{group} heads of {dim}, {length} keys"
    return Check("decode_attention", shape, dtype, run, own, want, read)


def attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    length: int,
    rules: Rules,
    sinks: mx.array | None,
) -> np.ndarray:
    """One row q [H, D] over k, v [KV, capacity, D] in float64 -> [1, 1, H * D]."""
    oldest = max(0, length - rules.window) if rules.window else 0
    slots = np.arange(oldest, length) % k.shape[1]
    out = np.zeros_like(q)
    for head, row in enumerate(q):
        kv = head // (len(q) // len(k))
        scores = k[kv, slots] @ row * rules.scale
        if rules.soft_cap:
            scores = rules.soft_cap * np.tanh(scores / rules.soft_cap)
        share = np.exp(scores)
        total = share.sum() + (0.0 if sinks is None else np.exp(floats(sinks)[head]))
        out[head] = share @ v[kv, slots] / total
    return out.reshape(1, 1, -1)


def expert_checks() -> Iterator[Check]:
    """One and four tokens on stacked arrays, three formats."""
    yield _experts(expert_matrix, 1, 8, (2048, 768), affine(4, 64), mx.bfloat16)
    yield _experts(expert_matrix, 4, 4, (2880, 2880), MXFP4, mx.bfloat16)
    yield _experts(expert_scalar, 1, 8, (2048, 768), affine(4, 64), mx.bfloat16)
    yield _experts(expert_scalar, 2, 4, (1024, 512), affine(6, 64), mx.float16)


def _experts(
    module: Any, tokens: int, ranks: int, shape: tuple[int, int], fmt: Quant, dtype: mx.Dtype
) -> Check:
    slots, (hidden, inner) = 16, shape
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    planes = [packed((slots, *s), fmt, dtype, i) for i, s in enumerate(shapes)]
    gate_m, up_m, down_m = (
        Matrix(fmt, *s, stacked(w), stacked(a), None if b is None else stacked(b))
        for s, (w, a, b) in zip(shapes, planes, strict=True)
    )
    experts = Experts(gate_m, up_m, down_m)
    random = np.random.default_rng(5)
    ids = np.stack([random.permutation(slots)[:ranks] for _ in range(tokens)]).astype(np.int32)
    share = random.uniform(0.05, 0.2, ids.shape).astype(np.float32)
    x, which, weights = normal((tokens, hidden), dtype, 6), mx.array(ids), mx.array(share)
    gate, up, down = (dense(p, fmt) for p in planes)
    want = np.zeros((tokens, hidden))
    for t, row in enumerate(floats(x)):
        for rank, e in enumerate(ids[t]):
            g = gate[e] @ row
            want[t] += share[t, rank] * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ row)))
    around, tuning = ExpertAround(), module.Tuning()

    def run(where: str) -> mx.array:
        h = module.launch_gate_up(x, which, experts, around, tuning).run(where)[0]
        down = module.launch_down(h, which, weights, experts, around, dtype, tuning)
        out: mx.array = down.run(where)[0]
        return out

    def own() -> mx.array:
        def product(a: mx.array, p: Planes) -> mx.array:
            size, bits, ids = fmt.group_size, fmt.bits, which.astype(mx.uint32)
            how: Any = dict(transpose=True, group_size=size, bits=bits, mode=fmt.mode)
            return mx.gather_qmm(a, *p, rhs_indices=ids, **how)

        rows = x[:, None, None]
        g = product(rows, planes[0])
        y = product(g * mx.sigmoid(g) * product(rows, planes[1]), planes[2]).squeeze(-2)
        return (y * weights[..., None].astype(dtype)).sum(axis=1)

    read = sum(nbytes(p) for p in planes) // slots * len(np.unique(ids))
    name = "expert_" + str(getattr(module, "__name__", "")).rsplit("_", 1)[-1]
    label = f"{tokens} x {ranks} of {hidden}x{inner} {_name(fmt)}"
    return Check(name, label, dtype, run, own, want, read)


def sparse_checks() -> Iterator[Check]:
    """Chosen blocks: their scores, what is attended of them, and the choice through both."""
    q, queries = normal((1, 24, 256), mx.bfloat16, 0), normal((1, 4, 128), mx.bfloat16, 1)
    length, capacity = 32767, 32768
    keys, values = (normal((capacity, 2, 256), mx.bfloat16, seed) for seed in (2, 3))
    blocks = normal((capacity // 4, 128), mx.bfloat16, 4)
    liked = np.maximum(floats(blocks)[: length // 4] @ floats(queries)[0].T, 0).sum(-1)
    chosen = np.sort(np.argsort(-liked, kind="stable")[:512])
    tail = np.arange(length // 4 * 4, length)
    spots = np.concatenate([(chosen[:, None] * 4 + np.arange(4)).ravel(), tail])
    want = np.zeros((24, 256))
    for head, row in enumerate(floats(q)[0]):
        share = np.exp(floats(keys[:, head // 12])[spots] @ row / 16)
        want[head] = share / share.sum() @ floats(values[:, head // 12])[spots]

    def run(where: str) -> mx.array:
        args = (q, keys, values, queries, blocks, length - 1, Rule(4, 512, 1 / 16))
        return choose_and_attend(*args, kernels=where != "cpu")[0]

    label, read = "512 of 8191 blocks, 2x12 heads of 256", blocks.nbytes + 2 * 2051 * 1024
    own = lambda: run("cpu")  # noqa: E731
    yield Check("qsa", label, mx.bfloat16, run, own, want[None], read)


def small_checks() -> Iterator[Check]:
    """Router top-k (its weights) and rope with stored rows (q, and the rows read back)."""
    for experts, k in ((128, 8), (512, 10)):
        logits = normal((1, experts), mx.float32, 0)
        row = np.sort(floats(logits)[0])[::-1][:k]
        want = (np.exp(row) / np.exp(row).sum())[None]
        yield Check(
            "router_topk",
            f"{k} of {experts}",
            mx.float32,
            lambda where, a=logits, n=k: launch_router(a, n, True, 1.0).run(where)[1],  # type: ignore[misc]
            lambda a=logits, n=k: router_topk_reference(a, n)[1],  # type: ignore[misc]
            want,
            logits.nbytes,
        )
    yield _rope()
    logits = normal((128256,), mx.float32, 0)
    yield Check(
        "likeliest",
        "128256 logits",
        mx.float32,
        lambda where: launch_best(*launch_shares(logits).run(where)).run(where)[0],
        lambda: likeliest_reference(logits),
        np.argmax(floats(logits), keepdims=True).astype(np.float64),
        logits.nbytes,
    )


def _rope() -> Check:
    dtype, capacity, position = mx.bfloat16, 256, 77
    norm = normal((128,), dtype, 0)
    heads = Heads(32, 8, 128, norm, norm, 1e-6)
    periods = (500000.0 ** (np.arange(0, 128, 2) / 128)).astype(np.float32)
    turn, count = Turn(128, mx.array(periods)), mx.array([position + 1], dtype=mx.int32)
    qkv = normal((1, 1, 48 * 128), dtype, 1)

    row = slice(position, position + 1)

    def buffers() -> list[mx.array]:
        return [mx.zeros((1, 8, capacity, 128), dtype=dtype) for _ in range(2)]

    def all_of(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.concatenate([a.reshape(-1) for a in (q, k, v)])

    def stored(where: str) -> mx.array:
        k, v = buffers()
        mx.eval(k, v)
        q = launch_store(qkv, k, v, count, heads, turn).run(where)[0]
        mx.eval(q)  # the rows are there once q is
        return all_of(q, k[:, :, row], v[:, :, row])

    def own() -> mx.array:
        k, v = buffers()
        q, k, v = rope_kv_reference(qkv, k, v, count, heads, turn)
        return all_of(q, k[:, :, row], v[:, :, row])

    want = floats(qkv).reshape(48, 128)
    want[:40] *= floats(norm) / np.sqrt((want[:40] ** 2).mean(-1, keepdims=True) + 1e-6)
    angle = position / periods.astype(np.float64)
    low, high = want[:40, :64].copy(), want[:40, 64:].copy()
    want[:40, :64] = low * np.cos(angle) - high * np.sin(angle)
    want[:40, 64:] = low * np.sin(angle) + high * np.cos(angle)
    return Check(
        "rope_kv", "32 + 2 x 8 heads of 128", dtype, stored, own, want.reshape(-1), qkv.nbytes
    )


CHECKS = {
    ("qmv_matrix", "qmv_scalar"): qmv_checks,
    ("chain",): chain_checks,
    ("decode_attention",): attention_checks,
    ("qsa",): sparse_checks,
    ("delta_step", "delta_rows"): delta_checks,
    ("expert_matrix", "expert_scalar"): expert_checks,
    ("packed_decode", "packed_qsa", "packed_turn", "kv_encode"): packed_checks,
    ("router_topk", "rope_kv", "likeliest"): small_checks,
}
"""By the names of the kernels checked."""


# --- running --------------------------------------------------------------------------------------


def measured(check: Check, where: str) -> Row:
    """Errors and times of one check on back end `where`."""
    scale = float(np.abs(check.want).max())
    errors = []
    for make in (lambda: check.run(where), check.own):
        difference = floats(make()).reshape(check.want.shape) - check.want
        errors.append(float(np.abs(difference).max()) / scale)
    times = [_time(lambda: check.run(where)), _time(check.own)]
    return Row(check, *errors, *times)


def _time(make: Callable[[], mx.array]) -> float:
    """Microseconds per call, the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        mx.eval([make() for _ in range(IN_FLIGHT)])
        best = min(best, (time.perf_counter() - start) / IN_FLIGHT)
    return best * 1e6


def _report(check: Check, where: str) -> bool:
    """Print its line; whether the kernel is right. What does not compile must not hide the rest."""
    try:
        row = measured(check, where)
    except (RuntimeError, ValueError) as e:
        lines = [line.strip() for line in str(e).splitlines() if line.strip()] or [repr(e)]
        why = next((line for line in lines if "error:" in line), lines[0])
        print(f"{check.kernel:22} {check.shape:34} FAILED: {why}", flush=True)
        return False
    print(row, flush=True)
    return row.right


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a kernel is wrong or none was checked."""
    parser = argparse.ArgumentParser(prog="python -m turbospark.kernels.check")
    names = [name for group in CHECKS for name in group]
    parser.add_argument("--kernel", action="append", choices=names, help="only this (repeatable)")
    options = parser.parse_args(arguments)
    where = backend(mx.default_device())
    if where == "cpu":
        print("no GPU here: kernels are not used. pytest tests/kernels emulates them on the CPU.")
        return 0
    print(f"mlx {version('mlx')}, {where}, {mx.device_info().get('device_name', 'GPU')}")
    print(HEADING)
    wrong = done = 0
    wanted = set(options.kernel or names)
    for group, checks in CHECKS.items():
        for check in checks() if wanted & set(group) else ():
            if check.kernel in wanted:
                wrong += not _report(check, where)
                done += 1
    if not done:
        print(f"nothing checked: {', '.join(sorted(wanted))} does not run on {where}")
        return 1
    print(f"{wrong} wrong" if wrong else "all right")
    print(TIMES)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
