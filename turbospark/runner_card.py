"""How an open model shows itself in a notebook.

Knows which of a runner's figures people look for first. Does not know how it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from turbospark import display
from turbospark.install.arch import ArchConfig
from turbospark.memory import MemoryReport
from turbospark.resolve import Resolved


class OpenRunner(Protocol):
    """A runner, as far as its card reads it."""

    path: Path
    resolved: Resolved
    arch: ArchConfig

    @property
    def closed(self) -> bool:
        """Whether it is."""

    @property
    def position(self) -> int:
        """Tokens in the context."""

    @property
    def max_context(self) -> int:
        """Tokens that fit."""

    @property
    def session_slots(self) -> int:
        """Conversations kept."""

    @property
    def prefix_reuse(self) -> bool:
        """Whether a prompt's known beginning is not fed again."""

    @property
    def steering_line(self) -> str | None:
        """The steering in force."""

    @property
    def steering_coefficients(self) -> list[list[float | None]] | None:
        """Of the last row, per layer and vector."""

    @property
    def memory(self) -> MemoryReport:
        """What it holds."""


def card(found: OpenRunner) -> str:
    """The model, what "auto" became, the context in use and the memory bar."""
    chosen = found.resolved
    note = f"{chosen.family} ({chosen.model_type}) on {chosen.device}, {chosen.dtype}"
    if found.closed:
        return display.card(found.path.name, note, display.facts({"state": "closed"}))
    experts = None
    if found.arch.num_experts:
        held = "" if chosen.expert_residency == "resident" else (
            f", {chosen.expert_cache_slots} slots per layer"
        )  # fmt: skip
        experts = (
            f"{found.arch.num_experts} per layer, {found.arch.top_k_experts} per token; "
            f"{chosen.expert_residency}{held}"
        )
    used = f"{found.position} of {found.max_context} tokens"
    rows = {
        "layers": f"{found.arch.num_layers} of width {found.arch.hidden_size}",
        "weights": chosen.weights,
        "experts": experts,
        "kv_quant": None if chosen.kv_quant == "off" else chosen.kv_quant,
        "prefix reuse": "on" if found.prefix_reuse else None,
        "conversations": str(found.session_slots) if found.session_slots > 1 else None,
        "steering": found.steering_line,
        "context": used,
    }
    by_vector = zip(*(found.steering_coefficients or []), strict=True)
    said = "coefficients per layer of the last row; the second colour is below zero"
    coefficients = [
        display.facts({f"vector {i}": said}) + display.strip(values, f"vector {i}: {said}")
        for i, values in enumerate(by_vector, 1)
    ]
    report = found.memory
    fill = display.gauge("context", found.position, found.max_context, used)
    plan = display.facts({"memory": f"{display.size(report.planned)} planned"})
    parts = [display.facts(rows), fill, *coefficients, plan, *report.drawn()]
    return display.card(found.path.name, note, *parts)
