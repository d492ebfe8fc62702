"""Whether a policy can be applied: which families are steered, and what fits an open model.

Knows the one table, the families' capabilities; the open, `runner.steering_supported`, its reason
and residual capture all read it here. Does not know any family.
"""

from __future__ import annotations

import warnings

import mlx.core as mx

from turbospark.errors import UnsupportedError
from turbospark.families import families, family_for_model_type
from turbospark.families.base import Family
from turbospark.install.arch import ArchConfig
from turbospark.policies import short
from turbospark.steering.edit import Steering
from turbospark.steering.vectors import SteeringPolicy


def unsupported_reason(family: Family | str) -> str | None:
    """Why a family refuses steering, in one sentence; None when it does not.

    A text is a family's name or a `model_type`. Raises UnsupportedArchitectureError.
    """
    listed = families()
    if isinstance(family, str):
        named = [f for f in listed if f.name == family]
        family = named[0] if named else family_for_model_type(family)
    if family.capabilities.steering is None:
        return None
    wired = ", ".join(f.name for f in listed if f.capabilities.steering is None)
    others = [f for f in listed if f.capabilities.steering is not None]
    unwired = ", ".join(f"{f.name} ({f.capabilities.steering})" for f in others)
    return (
        f"steering: family {family.name} applies no edit, so a set would silently do nothing; "
        f"steered: {wired}; not steered: {unwired}"
    )


def refuse_unsupported(family: Family) -> None:
    """Raise UnsupportedError with the reason, where there is one."""
    reason = unsupported_reason(family)
    if reason is not None:
        raise UnsupportedError(reason)


def place(
    policy: SteeringPolicy | None,
    family: Family,
    model_type: str,
    arch: ArchConfig,
    dtype: mx.Dtype,
) -> Steering | None:
    """The policy made ready for a model; None when there is nothing to apply.

    Raises UnsupportedError for the family, OptionError for directions that do not fit. Warns about
    a set that says it was made on another architecture: files are not reliable there.
    """
    if policy is None or not policy.is_active:
        return None
    refuse_unsupported(family)
    ours = {_plain(model_type), _plain(arch.family)}
    for vector in policy.vectors:
        made_on = vector.set.declared_arch
        if made_on not in (None, "unknown") and _plain(made_on) not in ours:
            warnings.warn(
                f"steering: {vector.set} says it was made on {short(made_on)}, and this model is "
                f"{model_type!r}; a direction of another model is noise here",
                stacklevel=5,  # the caller of Runner.open or set_steering
            )
    return Steering(policy, arch, dtype)


def _plain(name: str) -> str:
    """Architecture names without the spelling that hubs and GGUF differ in."""
    return "".join(c for c in name.lower() if c.isalnum())
