"""Measuring how a model's keys and queries are spread, for `kv_quant`: `turbospark calibrate`.

Every channel of a key head gets its mean, and the scale at which keys and queries share the error
of packing alike. Knows runners, statistics and the file they become. Does not know the codec.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.cache.attend import Step
from turbospark.cache.kv import LinearKV
from turbospark.cache.sparse import Index, SparseKV
from turbospark.errors import NonFiniteLogitsError, OptionError, UnsupportedError
from turbospark.families import family_for_wire
from turbospark.install import balance
from turbospark.install.models import resolve
from turbospark.install.opening import Install
from turbospark.options import MAX_CONTEXT, OpenOptions
from turbospark.policies import short
from turbospark.resolve import configured
from turbospark.runner import Runner
from turbospark.version import __version__

TOKENS = 4096
"""As many as contexts are long, at best: at positions past those measured, keys that turn slowly
with position lie where no table expects them.
"""
LEAST = 64
SKIPPED = 4
"""First positions, whose keys are unlike all others and are never read packed."""
FLOOR = 1e-4
CHUNK = 256


def calibrate(
    model: str | Path,
    *,
    text: str | None = None,
    tokens: int | None = None,
    seed: int = 0,
    options: OpenOptions | None = None,
) -> Path:
    """Measure an install's keys and store balance tables in it -> the file.

    The first `tokens` tokens of `text`, or as many random ids drawn from `seed`, run through the
    model once; None means 4096, or the context that the model was trained to if that is less.
    `options` say where; `kv_quant` is off meanwhile. Raises OptionError, UnsupportedError when no
    layer keeps keys of every position.
    """
    if text is not None and not isinstance(text, str):
        raise OptionError(f"text={short(text)} is not valid; works: a string, or None")
    if type(seed) is not int or seed < 0:
        raise OptionError(f"seed={short(seed)} is not valid; works: an integer >= 0")
    path = resolve(model)
    if tokens is None:
        tokens = max(LEAST, min(TOKENS, _trained(path) or TOKENS))
    if type(tokens) is not int or not LEAST <= tokens <= MAX_CONTEXT:
        works = f"an integer {LEAST}..{MAX_CONTEXT}"
        raise OptionError(f"tokens={short(tokens)} is not valid; works: {works}")
    opened = OpenOptions.of(options).replace(
        kv_quant="off", max_context=tokens, prefix_reuse=False, session_slots=1
    )
    with Runner.open(path, opened) as runner:
        ids, source = _ids(runner, text, tokens, seed)
        tables = measure(runner, ids)
    source |= {"tokens": str(len(ids)), "turbospark": __version__}
    with Install.open(path) as install:
        return balance.write(install, tables, source)


def measure(runner: Runner, ids: list[int]) -> balance.Tables:
    """Balance tables of every layer of `runner` that keeps keys of all positions."""
    with runner._exclusive() as engine:
        engine.reset()
        layers = engine.states.layers
        watched: dict[int, _Watched] = {}
        for layer, cache in enumerate(layers):
            if isinstance(cache, SparseKV):
                shape = (cache.spec.kv_heads, cache.spec.head_dim)
                watched[layer] = layers[layer] = _WatchedSparse(cache, shape)
            elif isinstance(cache, LinearKV):  # not one that shares a cache watched already
                _, heads, _, dim = cache.keys.shape
                watched[layer] = _Watched(cache, (heads, dim))
                for other in range(layer, len(layers)):
                    if layers[other] is cache:
                        layers[other] = watched[layer]
        if not watched:
            raise UnsupportedError(
                f"{runner.path.name} has no layer with keys and values of every position; there is "
                "nothing to calibrate for kv_quant"
            )
        try:
            for _ in engine.feed(ids, 0, CHUNK):
                pass
        finally:
            layers[:] = [c.cache if isinstance(c, _Watched) else c for c in layers]
            engine.reset()
        tables = {layer: watch.tables() for layer, watch in watched.items()}
    for layer, pair in tables.items():
        if not all(np.isfinite(table).all() for table in pair):
            raise NonFiniteLogitsError(
                f"{runner.path.name}: keys or queries of layer {layer} are not numbers on these "
                f"{len(ids)} tokens; measure on another text, or open with a wider dtype"
            )
    return tables


def _trained(path: Path) -> int | None:
    """The context that the model was trained to; None where nothing says."""
    with Install.open(path) as install:
        values, _ = configured(install, family_for_wire(install.arch.family))
    return values.get("max_position_embeddings")


def _ids(
    runner: Runner, text: str | None, tokens: int, seed: int
) -> tuple[list[int], dict[str, str]]:
    if text is None:
        random = np.random.default_rng(seed)
        ids = random.integers(0, runner.vocab_size, tokens).tolist()
        return ids, {"source": f"random ids, seed {seed}"}
    ids = runner.encode(text)[:tokens]
    if len(ids) < LEAST:
        raise OptionError(f"the text has {len(ids)} tokens; give one of {LEAST} or more")
    sha = hashlib.sha256(text.encode()).hexdigest()
    return ids, {"source": f"a text, sha256 {sha}"}


class _Watched:
    """A cache that adds up what passes through it; every other question goes to the cache."""

    def __init__(self, cache: Any, shape: tuple[int, int]) -> None:
        self.cache = cache
        self.count = self.queries_seen = 0
        self.origin: mx.array | None = None  # near the mean, as squares of large biases cancel
        self.sums = [mx.zeros(shape) for _ in range(3)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def arrays(self) -> list[mx.array]:
        """Evaluated with the buffers after every pass."""
        return [*self.cache.arrays(), *self.sums]

    def attend(self, q: mx.array, k: mx.array, v: mx.array, step: Step, *rest: Any) -> mx.array:
        self._count_keys(k[0], step)
        self._count_queries(q[0], step)
        return self.cache.attend(q, k, v, step, *rest)

    def read(self, q: mx.array, step: Step, *rest: Any) -> mx.array:
        self._count_queries(q[0], step)
        return self.cache.read(q, step, *rest)

    def _count_keys(self, k: mx.array, step: Step) -> None:
        """Rows [KV, L, dim]."""
        rows = k[:, max(0, SKIPPED - step.start) :].astype(mx.float32)
        if not rows.shape[1]:
            return
        if self.origin is None:
            self.origin = rows.mean(axis=1, keepdims=True)
        rows = rows - self.origin
        self.count += rows.shape[1]
        self.sums[0] = self.sums[0] + rows.sum(axis=1)
        self.sums[1] = self.sums[1] + (rows * rows).sum(axis=1)

    def _count_queries(self, q: mx.array, step: Step) -> None:
        """Rows [H, L, dim]."""
        heads, dim = self.sums[1].shape
        rows = q[:, max(0, SKIPPED - step.start) :].astype(mx.float32)
        self.queries_seen += rows.shape[0] // heads * rows.shape[1]
        self.sums[2] = self.sums[2] + (rows * rows).reshape(heads, -1, dim).sum(axis=1)

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Means, and (E q^2 / E (k - mean)^2)^(1/4), float32 [KV, dim]."""
        keys, squares, queries = (np.array(a).astype(np.float64) for a in self.sums)
        off = keys / self.count
        mean = off + np.array(self.origin)[:, 0]
        spread = _floored(squares / self.count - off**2)
        scale = (_floored(queries / self.queries_seen) / spread) ** 0.25
        scale /= np.exp(np.log(scale).mean(-1, keepdims=True))  # rows keep their size
        return mean.astype(np.float32), scale.astype(np.float32)


class _WatchedSparse(_Watched):
    """The same before a cache of block-sparse attention, whose rows come [L, heads, dim]."""

    def attend(  # type: ignore[override]
        self, q: mx.array, k: mx.array, v: mx.array, index: Index, step: Step, scale: float
    ) -> mx.array:
        self._count_keys(k.swapaxes(0, 1), step)
        self._count_queries(q.swapaxes(0, 1), step)
        return self.cache.attend(q, k, v, index, step, scale)


def _floored(values: np.ndarray) -> np.ndarray:
    """At least a ten-thousandth of the mean over channels: some channels are dead."""
    low = np.maximum(FLOOR * values.mean(-1, keepdims=True), 1e-12)
    return np.maximum(values, low)
