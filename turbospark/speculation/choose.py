"""Which drafter an open runner gets: policies, the family and the install's tensors together.

Knows the order of refusals. Does not build anything. Reasons that lie in the architecture come
before "no drafter here", so that nobody is sent to fetch weights that cannot help.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from turbospark.errors import SpeculationUnavailableError
from turbospark.policies import DraftPolicies

MARKS = {"mtp": "mtp.fc.weight", "dflash": "dflash.fc.weight"}
"""Drafter -> the tensor by whose presence it is recognised; never a flag."""
WITH_PROBABILITIES = ("mtp", "draft_model")
"""Drafters that can draw a proposal from a distribution."""
_SUPPLIERS = {
    "mtp": "converting the original checkpoint brings it; conversions by mlx-lm leave mtp.* out",
    "dflash": "converting with drafter= a DFlash2 checkpoint brings it",
}


@dataclass(frozen=True)
class Choice:
    """The drafter to open, None for none; `note` says why an automatic one is not there."""

    drafter: str | None
    width: int = 0
    note: str | None = None


@dataclass(frozen=True)
class Offer:
    """What a family and an install offer: drafters the family has, and resident tensor names."""

    family: str
    drafters: tuple[str, ...]
    tensors: Container[str]
    whole: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Drafter -> every tensor that it needs."""
    widest: Mapping[str, int] = field(default_factory=dict)
    """Drafter -> how many proposals it can make at once, where that is bounded."""

    def blocker(self, drafter: str) -> str | None:
        """Why `drafter` ("mtp" or "dflash") cannot run on this install; None when it can."""
        if drafter not in self.drafters:
            return (
                f"family {self.family} has no {drafter} drafter; draft_model and prompt_lookup "
                "work with every family"
            )
        needed = self.whole.get(drafter, ())
        if not needed:
            return (
                f"a {drafter} drafter of other than one layer is not supported in family "
                f"{self.family}; draft_model and prompt_lookup work with every model"
            )
        if MARKS[drafter] not in self.tensors:
            return f"this install has no {MARKS[drafter]}; {_SUPPLIERS[drafter]}"
        missing = [name for name in needed if name not in self.tensors]
        if missing:
            return (
                f"this install has only {len(needed) - len(missing)} of the {len(needed)} tensors "
                f"of its {drafter} drafter, {missing[0]} is missing; {_SUPPLIERS[drafter]}"
            )
        return None


def choose(policies: DraftPolicies, offer: Offer) -> Choice:
    """At most one drafter. Raises SpeculationUnavailableError where a named one is blocked."""
    if policies.draft_model is not None:
        return Choice("draft_model", policies.draft_model_width)
    if policies.prompt_lookup.kind == "fixed":
        return Choice("prompt_lookup", policies.prompt_lookup.draft_width)
    # A fixed MTP head forces DFlash off; else DFlash comes first and MTP yields.
    order = ("mtp",) if policies.mtp.kind == "fixed" else ("dflash", "mtp")
    notes = []
    for name in order:
        policy = getattr(policies, name)
        if policy.kind == "off":
            continue
        reason = offer.blocker(name)
        most = offer.widest.get(name, policy.draft_width)
        if reason is None and policy.kind == "fixed" and policy.draft_width > most:
            reason = f"it makes {most} proposals at most"
        if reason is None:
            return Choice(name, min(policy.draft_width, most))
        if policy.kind == "fixed":
            raise SpeculationUnavailableError(f"speculation {name}={policy}: {reason}")
        notes.append(reason)
    if policies.prompt_lookup.kind == "auto":
        return Choice("prompt_lookup", policies.prompt_lookup.draft_width)
    if notes and policies.dflash.kind == "off" and offer.blocker("dflash") is None:
        notes.append("its DFlash2 drafter starts when it is named: dflash=2")
    return Choice(None, note="; ".join(notes) or None)
