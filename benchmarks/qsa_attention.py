"""Block-sparse attention beside dense attention, and a whole step of the published qwen4_exp.

    python benchmarks/qsa_attention.py [--quick]

Attention: microseconds per layer and token at the published shape (24 query and 2 key/value heads
of 256, 4 index heads of 128, 512 blocks of 4). Each call waits for the one before, over more
layers than the caches hold; the calls are one traced graph. Dense is our own decode kernel where
the back end has it, sparse the four launches score, select, attend and combine; each launch is also
timed by itself.

Step: a model of the published widths with four layers, a small vocabulary, eight experts and a
short n-gram table, random 4-bit weights. Its two arms (sparse, and `qsa_force_dense`) are fed the
same tokens; reported are times per step, KL(sparse || dense) and how often the likeliest token is
the same. Random weights are no trained model: their KL says that both arms run, not what a
trained model loses. `--quick` takes shorter contexts for the step and fewer repetitions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark import OpenOptions, Runner, synth
from turbospark.kernels import qsa_attend, qsa_score, qsa_select
from turbospark.kernels.choices import backend
from turbospark.kernels.decode_attention import Rules, decode_attention
from turbospark.kernels.qsa import SPLITS, Rule, choose_and_attend
from turbospark.kernels.source import constant_ints

HEADS, KV, DIM, INDEX_HEADS, INDEX_DIM, RATIO, CHOSEN = 24, 2, 256, 4, 128, 4, 512
LAYERS = 4
SCALE = DIM**-0.5
CONTEXTS = (8192, 32768, 131072, 262144)
SHAPE = {
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM, "hidden_size": 2560,
    "indexer_head_dim": INDEX_DIM, "indexer_budget": CHOSEN * RATIO, "hc_lowrank": 320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "moe_intermediate_size": 640, "num_experts": 8,
    "num_experts_per_tok": 4, "shared_expert_intermediate_size": 640, "rope_theta": 1e7,
    "ple_embed_dim": 2560, "heads_per_ngram": 8, "vocab_size": 4096, "ngram_vocab_size_base": 2000,
    "max_position_embeddings": 262144, "ple_layer_ids": [2],
}  # fmt: skip


def normal(*shape: int) -> mx.array:
    array = mx.random.normal(shape, dtype=mx.bfloat16)
    mx.eval(array)
    return array


def chained(step: Callable[[int, mx.array], mx.array], first: mx.array, count: int) -> float:
    """Microseconds per call of `count` calls of which each reads what the one before gave.

    They are traced together, as the layers of a decode step are.
    """

    def chain(x: mx.array) -> mx.array:
        for i in range(count):
            x = step(i % LAYERS, x)
        return x

    run = mx.compile(chain)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        mx.eval(run(first))
        best = min(best, time.perf_counter() - start)
    return best / count * 1e6


def attention(length: int, count: int, where: str) -> None:
    """One line: dense and sparse at `length` positions, and each sparse launch by itself."""
    keys, values = ([normal(length, KV, DIM) for _ in range(LAYERS)] for _ in range(2))
    blocks = [normal(length // RATIO, INDEX_DIM) for _ in range(LAYERS)]
    q, queries = normal(1, HEADS, DIM), normal(1, INDEX_HEADS, INDEX_DIM)
    rule, end = Rule(RATIO, CHOSEN, SCALE), mx.array([length], dtype=mx.int32)
    heads_first = lambda a: a.reshape(1, KV, length, DIM)  # noqa: E731 (random: the order is moot)

    def dense(layer: int, x: mx.array) -> mx.array:
        k, v = heads_first(keys[layer]), heads_first(values[layer])
        out = decode_attention(x.reshape(1, HEADS, 1, DIM), k, v, end, Rules(SCALE))
        return out.reshape(1, HEADS, DIM)

    def sparse(layer: int, x: mx.array) -> mx.array:
        return choose_and_attend(
            x, keys[layer], values[layer], queries, blocks[layer], length - 1, rule, kernels=True
        )[0]

    full, chosen = chained(dense, q, count), chained(sparse, q, count)
    parts = launches(q, keys, values, queries, blocks, length, count, where)
    print(
        f"{length:>8}{full:>12.1f}{chosen:>12.1f}{full / chosen:>8.1f}x   "
        + "  ".join(f"{name} {us:.1f}" for name, us in parts.items()),
        flush=True,
    )


def launches(
    q: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
    queries: mx.array,
    blocks: list[mx.array],
    length: int,
    count: int,
    where: str,
) -> dict[str, float]:
    """Microseconds of each launch; calls of one kind do not wait for each other."""
    if where == "cpu":
        return {}
    start, none = constant_ints(length - 1), constant_ints(0)

    def score(i: int) -> list[mx.array]:
        return qsa_score.launch(queries, blocks[i], start, RATIO).run(where)

    def select(i: int) -> list[mx.array]:
        simdgroups = qsa_select.simdgroups_on(where)
        launch = qsa_select.launch(scores[i], start, CHOSEN, RATIO, none, 1, simdgroups)
        return launch.run(where)

    def attend(i: int) -> list[mx.array]:
        return qsa_attend.launch_partial(
            q, keys[i], values[i], ids[i], start, RATIO, SCALE, SPLITS
        ).run(where)

    def combine(i: int) -> list[mx.array]:
        return qsa_attend.launch_combine(q, *sums[i], SPLITS).run(where)

    scores = [score(i)[0] for i in range(LAYERS)]
    ids = [select(i)[0] for i in range(LAYERS)]
    sums = [attend(i) for i in range(LAYERS)]
    mx.eval(scores, ids, sums)
    return {make.__name__: batched(make, count) for make in (score, select, attend, combine)}


def batched(make: Callable[[int], list[mx.array]], count: int) -> float:
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        mx.eval([make(i % LAYERS) for i in range(count)])
        best = min(best, time.perf_counter() - start)
    return best / count * 1e6


def steps(contexts: tuple[int, ...], count: int, device: str) -> None:
    """Whole steps of a small published-shape model in both arms, after `contexts` tokens."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        made = synth(
            "qwen4_exp_text", Path(folder) / "m", layers=4, settings=SHAPE, bits=4, progress=False
        )
        options = OpenOptions(
            expert_residency="resident", device=device, max_context=contexts[-1] + 2 * count + 8,
            ngram_table="resident",
        )  # fmt: skip
        with Runner.open(made, options) as runner:
            runner.prefill(rng.integers(0, 4096, 64).tolist())
            for context in contexts:
                more = context - runner.position
                runner.prefill(rng.integers(0, 4096, more).tolist())
                compare_arms(runner, context, rng.integers(0, 4096, count).tolist())


def compare_arms(runner: Runner, context: int, tokens: list[int]) -> None:
    """Print time, KL and agreement of both arms over the same tokens, one after the other."""
    engine = runner._engine
    assert engine is not None
    before = engine.states.snapshot()
    rows, times = [], []
    for dense in (False, True):
        engine.states.restore(before)
        runner.toggles.qsa_force_dense = dense
        runner.step(tokens[0])
        start = time.perf_counter()
        logits = [runner.step(token) for token in tokens[1:]]
        times.append((time.perf_counter() - start) / len(logits) * 1e3)
        rows.append(np.stack([np.array(row) for row in logits]).astype(np.float64))
    runner.toggles.qsa_force_dense = False
    logs = [r - np.log(np.exp(r - r.max(-1, keepdims=True)).sum(-1, keepdims=True)) for r in rows]
    logs = [log - r.max(-1, keepdims=True) for log, r in zip(logs, rows, strict=True)]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    same = (rows[0].argmax(-1) == rows[1].argmax(-1)).mean()
    print(
        f"{context:>8}{times[1]:>12.2f}{times[0]:>12.2f}{times[1] / times[0]:>8.2f}x   "
        f"KL mean {kl.mean():.4f} max {kl.max():.4f} nats, same token {same:.0%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, shorter steps")
    quick = parser.parse_args().quick
    where = backend(mx.default_device())
    gpu = where != "cpu"
    print(f"mlx {version('mlx')}, {mx.device_info().get('device_name', 'CPU')}")
    print("attention, microseconds per layer and token; four launches in the sparse arm")
    print(f"{'context':>8}{'dense':>12}{'sparse':>12}{'':>9}   launches by themselves")
    if not gpu:
        print("no GPU: these are MLX's operations on a CPU, and take minutes")
    contexts = CONTEXTS if gpu else CONTEXTS[:2]
    for length in contexts:
        attention(length, (48 if quick else 192) if gpu else 4, where)
    print("whole step of 4 layers (1 sparse), milliseconds: dense, sparse")
    contexts = (4096, 8192) if quick or not gpu else (8192, 32768)
    steps(contexts, 12 if quick else 40, "gpu" if gpu else "cpu")


if __name__ == "__main__":
    main()
