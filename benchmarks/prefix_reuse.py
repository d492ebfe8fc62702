"""Time to the first token of a chat's second turn: cold against a reused prefix.

    python benchmarks/prefix_reuse.py INSTALL [--rounds 3] [--write]

INSTALL is an install with a chat template (`make demo` makes one). The first turn is a question
about a text of each size; the second adds the answer and a short question, the way a chat program
sends it, rendered by the model's own template. Each round runs both sides in turn; figures are
medians over the rounds, the ratio is cold / reused. A third row comes back to a conversation after
another one (two session slots), a fourth loads it from a file saved before. `--write` records the
figures under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkout import ROOT, commit

from turbospark import OpenOptions, Runner
from turbospark.generation import Token

TEXT = (
    "The keeper of the lighthouse wrote down every ship that passed, its flag and its hour. "
    "In the winter of that year no ship passed for forty days. "
)
GREEDY = {"temperature": 0, "ignore_eos": True}


def conversation(runner: Runner, words: int) -> list[int]:
    """Answers a first turn and returns the prompt of the second."""
    text = " ".join((TEXT * (words // len(TEXT.split()) + 1)).split()[:words])
    messages = [{"role": "user", "content": f"{text}\n\nWhat did the keeper write down?"}]
    answer = runner.generate(messages, max_new_tokens=24, **GREEDY)
    messages += [
        {"role": "assistant", "content": answer.text or ""},
        {"role": "user", "content": "And in the winter?"},
    ]
    return runner.encode(messages)


def first_token(runner: Runner, prompt: list[int]) -> tuple[float, int]:
    """(seconds from the call to the first token, tokens reused)."""
    start = time.perf_counter()
    stream = runner.stream(prompt, max_new_tokens=2, **GREEDY)
    seconds, result = 0.0, None
    for event in stream:
        if isinstance(event, Token) and event.index == 0:
            seconds = time.perf_counter() - start
        result = event
    return seconds, result.result.reused_prefix_tokens


def sides(runner: Runner, second: list[int], file: Path) -> dict[str, Callable]:
    """What is timed: a function per way to the second turn. `file` holds the first turn."""
    other = runner.encode([{"role": "user", "content": "Name a river."}])

    def cold() -> tuple[float, int]:
        runner.reset()
        return first_token(runner, second)

    def reused() -> tuple[float, int]:
        runner.reset()
        runner.load_session(file)
        return first_token(runner, second)

    def returned() -> tuple[float, int]:
        runner.reset()
        runner.load_session(file)
        runner.generate(other, max_new_tokens=1, **GREEDY)
        return first_token(runner, second)

    def loaded() -> tuple[float, int]:
        runner.reset()
        start = time.perf_counter()
        runner.load_session(file)
        reading = time.perf_counter() - start
        seconds, kept = first_token(runner, second)
        return reading + seconds, kept

    return {"cold": cold, "reused": reused, "after another chat": returned, "from a file": loaded}


def measure(runner: Runner, words: int, rounds: int, file: Path) -> dict[str, Any]:
    """Medians of every side for one size of conversation."""
    runner.reset()
    second = conversation(runner, words)
    runner.save_session(file)
    runs = sides(runner, second, file)
    times: dict[str, list[float]] = {name: [] for name in runs}
    kept: dict[str, int] = {}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            seconds, kept[name] = run()
            if round_:  # the first round warms up
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "second_turn_tokens": len(second),
        "reused_tokens": kept,
        "seconds_to_first_token": {name: round(s, 4) for name, s in medians.items()},
        "cold_over": {n: round(medians["cold"] / s, 2) for n, s in medians.items() if n != "cold"},
        "file_mib": round(file.stat().st_size / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("install", type=Path)
    parser.add_argument("--words", type=int, nargs="+", default=[50, 200, 600])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    options = OpenOptions(max_context=4096, prefix_reuse=True, session_slots=2)
    rows = []
    with Runner.open(args.install, options) as runner, tempfile.TemporaryDirectory() as folder:
        for words in args.words:
            row = measure(runner, words, args.rounds, Path(folder) / "talk.safetensors")
            rows.append(row)
            print(json.dumps(row), flush=True)
        report = {
            "what": "seconds from the call to the first token of a chat's second turn, median",
            "command": f"python benchmarks/prefix_reuse.py {args.install.name} --write",
            "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            "versions": {
                "turbospark": version("turbospark"),
                "commit": commit(),
                "mlx": version("mlx"),
                "python": platform.python_version(),
            },
            "model": f"{args.install.name} ({runner.resolved.model_type})",
            "device": runner.resolved.device,
            "dtype": runner.resolved.dtype,
            "rounds": args.rounds,
            "rows": rows,
        }
    if args.write:
        out = ROOT / "benchmarks" / "results" / "prefix_reuse.json"
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
