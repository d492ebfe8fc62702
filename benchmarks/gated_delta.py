"""Gated delta nets, one token at a time, beside mlx-lm's on the same weights.

    python benchmarks/gated_delta.py [--layers 12] [--tokens 64] [--rounds 3]
    python benchmarks/gated_delta.py --model [--prompt 2048]

A stack of gated delta nets of Qwen3.5-35B-A3B's shape (hidden 2048, 16 key and 32 value heads of
128), random 4-bit group-64 weights in bfloat16; every layer reads what the one before gave. Ways:
mlx-lm's layer, ours of MLX's operations (its fused recurrence among them), ours with one launch
between the projections. Microseconds per layer and token, medians of rounds taken in turn; and how
far the outputs of the other two are from the second's. `--model` runs a whole dense model of
Qwen3.5-9B's widths instead, one layer of four full attention: a prompt, and decoding after it.
Needs mlx-lm: pip install mlx-lm==0.32.2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gpu_vs_mlx_lm import (
    SharedTensors,
    our_decode,
    peer_decode,
    random_prompt,
    random_words,
    turbospark_engine,
)
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet as PeerNet
from mlx_lm.models.qwen3_5 import TextModel, TextModelArgs

from turbospark.cache.state import LayerStates
from turbospark.engine import Engine
from turbospark.kernels.choices import Choices, backend, choices
from turbospark.kernels.delta_rows import BACKENDS
from turbospark.layers.gated_delta import DeltaShape, GatedDeltaNet
from turbospark.layers.weights import Weights

HIDDEN, EPS = 2048, 1e-6
SHAPE = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
CONFIG = {
    "hidden_size": HIDDEN, "rms_norm_eps": EPS, "linear_num_key_heads": SHAPE.key_heads,
    "linear_num_value_heads": SHAPE.value_heads, "linear_key_head_dim": SHAPE.key_dim,
    "linear_value_head_dim": SHAPE.value_dim, "linear_conv_kernel_dim": SHAPE.taps,
}  # fmt: skip
SHAPES = {
    "in_proj_qkv.weight": (SHAPE.channels, HIDDEN),
    "in_proj_z.weight": (SHAPE.values, HIDDEN),
    "in_proj_b.weight": (SHAPE.value_heads, HIDDEN),
    "in_proj_a.weight": (SHAPE.value_heads, HIDDEN),
    "out_proj.weight": (HIDDEN, SHAPE.values),
    "conv1d.weight": (SHAPE.channels, SHAPE.taps, 1),
    "A_log": (SHAPE.value_heads,),
    "dt_bias": (SHAPE.value_heads,),
    "norm.weight": (SHAPE.value_dim,),
}
MODEL = CONFIG | {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 248320, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "norm_convention": "plain", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
Step = Callable[[mx.array], mx.array]


def real_taps(weight: mx.array) -> mx.array:
    return (mx.random.normal(weight.shape) * 0.5).astype(mx.bfloat16)


class Stack(nn.Module):
    """mlx-lm's layers, quantized, of random words; sums stay in range by each layer's norm."""

    def __init__(self, count: int) -> None:
        super().__init__()
        args = TextModelArgs.from_dict(CONFIG)
        self.nets = [PeerNet(args) for _ in range(count)]
        random_words(self)
        for net in self.nets:  # as large as real taps, or what a net adds is lost in rounding
            net.conv1d.weight = real_taps(net.conv1d.weight)

    def stepper(self) -> Step:
        """One token through all of them, with caches of their own."""
        caches = [ArraysCache(size=2) for _ in self.nets]

        def step(x: mx.array) -> mx.array:
            for net, cache in zip(self.nets, caches, strict=True):
                x = x + net(x, cache=cache)
            mx.async_eval(x, [a for cache in caches for a in cache.state])
            return x

        return step


def our_stepper(stack: Stack, kernels: Choices) -> Step:
    """The same of turbospark over the same arrays."""
    nets = []
    for i in range(len(stack.nets)):
        shapes = {f"nets.{i}.{name}": shape for name, shape in SHAPES.items()}
        weights = Weights(SharedTensors(stack, shapes), shapes, mx.bfloat16, kernels=kernels)
        nets.append(GatedDeltaNet(weights, f"nets.{i}", i, SHAPE, EPS))
    states = LayerStates([SHAPE.memory] * len(nets), 1 << 20, mx.bfloat16)

    def step(x: mx.array) -> mx.array:
        states.begin(1)
        for net in nets:
            x = x + net(x, states)
        mx.async_eval(x, states.arrays())
        states.advance()
        return x

    return step


def timed(step: Step, rows: list[mx.array]) -> float:
    """Microseconds of one token through the stack; tokens are begun without waiting for each."""
    mx.synchronize()
    start = time.perf_counter()
    for row in rows:
        step(row)
    mx.synchronize()
    return (time.perf_counter() - start) / len(rows) * 1e6


def whole_model(ways: dict[str, Choices], prompt: list[int], tokens: int, rounds: int) -> None:
    """Tokens per second of a whole model, of the prompt and decoding after it."""
    model = random_words(TextModel(TextModelArgs.from_dict(MODEL)))
    for layer in model.layers:
        if layer.is_linear:
            layer.linear_attn.conv1d.weight = real_taps(layer.linear_attn.conv1d.weight)
    engines = {
        way: turbospark_engine(model, MODEL, len(prompt) + tokens + 8, best)
        for way, best in ways.items()
    }
    print(
        f"whole model: prompt logits differ by {difference(*engines.values(), prompt):.1e}",
        flush=True,
    )
    runs = {way: lambda e=engine: our_decode(e, prompt, tokens) for way, engine in engines.items()}
    runs["mlx-lm"] = lambda: peer_decode(model, prompt, tokens)  # type: ignore[misc]
    for turn in range(rounds + 1):
        for way, run in runs.items():
            prefill, decode = run()
            if turn:
                print(f"whole model, {way:24} prefill of {len(prompt)}: {prefill:7.0f} tokens/s, "
                      f"decode {decode:6.1f}", flush=True)  # fmt: skip


def difference(a: Engine, b: Engine, prompt: list[int]) -> float:
    """Of the logits behind the prompt: the largest over the largest value."""
    rows = []
    for engine in (a, b):
        engine.begin(prompt)
        *_, (_, logits) = engine.prefill_steps(prompt, 0)
        rows.append(np.array(logits.astype(mx.float32)))
        engine.end_run()
    return float(np.abs(rows[0] - rows[1]).max() / np.abs(rows[0]).max())


def stack_of_nets(plain: Choices, fused: Choices, layers: int, tokens: int, rounds: int) -> None:
    """Microseconds per layer and token in three ways."""
    stack = Stack(layers)
    ways = {
        "mlx-lm": stack.stepper(),
        "MLX's operations": our_stepper(stack, plain),
        "one launch": our_stepper(stack, fused),
    }
    rows = [mx.random.normal((1, 1, HIDDEN)).astype(mx.bfloat16) for _ in range(tokens)]
    mx.eval(rows)
    # The fourth token's, so that past and memory count.
    outputs = {w: [step(r) for r in rows[:4]][-1] for w, step in ways.items()}
    fourth = {way: np.array(out.astype(mx.float32)) for way, out in outputs.items()}
    want = fourth["MLX's operations"]
    for way in ("mlx-lm", "one launch"):
        print(f"{way}: the fourth output differs by {np.abs(fourth[way] - want).max():.1e} of "
              f"{np.abs(want).max():.2f}", flush=True)  # fmt: skip
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, step in ways.items():
            us = timed(step, rows) / layers
            if turn:
                times[way].append(us)
    peer = statistics.median(times["mlx-lm"])
    for way, found in times.items():
        us = statistics.median(found)
        print(f"{way:18} {us:8.1f} us per layer and token, {peer / us:5.2f}x of mlx-lm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", action="store_true", help="a whole model instead")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of its prompt")
    args = parser.parse_args()
    device = mx.default_device()
    if backend(device) not in BACKENDS:
        raise SystemExit("the kernels of gated delta nets run on CUDA: pip install '.[cuda13]'")
    name = mx.device_info().get("device_name", "CPU")
    print(f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, {name}", flush=True)
    best = choices(device)
    plain, fused = (replace(best, gated_delta=on) for on in (False, True))
    if args.model:
        ways = {"our kernels": fused, "nets of MLX's operations": plain}
        whole_model(ways, random_prompt(args.prompt), args.tokens, args.rounds)
    else:
        stack_of_nets(plain, fused, args.layers, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
