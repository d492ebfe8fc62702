"""Experts that do not fit: speed, hit rate and reads of one model in every residency, on the CPU.

    python benchmarks/streaming.py --dir /large/disk [--layers 26] [--slots 8 16 32 64] [--write]

Makes a synthetic install under --dir (kept and used again): layers of the Qwen3-30B-A3B shape, 128
experts of which 8 are used, about 324 MiB of 4-bit experts each, 26 layers = 8.2 GiB. Random
routers choose all experts alike, which no model does; --skew (default 0.75) makes some experts
more likely, with an order of their own in every layer. Tokens are random, so nothing ties one
token's experts to the next one's: in that a real text is kinder to a cache.

Reads are held against a raw loop of `preadv` over the same records, sample by sample in turn, with
the files in the page cache (warm) and pushed out of it before every read (cold).

--write records the figures and a plot under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark import OpenOptions, Runner, synth
from turbospark.experts.reader import RecordReader, Wanted, cores
from turbospark.install.opening import Install
from turbospark.sizing import physical_memory

RESULTS = Path(__file__).parent / "results"
SHAPE: dict[str, Any] = {
    "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "width": 6144, "vocab": 32000,
    "experts": 128, "top_k": 8, "expert_width": 768, "bits": 4, "seed": 0,
}  # fmt: skip
PROMPT, WARM_UP = 8, 24


def make(folder: Path, layers: int, skew: float) -> Path:
    """The install, made once per shape."""
    path = folder / f"qwen3_moe-{layers}x128-skew{skew}.gturbo"
    if not path.exists():
        synth("qwen3_moe", path, layers=layers, router_skew=skew, **SHAPE)
    return path


def layer_files(path: Path) -> list[Path]:
    return sorted((path / "packed_experts").glob("layer_*.bin"))


def push_out(path: Path) -> None:
    """Drop the layer files from the page cache."""
    for file in layer_files(path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_in(path: Path) -> None:
    """Bring the layer files into the page cache, as far as it has room."""
    buffer = bytearray(16 << 20)
    for file in layer_files(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


# --- decoding -------------------------------------------------------------------------------------


def decode(path: Path, tokens: int, cold_start: bool = False, **options: Any) -> dict[str, Any]:
    """First-token time, then warm-up, then `tokens` random tokens: speed and counters."""
    ids = np.random.default_rng(1).integers(0, SHAPE["vocab"], PROMPT + WARM_UP + tokens).tolist()
    (push_out if cold_start else read_in)(path)
    with Runner.open(path, OpenOptions(max_context=len(ids), **options)) as runner:
        start = time.perf_counter()
        runner.prefill(ids[:PROMPT])
        first = time.perf_counter() - start
        if cold_start:
            return {"first_token_s": first}
        for token in ids[PROMPT : PROMPT + WARM_UP]:
            runner.step(token)
        before, start = runner.phase_counters, time.perf_counter()
        for token in ids[PROMPT + WARM_UP :]:
            runner.step(token)
        seconds = time.perf_counter() - start
        spent = runner.phase_counters - before
        return {
            "first_token_s": first,
            "tokens_per_s": tokens / seconds,
            "hit_rate": spent.expert_hit_rate,
            "read_mib_per_token": spent.expert_io_bytes_requested / tokens / 2**20,
            "expert_io_share": spent.expert_io_ns / spent.total_ns,
            "expert_mib": runner.memory.experts / 2**20,
            "mapping": runner.resolved.expert_mapping,
        }


def configurations(path: Path, slots: list[int]) -> dict[str, dict[str, Any]]:
    """Name -> options; resident only where it fits."""
    named: dict[str, dict[str, Any]] = {
        f"streamed {n}": {"expert_residency": "streamed", "expert_cache_slots": n} for n in slots
    }
    named["mapped"] = {"expert_residency": "mapped", "expert_cache_slots": 8}
    with Install.open(path) as install:
        assert install.experts is not None
        # Companions widen to float32, and so do the resident matrices.
        need = 1.15 * install.bytes_per_slot * 128 + 8 * install.resident_bytes
    if need < free_memory():
        named["resident"] = {"expert_residency": "resident"}
    else:
        print(f"resident: skipped, it needs {need / 2**30:.1f} GiB", flush=True)
    return named


def free_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return physical_memory()
    return int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024


def compare(path: Path, slots: list[int], tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Every configuration `rounds` times in turn; medians, and all speeds."""
    named = configurations(path, slots)
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
    for turn in range(rounds):
        for name, options in named.items():
            found = decode(path, tokens, **options)
            seen[name].append(found)
            print(
                f"round {turn}: {name}: {found['tokens_per_s']:.2f} tokens/s, {found}", flush=True
            )
    report = {}
    for name, runs in seen.items():
        report[name] = dict(runs[0])
        for key in ("tokens_per_s", "first_token_s", "expert_io_share"):
            report[name][key] = statistics.median(run[key] for run in runs)
        report[name]["all_tokens_per_s"] = [run["tokens_per_s"] for run in runs]
        if name != "resident":
            cold = decode(path, tokens, cold_start=True, **named[name])
            report[name]["first_token_cold_s"] = cold["first_token_s"]
    return report


# --- reading --------------------------------------------------------------------------------------


class ReadRace:
    """Every read of misses, and a raw loop over the same records, one after the other in turn."""

    def __init__(self, cold: bool) -> None:
        self.cold = cold
        self.bytes = 0
        self.seconds = {"turbospark": 0.0, "raw": 0.0}
        self.ratios: dict[int, list[float]] = {}
        self.turn = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of `RecordReader.read`."""
        real = RecordReader.read
        race = self

        def read(self: RecordReader, wanted: Wanted) -> None:
            race.run(self, wanted, lambda: real(self, wanted))

        RecordReader.read = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            RecordReader.read = real  # type: ignore[method-assign]

    def run(self, reader: RecordReader, wanted: Wanted, ours: Any) -> None:
        layer = reader.file.layer
        offsets = [layer.offset(expert) for expert, _ in wanted]
        fd = reader.file.fd(wanted[0][0])

        def raw() -> None:  # into the same memory: a small buffer of its own would stay in caches
            for (_, room), offset in zip(wanted, offsets, strict=True):
                for start, buffer in room.segments:
                    done = 0
                    while done < buffer.nbytes:
                        done += os.preadv(fd, [buffer[done:]], offset + start + done)

        ways = {"turbospark": ours, "raw": raw}
        order = list(ways)[:: 1 if self.turn % 2 else -1]
        self.turn += 1
        took = {}
        for name in order:
            if self.cold:
                for offset in offsets:
                    os.posix_fadvise(fd, offset, layer.stride, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            ways[name]()
            took[name] = time.perf_counter() - start
            self.seconds[name] += took[name]
        self.bytes += len(wanted) * layer.stride
        self.ratios.setdefault(len(wanted), []).append(took["raw"] / took["turbospark"])

    def report(self) -> dict[str, Any]:
        """GB/s of both, and the ratio: of all bytes, and the median by misses per read."""
        speeds = {name: self.bytes / seconds / 1e9 for name, seconds in self.seconds.items()}
        return {
            "gb": self.bytes / 1e9,
            "turbospark_gb_per_s": speeds["turbospark"],
            "raw_gb_per_s": speeds["raw"],
            "ratio": speeds["turbospark"] / speeds["raw"],
            "median_ratio_by_misses": {
                str(n): round(statistics.median(r), 3) for n, r in sorted(self.ratios.items())
            },
        }


def race_reads(path: Path, slots: int, tokens: int, cold: bool) -> dict[str, Any]:
    """Decode with every miss raced against the raw loop."""
    ids = np.random.default_rng(2).integers(0, SHAPE["vocab"], 8 + tokens).tolist()
    race = ReadRace(cold)
    read_in(path)
    options = OpenOptions(expert_cache_slots=slots, max_context=len(ids))
    with Runner.open(path, options) as runner:
        for token in ids[:8]:
            runner.step(token)
        with race.installed():
            for token in ids[8:]:
                runner.step(token)
    return race.report()


# --- results --------------------------------------------------------------------------------------


def plot(report: dict[str, Any], path: Path) -> None:
    """Hit rate and tokens/s over slots, as an SVG."""
    points = {
        int(name.split()[1]): row
        for name, row in report["decode"].items()
        if name.startswith("streamed")
    }
    slots = sorted(points)
    width, height, left, top = 560, 320, 60, 40
    inner_w, inner_h = width - 2 * left, height - 2 * top - 20
    fastest = max(row["tokens_per_s"] for row in report["decode"].values()) * 1.1

    def x(n: int) -> float:
        return left + inner_w * slots.index(n) / max(1, len(slots) - 1)

    def y(share: float) -> float:
        return top + inner_h * (1 - share)

    def line(values: dict[int, float], colour: str) -> str:
        way = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in values.items())
        dots = "".join(
            f'<circle cx="{x(n):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>'
            for n, v in values.items()
        )
        return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'

    def text(at_x: float, at_y: float, words: str, colour: str = "#333", anchor: str = "middle"):
        place = f'x="{at_x:.1f}" y="{at_y:.1f}"'
        return f'<text {place} fill="{colour}" text-anchor="{anchor}">{words}</text>'

    hits, speed = "#1f6fb2", "#c2571a"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left},{top} V{top + inner_h} H{left + inner_w} V{top}" '
        'fill="none" stroke="#999"/>',
        line({n: points[n]["hit_rate"] for n in slots}, hits),
        line({n: points[n]["tokens_per_s"] / fastest for n in slots}, speed),
        *(text(x(n), top + inner_h + 16, str(n)) for n in slots),
        *(text(left - 6, y(s) + 4, f"{s:.0%}", hits, "end") for s in (0, 0.5, 1)),
        *(
            text(left + inner_w + 6, y(s) + 4, f"{s * fastest:.2f}", speed, "start")
            for s in (0, 0.5, 1)
        ),
        text(left, top - 14, "hit rate", hits, "start"),
        text(left + inner_w, top - 14, "tokens/s", speed, "end"),
        text(width / 2, height - 14, "expert slots per layer (of 128)"),
    ]
    for name, dash in (("resident", "2 4"), ("mapped", "6 3")):
        if name in report["decode"]:
            at = y(report["decode"][name]["tokens_per_s"] / fastest)
            parts.append(
                f'<path d="M{left},{at:.1f} H{left + inner_w}" stroke="{speed}" '
                f'stroke-dasharray="{dash}"/>'
            )
            parts.append(text(left + 6, at - 4, name, speed, "start"))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def environment(command: str) -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "command": command,
        "cpu": model,
        "cores": cores(),
        "memory_gib": round(physical_memory() / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("turbospark", "mlx", "numpy")},
        "load_before": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="where the install goes (9 GiB)")
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skew", type=float, default=0.75)
    parser.add_argument("--write", action="store_true", help="record under benchmarks/results/")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    words = [f"--layers {args.layers}", "--slots", *map(str, args.slots), f"--tokens {args.tokens}"]
    words += [f"--rounds {args.rounds}", f"--skew {args.skew}"]
    command = " ".join(["python benchmarks/streaming.py --dir DIR", *words])
    report: dict[str, Any] = {"environment": environment(command)}
    path = make(args.dir, args.layers, args.skew)
    with Install.open(path) as install:
        report["model"] = {
            **SHAPE,
            "layers": args.layers,
            "router_skew": args.skew,
            "expert_gib": install.bytes_per_slot * 128 / 2**30,
        }
    report["reads"] = {}
    for slots in args.slots:
        for regime in ("warm", "cold"):
            found = race_reads(path, slots, args.tokens // 2, regime == "cold")
            report["reads"][f"{regime}, {slots} slots"] = found
            print(f"reads, {regime}, {slots} slots: {found}", flush=True)
    report["decode"] = compare(path, args.slots, args.tokens, args.rounds)
    print(json.dumps(report, indent=1))
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "streaming.json").write_text(json.dumps(report, indent=1) + "\n")
        plot(report, RESULTS / "streaming.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
