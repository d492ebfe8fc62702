"""Drafters whose weights are in the install: their caches, and how they are built.

Knows a family's declarations. Does not know options, nor whether a drafter was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from turbospark.cache.specs import CacheSpec
from turbospark.cache.state import LayerStates
from turbospark.counters import PhaseClock
from turbospark.experts.resident import ResidentExperts
from turbospark.families.base import Family
from turbospark.families.dflash_shapes import dflash_shapes
from turbospark.layers.weights import Weights
from turbospark.options import LiveToggles
from turbospark.speculation.choose import MARKS
from turbospark.speculation.dflash import DflashDrafter, DflashModel, dflash_specs
from turbospark.speculation.mtp import MtpDrafter, MtpHead, mtp_specs

Watching = MtpDrafter | DflashDrafter
"""Drafters that read the model's passes."""


def whole(family: Family, config: Any) -> dict[str, tuple[str, ...]]:
    """Drafter -> every tensor it needs."""
    found: dict[str, tuple[str, ...]] = {}
    if family.draft_head is not None:
        found["mtp"] = tuple(family.draft_head.tensors(config))
    if "dflash" in family.capabilities.drafters:
        found["dflash"] = tuple(dflash_shapes(config.dflash)) or (MARKS["dflash"],)
    return found


def widest(config: Any) -> dict[str, int]:
    """Drafter -> proposals at most: a block drafter's masks."""
    dflash = getattr(config, "dflash", None)
    return {} if dflash is None else {"dflash": dflash.block_size - 1}


def drafter_specs(drafter: str | None, family: Family, config: Any) -> list[CacheSpec]:
    """Caches that a drafter keeps beside the model's own; none for those without weights here."""
    head = family.draft_head
    if drafter == "mtp" and head is not None:
        return mtp_specs(head, config, config.hidden_size)
    if drafter == "dflash":
        return dflash_specs(config.dflash)
    return []


def open_watching(
    drafter: str | None,
    family: Family,
    config: Any,
    weights: Weights,
    model: Any,
    states: Callable[[], LayerStates],
    toggles: LiveToggles,
    clock: PhaseClock,
) -> Watching | None:
    """The drafter, built; its caches come after those of the model's layers.

    The experts of an MTP head are in memory wherever the model's own are: it is one layer, asked
    for every token drafted.
    """
    head, first = family.draft_head, len(family.cache_specs(config))
    if drafter == "mtp" and head is not None:
        toggles.add_effective(("mtp_batched_prime",))
        hold = partial(ResidentExperts, toggles=toggles, clock=clock)
        built = MtpHead(head, config, weights, model, first, hold)
        return MtpDrafter(built, model.final_norm, states, first, toggles)
    if drafter == "dflash":
        # Its stream leaves the range of float16.
        wide = weights.of(mx.bfloat16) if weights.dtype == mx.float16 else weights
        return DflashDrafter(DflashModel(config.dflash, wide, model), states, first)
    return None
