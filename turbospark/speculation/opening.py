"""Drafters whose weights are in the install: their caches, and how they are built.

Knows a family's declarations. Does not know options, nor whether a drafter was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turbospark.cache.specs import CacheSpec
from turbospark.cache.state import LayerStates
from turbospark.families.base import Family
from turbospark.layers.weights import Weights
from turbospark.options import LiveToggles
from turbospark.speculation.mtp import MtpDrafter, MtpHead, mtp_specs

Watching = MtpDrafter
"""Drafters that read the model's passes."""


def whole(family: Family, config: Any) -> dict[str, tuple[str, ...]]:
    """Drafter -> every tensor it needs."""
    head = family.draft_head
    return {} if head is None else {"mtp": tuple(head.tensors(config))}


def drafter_specs(drafter: str | None, family: Family, config: Any) -> list[CacheSpec]:
    """Caches that a drafter keeps beside the model's own; none for those without weights here."""
    head = family.draft_head
    if drafter == "mtp" and head is not None:
        return mtp_specs(head, config, config.hidden_size)
    return []


def open_watching(
    drafter: str | None,
    family: Family,
    config: Any,
    weights: Weights,
    model: Any,
    states: Callable[[], LayerStates],
    toggles: LiveToggles,
) -> Watching | None:
    """The drafter, built; its caches come after those of the model's layers."""
    head, first = family.draft_head, len(family.cache_specs(config))
    if drafter == "mtp" and head is not None:
        toggles.add_effective(("mtp_batched_prime",))
        built = MtpHead(head, config, weights, model, first)
        return MtpDrafter(built, model.final_norm, states, first, toggles)
    return None
