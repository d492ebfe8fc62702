"""Every option a caller can give: opening a model, and generating with it.

Knows names, defaults, ranges and which values contradict each other. Does not know models, files
or MLX: whether a family can honour an option is decided, and said, where the model is opened.
The environment is read by `from_env` and `interactive` and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    Strict,
    model_validator,
)

from turbospark.errors import OptionError
from turbospark.loading import load
from turbospark.policies import (
    AUTO_DRAFT_WIDTH,
    ENV_PREFIX,
    MAX_DRAFT_WIDTH,
    Bool,
    DflashPolicy,
    DraftPolicies,
    ExpertResidency,
    FrozenOptions,
    Int,
    KvQuant,
    LiveToggles,
    LoadGuard,
    LookupPolicy,
    MtpPolicy,
    Natural,
    Positive,
    Real,
    RuntimeToggles,
    env_flag,
    env_variable,
    option,
    short,
)

DEFAULT_MAX_CONTEXT = 4096
EXPERT_CACHE_SLOTS = 16
MAX_TOP_K = 256

# --- fields whose types live on higher floors ---------------------------------------------------


def _as_arch(value: Any) -> Any:
    """None, an ArchConfig, or a manifest's `arch` object.

    Imported here and not above: options are floor 0 and the architecture record is floor 1.
    """
    if value is None:
        return None
    from turbospark.install.arch import ArchConfig

    if isinstance(value, ArchConfig):
        return value
    if isinstance(value, dict):
        return ArchConfig.from_manifest(value)
    raise ValueError(f"{short(value)} is not valid; works: an ArchConfig or None")


def _as_steering(value: Any) -> Any:
    """None (off), or a SteeringPolicy; imported late, as above."""
    if value is None:
        return None
    policy = load("turbospark.steering").SteeringPolicy
    if isinstance(value, policy):
        return value
    if isinstance(value, dict):
        return policy.model_validate(value)
    raise ValueError(f"{short(value)} is not valid; works: a SteeringPolicy or None")


def _arch_json(value: Any) -> Any:
    return None if value is None else value.to_manifest()


def _steering_json(value: Any) -> Any:
    return None if value is None else value.model_dump(mode="json")


Expecting = Annotated[Any, PlainValidator(_as_arch), PlainSerializer(_arch_json, when_used="json")]
Steering = Annotated[
    Any, PlainValidator(_as_steering), PlainSerializer(_steering_json, when_used="json")
]
SidecarPath = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)
]
AutoOrPositive = Literal["auto"] | Positive
MAX_CONTEXT = 1 << 24
"""Positions at most: float32 tells all of them apart, and sizes stay within MLX's 31 bits."""
Context = Literal["auto"] | Annotated[int, Strict(), Field(ge=1, le=MAX_CONTEXT)]
PrefillChunk = Literal["off", "auto", 32, 64, 128, 256, 512, 1024, 2048, 4096]


# --- opening ----------------------------------------------------------------------------------


class OpenOptions(FrozenOptions):
    """How to open an install. `OpenOptions()` pins everything the environment could change.

    Constructing, `replace` and the JSON readers raise OptionError, one line that names the option,
    its value and what works. What was finally chosen is `runner.resolved`.
    """

    expecting: Expecting = option(
        None,
        "an ArchConfig or None",
        "architecture the manifest must match field by field; None trusts the manifest",
    )
    max_context: Context = option(
        DEFAULT_MAX_CONTEXT,
        f"an integer 1..{MAX_CONTEXT} or 'auto'",
        "tokens the KV cache is allocated for; 'auto' fits the trained context and the memory",
    )
    min_auto_context: Natural = option(
        0, "an integer >= 0", "refuse to open when max_context='auto' comes out smaller"
    )
    load_guard: LoadGuard | Positive = option(
        LoadGuard.RELAXED,
        "'off', 'relaxed', 'balanced', 'strict' or a number of bytes > 0",
        "how much of the machine an open leaves free; bytes cap expert slots + KV, not weights",
    )
    expert_cache_slots: AutoOrPositive = option(
        EXPERT_CACHE_SLOTS,
        "an integer >= 1 or 'auto'",
        "experts kept per layer when streaming; capped at the expert count, and that when resident",
    )
    expert_residency: ExpertResidency = option(
        ExpertResidency.STREAMED,
        "'streamed', 'mapped', 'resident' or 'auto'",
        "where routed experts live",
    )
    ngram_table: Literal["mapped", "resident"] = option(
        "mapped", "'mapped' or 'resident'", "where tables of hashed n-grams live (qwen4_exp)"
    )
    expert_cache_policy: Literal["lfu", "lru"] = option(
        "lfu", "'lfu' or 'lru'", "which expert a full cache gives up"
    )
    expert_lookahead: Bool = option(
        False,
        "True or False",
        "read the experts that the next layer will probably ask for (streamed)",
    )
    expert_disk_io: Bool = option(
        False, "True or False", "measure which expert bytes came from the disk (Linux)"
    )
    kv_quant: KvQuant = option(
        KvQuant.OFF, "'off', 2, 3, 3.5 or 4", "bits of quantized keys and values"
    )
    speculation: DraftPolicies = option(
        DraftPolicies(), "a DraftPolicies", "which drafter to build; off by default"
    )
    acceptance: Literal["auto", "rejection", "match"] = option(
        "auto",
        "'auto', 'rejection' or 'match'",
        "how sampled proposals are accepted; 'auto' is rejection where the drafter has "
        "probabilities",
    )
    steering: Steering = option(
        None, "a SteeringPolicy or None", "directional edits of the residual stream; None is off"
    )
    session_slots: Positive = option(
        1,
        "an integer >= 1",
        "conversations kept at once: one live, the rest parked; found again by prefix_reuse",
    )
    prefix_reuse: Bool = option(
        False, "True or False", "keep the cache of a shared prompt prefix between calls"
    )
    prefill_chunk: PrefillChunk = option(
        "auto",
        "'off', 'auto' or a power of two 32..4096",
        "prompt tokens per forward pass; 'auto' is 512, and 4096 on CUDA",
    )
    swa_ring_capacity: Positive | None = option(
        None, "an integer >= the window, or None", "slots of a sliding-window cache (for testing)"
    )
    toggles: RuntimeToggles = option(
        RuntimeToggles(), "a RuntimeToggles", "switches between equivalent ways of computing"
    )
    vision_sidecar: SidecarPath | None = option(
        None, "a path, 'auto' or None", "the image tower's install; this build refuses it"
    )
    verify: Literal["none", "receipt", "full"] = option(
        "none", "'none', 'receipt' or 'full'", "checksums to check before opening"
    )
    verify_reads: Bool = option(
        False, "True or False", "check every expert that is read against the install's checksums"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "'auto', 'float32', 'bfloat16' or 'float16'",
        "activations; 'auto' is float32 on a CPU and the install's own dtype on a GPU",
    )
    device: Literal["auto", "cpu", "gpu"] = option(
        "auto", "'auto', 'cpu' or 'gpu'", "where the model runs"
    )
    kernels: Literal["auto", "reference"] = option(
        "auto",
        "'auto' or 'reference'",
        "kernels of our own where they win, or MLX's operations alone (to tell a fault apart)",
    )

    chat_date: date | None = option(
        None, "a date or an ISO date string", "the day that chat templates see; None is today"
    )

    @model_validator(mode="after")
    def _consistent(self) -> OpenOptions:
        if self.min_auto_context and self.max_context != "auto":
            raise ValueError(
                f"min_auto_context={self.min_auto_context} applies to max_context='auto' alone, "
                f"but max_context={self.max_context}; drop one of them"
            )
        if self.acceptance != "auto" and self.speculation.is_off:
            raise ValueError(
                f"acceptance={self.acceptance!r} has no effect: speculation is off; name a drafter "
                "in speculation, or use acceptance='auto'"
            )
        for name in ("dflash", "prompt_lookup"):
            policy = getattr(self.speculation, name)
            if self.acceptance == "rejection" and policy.kind == "fixed":
                raise ValueError(
                    f"acceptance='rejection' needs a drafter with probabilities, but speculation "
                    f"names {name}={policy}; works: 'auto' or 'match'"
                )
        return self

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **changes: Any) -> OpenOptions:
        """The pinned defaults, overlaid with the variables that are set, then with `changes`.

        Reads TURBOSPARK_PREFILL_CHUNK, _EXPERT_RESIDENCY, _EXPERT_DISK_IO, _CHAT_DATE, _MTP_DRAFT,
        _DFLASH_DRAFT and the toggles'. A drafter whose variable is not set stays off.
        """
        return cls(**{**_environment(environ, changes), **changes})

    @classmethod
    def interactive(cls, environ: Mapping[str, str] | None = None, **changes: Any) -> OpenOptions:
        """For a person at a terminal: slots, residency and context automatic, environment read.

        Speculation follows the environment, where an unset MTP variable means "if the install has
        it"; the block drafter opens only when its variable names a width, since it seldom pays.
        """
        values: dict[str, Any] = {
            "expert_cache_slots": "auto",
            "expert_residency": ExpertResidency.AUTO,
            "max_context": "auto",
            **_environment(environ, changes),
        }
        if "speculation" not in changes:
            policies = DraftPolicies.from_env(environ)
            quiet = policies.dflash.kind == "auto"
            values["speculation"] = policies.replace(dflash="off") if quiet else policies
        return cls(**{**values, **changes})


_VARIABLES = {
    "prefill_chunk": "PREFILL_CHUNK",
    "expert_residency": "EXPERT_RESIDENCY",
    "chat_date": "CHAT_DATE",
}


def _environment(environ: Mapping[str, str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """OpenOptions fields that the environment sets and the caller does not (`given` wins)."""
    values: dict[str, Any] = {}
    for name, suffix in _VARIABLES.items():
        text = env_variable(suffix, environ)
        if text is not None and name not in given:
            values[name] = _number(text)
            _check_variable(suffix, text, name, values[name])
    disk_io = env_flag("EXPERT_DISK_IO", environ)
    if disk_io is not None and "expert_disk_io" not in given:
        values["expert_disk_io"] = disk_io
    if "toggles" not in given:
        values["toggles"] = RuntimeToggles.from_env(environ)
    if "speculation" not in given:
        named: dict[str, Any] = {}
        if env_variable(MtpPolicy.VARIABLE, environ) is not None:
            named["mtp"] = MtpPolicy.from_env(environ)
        if env_variable(DflashPolicy.VARIABLE, environ) is not None:
            named["dflash"] = DflashPolicy.from_env(environ)
        values["speculation"] = DraftPolicies(**named)
    return values


def _number(text: str) -> int | str:
    """An integer where `text` is one; longer ones than any option takes stay text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else text


def _check_variable(suffix: str, text: str, name: str, value: Any) -> None:
    """Refuse a variable's value by the variable's name rather than the field's."""
    try:
        OpenOptions(**{name: value})
    except OptionError as error:
        raise OptionError(f"{ENV_PREFIX}{suffix}={short(text)}: {error}") from None


# --- generating -------------------------------------------------------------------------------


def _as_strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_schema(value: Any) -> Any:
    """A JSON schema as text; a text is taken as it stands."""
    if not isinstance(value, dict):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{short(value)} is not JSON: {error}") from None


Schema = Annotated[str, Strict(), BeforeValidator(_as_schema)]
Text = Annotated[str, Strict()]
Strings = Annotated[tuple[Annotated[str, Strict()], ...], BeforeValidator(_as_strings)]


class GenerationOptions(FrozenOptions):
    """One generation: its length, its sampling and its stops. Raises OptionError."""

    max_new_tokens: Positive | None = option(
        1024,
        "an integer >= 1, or None",
        "tokens to generate at most; prompt + this must fit max_context; None goes on to its end",
    )
    temperature: Annotated[Real, Field(ge=0)] = option(
        0.2, "a finite number >= 0 (0 is greedy)", "applied after the truncations"
    )
    top_k: Annotated[Int, Field(ge=0, le=MAX_TOP_K)] = option(
        64, f"an integer 0..{MAX_TOP_K} (0 is off)", "keep the k most probable tokens"
    )
    top_p: Annotated[Real, Field(gt=0, le=1)] = option(
        0.95, "a number > 0 and <= 1 (1 is off)", "keep the smallest head of this probability mass"
    )
    min_p: Annotated[Real, Field(ge=0, lt=1)] = option(
        0.0, "a number >= 0 and < 1 (0 is off)", "drop tokens below this fraction of the top's"
    )
    repetition_penalty: Annotated[Real, Field(gt=0)] = option(
        1.0, "a finite number > 0 (1 is off)", "over prompt and answer, once per distinct token"
    )
    presence_penalty: Annotated[Real, Field(ge=-2, le=2)] = option(
        0.0, "a number -2..2 (0 is off)", "subtracted once from every generated token"
    )
    frequency_penalty: Annotated[Real, Field(ge=-2, le=2)] = option(
        0.0, "a number -2..2 (0 is off)", "subtracted per occurrence among generated tokens"
    )
    seed: Annotated[Int, Field(ge=0, lt=2**64)] | None = option(
        None, "an integer 0..2^64-1, or None for the clock", "same seed, same tokens"
    )
    stop: Strings = option((), "a string or a list of strings", "texts that end the answer")
    stop_token_ids: tuple[Natural, ...] = option(
        (), "a list of token ids >= 0", "token ids that end the answer, besides the model's own"
    )
    ignore_eos: Bool = option(
        False, "True or False", "run through the model's own end tokens (for measuring)"
    )
    draft_tokens: Annotated[Int, Field(ge=0, le=MAX_DRAFT_WIDTH)] | None = option(
        None,
        f"an integer 0..{MAX_DRAFT_WIDTH} (0 is off), or None",
        "proposals per round; None is the open drafter's width",
    )

    json_schema: Schema | None = option(
        None,
        "a JSON schema (a dict or its text), or None",
        "hold the answer to this schema",
    )
    regex: Text | None = option(
        None, "a regular expression, or None", "hold the answer to this expression, as a whole"
    )
    grammar: Text | None = option(
        None, "a Lark grammar with a rule 'start', or None", "hold the answer to this grammar"
    )

    @property
    def constraint(self) -> tuple[str, str] | None:
        """(option, text) of what the answer is held to; None for nothing."""
        given = {name: getattr(self, name) for name in ("json_schema", "regex", "grammar")}
        return next(((name, text) for name, text in given.items() if text is not None), None)

    @model_validator(mode="after")
    def _one_constraint(self) -> GenerationOptions:
        given = [n for n in ("json_schema", "regex", "grammar") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} were given; an answer is held to one of them")
        if given and self.ignore_eos:
            raise ValueError(f"ignore_eos goes past the end that {given[0]} sets; drop one of them")
        return self

    @model_validator(mode="after")
    def _nucleus_needs_top_k(self) -> GenerationOptions:
        if self.top_p < 1 and self.temperature > 0 and self.top_k == 0:
            raise ValueError(
                f"top_p={self.top_p} with temperature={self.temperature} needs top_k > 0, "
                f"but top_k=0; works: top_k 1..{MAX_TOP_K} or top_p=1"
            )
        return self


__all__ = [
    "AUTO_DRAFT_WIDTH",
    "DEFAULT_MAX_CONTEXT",
    "EXPERT_CACHE_SLOTS",
    "MAX_DRAFT_WIDTH",
    "DflashPolicy",
    "DraftPolicies",
    "ExpertResidency",
    "GenerationOptions",
    "KvQuant",
    "LiveToggles",
    "LoadGuard",
    "LookupPolicy",
    "MtpPolicy",
    "OpenOptions",
    "RuntimeToggles",
]
