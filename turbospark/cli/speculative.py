"""--speculative and its companions: from what a person asks to draft policies.

Knows the words and which drafter an install carries. Does not know how drafting is done.
"""

from __future__ import annotations

import argparse
from typing import Any

from turbospark.errors import OptionError, SpeculationUnavailableError

WORKS = "off, auto or a number of proposals 1..15"


def add_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """The flags of drafting; `default` is what the command does without them."""
    group = parser.add_argument_group("drafting")
    group.add_argument(
        "--speculative",
        metavar="HOW",
        help=f"draft tokens ahead: {WORKS} [default: {default}: "
        + ("never]" if default == "off" else "by the model's own MTP head, where it has one]"),
    )
    group.add_argument(
        "--speculative-drafter",
        metavar="NAME",
        choices=("auto", "mtp", "dflash", "lookup"),
        help="who drafts: mtp, dflash, lookup (what followed the newest tokens before) or auto "
        "[default: auto]",
    )
    group.add_argument(
        "--draft-model", metavar="MODEL", help="draft with another install of the same vocabulary"
    )


def policies(args: argparse.Namespace) -> dict[str, Any]:
    """`speculation` of OpenOptions; empty where nothing was asked and the defaults hold."""
    how = getattr(args, "speculative", None)
    drafter = getattr(args, "speculative_drafter", None)
    model = getattr(args, "draft_model", None)
    if how is drafter is model is None:
        return {}
    if model is not None and drafter is not None:
        raise OptionError("--draft-model and --speculative-drafter both name who drafts; give one")
    if how == "off":
        if drafter is not None or model is not None:
            raise OptionError("--speculative off, but a drafter was named; drop one of them")
        return {"speculation": {}}
    width = _width(how)
    if model is not None:
        wide = {} if width is None else {"draft_model_width": width}
        return {"speculation": {"draft_model": model, **wide}}
    if drafter in (None, "auto"):
        if width is None:
            return {"speculation": {"mtp": "auto"}}
        drafter = _carried(args.model, width)
    name = {"lookup": "prompt_lookup"}.get(str(drafter), drafter)
    return {"speculation": {name: width or (8 if name == "prompt_lookup" else 2)}}


def _width(how: str | None) -> int | None:
    """The number of proposals; None for "auto"."""
    if how in (None, "auto"):
        return None
    if str(how) not in map(str, range(1, 16)):
        raise OptionError(f"--speculative {how!s:.40} is not valid; works: {WORKS}")
    return int(str(how))


def _carried(model: str, width: int) -> str:
    """The drafter that an install carries, MTP before DFlash; refuses one that has neither."""
    from turbospark.families import family_for_wire
    from turbospark.families.config import ConfigReader
    from turbospark.install.models import resolve
    from turbospark.install.opening import Install
    from turbospark.speculation.choose import Offer
    from turbospark.speculation.opening import whole

    with Install.open(resolve(model)) as install:
        family = family_for_wire(install.arch.family)
        values = install.config or family.config_from_arch(install.arch)
        needed = whole(family, family.read_config(ConfigReader(values)))
        tensors = set(install.resident.names)
        offer = Offer(family.name, family.capabilities.drafters, tensors, needed)
    for name in ("mtp", "dflash"):
        if offer.blocker(name) is None:
            return name
    raise SpeculationUnavailableError(f"--speculative {width}: {offer.blocker('mtp')}")
