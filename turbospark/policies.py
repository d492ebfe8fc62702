"""What an option can be: the frozen base model, the enumerations, toggles and draft policies.

Knows names, ranges and one-line errors. Does not know which options exist, nor models or MLX.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from math import ceil
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from turbospark.errors import OptionError

MAX_DRAFT_WIDTH = 15
AUTO_DRAFT_WIDTH = 2
ENV_PREFIX = "TURBOSPARK_"

# bool is an int in Python and "12" is an int to pydantic; neither is what a caller meant.
Int = Annotated[int, Strict()]
Positive = Annotated[int, Strict(), Field(ge=1)]
Natural = Annotated[int, Strict(), Field(ge=0)]
Bool = Annotated[bool, Strict()]
Real = Annotated[float, Strict(), Field(allow_inf_nan=False)]


# --- errors: one line, never pydantic's own ---------------------------------------------------


def option(default: Any, works: str, description: str) -> Any:
    """A field with its description and the words "what would work" for its error message."""
    return Field(default, description=description, json_schema_extra={"works": works})


def short(value: object) -> str:
    text = repr(value.value if isinstance(value, Enum) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    """The first problem of a pydantic error in our words: option, value, what works."""
    first = error.errors(include_url=False)[0]
    loc, kind = first["loc"], first["type"]
    name = str(loc[0]) if loc else ""
    if kind == "extra_forbidden":
        near = get_close_matches(name, model.model_fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(model.model_fields)}"
        return f"unknown option {name!r} in {model.__name__}; {hint}"
    if kind == "json_invalid":
        return f"{model.__name__}: not valid JSON ({first['ctx']['error']})"
    if kind == "value_error":
        reason = str(first["ctx"]["error"])
        return f"{name}: {reason}" if name else reason
    if name not in model.model_fields:
        return f"{model.__name__}: {short(first['input'])} is not a set of options; {first['msg']}"
    extra = model.model_fields[name].json_schema_extra
    works = extra["works"] if isinstance(extra, dict) else first["msg"]
    return f"{name}={short(first['input'])} is not valid; works: {works}"


_Self = TypeVar("_Self", bound="FrozenOptions")


class FrozenOptions(BaseModel):
    """Frozen options whose every validation failure is an `OptionError` of one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    if not TYPE_CHECKING:  # type checkers keep the signature made from the fields

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise OptionError(_explain(type(self), error)) from None

        def __setattr__(self, name: str, value: Any) -> None:
            raise OptionError(
                f"{type(self).__name__}.{name} cannot be assigned: options are frozen; "
                f"use .replace({name}=...)"
            )

    if not TYPE_CHECKING:

        def __delattr__(self, name: str) -> None:
            raise OptionError(
                f"{type(self).__name__}.{name} cannot be deleted: options are frozen; "
                f"use .replace({name}=...)"
            )

    @classmethod
    def of(cls: type[_Self], options: _Self | None) -> _Self:
        """What a caller gave as `options`, or the defaults for None. Raises OptionError."""
        if options is None:
            return cls()
        if not isinstance(options, cls):
            raise OptionError(
                f"options={short(options)} is not valid; works: {cls.__name__}(...), or its "
                "fields as keywords"
            )
        return options

    @classmethod
    def model_validate(cls: type[_Self], obj: Any, **kwargs: Any) -> _Self:
        """pydantic's, with `OptionError` for every failure."""
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as error:
            raise OptionError(_explain(cls, error)) from None

    @classmethod
    def model_validate_json(
        cls: type[_Self], json_data: str | bytes | bytearray, **kwargs: Any
    ) -> _Self:
        """pydantic's, with `OptionError` for every failure."""
        try:
            return super().model_validate_json(json_data, **kwargs)
        except ValidationError as error:
            raise OptionError(_explain(cls, error)) from None

    def replace(self: _Self, **changes: Any) -> _Self:
        """A copy with `changes`, validated as a whole. Raises OptionError."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})


def env_variable(suffix: str, environ: Mapping[str, str] | None) -> str | None:
    return (os.environ if environ is None else environ).get(ENV_PREFIX + suffix)


def env_flag(suffix: str, environ: Mapping[str, str] | None) -> bool | None:
    """A variable that is 0 or 1; None when it is not set. Raises OptionError."""
    text = env_variable(suffix, environ)
    if text not in (None, "0", "1"):
        raise OptionError(f"{ENV_PREFIX}{suffix}={text!r} is not valid; works: 0 or 1")
    return None if text is None else text == "1"


# --- enumerations -----------------------------------------------------------------------------


class ExpertResidency(str, Enum):
    """Where routed experts live: read on demand, mapped from disk, all in memory, or chosen."""

    STREAMED = "streamed"
    MAPPED = "mapped"
    RESIDENT = "resident"
    AUTO = "auto"

    def __str__(self) -> str:
        return self.value


class LoadGuard(str, Enum):
    """How much of the machine's memory an open may plan to use."""

    OFF = "off"
    RELAXED = "relaxed"
    BALANCED = "balanced"
    STRICT = "strict"

    def __str__(self) -> str:
        return self.value


class KvQuant(Enum):
    """Bits per element of quantized keys and values; OFF keeps them as computed.

    Members compare equal to nothing but themselves; `KvQuant(3.5)` and `KvQuant("3.5")` work.
    """

    OFF = "off"
    BITS_2 = 2
    BITS_3 = 3
    BITS_3_5 = 3.5
    BITS_4 = 4

    @classmethod
    def _missing_(cls, value: object) -> KvQuant | None:
        return {"2": cls.BITS_2, "3": cls.BITS_3, "3.5": cls.BITS_3_5, "4": cls.BITS_4}.get(
            value if isinstance(value, str) else ""
        )

    @property
    def bits(self) -> float | None:
        """Bits per element, or None when off."""
        return None if self is KvQuant.OFF else float(self.value)

    @property
    def key_bits(self) -> int | None:
        """Bits per element of keys; keys need them more than values, so 3.5 is 4 and 3."""
        return None if self is KvQuant.OFF else ceil(float(self.value))

    @property
    def value_bits(self) -> int | None:
        """Bits per element of values."""
        return None if self is KvQuant.OFF else int(float(self.value))

    def __str__(self) -> str:
        return str(self.value)


class SteeringMode(str, Enum):
    """What an edit does with a direction: take it out, add it, set it, or take it out and keep the
    row's length.
    """

    ABLATE = "ablate"
    ADD = "add"
    CLAMP = "clamp"
    RENORM = "renorm"

    def __str__(self) -> str:
        return self.value


# --- toggles ----------------------------------------------------------------------------------


class RuntimeToggles(FrozenOptions):
    """Eight switches between two ways of computing the same tokens (`qsa_force_dense` excepted)."""

    shared_expert_overlap: Bool = option(
        True, "True or False", "start the shared expert before reading missing experts"
    )
    routed_pipeline: Bool = option(
        True, "True or False", "let a layer's routed output finish under the next layer"
    )
    qsa_force_dense: Bool = option(
        False, "True or False", "dense attention where block-sparse attention would run"
    )
    routed_batch_prefill: Bool = option(
        True, "True or False", "all routes of a prompt chunk in one gathered product"
    )
    batched_gemv_prefill: Bool | None = option(
        None, "None (auto), True or False", "prompt rows as one product; None is auto = batched"
    )
    prefill_steel: Bool = option(
        True, "True or False", "one large product per chunk instead of slices of 4 rows"
    )
    mtp_batched_prime: Bool = option(
        True, "True or False", "prime the MTP head in one pass per chunk"
    )
    prefill_rows_attention: Bool = option(
        True, "True or False", "one attention call over all rows of a chunk"
    )

    ENVIRONMENT: ClassVar[dict[str, str]] = {
        "shared_expert_overlap": "SHARED_CB",
        "routed_pipeline": "ROUTED_PIPELINE",
        "qsa_force_dense": "QSA_FORCE_DENSE",
        "routed_batch_prefill": "ROUTED_BATCH",
        "batched_gemv_prefill": "BATCHED_GEMV",
        "prefill_steel": "PREFILL_STEEL",
        "mtp_batched_prime": "MTP_BATCHED_PRIME",
        "prefill_rows_attention": "PREFILL_ROWS_ATTN",
    }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> RuntimeToggles:
        """Defaults overlaid with the TURBOSPARK_* variables that are set to 0 or 1."""
        values = {}
        for name, suffix in cls.ENVIRONMENT.items():
            flag = env_flag(suffix, environ)
            if flag is not None:
                values[name] = flag
        return cls(**values)


class LiveToggles:
    """An open runner's toggles: the eight names, assignable at any time, each value checked.

    `has_effect(name)` says whether the open model consults a toggle at all, so that an A/B of
    something the family never reads cannot pass for a measurement.
    """

    _state: RuntimeToggles
    _effective: frozenset[str]

    def __init__(self, toggles: RuntimeToggles, effective: Iterable[str] = ()) -> None:
        object.__setattr__(self, "_state", toggles)
        object.__setattr__(self, "_effective", frozenset(effective))

    def __getattr__(self, name: str) -> bool | None:
        if name not in RuntimeToggles.model_fields:
            raise AttributeError(f"no toggle {name!r}; known: {', '.join(_TOGGLES)}")
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: bool | None) -> None:
        object.__setattr__(self, "_state", self._state.replace(**{name: value}))

    def has_effect(self, name: str) -> bool:
        """Whether this model's forward pass reads toggle `name` in the current combination."""
        if name not in RuntimeToggles.model_fields:
            raise OptionError(f"no toggle {name!r}; known: {', '.join(_TOGGLES)}")
        if name in _OF_SEVERAL_ROWS and self._state.batched_gemv_prefill is False:
            return False  # every pass has one row
        return name in self._effective

    def add_effective(self, names: Iterable[str]) -> None:
        """The model that was opened reads these too."""
        object.__setattr__(self, "_effective", self._effective | frozenset(names))

    def snapshot(self) -> RuntimeToggles:
        """The current values, frozen."""
        return self._state

    def __repr__(self) -> str:
        return f"LiveToggles({self._state})"


_TOGGLES = tuple(RuntimeToggles.model_fields)
_OF_SEVERAL_ROWS = ("prefill_steel", "prefill_rows_attention", "routed_batch_prefill")


# --- speculation ------------------------------------------------------------------------------

_Policy = TypeVar("_Policy", bound="_DraftPolicy")


class _DraftPolicy(FrozenOptions):
    """off: never built; auto: used when the install carries it; fixed(n): required, n wide."""

    kind: Literal["off", "auto", "fixed"] = option(
        "off", "'off', 'auto' or 'fixed'", "whether drafter state is built"
    )
    width: Int | None = option(
        None, f"an integer 1..{MAX_DRAFT_WIDTH} with kind='fixed'", "proposals per round"
    )

    VARIABLE: ClassVar[str] = ""
    AUTO_WIDTH: ClassVar[int] = AUTO_DRAFT_WIDTH

    @model_validator(mode="before")
    @classmethod
    def _from_scalar(cls, value: Any) -> Any:
        """Accept the short forms "off", "auto" and n that `model_dump` writes."""
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, int) and not isinstance(value, bool):
            return {"kind": "fixed", "width": value}
        return value

    @model_validator(mode="after")
    def _width_belongs_to_fixed(self: _Policy) -> _Policy:
        fixed = self.kind == "fixed"
        if fixed != (self.width is not None) or self.width not in (
            None,
            *range(1, MAX_DRAFT_WIDTH + 1),
        ):
            raise ValueError(
                f"{type(self).__name__} kind={self.kind!r}, width={self.width!r} is not valid; "
                f"works: 'off', 'auto' or a fixed width 1..{MAX_DRAFT_WIDTH}"
            )
        return self

    @model_serializer
    def _to_scalar(self) -> str | int:
        return self.kind if self.width is None else self.width

    @classmethod
    def off(cls: type[_Policy]) -> _Policy:
        """Never build the drafter."""
        return cls(kind="off")

    @classmethod
    def auto(cls: type[_Policy]) -> _Policy:
        """Use the drafter if the install carries it."""
        return cls(kind="auto")

    @classmethod
    def fixed(cls: type[_Policy], width: int) -> _Policy:
        """Require the drafter, `width` proposals per round (1..15)."""
        return cls(kind="fixed", width=width)

    @classmethod
    def parse(cls: type[_Policy], text: str | None) -> _Policy:
        """The environment's mapping: None or unparsable: auto; "0": off; n: fixed(n)."""
        digits = (text or "").strip()
        if not (digits.isascii() and digits.isdigit()):
            return cls.auto()
        width = int(digits.lstrip("0")[:9] or 0)  # Python reads no number of 5,000 digits
        return cls.fixed(width) if width else cls.off()

    @classmethod
    def from_env(cls: type[_Policy], environ: Mapping[str, str] | None = None) -> _Policy:
        """`parse` of this drafter's variable. Raises OptionError for a width past 15."""
        text = env_variable(cls.VARIABLE, environ)
        try:
            return cls.parse(text)
        except OptionError as error:
            raise OptionError(f"{ENV_PREFIX}{cls.VARIABLE}={text!r:.40}: {error}") from None

    @property
    def draft_width(self) -> int:
        """Proposals per round: the fixed width, the automatic width, or 0 when off."""
        return {"off": 0, "auto": self.AUTO_WIDTH}.get(self.kind, self.width or 0)

    def __str__(self) -> str:
        return self.kind if self.width is None else f"fixed({self.width})"


class MtpPolicy(_DraftPolicy):
    """Policy of the multi-token-prediction head."""

    VARIABLE: ClassVar[str] = "MTP_DRAFT"


class DflashPolicy(_DraftPolicy):
    """Policy of the DFlash2 block drafter."""

    VARIABLE: ClassVar[str] = "DFLASH_DRAFT"


class LookupPolicy(_DraftPolicy):
    """Policy of prompt lookup, which needs no weights: auto and fixed both use it."""

    AUTO_WIDTH: ClassVar[int] = 8


class DraftPolicies(FrozenOptions):
    """Which drafter to build at open; at most one is ever open."""

    mtp: MtpPolicy = option(
        MtpPolicy(), f"'off', 'auto' or a width 1..{MAX_DRAFT_WIDTH}", "the MTP head"
    )
    dflash: DflashPolicy = option(
        DflashPolicy(), f"'off', 'auto' or a width 1..{MAX_DRAFT_WIDTH}", "the block drafter"
    )

    prompt_lookup: LookupPolicy = option(
        LookupPolicy(),
        f"'off', 'auto' or a width 1..{MAX_DRAFT_WIDTH}",
        "what followed the newest tokens before",
    )
    draft_model: Annotated[str, Field(min_length=1)] | None = option(
        None, "a name, a path or None", "an installed model with the same vocabulary"
    )
    draft_model_width: Annotated[Int, Field(ge=1, le=MAX_DRAFT_WIDTH)] = option(
        4, f"an integer 1..{MAX_DRAFT_WIDTH}", "proposals per round of `draft_model`"
    )

    @field_validator("draft_model", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, PurePath) else value

    @model_validator(mode="after")
    def _one_drafter(self) -> DraftPolicies:
        named = [
            f"{name}={getattr(self, name)}"
            for name in ("mtp", "dflash", "prompt_lookup")
            if getattr(self, name).kind == "fixed"
        ]
        if self.draft_model is not None:
            named.append(f"draft_model={self.draft_model!r}")
        if len(named) > 1:
            raise ValueError(
                f"{' and '.join(named)} are named together, but a round drafts with one model; "
                "name exactly one"
            )
        if self.draft_model is None and self.draft_model_width != 4:
            raise ValueError(
                f"draft_model_width={self.draft_model_width} has no effect without draft_model"
            )
        return self

    @classmethod
    def off(cls) -> DraftPolicies:
        """No drafter."""
        return cls()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DraftPolicies:
        """Both policies from TURBOSPARK_MTP_DRAFT and TURBOSPARK_DFLASH_DRAFT; unset is auto."""
        return cls(mtp=MtpPolicy.from_env(environ), dflash=DflashPolicy.from_env(environ))

    @property
    def is_off(self) -> bool:
        """True when no drafter may be built."""
        kinds = {self.mtp.kind, self.dflash.kind, self.prompt_lookup.kind}
        return kinds == {"off"} and self.draft_model is None
