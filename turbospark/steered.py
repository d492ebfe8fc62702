"""What an open model answers about its stream: steering in force, coefficients, residuals.

Knows the engine and the policy. Part of `runner`, whose public surface it is; does not know text.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.engine import Engine
from turbospark.errors import NonFiniteLogitsError, OptionError
from turbospark.families.base import Family
from turbospark.install.arch import ArchConfig
from turbospark.install.planes import MX_DTYPES
from turbospark.options import OpenOptions
from turbospark.policies import short
from turbospark.resolve import Resolved
from turbospark.steering import Steering, SteeringPolicy, unsupported_reason
from turbospark.steering.support import place, refuse_unsupported


def placed(
    policy: SteeringPolicy | None, family: Family, resolved: Resolved, arch: ArchConfig
) -> Steering | None:
    """The policy made ready for a model that is opened so; see `steering.support.place`."""
    return place(policy, family, resolved.model_type, arch, MX_DTYPES[resolved.dtype])


class Steered:
    """The part of a `Runner` that looks at the residual stream and edits it."""

    resolved: Resolved
    arch: ArchConfig
    steering: SteeringPolicy | None
    """The policy in force, None when off; `set_steering` changes it."""
    _family: Family
    _binding: dict[str, str]
    _open_engine: Callable[[], Engine]
    _exclusive: Callable[[], AbstractContextManager[Engine]]
    encode: Callable[[Any], list[int]]

    @property
    def steering_line(self) -> str | None:
        """One line describing the steering in force; None when off."""
        return self.resolved.steering

    @property
    def steering_coefficients(self) -> list[list[float | None]] | None:
        """Per layer and vector, how much of the direction the last row carried before the edit.

        None when off; inside None where a vector does not cover a layer, or nothing ran yet.
        """
        steering = self._open_engine().steering
        return None if steering is None else steering.coefficients()

    @property
    def steering_supported(self) -> bool:
        """Whether this family applies steering at all (not whether it is on)."""
        return self.steering_unsupported_reason is None

    @property
    def steering_unsupported_reason(self) -> str | None:
        """Why steering is refused at open, in the refusal's own words."""
        return unsupported_reason(self._family)

    def set_steering(self, policy: SteeringPolicy | None) -> None:
        """Steer otherwise from now on; every conversation, parked ones too, is forgotten.

        What caches hold was computed under the former policy. Refuses as an open does, and then
        nothing has changed.
        """
        chosen = SteeringPolicy.of(OpenOptions(steering=policy).steering)
        with self._exclusive() as engine:
            engine.set_steering(self._place(chosen))
            self._steer(chosen)

    def _place(self, policy: SteeringPolicy) -> Steering | None:
        return placed(policy, self._family, self.resolved, self.arch)

    def _steer(self, policy: SteeringPolicy) -> None:
        """Say that `policy` is what the engine applies."""
        self.steering = policy if policy.is_active else None
        self.resolved = replace(self.resolved, steering=policy.line(self.arch.num_layers))
        self._binding["steering"] = policy.digest
        self._binding["about_steering"] = self.resolved.steering or "off"

    def residuals(self, prompt: Any) -> mx.array:
        """float32 [layers, hidden]: the residual stream after every layer, at the last token of a
        prompt (what `encode` takes), from an empty cache. With steering on, as it leaves the edit.

        Raises UnsupportedError for a family without an edit point.
        """
        refuse_unsupported(self._family)
        with self._exclusive() as engine:
            tokens = engine.check(self.encode(prompt))
            engine.reset(everything=False)
            engine.check_room(len(tokens))
            return engine.residuals(tokens)

    def checked(self, prompt: Any) -> list[int]:
        """Token ids of a prompt that `residuals` takes; nothing is computed.

        Raises what `residuals` raises, but for the length.
        """
        refuse_unsupported(self._family)
        return self._open_engine().check(self.encode(prompt))

    def check_finite(self, values: mx.array) -> mx.array:
        """Logits or residuals as they are; raises NonFiniteLogitsError for NaN and infinity, and
        OptionError for what is no array of numbers.

        An edit can overflow the stream, and rankings of NaN look perfect: probes check.
        """
        narrow = isinstance(values, mx.array) and values.dtype == mx.bfloat16  # numpy has none
        found = np.asarray(values.astype(mx.float32) if narrow else values)
        if not isinstance(values, (mx.array, np.ndarray)) or found.dtype.kind not in "fiuc":
            raise OptionError(
                f"check_finite: {short(values)} is not valid; works: an array of numbers, such as "
                "logits"
            )
        bad = found.size - np.count_nonzero(np.isfinite(found))
        if bad:
            raise NonFiniteLogitsError(
                f"{bad} of {found.size} values are not finite; lower the steering's strength, or "
                "open with a wider dtype"
            )
        return values
