"""Times of the decode kernels at real shapes over their tunings, beside MLX's own and a copy.

    python benchmarks/kernel_speed.py [--only qmv|experts|attention]

4-bit group 64 with bfloat16 companions, random weights, more copies of them than fit a cache. A
figure is the wall time of a batch of launches divided by their number: for small matrices it is
the host's time to launch, not the GPU's. GB/s counts the bytes that must be read.
"""

# ruff: noqa: B023 - every closure is called within its own turn of the loop
from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from turbospark.dtypes import affine
from turbospark.kernels import decode_attention as attention
from turbospark.kernels import expert_matrix, expert_scalar, qmv_matrix, qmv_scalar
from turbospark.kernels.choices import backend
from turbospark.kernels.experts import PLAIN, Experts, Matrix, stacked
from turbospark.kernels.fused import Around, qmv_reference

Q4 = affine(4, 64)
BF16 = mx.bfloat16
CACHE_BYTES = 300 << 20
QMV = {
    "llama-8b qkv": (6144, 4096, None),
    "llama-8b o": (4096, 4096, None),
    "llama-8b gate+up": (28672, 4096, "silu"),
    "llama-8b down": (4096, 14336, None),
    "llama-8b head": (128256, 4096, None),
    "qwen3-30b-a3b qkv": (5120, 2048, None),
}
ATTENTION = [(8, 4, 512), (8, 4, 8192), (8, 4, 32768), (8, 4, 131072), (4, 8, 4096)]


def random(shape: tuple[int, ...], scale: float = 1.0) -> mx.array:
    """Normal bfloat16."""
    return (mx.random.normal(shape) * scale).astype(BF16)


def packed(*shape: int) -> tuple[mx.array, mx.array, mx.array]:
    """Planes of a random matrix [..., rows, columns]."""
    words = mx.random.randint(0, 2**31 - 1, (*shape[:-1], shape[-1] // 8)).astype(mx.uint32)
    groups = (*shape[:-1], shape[-1] // 64)
    planes = (words, random(groups, 0.002), random(groups, 0.002))
    mx.eval(planes)
    return planes


def microseconds(make: Callable[[int], mx.array], count: int) -> float:
    """Of one of `count` launches, the best of five batches."""
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        mx.eval([make(i) for i in range(count)])
        best = min(best, time.perf_counter() - start)
    return best / count * 1e6


def line(what: str, us: float, nbytes: int) -> None:
    print(f"  {what:28} {us:9.1f} us {nbytes / us / 1e3:8.0f} GB/s", flush=True)


def copy_speed() -> None:
    a = mx.zeros((1 << 28,), dtype=mx.uint32)
    mx.eval(a)
    us = microseconds(lambda i: a + i, 4)
    print(f"copy of 1 GiB: {2 * a.nbytes / us / 1e3:.0f} GB/s read and written")


def qmv_speed(where: str) -> None:
    for name, (n, k, glu) in QMV.items():
        nbytes = n * k // 2 + n * k // 16
        weights = [packed(n, k) for _ in range(max(2, CACHE_BYTES // nbytes))]
        norm, x = random((k,)), random((1, k))
        around = Around(norm=norm, eps=1e-5, glu=glu)
        print(f"{name}: {n} x {k}, norm in front{', swiglu behind' if glu else ''}")
        bare = Around()
        own = lambda i: qmv_reference(x, Q4, *weights[i], bare)  # noqa: E731
        line("MLX, matrix only", microseconds(own, len(weights)), nbytes)
        tunings = [(qmv_matrix, t, s) for t in (1, 2, 4) for s in (4, 8)]
        tunings += [(qmv_scalar, r, s) for r, s in ((1, 8), (2, 4), (2, 8), (4, 4))]
        for module, rows, simdgroups in tunings:
            tuning = module.Tuning(rows, simdgroups)
            run = lambda i: module.launch(x, Q4, *weights[i], around, tuning).run(where)[0]  # noqa: E731
            label = f"{module.__name__.rsplit('_', 1)[-1]} {rows} x {simdgroups}"
            line(label, microseconds(run, len(weights)), nbytes)


def expert_speed(where: str) -> None:
    experts, ranks, hidden, inner = 128, 8, 2048, 768
    planes = [packed(experts, r, c) for r, c in ((inner, hidden), (inner, hidden), (hidden, inner))]
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    matrices = [
        Matrix(Q4, *shape, *(stacked(a) for a in p))
        for shape, p in zip(shapes, planes, strict=True)
    ]
    mlp = Experts(*matrices)
    draw = np.random.default_rng(0)
    chosen = [draw.permutation(experts)[:ranks][None].astype(np.int32) for _ in range(24)]
    ids = [mx.array(c) for c in chosen]
    x, share = random((1, hidden)), mx.full((1, ranks), 1.0 / ranks)
    mx.eval(ids, x, share)
    nbytes = ranks * 3 * inner * hidden * 9 // 16
    print(f"qwen3-30b-a3b experts: {ranks} of {experts}, {hidden} x {inner}")

    def own(i: int) -> mx.array:
        which = ids[i].astype(mx.uint32)
        product = lambda a, p: mx.gather_qmm(  # noqa: E731
            a, *p, rhs_indices=which, transpose=True, group_size=64, bits=4
        )
        rows = x[:, None, None]
        gate = product(rows, planes[0])
        y = product(gate * mx.sigmoid(gate) * product(rows, planes[1]), planes[2])
        return (y.squeeze(-2) * share[..., None].astype(BF16)).sum(axis=1)

    line("MLX", microseconds(own, len(ids)), nbytes)
    tunings = [(expert_matrix, t, s) for t in (1, 2) for s in (4, 8)]
    for module, rows, simdgroups in [*tunings, (expert_scalar, 2, 4), (expert_scalar, 2, 8)]:
        tuning = module.Tuning(rows, simdgroups)

        def run(i: int) -> mx.array:
            h = module.launch_gate_up(x, ids[i], mlp, PLAIN, tuning).run(where)[0]
            down = module.launch_down(h, ids[i], share, mlp, PLAIN, BF16, tuning)
            return down.run(where)[0]

        label = f"{module.__name__.rsplit('_', 1)[-1]} {rows} x {simdgroups}"
        line(label, microseconds(run, len(ids)), nbytes)


def attention_speed(where: str) -> None:
    for kv, group, length in ATTENTION:
        rules = attention.Rules(128**-0.5)
        q = [random((1, kv * group, 1, 128)) for _ in range(8)]
        k, v = (random((1, kv, length, 128)) for _ in range(2))
        count = mx.array([length], dtype=mx.int32)
        mx.eval(q, k, v, count)
        nbytes = k.nbytes + v.nbytes
        print(f"attention: {kv} x {group} heads of 128, {length} keys")
        own = lambda i: mx.fast.scaled_dot_product_attention(  # noqa: E731
            q[i],
            k,
            v,
            scale=rules.scale,
        )
        line("MLX", microseconds(own, len(q)), nbytes)
        for simdgroups, splits in ((4, 16), (4, 32), (4, 64), (8, 32)):
            tuning = attention.Tuning(simdgroups, splits)

            def run(i: int) -> mx.array:
                first = attention.launch_partial(q[i], k, v, count, rules, tuning)
                o, ml = first.run(where)
                second = attention.launch_combine(q[i], o, ml, length, None, tuning)
                return second.run(where)[0]

            line(f"{simdgroups} simdgroups, {splits} splits", microseconds(run, len(q)), nbytes)


PARTS = {"qmv": qmv_speed, "experts": expert_speed, "attention": attention_speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS))
    options = parser.parse_args()
    where = backend(mx.default_device())
    if where == "cpu":
        raise SystemExit("no GPU back end: install turbospark[cuda13] on Linux, or run on a Mac")
    copy_speed()
    for name in [options.only] if options.only else PARTS:
        PARTS[name](where)


if __name__ == "__main__":
    main()
