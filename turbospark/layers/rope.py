"""Rotary position embeddings. Frequencies are computed in float64 and rounded once.

Knows the scalings (linear, llama3, yarn) and which pairs rotate. Does not know layers.
`mx.fast.rope(base=...)` is off by 8.6e-3 at position 131k; explicit frequencies are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.errors import SourceError, UnsupportedError

SCALINGS = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True)
class Rope:
    """Rotates the leading `dims` of each head by position * frequency.

    periods float32 [dims / 2] are reciprocal frequencies (infinite = not rotated). `interleaved`
    pairs elements (2i, 2i+1), else (i, dims/2 + i). `attention_factor` multiplies cos and sin.
    """

    dims: int
    periods: mx.array
    interleaved: bool = False
    attention_factor: float = 1.0

    def __call__(self, x: mx.array, offset: int, every: int = 1) -> mx.array:
        """x [1, H, L, D], row i at position every * (offset + i) -> the same shape and dtype."""
        if self.attention_factor != 1.0:
            head = x[..., : self.dims] * self.attention_factor
            x = (
                head
                if self.dims == x.shape[-1]
                else mx.concatenate([head, x[..., self.dims :]], -1)
            )
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.interleaved,
            base=None,
            scale=float(every),
            offset=offset,
            freqs=self.periods,
        )


def make_rope(
    dims: int,
    theta: float,
    scaling: dict[str, Any] | None,
    max_position_embeddings: int,
    *,
    interleaved: bool = False,
    factors: np.ndarray | None = None,
) -> Rope:
    """The rope of a config's `rope_theta` and `rope_scaling` over `dims` leading dimensions."""
    scaling = scaling or {}
    kind = scaling_kind(scaling, proportional=True)
    inverse = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    factor = 1.0
    if kind == "linear":
        inverse /= _number(scaling, "factor")
    elif kind == "llama3":
        inverse = _llama3(inverse, scaling, max_position_embeddings)
    elif kind == "yarn":
        inverse = _yarn(inverse, dims, theta, scaling, max_position_embeddings)
        factor = yarn_attention_factor(scaling)
    elif kind == "proportional":
        # Pairs span the whole width; only the first share of them turns.
        inverse /= _number(scaling, "factor", 1.0)
        inverse[int(_number(scaling, "partial_rotary_factor", 1.0) * dims // 2) :] = 0.0
    elif kind == "factors":
        inverse /= np.asarray(factors, dtype=np.float64)
    return Rope(dims, periods(inverse), interleaved, factor)


def periods(inverse: np.ndarray) -> mx.array:
    """Frequencies (float64) -> the float32 reciprocals that `mx.fast.rope` takes; 0 -> inf."""
    with np.errstate(divide="ignore"):
        return mx.array((1.0 / inverse).astype(np.float32))


def scaling_kind(scaling: dict[str, Any] | None, proportional: bool = False) -> str:
    """The name of the scaling; refuses those that are not computed here.

    Proportional ropes rotate a share of the head's pairs: only families that say so have them.
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "default" if kind in ("mrope", "none") else kind
    if kind not in SCALINGS and not (proportional and kind == "proportional"):
        raise UnsupportedError(
            f"config.json: rope_scaling type {kind!r} is not supported; "
            f"supported: {', '.join(SCALINGS[:-1])}"
        )
    return kind


_NUMBERS: dict[str, dict[str, float | None]] = {
    "linear": {"factor": None},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": 1.0,
    },
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    },
    "proportional": {"factor": 1.0, "partial_rotary_factor": 1.0},
}
"""What each scaling reads; None where there is no default."""


def check_scaling(scaling: dict[str, Any] | None, proportional: bool = False) -> str:
    """`scaling_kind`, with the numbers that `make_rope` will read checked too."""
    kind = scaling_kind(scaling, proportional)
    numbers = {
        key: _number(scaling or {}, key, default) for key, default in _NUMBERS.get(kind, {}).items()
    }
    for key in ("mscale", "mscale_all_dim"):
        if kind == "yarn" and (scaling or {}).get(key):
            _number(scaling or {}, key)
    if kind == "llama3" and numbers["low_freq_factor"] == numbers["high_freq_factor"]:
        raise SourceError(
            "config.json: rope_scaling: low_freq_factor and high_freq_factor are both "
            f"{numbers['low_freq_factor']}; expected two different numbers"
        )
    return kind


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature term: 0.1 * weight * ln(factor) + 1, and 1 below factor 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """What cos and sin are multiplied by."""
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _number(scaling, "factor")
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if over and under:
        return mscale(factor, over) / mscale(factor, under)
    return mscale(factor)


def _number(scaling: dict[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        value = default
    if value is None:
        raise SourceError(f"config.json: rope_scaling: required key {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**63:
        raise SourceError(
            f"config.json: rope_scaling: {key} = {value!r}; expected a positive number below 2^63"
        )
    return float(value)


def _llama3(inverse: np.ndarray, scaling: dict[str, Any], trained: int) -> np.ndarray:
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings", trained)
    turns = original * inverse / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inverse * ((1 - blend) / factor + blend)


def _yarn(
    inverse: np.ndarray, dims: int, theta: float, scaling: dict[str, Any], trained: int
) -> np.ndarray:
    factor = _number(scaling, "factor")
    original = _number(scaling, "original_max_position_embeddings", trained)

    def correction(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = correction(_number(scaling, "beta_fast", 32.0))
    high = correction(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0.0, 1.0)
    # Fast pairs (small index, ramp 0) keep their frequency; slow ones are divided.
    return inverse * (ramp / factor + 1.0 - ramp)
