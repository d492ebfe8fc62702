"""`turbospark bench`: prompt and decode speed, with everything that makes the figures repeatable.

Knows how to measure an open model from outside. Options are pinned: the environment is not read.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from turbospark import GenerationOptions, GenerationResult, OpenOptions, PhaseCounters, Runner
from turbospark.cli.console import show, size, table
from turbospark.cli.machine import machine, peak_resident_bytes, versions
from turbospark.cli.parser import opening
from turbospark.cli.peer import Peer, PeerRound, agreeing
from turbospark.errors import OptionError
from turbospark.options import LiveToggles, RuntimeToggles
from turbospark.resolve import Resolved

TEXT = (
    "The harbour wakes before the town does. Boats that left in the dark come back with the "
    "tide, and the first thing one hears is not the gulls but the winch of the ice house. By "
    "six the crates stand in rows: mackerel, two sorts of flatfish, a box of crabs that nobody "
    "has counted. A woman with a ledger walks along them and writes down weights, prices and "
    "the names of ships. What she writes in the morning decides what the kitchens cook at noon. "
    "When a storm keeps the fleet inside, the ledger stays closed, the ice melts into the "
    "drains, and people who never look at the sea ask each other what the wind is doing. "
)
MEASURE = GenerationOptions(temperature=0, ignore_eos=True)


def bench(args: Namespace) -> int:
    """turbospark bench MODEL"""
    for name in ("prompt_tokens", "max_new", "rounds"):
        least = 2 if name == "max_new" else 1
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} {getattr(args, name)} is too few; at least {least}")
    toggles = RuntimeToggles(**dict(map(_toggle, args.toggle)))
    chosen = {"max_context": args.prompt_tokens + args.max_new, **opening(args)}
    with Runner.open(args.model, OpenOptions(toggles=toggles, **chosen)) as runner:
        _check_effects(runner.toggles, args.toggle)
        ids, origin = _prompt(runner, args.prompt, args.prompt_tokens)
        options = MEASURE.replace(max_new_tokens=args.max_new)
        peer = Peer(args.mlx_lm, runner.resolved.device) if args.mlx_lm else None
        runner.generate(ids, options)  # warm-up: first use of kernels, files and buffers
        if peer is not None:
            peer.generate(ids, args.max_new)
        before = runner.phase_counters
        results, others = [], []
        for _ in range(args.rounds):  # in turn, so that a busy minute hits both
            results.append(runner.generate(ids, options))
            others += [] if peer is None else [peer.generate(ids, args.max_new)]
        counters = runner.phase_counters - before
        for result in results:
            if result.speculation is not None:
                result.speculation.check()  # figures of a broken drafter would look tidy
        data = _report(args, runner, results, counters, origin)
        if peer is not None:
            data["mlx_lm"] = _beside(peer, others, results)
            data["versions"]["mlx-lm"] = peer.version
    show(args, data, _text(data, runner.resolved, counters))
    return 0


def _toggle(text: str) -> tuple[str, bool]:
    name, _, value = text.partition("=")
    if value not in ("0", "1"):
        raise OptionError(f"--toggle {text} is not NAME=0 or NAME=1")
    return name, value == "1"


def _check_effects(toggles: LiveToggles, asked: Sequence[str]) -> None:
    """A switch that this model never reads would make a comparison of two equal things."""
    for text in asked:
        name = text.partition("=")[0]
        if not toggles.has_effect(name):
            raise OptionError(f"--toggle {text}: this model with these options never reads {name}")


def _prompt(runner: Runner, text: str | None, count: int) -> tuple[list[int], str]:
    """`count` token ids and where they come from. Texts repeat until they are long enough."""
    if text is None and runner.tokenizer is None:
        drawn = np.random.default_rng(0).integers(0, runner.vocab_size, count)
        return drawn.tolist(), "random token ids (no tokenizer)"
    ids = runner.encode(text or TEXT)
    repeated = (ids * (count // len(ids) + 1))[:count]
    return repeated, "the prompt given" if text else "a built-in text"


def _report(
    args: Namespace,
    runner: Runner,
    results: list[GenerationResult],
    counters: PhaseCounters,
    origin: str,
) -> dict[str, Any]:
    prefill = [r.prompt_tokens / r.prefill_seconds for r in results]
    # The first token comes from the prompt's own logits: one step fewer than tokens.
    decode = [(r.new_tokens - 1) / r.decode_seconds for r in results]
    hits = counters.expert_hit_rate
    return {
        "prefill_tokens_per_second": _spread(prefill),
        "decode_tokens_per_second": _spread(decode),
        "expert_hit_rate": hits,
        "peak_resident_bytes": peak_resident_bytes(),
        "prompt": {"tokens": results[0].prompt_tokens, "from": origin},
        "new_tokens": results[0].new_tokens,
        "rounds": args.rounds,
        "model": {"path": runner.path, "family": runner.resolved.family},
        "machine": machine(runner.resolved.device),
        "versions": versions(),
        "resolved": runner.resolved.as_dict(),
        "toggles": runner.toggles.snapshot().model_dump(),
        "memory": asdict(runner.memory),
        "drafting": results[-1].speculation and str(results[-1].speculation),
        "speculation": results[-1].speculation and results[-1].speculation.as_dict(),
        "counters": counters.as_dict(),
    }


def _beside(
    peer: Peer, rounds: Sequence[PeerRound], ours: Sequence[GenerationResult]
) -> dict[str, Any]:
    """mlx-lm on the same ids: its speeds, and how long its greedy tokens are ours."""
    return {
        "path": peer.path,
        "dtypes": peer.dtypes,
        "prefill_tokens_per_second": _spread([r.prefill for r in rounds]),
        "decode_tokens_per_second": _spread([r.decode for r in rounds]),
        "agreeing_tokens": agreeing(ours[0].token_ids, rounds[0].token_ids),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _text(data: dict[str, Any], resolved: Resolved, counters: PhaseCounters) -> str:
    def speed(name: str, of: dict[str, Any] = data) -> str:
        found = of[f"{name}_tokens_per_second"]
        spread = f"{found['min']:.1f} .. {found['max']:.1f}"
        return f"{found['median']:.1f} tokens/s ({spread} over {data['rounds']} rounds)"

    def beside(name: str) -> str | None:
        if not peer:
            return None
        ours, theirs = (d[f"{name}_tokens_per_second"]["median"] for d in (data, peer))
        return f"{speed(name, peer)}; turbospark does {ours / theirs:.2f} times that"

    peer = data.get("mlx_lm", {})
    where, memory = data["machine"], data["memory"]
    both = " (mlx-lm's included)" if peer else ""
    planned = ", ".join(f"{k} {size(memory[k])}" for k in ("weights", "experts", "kv"))
    hits = data["expert_hit_rate"]
    summary = {
        "prefill": speed("prefill"),
        "decode": speed("decode"),
        "mlx-lm prefill": beside("prefill"),
        "mlx-lm decode": beside("decode"),
        "mlx-lm answer": peer
        and f"the first {peer['agreeing_tokens']} of {data['new_tokens']} "
        f"tokens are the same; its weights are {', '.join(peer['dtypes'])}",
        "drafting": data["drafting"],
        "expert hits": None if hits is None else f"{hits:.1%}",
        "memory": f"{planned}; peak of the process {size(data['peak_resident_bytes'])}{both}",
        "prompt": f"{data['prompt']['tokens']} tokens, {data['prompt']['from']}",
        "answer": f"{data['new_tokens']} tokens, greedy, past end tokens; one warm-up round",
        "machine": f"{where['system']}, {where['processor']}, {where['cores']} cores, "
        f"{size(where['memory_bytes'])}",
        "backend": where["backend"] + (f" on {where['gpu']}" if where["gpu"] else ""),
        "versions": ", ".join(f"{name} {number}" for name, number in data["versions"].items()),
        "model": data["model"]["path"],
        "toggles": ", ".join(f"{k}={v}" for k, v in data["toggles"].items()),
    }
    return f"{table(summary)}\n\n{resolved}\n\n{counters}"
