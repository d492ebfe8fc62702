"""Decode and prefill side by side with mlx-lm on one GPU, both on the same weights in memory.

    python benchmarks/gpu_vs_mlx_lm.py [--case llama-8b] [--case qwen3-30b-a3b] [--out FILE]
    python benchmarks/gpu_vs_mlx_lm.py --quick --case llama-8b

Weights are random, 4-bit group 64 with bfloat16 companions, of the real models' shapes; nothing is
downloaded. mlx-lm builds its model first, and turbospark's layers are built from the same arrays.
Needs mlx-lm: pip install mlx-lm==0.32.2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from decode_cost import launches, least_bytes, moved_bytes
from mlx.utils import tree_flatten, tree_map

from turbospark.cache.pool import SessionPool
from turbospark.cache.state import LayerStates
from turbospark.counters import PhaseClock
from turbospark.dtypes import Quant, Raw
from turbospark.engine import Engine
from turbospark.experts.mlp import ExpertMLP, StackedMatrix
from turbospark.experts.resident import ResidentExperts
from turbospark.families import family_for_model_type
from turbospark.families.config import ConfigReader
from turbospark.install.planes import Planes
from turbospark.kernels.choices import Choices, choices
from turbospark.kernels.decode_attention import tuned
from turbospark.kernels.likeliest import likeliest, likeliest_reference
from turbospark.layers.weights import Weights
from turbospark.options import LiveToggles, RuntimeToggles

try:
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
except ModuleNotFoundError as error:
    raise SystemExit("needs mlx-lm: pip install mlx-lm==0.32.2") from error

CASES: dict[str, dict[str, Any]] = {
    "llama-8b": dict(
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
        max_position_embeddings=131072,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
PREFILL = {"llama-8b": 8192, "qwen3-30b-a3b": 4096}


def mlx_lm_model(config: dict[str, Any]) -> nn.Module:
    """mlx-lm's model of that shape, quantized, with random words in place of weights."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    return random_words(module.Model(module.ModelArgs.from_dict(config)))


def random_words(model: nn.Module) -> nn.Module:
    """`model` quantized (4 bits, routers 8), with random words in place of weights."""

    def wanted(path: str, layer: nn.Module) -> bool | dict[str, int]:
        if path.endswith("mlp.gate"):
            return {"group_size": 64, "bits": 8}
        return hasattr(layer, "to_quantized")

    nn.quantize(model, group_size=64, bits=4, class_predicate=wanted)
    model.update(tree_map(random_like, model.parameters()))
    mx.eval(model.parameters())
    return model


def random_like(array: mx.array) -> mx.array:
    """Random words for packed weights, small numbers for companions, ones for norms."""
    if array.dtype == mx.uint32:
        values = mx.random.randint(0, 2**31 - 1, array.shape, dtype=mx.int32).astype(mx.uint32)
    elif array.ndim == 1:
        values = mx.ones(array.shape, mx.bfloat16)
    else:
        values = (mx.random.normal(array.shape) * 0.002).astype(mx.bfloat16)
    mx.eval(values)
    return values


class SharedTensors:
    """The peer's arrays under canonical names, as an install's resident index would give them."""

    def __init__(self, model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
        self.arrays = dict(tree_flatten(model.parameters()))
        self.shapes = shapes

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def read(self, name: str) -> Planes:
        if not name.endswith(".weight"):
            return Planes(Raw("bfloat16"), self.shapes[name], self.arrays[name])
        return self.planes(name.removesuffix(".weight"), self.shapes[name])

    def planes(self, module: str, shape: tuple[int, ...]) -> Planes:
        weight = self.arrays[f"{module}.weight"]
        scales = self.arrays.get(f"{module}.scales")
        if scales is None:
            return Planes(Raw("bfloat16"), shape, weight)
        bits = weight.shape[-1] * 32 // shape[-1]
        fmt = Quant("affine", bits, 64, "bfloat16")
        return Planes(fmt, shape, weight, scales, self.arrays[f"{module}.biases"])


def turbospark_engine(
    model: nn.Module, config: dict[str, Any], context: int, best: Choices | None = None
) -> Engine:
    """Our engine over the same arrays; `best` in place of the table's choices."""
    family = family_for_model_type(config["model_type"])
    ours = family.read_config(ConfigReader(config))
    tensors = SharedTensors(model, family.weight_shapes(ours))
    toggles = LiveToggles(RuntimeToggles())
    best = best or choices(mx.default_device())
    layers = {}
    for i, shape in family.expert_shapes(ours).items():
        matrices = []
        for name in ("gate", "up", "down"):
            stacked = (shape.count, *shape.matrix(name))
            planes = tensors.planes(f"model.layers.{i}.mlp.switch_mlp.{name}_proj", stacked)
            matrices.append(StackedMatrix(planes.fmt, planes.weight, planes.scales, planes.biases))
        layers[i] = ExpertMLP(
            *matrices, family.expert_activation(ours), padded_routes=best.padded_routes
        )
    clock = PhaseClock()
    store = ResidentExperts(layers, toggles, clock) if layers else None
    weights = Weights(tensors, tensors.shapes, mx.bfloat16, kernels=best)
    built = family.build(ours, weights, store)
    pool = SessionPool(1, lambda: LayerStates(built.cache_specs, context, mx.bfloat16))
    return Engine(
        built,
        store,
        pool,
        toggles,
        device=mx.default_device(),
        max_context=context,
        prefill_chunk=best.prefill_chunk,
        prefix_reuse=False,
        clock=clock,
        pick=likeliest,
    )


def peer_decode(model: nn.Module, prompt: list[int], tokens: int) -> tuple[float, float]:
    """(prefill tokens/s, decode tokens/s) of mlx-lm, its own loop."""
    start = time.perf_counter()
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens, prefill_step_size=2048)
    next(steps)
    first = time.perf_counter()
    count = sum(1 for _ in steps)
    return len(prompt) / (first - start), count / (time.perf_counter() - first)


def our_decode(engine: Engine, prompt: list[int], tokens: int) -> tuple[float, float]:
    """The same of turbospark."""
    engine.begin(prompt)
    start = time.perf_counter()
    *_, (_, logits) = engine.prefill_steps(prompt, 0)
    token = engine.likeliest(logits)
    first = time.perf_counter()
    engine.run_ahead = True
    for _ in range(tokens - 1):
        token = engine.likeliest(engine.step(token))
    elapsed = time.perf_counter() - first
    engine.end_run()
    return len(prompt) / (first - start), (tokens - 1) / elapsed


def random_prompt(length: int) -> list[int]:
    return mx.random.randint(0, 100_000, (length,)).tolist()


def say(**row: Any) -> dict[str, Any]:
    """Print a result as soon as it is known: a run may be cut off."""
    print(json.dumps(row), flush=True)
    return row


def run_case(name: str, rounds: int, tokens: int, contexts: list[int]) -> list[dict[str, Any]]:
    config = CASES[name]
    model = mlx_lm_model(config)
    engine = turbospark_engine(model, config, max(*contexts, PREFILL[name]) + tokens + 8)
    rows = []
    for length in sorted({*contexts, PREFILL[name]}):
        prompt = random_prompt(length)
        sides = {"mlx-lm": [], "turbospark": []}
        for _ in range(rounds + 1):
            sides["mlx-lm"].append(peer_decode(model, prompt, tokens))
            sides["turbospark"].append(our_decode(engine, prompt, tokens))
        row: dict[str, Any] = {"case": name, "context": length}
        for k, what in enumerate(("prefill", "decode")):
            medians = {s: statistics.median(r[k] for r in v[1:]) for s, v in sides.items()}
            row[what] = {**medians, "ratio": medians["turbospark"] / medians["mlx-lm"]}
        counters = engine.clock.snapshot()
        row["build_ms_per_pass"] = counters.build_ns / 1e6 / max(counters.passes, 1)
        row.update(cost(config, length, row["decode"]["turbospark"]))
        rows.append(say(**row))
    rows.append(say(case=name, **launch_counts(model, engine, prompt)))
    return rows


def cost(config: dict[str, Any], length: int, rate: float) -> dict[str, Any]:
    """Bytes per token, least and moved, and the rate of the least ones."""
    tuning = tuned("cuda", config["num_key_value_heads"])
    least = least_bytes(config, length)
    return {
        "least_bytes_per_token": least,
        "moved_bytes_per_token": moved_bytes(config, length, tuning.splits if tuning else 1),
        "least_gb_per_s": round(least * rate / 1e9),
    }


# --- the quick mode: most telling figures first, each printed at once -----------------------------


@contextmanager
def ways(engine: Engine, kernels: bool = True, traced: bool = True) -> Iterator[None]:
    """Our kernels and the traced step, on or off for a while."""
    decode, head, pick = engine.model.decode, engine.model.logits, engine.pick
    rows, compiled, head_rows = decode.rows, decode.compiled, head.rows
    decode.compiled = compiled and traced
    if not kernels:
        decode.rows = head.rows = None
        engine.pick = likeliest_reference
    try:
        yield
    finally:
        decode.rows, decode.compiled, head.rows, engine.pick = rows, compiled, head_rows, pick


def quick_case(name: str, tokens: int, contexts: list[int], ours_only: bool) -> None:
    """Print, one line each: rates in turn, errors of the kernels, other ways, launches, prefill."""
    start = time.perf_counter()
    config = CASES[name]
    model = mlx_lm_model(config)
    lengths = sorted(set(contexts))
    engine = turbospark_engine(model, config, max(*lengths, PREFILL[name]) + tokens + 8)
    spent = lambda: round(time.perf_counter() - start, 1)  # noqa: E731
    say(case=name, built_after_s=spent())
    for length in lengths:
        prompt = random_prompt(length)
        our_decode(engine, prompt, 8)
        if not ours_only:
            peer_decode(model, prompt, 4)
        for _ in range(3):
            before = engine.clock.snapshot()
            _, rate = our_decode(engine, prompt, tokens)
            counters = engine.clock.snapshot() - before
            row = dict(
                decode=round(rate, 1),
                build_ms=round(counters.build_ns / 1e6 / counters.passes, 2),
                wait_ms=round(counters.final_wait_ns / 1e6 / counters.passes, 2),
            )
            if not ours_only:
                prefill, decode = peer_decode(model, prompt, tokens)
                row |= dict(mlx_lm=round(decode, 1), ratio=round(rate / decode, 2))
                row |= dict(mlx_lm_prefill=round(prefill))
            say(case=name, context=length, **row, after_s=spent())
        say(case=name, context=length, **cost(config, length, rate))
    prompt = random_prompt(lengths[0])
    say(case=name, **agreement(engine, prompt), after_s=spent())
    prompt = random_prompt(lengths[0])
    for way in ({"traced": False}, {"kernels": False}):
        with ways(engine, **way):
            our_decode(engine, prompt, 4)
            rate = our_decode(engine, prompt, tokens // 2)[1]
            say(case=name, context=lengths[0], way=str(way), decode=round(rate, 1))
    if ours_only:
        return
    say(case=name, **launch_counts(model, engine, prompt), after_s=spent())
    prompt = random_prompt(PREFILL[name])
    our_decode(engine, prompt, 2)
    peer_decode(model, prompt, 2)
    for _ in range(3):
        ours, theirs = our_decode(engine, prompt, 2)[0], peer_decode(model, prompt, 2)[0]
        say(case=name, prefill_of=len(prompt), turbospark=round(ours), mlx_lm=round(theirs),
            ratio=round(ours / theirs, 2), after_s=spent())  # fmt: skip


def agreement(engine: Engine, prompt: list[int], steps: int = 6) -> dict[str, Any]:
    """Logits of the same tokens by kernels, and by MLX's operations: the largest difference over
    the largest value, and in how many steps both prefer the same token.
    """
    sides, ids = [], []
    for kernels in (False, True):
        with ways(engine, kernels=kernels):
            engine.begin(prompt)
            *_, (_, logits) = engine.prefill_steps(prompt, 0)
            rows, picks = [], []
            for token in prompt[:steps]:
                logits = engine.step(token)
                rows.append(np.array(logits))
                picks.append(engine.likeliest(logits))
            sides.append(np.stack(rows))
            ids.append(picks)
    plain, fused = sides
    error = np.abs(plain - fused).max(-1) / np.abs(plain).max(-1)
    return {
        "error_of_fused_logits": [float(f"{e:.1e}") for e in error],
        "same_choice": f"{sum(a == b for a, b in zip(*ids, strict=True))} of {steps}",
        "picks_are_argmax": [int(r.argmax()) for r in fused] == ids[1],
    }


def launch_counts(model: nn.Module, engine: Engine, prompt: list[int]) -> dict[str, int]:
    """Launches per token: of mlx-lm, and of ours without and with kernels."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt[:8]]), cache=cache))
    found = {"launches_mlx_lm": launches(mx.argmax(model(mx.array([[1]]), cache=cache)[0, -1]))}
    engine.begin(prompt)
    *_, _last = engine.prefill_steps(prompt[:8], 0)
    for label, kernels in (("launches_without_kernels", False), ("launches", True)):
        with ways(engine, kernels=kernels, traced=False):
            _, logits = engine._build(mx.array([[1]]), "last")
            found[label] = launches(engine.pick(logits))
            mx.eval(logits, engine.states.unevaluated())  # not committed: the same again
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--context", action="append", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="three rounds, printed as they come")
    parser.add_argument("--ours-only", action="store_true", help="quick, mlx-lm's model not timed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out and (args.quick or args.ours_only):
        parser.error("--out takes the whole report, which --quick and --ours-only do not make")
    if not mx.is_available(mx.gpu):
        raise SystemExit("no GPU back end: install turbospark[cuda13] on Linux, or run on a Mac")
    rows = []
    for name in args.case or CASES:
        contexts = args.context or [512]
        if args.quick or args.ours_only:
            quick_case(name, args.tokens, contexts, args.ours_only)
        else:
            rows += run_case(name, args.rounds, args.tokens, contexts)
        mx.clear_cache()
    if args.out:
        report = {
            "command": "python " + " ".join(sys.argv),
            "gpu": gpu_name(),
            "versions": {n: version(n) for n in ("mlx", "mlx-lm")},
            "rows": rows,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def gpu_name() -> str:
    info = mx.device_info(mx.Device(mx.gpu)) if hasattr(mx, "device_info") else {}
    name = info.get("device_name")
    if name:
        return str(name)
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
