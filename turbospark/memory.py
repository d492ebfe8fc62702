"""What an open runner holds in memory, and how each figure comes about. Knows bytes and words."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from turbospark import display
from turbospark.engine import Engine


@dataclass(frozen=True)
class MemoryReport(display.Shown):
    """Bytes a runner planned (weights, experts, KV) and what MLX holds now, process-wide.

    `str()` shows the sum with the formula of each part.
    """

    weights: int
    experts: int
    kv: int
    active: int
    peak: int
    cache: int
    expert_formula: str = "none"
    kv_formula: str = ""

    @property
    def planned(self) -> int:
        return self.weights + self.experts + self.kv

    def _repr_html_(self) -> str:
        note = f"{display.size(self.planned)} planned"
        return display.card("Memory", note, *self.drawn())

    def drawn(self) -> tuple[str, str]:
        """HTML: a bar of what is planned, with the formula of each part, and what MLX holds."""
        size = display.size
        parts = [
            ("weights", self.weights, "resident tensors, as they are computed with"),
            ("experts", self.experts, self.expert_formula),
            ("kv", self.kv, self.kv_formula),
        ]
        rows = [(i, (n, size(c), how)) for i, (n, c, how) in enumerate(parts) if c]
        planned = display.bar([(n, c, size(c)) for n, c, _ in parts]) + display.legend(rows)
        held = f"{size(self.active)} now, {size(self.peak)} at most, {size(self.cache)} cached"
        return planned, display.facts({"MLX holds": held})

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights, "resident tensors, as they are computed with"),
            ("experts", self.experts, self.expert_formula),
            ("kv", self.kv, self.kv_formula),
            ("planned", self.planned, "weights + experts + kv"),
            ("mlx", self.active, f"now; peak {_mib(self.peak)}, cached {_mib(self.cache)}"),
        ]
        return "\n".join(f"{name:<8} {_mib(count):>12}  {how}" for name, count, how in rows)


def report(engine: Engine, weights: int, drafting: tuple[int, int, int]) -> MemoryReport:
    """Of an open engine with so many bytes of weights; `drafting`: weights, experts and KV of its
    drafter.
    """
    store, sessions = engine.store, engine.pool.sessions
    kept = sum(len(s.snapshots) for s in sessions)
    return MemoryReport(
        weights=weights + drafting[0],
        experts=drafting[1] + (store.nbytes if store is not None else 0),
        kv=drafting[2] + engine.pool.nbytes,
        active=mx.get_active_memory(),
        peak=mx.get_peak_memory(),
        cache=mx.get_cache_memory(),
        expert_formula=store.formula if store is not None else "none",
        kv_formula=f"{_counted(len(sessions), 'conversation')} of up to {engine.max_context} tokens"
        + (f", {_counted(kept, 'state')} kept to go back to" if kept else ""),
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
