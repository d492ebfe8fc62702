"""Decode speed on the CPU, side by side with mlx-lm on the same weights.

    python benchmarks/cpu_decode.py INSTALL [--tokens 64] [--rounds 3] [--out results.json]

INSTALL is a dense .gturbo install of a llama-shaped model (`make demo` makes one). mlx-lm gets the
same values twice, as it would be used at best: the packed matrices with float32 companions, and
dense float32. Each round runs every engine once, in turn; the ratio is taken between medians of
the rounds, turbospark against mlx-lm's better setting. Needs mlx-lm: pip install mlx-lm==0.32.2
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from turbospark import OpenOptions, Runner
from turbospark.dtypes import Quant
from turbospark.install.opening import Install

PROMPT = "Write a long story about a lighthouse keeper and the sea."


def write_checkpoint(install: Install, folder: Path, packed: bool) -> None:
    """The install's values as an MLX checkpoint folder, packed or dense float32."""
    tensors: dict[str, mx.array] = {}
    quantization: dict = {"group_size": 32, "bits": 4}
    for name in install.resident.names:
        planes = install.resident.read(name)
        module = name.removesuffix(".weight")
        if packed and isinstance(planes.fmt, Quant):
            quantization[module] = {"group_size": planes.fmt.group_size, "bits": planes.fmt.bits}
            tensors[name] = planes.weight
            tensors[f"{module}.scales"] = planes.scales.astype(mx.float32)
            tensors[f"{module}.biases"] = planes.biases.astype(mx.float32)
        else:
            tensors[name] = planes.dense(mx.float32)
    config = dict(install.config)
    config.pop("torch_dtype", None)
    if packed:
        config["quantization"] = quantization
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(config))


def mlx_lm_run(folder: Path):
    """A function (prompt ids, tokens) -> (prefill seconds, decode tokens/s, ids) on mlx-lm."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    mx.eval(model.parameters())

    def run(ids: list[int], tokens: int) -> tuple[float, float, list[int]]:
        start = time.perf_counter()
        steps = generate_step(mx.array(ids), model, max_tokens=tokens)
        out = [int(next(steps)[0])]
        first = time.perf_counter()
        out += [int(token) for token, _ in steps]
        return first - start, (len(out) - 1) / (time.perf_counter() - first), out

    return run


def turbospark_run(path: Path):
    """The same function on turbospark."""
    runner = Runner.open(path, OpenOptions(max_context=1024))

    def run(ids: list[int], tokens: int) -> tuple[float, float, list[int]]:
        result = runner.generate(ids, temperature=0, max_new_tokens=tokens, ignore_eos=True)
        speed = (result.new_tokens - 1) / result.decode_seconds
        return result.prefill_seconds, speed, list(result.token_ids)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("install", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)

    with tempfile.TemporaryDirectory() as temporary:
        with Install.open(args.install) as install:
            engines = {"turbospark": turbospark_run(args.install)}
            for name, packed in (("mlx-lm packed", True), ("mlx-lm dense", False)):
                folder = Path(temporary) / name.replace(" ", "-")
                folder.mkdir()
                write_checkpoint(install, folder, packed)
                engines[name] = mlx_lm_run(folder)
        with Runner.open(args.install, OpenOptions(max_context=1024)) as runner:
            ids = runner.encode([{"role": "user", "content": PROMPT}])
        rows: dict[str, list[tuple[float, float, list[int]]]] = {name: [] for name in engines}
        for run in engines.values():
            run(ids, 4)
        for _ in range(args.rounds):
            for name, run in engines.items():
                rows[name].append(run(ids, args.tokens))

    decode = {n: statistics.median(speed for _, speed, _ in r) for n, r in rows.items()}
    prefill = {n: len(ids) / statistics.median(s for s, _, _ in r) for n, r in rows.items()}
    peers = [n for n in engines if n.startswith("mlx-lm")]
    best_decode = max(decode[n] for n in peers)
    best_prefill = max(prefill[n] for n in peers)
    flags = [args.install.name, f"--tokens {args.tokens}", f"--rounds {args.rounds}"]
    flags += [f"--out {args.out.name}"] if args.out else []
    report = {
        "command": f"python benchmarks/cpu_decode.py {' '.join(flags)}",
        "machine": f"{platform.system()} {platform.machine()}, {processor()}, {cores()} cores",
        "versions": {n: version(n) for n in ("mlx", "mlx-lm", "numpy")},
        "model": args.install.name,
        "prompt_tokens": len(ids),
        "new_tokens": args.tokens,
        "decode_tokens_per_second": decode,
        "prefill_tokens_per_second": prefill,
        "decode_ratio": decode["turbospark"] / best_decode,
        "prefill_ratio": prefill["turbospark"] / best_prefill,
        "same_tokens": {n: rows[n][0][2] == rows["turbospark"][0][2] for n in peers},
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def cores() -> int:
    import os

    return os.cpu_count() or 1


if __name__ == "__main__":
    main()
