"""Peak memory of prompts: bounded by the chunk, not by the prompt.

    python benchmarks/prefill_memory.py [--lengths 1024 8192 32768] [--write]

Makes small synthetic models, one per kind of memory, feeds prompts of each length in chunks of 512
and reads what MLX held at most above what was there when the prompt began (weights and caches are
allocated at open). A vocabulary of 32,000 makes the logits of a whole prompt visible if anything
computed them: their size is given beside each figure. `--write` records the figures under
benchmarks/results/.

On a CPU, MLX holds the attention scores of a pass (rows x keys x heads), so a chunk deep in a
context is fed in smaller passes; `opening.SCORE_BYTES` is what bounds them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checkout import ROOT, commit

from turbospark import OpenOptions, Runner, synth
from turbospark.opening import SCORE_BYTES

CHUNK, VOCAB = 512, 32_000
SIZES: dict[str, Any] = {"hidden": 128, "heads": 2, "head_dim": 32}
# As few layers as the model type allows: a prompt of 32,768 tokens is long on a CPU.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "every position": ("llama", SIZES | {"layers": 1, "kv_heads": 1}),
    "a ring, every position": ("gemma3_text", SIZES | {"layers": 2, "kv_heads": 1}),
    "latent rows": ("deepseek_v2", {"layers": 2, "hidden": 128, "heads": 2, "kv_heads": 2}),
    "recurrent, every position": ("qwen3_5_text", SIZES | {"layers": 2, "kv_heads": 1}),
    "every position, experts": ("qwen3_moe", SIZES | {"layers": 1, "kv_heads": 1}),
}


def measure(install: Path, length: int) -> dict[str, Any]:
    """Peak bytes above the open model, seconds and passes of one prompt."""
    options = OpenOptions(max_context=length + 1, prefill_chunk=CHUNK, device="cpu")
    with Runner.open(install, options) as runner:
        prompt = np.random.default_rng(0).integers(0, VOCAB, length).tolist()
        runner.prefill(prompt[:64])
        runner.reset()
        before, passes = mx.get_active_memory(), runner.phase_counters.passes
        mx.reset_peak_memory()
        start = time.perf_counter()
        runner.prefill(prompt)
        seconds = time.perf_counter() - start
        return {
            "prompt_tokens": length,
            "peak_mib": round((mx.get_peak_memory() - before) / 2**20, 1),
            "all_logits_mib": round(length * VOCAB * 4 / 2**20, 1),
            "kv_mib": round(runner.memory.kv / 2**20, 1),
            "passes": runner.phase_counters.passes - passes,
            "seconds": round(seconds, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, (model_type, sizes) in CASES.items():
            install = synth(
                model_type,
                Path(temporary) / model_type,
                vocab=VOCAB,
                settings={"max_position_embeddings": 1 << 20},
                progress=False,
                **sizes,
            )
            for length in args.lengths:
                rows.append({"memory": name, "model_type": model_type, **measure(install, length)})
                print(json.dumps(rows[-1]), flush=True)
    lengths = " ".join(map(str, args.lengths))
    report = {
        "what": "most bytes MLX held above the open model while a prompt was fed",
        "command": f"python benchmarks/prefill_memory.py --lengths {lengths} --write",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "turbospark": version("turbospark"),
            "commit": commit(),
            "mlx": version("mlx"),
            "python": platform.python_version(),
        },
        "prefill_chunk": CHUNK,
        "score_bytes": SCORE_BYTES,
        "rows": rows,
    }
    if args.write:
        out = ROOT / "benchmarks" / "results" / "prefill_memory.json"
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
