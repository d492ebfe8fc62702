"""What an open runner holds in memory, and how each figure comes about. Knows bytes and words."""

from __future__ import annotations

from dataclasses import dataclass

from turbospark import display


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
        return display.memory(self)

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights, "resident tensors, as they are computed with"),
            ("experts", self.experts, self.expert_formula),
            ("kv", self.kv, self.kv_formula),
            ("planned", self.planned, "weights + experts + kv"),
            ("mlx", self.active, f"now; peak {_mib(self.peak)}, cached {_mib(self.cache)}"),
        ]
        return "\n".join(f"{name:<8} {_mib(count):>12}  {how}" for name, count, how in rows)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
