"""What drafting saves where an answer repeats its prompt, and what verifying n rows costs.

    python benchmarks/speculation.py --model INSTALL [--rounds 3] [--write]
    python benchmarks/speculation.py --cost [--quick] [--device gpu] [--write]

The first decodes the same greedy answers with prompt lookup and without, in turn on one runner, for
a list to be continued and a record to be repeated; the ratio is of decode times, medians over the
rounds, and the tokens must be the same. The second times one pass of n = 1..16 rows over a cache of
`--context` tokens against one row, in turn, on a random llama of an 8B model's layers (4 bits),
after a warm-up of each: acceptance pays when it gives more tokens than that. `--quick` takes two
layers and fewer repeats. `--write` records the figures under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from checkout import ROOT, commit

from turbospark import DraftPolicies, OpenOptions, Runner, synth
from turbospark.cli.machine import machine, versions

RESULTS = ROOT / "benchmarks" / "results"
THINGS = ("green door", "red roof", "white gate", "blue fence", "grey wall", "brown floor")
LIST = "".join(f"{n}. House {n} has a {thing}.\n" for n, thing in enumerate(THINGS, 1))
RECORD = (
    '{"name": "Anna Smith", "city": "London", "street": "Baker Street", "number": 221, '
    '"phone": "555-0134"}'
)
REPEAT = f"Repeat this JSON exactly, but with the city Paris:\n\n{RECORD}"
LAYER = {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "width": 14336}
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)


def lookup(path: Path, rounds: int, width: int, new: int) -> dict[str, Any]:
    """What prompt lookup saves on each of two texts."""
    drafter = DraftPolicies(prompt_lookup=width)
    # With prefix reuse the prompt is fed once; only decoding is timed.
    options = OpenOptions(max_context=1024, speculation=drafter, prefix_reuse=True)
    with Runner.open(path, options) as runner:
        # The list three times and its beginning: a small model goes on with something like it.
        prompts: dict[str, Any] = {
            "list": runner.encode(LIST * 3 + LIST[:12]),
            "json": [{"role": "user", "content": REPEAT}],
        }
        texts = {name: compare(runner, p, rounds, width, new) for name, p in prompts.items()}
        return {"device": runner.resolved.device, "width": width, **texts}


def compare(runner: Runner, prompt: Any, rounds: int, width: int, new: int) -> dict[str, Any]:
    """An answer with proposals and without, in turn: the same tokens."""
    asked = {"temperature": 0, "max_new_tokens": new}
    runner.generate(prompt, **asked)
    times: dict[int, list[float]] = {0: [], width: []}
    answers = {}
    for _ in range(rounds):
        for n in times:
            answers[n] = runner.generate(prompt, **asked, draft_tokens=n)
            times[n].append(answers[n].decode_seconds)
    if answers[0].token_ids != answers[width].token_ids:
        raise SystemExit("the drafted answer differs from the sequential one")
    stats = answers[width].speculation
    assert stats is not None
    plain, drafted = (statistics.median(times[n]) for n in (0, width))
    count = answers[0].new_tokens
    return {
        "prompt_tokens": answers[0].prompt_tokens,
        "new_tokens": count,
        "sequential_tokens_per_second": round((count - 1) / plain, 2),
        "drafted_tokens_per_second": round((count - 1) / drafted, 2),
        "speed_up": round(plain / drafted, 2),
        "rounds": stats.rounds,
        "tokens_per_round": round(stats.committed / stats.rounds, 2),
        "acceptance": [a and round(a, 3) for a in stats.per_position_acceptance],
    }


def cost(device: str, layers: int, context: int, repeats: int) -> dict[str, Any]:
    """Seconds of a pass of n rows that could be taken back, against a pass of one row."""
    with tempfile.TemporaryDirectory() as folder:
        model = synth(
            "llama", Path(folder) / "model.gturbo", layers=layers, vocab=32000, bits=4,
            progress=False, **LAYER,
        )  # fmt: skip
        room = context + max(ROWS) + 1
        with Runner.open(model, OpenOptions(max_context=room, device=device)) as runner:  # type: ignore[arg-type]
            runner.prefill([i % 1000 for i in range(context)])
            engine = runner._engine
            assert engine is not None
            taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
            # In turn, so that what else the machine does meets all numbers of rows alike.
            for _ in range(repeats + 2):
                for rows in ROWS:
                    start = time.perf_counter()
                    if rows == 1:
                        engine.step(5)
                    else:
                        engine.verify([5] * rows)
                    taken[rows].append(time.perf_counter() - start)
                    with engine.working():
                        engine.pool.live.rewind(context)
            seconds = {rows: statistics.median(times[2:]) for rows, times in taken.items()}
            return {
                "layers": layers,
                "context": context,
                "device": runner.resolved.device,
                "dtype": runner.resolved.dtype,
                "milliseconds": {n: round(1e3 * s, 3) for n, s in seconds.items()},
                "over_one_row": {n: round(s / seconds[1], 2) for n, s in seconds.items()},
            }


def main() -> None:
    """Run what the flags ask for and print or record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="an install with a tokenizer: prompt lookup")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=15)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--cost", action="store_true", help="the cost of a pass of n rows")
    parser.add_argument("--quick", action="store_true", help="two layers, fewer repeats")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    if args.model is not None:
        figures["prompt_lookup"] = lookup(args.model, args.rounds, args.width, args.new)
    if args.cost:
        layers, repeats = (2, 10) if args.quick else (8, 30)
        figures["verify_cost"] = cost(args.device, layers, args.context, repeats)
    if not figures:
        parser.error("give --model INSTALL, --cost or both")
    device = next(iter(figures.values()))["device"]
    flags = [f"--model {args.model.name}"] if args.model else []
    flags += [f"--{name}" for name in ("cost", "quick", "write") if getattr(args, name)]
    report = {
        "what": "decode speed with prompt lookup; cost of verifying n rows against one",
        "command": f"python benchmarks/speculation.py {' '.join(flags)}",
        "machine": machine(device),
        "versions": {**versions(), "commit": commit()},
        **figures,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.write:
        name = "speculation.json" if device == "cpu" else "speculation_gpu.json"
        (RESULTS / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
