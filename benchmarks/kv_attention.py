"""Decode attention over packed 4-bit caches against bfloat16 ones, and whole steps of an 8B model.

    python benchmarks/kv_attention.py [--quick] [--steps] [--write]

One row of 32 query heads over 8 key heads of 128. Packed: partial sums and combination by the
kernels that `kv_quant` runs; dense: `mx.fast.scaled_dot_product_attention` on slices as long as the
context, and our own split kernel. Enough copies of every cache that none of them is cached. A time
is the wall time of a batch of launches that do not wait for each other, over their number, the best
of several batches; GB/s counts the bytes of the cache that must be read. The error is the largest
difference from the same attention in plain MLX, over the largest value. `--quick` leaves the other
tunings out; `--steps` adds tokens per second of the model's shape with random 4-bit weights, whose
kernels take a minute to compile. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from checkout import ROOT, commit

from turbospark.cache.packed import packed_specs
from turbospark.cache.specs import PackedSpec
from turbospark.cache.state import LayerStates
from turbospark.dtypes import Raw, affine
from turbospark.families import family_for_model_type
from turbospark.families.config import ConfigReader
from turbospark.install.planes import Planes
from turbospark.kernels import decode_attention as dense
from turbospark.kernels import packed_decode
from turbospark.kernels.choices import backend, choices
from turbospark.kernels.packed_attention import (
    Near,
    Packed,
    first_exact,
    packed_attention_reference,
)
from turbospark.kernels.packed_decode import Tuning
from turbospark.layers.weights import Weights

KV, GROUP, DIM, RING = 8, 4, 128, 128
LENGTHS = (32768, 131072)
CACHE_BYTES = 400 << 20
LLAMA_8B: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    max_position_embeddings=1 << 20,
)


def microseconds(make: Callable[[int], mx.array], count: int) -> float:
    """Of one of `count` launches, the best of five batches."""
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        mx.eval([make(i) for i in range(count)])
        mx.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / count * 1e6


# --- attention ------------------------------------------------------------------------------------


def packed_cache(length: int, bits: tuple[int, int]) -> tuple[Packed, Near]:
    """Random codes; scales as rows of variance 1 would have."""

    def words(*shape: int) -> mx.array:
        return mx.random.randint(0, 2**31 - 1, shape).astype(mx.uint32)

    def scales() -> mx.array:
        return mx.random.uniform(0.8, 1.2, (KV, length)).astype(mx.float16)

    def rows(count: int) -> mx.array:
        return mx.random.normal((KV, count, DIM)).astype(mx.float16)

    packed = Packed(
        words(KV, length, DIM * bits[0] // 32),
        scales(),
        words(KV, length // 32, bits[1], DIM),
        scales(),
    )
    near = Near(0, rows(RING), rows(RING), rows(4), rows(4))
    mx.eval(list(vars(packed).values()), near.keys, near.values, near.first_keys, near.first_values)
    return packed, near


def plain(q: mx.array, packed: Packed, near: Near, length: int) -> mx.array:
    """What the launches should give, still turned: [H, 1, D]."""
    start = first_exact(length - 1)
    at = mx.arange(start, length) % RING
    held = Near(start, near.keys[:, at], near.values[:, at], near.first_keys, near.first_values)
    return packed_attention_reference(q, length - 1, packed, held)


def attention_rows(length: int, bits: tuple[int, int], tunings: list[Tuning]) -> dict[str, Any]:
    """Times at one context."""
    where = backend(mx.default_device())
    count = mx.array([length], dtype=mx.int32)
    q = mx.random.normal((KV * GROUP, 1, DIM)) * 0.1
    own = packed_cache(length, bits)
    nbytes = sum(a.nbytes for a in vars(own[0]).values())
    copies = [own] + [packed_cache(length, bits) for _ in range(CACHE_BYTES // nbytes)]
    row: dict[str, Any] = {"keys": length, "bits": bits, "packed_bytes": nbytes, "packed": []}

    def launch(i: int, tuning: Tuning) -> mx.array:
        packed, near = copies[i % len(copies)]
        o, ml = packed_decode.launch_partial(q, packed, near, count, tuning).run(where)
        return packed_decode.launch_combine(q, o, ml, None, mx.bfloat16, tuning).run(where)[0]

    want = packed_decode.kv_codec.turn_back(plain(q, *own, length)[:, 0], 1).reshape(-1)
    for tuning in tunings:
        got = launch(0, tuning).reshape(-1).astype(mx.float32)
        error = (mx.abs(got - want).max() / mx.abs(want).max()).item()
        us = microseconds(lambda i, t=tuning: launch(i, t), 24)
        row["packed"].append({
            "simdgroups": tuning.simdgroups,
            "splits": tuning.splits,
            "us": round(us, 1),
            "gb_per_s": round(nbytes / us / 1e3),
            "error": float(f"{error:.2e}"),
        })  # fmt: skip
    return row


def dense_rows(length: int) -> dict[str, Any]:
    """Times of bfloat16 caches: MLX's own attention, and our split kernel."""
    where = backend(mx.default_device())
    count = mx.array([length], dtype=mx.int32)
    q = mx.random.normal((1, KV * GROUP, 1, DIM)).astype(mx.bfloat16)
    shape = (1, KV, length, DIM)
    nbytes = 2 * KV * length * DIM * 2
    copies = []
    for _ in range(1 + CACHE_BYTES // nbytes):
        copies.append([mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)])
        mx.eval(copies[-1])
    rules, tuning = dense.Rules(DIM**-0.5), dense.tuned(where, KV)
    assert tuning is not None

    def mlx(i: int) -> mx.array:
        k, v = copies[i % len(copies)]
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=DIM**-0.5)

    def ours(i: int) -> mx.array:
        k, v = copies[i % len(copies)]
        o, ml = dense.launch_partial(q, k, v, count, rules, tuning).run(where)
        return dense.launch_combine(q, o, ml, length, None, tuning).run(where)[0]

    us = {name: microseconds(run, 24) for name, run in (("mlx", mlx), ("ours", ours))}
    return {
        "dense_bytes": nbytes,
        "sdpa_us": round(us["mlx"], 1),
        "dense_kernel_us": round(us["ours"], 1),
    }


# --- whole steps ----------------------------------------------------------------------------------


class RandomTensors:
    """Random packed matrices and norms of ones under any name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str) -> Planes:
        shape = self.shapes[name]
        if len(shape) == 1:
            return Planes(Raw("bfloat16"), shape, mx.ones(shape, mx.bfloat16))
        words = mx.random.randint(0, 2**31 - 1, (shape[0], shape[1] // 8)).astype(mx.uint32)
        groups = (shape[0], shape[1] // 64)
        scales, biases = ((mx.random.normal(groups) * 0.002).astype(mx.bfloat16) for _ in range(2))
        return Planes(affine(4, 64, "bfloat16"), shape, words, scales, biases)


def step_rows(lengths: tuple[int, ...], bits: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Tokens per second of one conversation of an 8B llama, steps that depend on each other."""
    family = family_for_model_type("llama")
    config = family.read_config(ConfigReader(LLAMA_8B))
    shapes = family.weight_shapes(config)
    best = choices(mx.default_device())
    weights: Any = Weights(RandomTensors(shapes), shapes, mx.bfloat16, kernels=best)  # type: ignore[arg-type]
    model = family.build(config, weights, None)
    specs = family.cache_specs(config)
    rows = []
    for length in lengths:
        for name, widths in {"off": None, **bits}.items():
            own = specs if widths is None else packed_specs(specs, *widths)[0]
            states = LayerStates(own, length + 256, mx.bfloat16)
            states.position = states.furthest = length - 1
            token = mx.array([[1]])
            times = []
            for i in range(88):
                begun = time.perf_counter()
                states.begin(1)
                logits = model.head(model(token, states))
                token = mx.argmax(logits, axis=-1)
                mx.eval(token, states.unevaluated())
                states.advance()
                if i >= 24:
                    times.append(time.perf_counter() - begun)
            packed = sum(isinstance(s, PackedSpec) for s in own)
            row = {
                "keys": length,
                "kv_quant": name,
                "packed_layers": packed,
                "tokens_per_s": round(len(times) / sum(times), 1),
                "cache_mib": round(states.nbytes / 2**20),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            del states
            mx.clear_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tuning that is used, 4 bits only")
    parser.add_argument("--steps", action="store_true", help="whole steps of an 8B model too")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if backend(mx.default_device()) != "cuda":
        raise SystemExit("the kernels of packed caches run on CUDA; there is none here")
    chosen = [packed_decode.tuned(DIM, KV)]
    if not args.quick:
        chosen += [Tuning(sg, splits) for sg in (1, 2, 4) for splits in (32, 48, 64, 128)]
    widths = [(4, 4)] if args.quick else [(4, 4), (4, 3), (3, 3), (2, 2)]
    rows = []
    for length in LENGTHS:
        beside = dense_rows(length)
        for bits in widths:
            row = attention_rows(length, bits, chosen if bits == (4, 4) else chosen[:1]) | beside
            us = min(r["us"] for r in row["packed"])
            row["bytes_ratio"] = round(row["packed_bytes"] / row["dense_bytes"], 3)
            row["times_sdpa"] = round(row["sdpa_us"] / us, 2)
            rows.append(row)
            print(json.dumps(row), flush=True)
    steps = step_rows(LENGTHS, {"4": (4, 4), "2": (2, 2)}) if args.steps else []
    if args.write:
        report = {
            "what": "one row of 32 heads over 8 key heads of 128; whole steps of an 8B llama",
            "command": "python benchmarks/kv_attention.py"
            + "".join(f" --{n}" for n in ("quick", "steps") if getattr(args, n))
            + " --write",
            "device": mx.device_info()["device_name"],
            "versions": {"mlx": version("mlx"), "commit": commit()},
            "attention": rows,
            "steps": steps,
        }
        out = ROOT / "benchmarks" / "results" / "kv_attention.json"
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
