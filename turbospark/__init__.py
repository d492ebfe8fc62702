"""Run large language models locally on MLX.

`Runner.open(dir, OpenOptions(...))` opens an install made by `convert` or `pull`.
Names are imported on first use, so that `import turbospark` does not load MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turbospark.loading import load
from turbospark.version import __version__

_EXPORTS = {
    "Runner": "turbospark.runner",
    "OpenOptions": "turbospark.options",
    "GenerationOptions": "turbospark.options",
    "GenerationResult": "turbospark.result",
    "Prefill": "turbospark.generation",
    "Token": "turbospark.generation",
    "Tail": "turbospark.generation",
    "Finished": "turbospark.generation",
    "Content": "turbospark.text.turns",
    "Reasoning": "turbospark.text.turns",
    "ToolCall": "turbospark.text.turns",
    "ReleasedToolSpan": "turbospark.text.turns",
    "ArchConfig": "turbospark.install.arch",
    "KvQuant": "turbospark.options",
    "ExpertResidency": "turbospark.options",
    "LoadGuard": "turbospark.options",
    "RuntimeToggles": "turbospark.options",
    "DraftPolicies": "turbospark.options",
    "MtpPolicy": "turbospark.options",
    "DflashPolicy": "turbospark.options",
    "ControlVectorInfo": "turbospark.steering",
    "SteeringMode": "turbospark.policies",
    "SteeringPolicy": "turbospark.steering",
    "SteeringSet": "turbospark.steering",
    "SteeringVector": "turbospark.steering",
    "PhaseCounters": "turbospark.counters",
    "SpeculationStats": "turbospark.speculation.stats",
    "LookupPolicy": "turbospark.options",
    "convert": "turbospark.conversion",
    "pull": "turbospark.hub",
    "synth": "turbospark.synthesis",
    "watch": "turbospark.notebook",
    "calibrate": "turbospark.calibration",
    "TurbosparkError": "turbospark.errors",
}

__all__ = [
    "ArchConfig",
    "Content",
    "ControlVectorInfo",
    "DflashPolicy",
    "DraftPolicies",
    "ExpertResidency",
    "Finished",
    "GenerationOptions",
    "GenerationResult",
    "KvQuant",
    "LoadGuard",
    "LookupPolicy",
    "MtpPolicy",
    "OpenOptions",
    "PhaseCounters",
    "Prefill",
    "Reasoning",
    "ReleasedToolSpan",
    "Runner",
    "RuntimeToggles",
    "SpeculationStats",
    "SteeringMode",
    "SteeringPolicy",
    "SteeringSet",
    "SteeringVector",
    "Tail",
    "Token",
    "ToolCall",
    "TurbosparkError",
    "__version__",
    "calibrate",
    "convert",
    "pull",
    "synth",
    "watch",
]

if TYPE_CHECKING:
    from turbospark.calibration import calibrate
    from turbospark.conversion import convert
    from turbospark.counters import PhaseCounters
    from turbospark.errors import TurbosparkError
    from turbospark.generation import Finished, Prefill, Tail, Token
    from turbospark.hub import pull
    from turbospark.install.arch import ArchConfig
    from turbospark.notebook import watch
    from turbospark.options import (
        DflashPolicy,
        DraftPolicies,
        ExpertResidency,
        GenerationOptions,
        KvQuant,
        LoadGuard,
        LookupPolicy,
        MtpPolicy,
        OpenOptions,
        RuntimeToggles,
    )
    from turbospark.policies import SteeringMode
    from turbospark.result import GenerationResult
    from turbospark.runner import Runner
    from turbospark.speculation.stats import SpeculationStats
    from turbospark.steering import (
        ControlVectorInfo,
        SteeringPolicy,
        SteeringSet,
        SteeringVector,
    )
    from turbospark.synthesis import synth
    from turbospark.text.turns import Content, Reasoning, ReleasedToolSpan, ToolCall


def __getattr__(name: str) -> Any:
    if name == "kv":  # a module of the public surface, as `turbospark.kv.report`
        return load("turbospark.kv")
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'turbospark' has no attribute {name!r}")
    value = getattr(load(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
