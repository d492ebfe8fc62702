"""What `kv_quant` costs: divergence from exact caches, against other codecs at like bytes.

    python benchmarks/kv_quality.py MODEL [--texts prose code] [--long] [--sides ...] [--write]

MODEL is a GGUF file or an install. Texts come with Python: prose (pages of the language reference
in pydoc), code (a module's source), docstrings. Balance tables are measured on other pages, so that
those texts are held out; "measured" is the text of the tables itself, for what they gain in-sample,
and other sides use tables of random ids, as `turbospark calibrate` does by default, or of fewer
tokens. Teacher-forced, position by position: KL divergence of the next token's distribution from
that of exact float32 caches, in nats, and how often the likeliest token is the same. "window"
codecs read the same first 4 and newest positions exactly as kv_quant does; the others read
everything packed, as their programs do. All sides pack the same layers. The attention error is that
of one layer on the exact run's inputs, over its output, as lengths, mean over layers. Rows of
results are kept by model, text, length and side; `--write` adds or replaces them. MLX's matrix
products on a CPU are slow, so numpy multiplies here; caches, codes and their order of reading are
the real ones.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import numpy as np
from checkout import ROOT, commit

from turbospark import OpenOptions, Runner, convert
from turbospark.cache.attend import Step
from turbospark.cache.packed import SINKS, Balance, packed_specs
from turbospark.cache.pool import Session
from turbospark.cache.specs import CacheSpec, PackedSpec
from turbospark.cache.state import LayerStates
from turbospark.calibration import TOKENS, measure
from turbospark.kernels import kv_codec
from turbospark.kernels.packed_attention import first_exact
from turbospark.layers.linear import Linear

WIDTHS = {"4": (4, 4), "3.5": (4, 3), "3": (3, 3), "2": (2, 2)}
CHUNK = 256
Tables = dict[int, Balance]
"""Of each packed layer; kept by the end of the name of the side that they are for."""


def texts() -> dict[str, str]:
    """Held-out texts, and the one that tables are measured on."""
    docs = [str(o.__doc__) for _, o in inspect.getmembers(statistics) if inspect.isfunction(o)]
    return {
        "measured": topics["debugger"] + topics["formatstrings"],
        "prose": topics["execmodel"] + topics["import"] + topics["exceptions"],
        "code": inspect.getsource(heapq) + inspect.getsource(argparse),
        "docstrings": "\n\n".join(docs),
    }


# --- other codecs ---------------------------------------------------------------------------------

Codec = Callable[[mx.array], mx.array]


def exact_rows(rows: mx.array) -> mx.array:
    """As they are."""
    return rows


def affine(rows: mx.array) -> mx.array:
    """MLX's 4-bit affine groups of 64: 4.5 bits per element."""
    scale = mx.quantize(rows, group_size=64, bits=4)
    return mx.dequantize(*scale, group_size=64, bits=4)


def plain(seed: int) -> Codec:
    """The published codec at 4 bits: signs, Hadamard, the row's own length as its scale."""

    def run(rows: mx.array) -> mx.array:
        turned = kv_codec.turn(rows, seed)
        norm = mx.linalg.norm(turned, axis=-1, keepdims=True) / rows.shape[-1] ** 0.5
        table = kv_codec.codebook(4)
        middles = (table[1:] + table[:-1]) / 2
        codes = mx.sum(turned[..., None] > middles * norm[..., None], axis=-1)
        return kv_codec.turn_back(mx.take(table, codes) * norm, seed)

    return run


class CodedKV:
    """Every row as it came and as a codec gives it back; which one is read depends on `window`."""

    def __init__(self, key: Codec, value: Codec, window: bool) -> None:
        self.codecs, self.window = (key, value), window
        self.rows: list[np.ndarray] = []

    def arrays(self) -> list[mx.array]:
        return []

    def attend(self, q: mx.array, k: mx.array, v: mx.array, step: Step, scale: float) -> mx.array:
        k, v = (a[0].astype(mx.float32) for a in (k, v))
        new = [np.array(a) for a in (k, v, self.codecs[0](k), self.codecs[1](v))]
        held = self.rows if step.start else [a[:, :0] for a in new]
        self.rows = [np.concatenate(p, axis=1) for p in zip(held, new, strict=True)]
        at, keys = np.arange(step.start, step.end)[:, None], np.arange(step.end)
        exact = keys == at
        if self.window:
            near = np.array([first_exact(int(p)) for p in at[:, 0]])[:, None]
            exact = (keys < SINKS) | (keys >= near)
        heads = np.array(q[0].astype(mx.float32)) * scale
        ke, ve, kc, vc = self.rows
        out, group = np.empty_like(heads), len(heads) // len(ke)
        for h, rows in enumerate(heads):
            kv = h // group
            scores = np.where(exact, rows @ ke[kv].T, rows @ kc[kv].T)
            scores = np.where(keys <= at, scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            out[h] = np.where(exact, p, 0) @ ve[kv] + np.where(exact, 0, p) @ vc[kv]
        return mx.array(out)[None].astype(q.dtype)


OTHERS: dict[str, tuple[Codec, Codec, bool]] = {
    "exact": (exact_rows, exact_rows, False),
    "plain codec, window": (plain(0), plain(1), True),
    "plain codec": (plain(0), plain(1), False),
    "affine 4, window": (affine, affine, True),
    "affine 4": (affine, affine, False),
}


# --- sides ----------------------------------------------------------------------------------------


@dataclass
class Side:
    """One way to keep rows, its conversation and what it lost so far."""

    session: Session
    divergence: float = 0.0
    alike: int = 0
    counted: int = 0


def sides(
    specs: list[CacheSpec], tables: dict[str, Tables], context: int, chosen: list[str]
) -> dict[str, Side]:
    """The chosen sides, their caches empty; "exact" first."""
    packed, reason = packed_specs(specs, 4, 4)
    if reason:
        raise SystemExit(reason)
    made: dict[str, Side] = {}
    for name in ["exact", *chosen]:
        width, _, how = name.removeprefix("kv_quant ").partition(", ")
        bits = WIDTHS.get(width)
        own = specs if bits is None else packed_specs(specs, *bits)[0]
        states = LayerStates(own, context, mx.float32, balance=tables.get(how, {}))
        for i, spec in enumerate(packed):
            if isinstance(spec, PackedSpec) and bits is None:
                states.layers[i] = CodedKV(*OTHERS[name])
        made[name] = Side(Session(states))
    return made


class Beside:
    """A cache of the exact run; other caches attend the same rows, and their errors add up."""

    def __init__(self, cache: CodedKV, others: dict[str, Any]) -> None:
        self.cache, self.others = cache, others
        self.errors = dict.fromkeys(others, 0.0)
        self.size = 0.0

    def arrays(self) -> list[mx.array]:
        return [a for c in self.others.values() for a in c.arrays()]

    def attend(self, q: mx.array, k: mx.array, v: mx.array, step: Step, scale: float) -> mx.array:
        out = self.cache.attend(q, k, v, step, scale)
        late = slice(max(0, 256 - step.start), None)
        self.size += mx.sum(out[:, :, late] ** 2).item()
        for name, other in self.others.items():
            wrong = (other.attend(q, k, v, step, scale) - out)[:, :, late]
            self.errors[name] += mx.sum(wrong**2).item()
        return out


def run(
    runner: Runner,
    ids: list[int],
    specs: list[CacheSpec],
    tables: dict[str, Tables],
    first: int,
    chosen: list[str],
) -> tuple[dict[str, Side], dict[str, float]]:
    """Feed `ids` through every side chunk by chunk; positions from `first` on count."""
    engine = runner._engine
    assert engine is not None
    made = sides(specs, tables, len(ids), chosen)
    beside = sides(specs, tables, len(ids), [c for c in chosen if first < 1024])
    del beside["exact"]
    watched = []
    layers = made["exact"].session.states.layers
    for i, cache in enumerate(layers):
        if isinstance(cache, CodedKV):
            caches = {name: side.session.states.layers[i] for name, side in beside.items()}
            layers[i] = Beside(cache, caches)
            watched.append(layers[i])
    for at in range(0, len(ids), CHUNK):
        part = ids[at : at + CHUNK]
        want = None
        for side in made.values():
            engine.pool.live = side.session
            got = log_softmax(engine.score(part, None)[max(0, first - at) :])
            if want is None:
                want = got
            if len(got):
                side.divergence += float((np.exp(want) * (want - got)).sum(dtype=np.float64))
                side.alike += int((want.argmax(-1) == got.argmax(-1)).sum())
                side.counted += len(got)
        print(f"{at + len(part)} of {len(ids)} tokens", flush=True)
    errors = {
        name: float(np.mean([(b.errors[name] / b.size) ** 0.5 for b in watched])) for name in beside
    }
    return made, errors


def log_softmax(logits: mx.array) -> np.ndarray:
    """float32, as float64 would need gigabytes for large vocabularies."""
    rows = np.array(logits)
    rows -= rows.max(-1, keepdims=True, initial=-np.inf)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


# --- products through numpy's BLAS ----------------------------------------------------------------


def product(a: mx.array, b: mx.array) -> mx.array:
    """`mx.array.__matmul__`."""
    return mx.array(np.matmul(np.array(a, copy=False), np.array(b, copy=False)))


def exp(x: mx.array) -> mx.array:
    """`mx.exp`."""
    return mx.array(np.exp(np.array(x, copy=False)))


def linear(self: Linear, x: mx.array) -> mx.array:
    """`Linear.__call__`."""
    y = product(x, self.matrix)
    return y if self.bias is None else y + self.bias


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: None = None,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention` of one sequence."""
    heads, keys, values = (np.array(a[0]) for a in (q, k, v))
    seen = np.tri(heads.shape[1], keys.shape[1], keys.shape[1] - heads.shape[1], dtype=bool)
    if isinstance(mask, mx.array):
        seen = np.array(mask).reshape(seen.shape)
    out, group = np.empty((*heads.shape[:2], values.shape[-1]), np.float32), len(heads) // len(keys)
    for h, rows in enumerate(heads):
        scores = np.where(seen, rows * scale @ keys[h // group].T, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[h] = p @ values[h // group] / p.sum(-1, keepdims=True)
    return mx.array(out)[None]


def multiply_by_numpy() -> None:
    """MLX's own products and exponentials take ten and six times as long on a CPU."""
    Linear.__call__ = linear  # type: ignore[method-assign]
    mx.array.__matmul__ = product  # type: ignore[method-assign]
    mx.exp = exp
    mx.fast.scaled_dot_product_attention = attention


# --- running --------------------------------------------------------------------------------------

SIDES = [f"kv_quant {name}" for name in WIDTHS]
SHORT, RANDOM, FEW = "tables of 1,024 tokens", "random ids", "1,024 random ids"
SIDES += [f"kv_quant 4, {how}" for how in (SHORT, RANDOM, FEW, "not calibrated")] + [*OTHERS]
SIDES.remove("exact")


def measured(
    runner: Runner, name: str, chosen: list[str], names: list[str], count: int
) -> list[dict[str, Any]]:
    """Rows of every text."""
    engine, text = runner._engine, texts()
    assert engine is not None
    specs = list(engine.model.cache_specs)
    drawn = np.random.default_rng(0).integers(0, runner.vocab_size, TOKENS).tolist()
    asked = runner.encode(text["measured"])[:TOKENS]
    feeds = {"": asked, SHORT: asked[:1024], RANDOM: drawn, FEW: drawn[:1024]}
    tables = {
        name: {i: Balance(*map(mx.array, pair)) for i, pair in measure(runner, ids).items()}
        for name, ids in feeds.items()
        if any(side.partition(", ")[2] == name for side in chosen)
    }
    first = count - 512 if count > 1024 else 256
    rows = []
    for topic in names:
        ids = runner.encode(text[topic])[:count]
        if len(ids) < count:
            raise SystemExit(f"{topic} has {len(ids)} tokens only")
        made, errors = run(runner, ids, specs, tables, first, chosen)
        for side in chosen:
            lost, (kind, _, how) = made[side], side.partition(", ")
            fed = feeds.get(how, []) if kind.startswith("kv_quant") else []
            row = {
                "model": name,
                "text": topic,
                "tokens": count,
                "positions": f"{first}..{count - 1}",
                "side": side,
                "table_tokens": len(fed) or None,
                "kl": round(lost.divergence / lost.counted, 6),
                "top1": round(lost.alike / lost.counted, 4),
                "attention_error": round(errors[side], 5) if side in errors else None,
                "commit": commit(),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", nargs="+", default=["prose", "code", "docstrings"])
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--long", action="store_true", help="4,096 tokens, the last 512 count")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    multiply_by_numpy()
    with tempfile.TemporaryDirectory() as folder:
        install = args.model
        if install.is_file():
            install = convert(install, Path(folder) / "model.gturbo", progress=False)
        count = 4096 if args.long else 1024
        with Runner.open(install, OpenOptions(device="cpu", max_context=TOKENS)) as runner:
            rows = measured(runner, args.model.stem, args.sides, args.texts, count)
    if args.write:
        record(rows)


def record(rows: list[dict[str, Any]]) -> None:
    """Add rows to the results, in place of those of the same model, text, length and side."""
    out = ROOT / "benchmarks" / "results" / "kv_quality.json"
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    kept = {tuple(r[k] for k in ("model", "text", "tokens", "side")): r for r in [*old, *rows]}
    report = {
        "what": "divergence from exact float32 caches; balance tables are of the text 'measured', "
        "so that its rows are in-sample and all others held out",
        "command": "python benchmarks/kv_quality.py MODEL [--long] [--texts ...] --write",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "versions": {
            "turbospark": version("turbospark"),
            "mlx": version("mlx"),
            "python": platform.python_version(),
        },
        "rows": list(kept.values()),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
