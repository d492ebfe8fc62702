"""The drafter of an open runner: how its rounds are made for one generation, and their sums.

Knows options, samplers and the engine. Does not know how any drafter works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from turbospark.engine import Engine
from turbospark.errors import OptionError, SpeculationUnavailableError
from turbospark.memory import MemoryReport
from turbospark.options import GenerationOptions, OpenOptions
from turbospark.resolve import Resolved
from turbospark.result import GenerationResult
from turbospark.sampling import Sampler
from turbospark.speculation.acceptance import Law, Matching, Rejection
from turbospark.speculation.draft_model import DraftModel, same_vocabulary
from turbospark.speculation.drafter import Drafter
from turbospark.speculation.lookup import PromptLookup
from turbospark.speculation.rounds import Rounds
from turbospark.speculation.stats import SpeculationStats
from turbospark.text.prompts import Prompt
from turbospark.text.tokenizer import Tokenizer

PROBE_TOKENS = 64
"""What `probe_speculation` generates: enough rounds to tell a broken drafter."""


class OpenModel(Protocol):
    """A runner, as far as a draft model needs one."""

    tokenizer: Tokenizer | None
    _engine: Engine | None

    @property
    def memory(self) -> MemoryReport:
        """Planned bytes."""

    def close(self) -> None:
        """Release the model."""


@dataclass
class Drafting:
    """One drafter, at most `width` proposals per round; `acceptance` is resolved."""

    drafter: Drafter
    width: int
    acceptance: str
    second: OpenModel | None = None
    """The runner of a draft model."""
    totals: SpeculationStats = field(init=False)

    def __post_init__(self) -> None:
        self.totals = SpeculationStats(self.drafter.name, self.width)

    def rounds(
        self, engine: Engine, options: GenerationOptions
    ) -> Callable[[Sampler], Rounds] | None:
        """What makes the rounds of a generation with `options`; None where it does not draft."""
        width = self.width if options.draft_tokens is None else options.draft_tokens
        if width == 0:
            return None

        def make(sampler: Sampler) -> Rounds:
            return Rounds(engine, self.drafter, self._law(options, sampler), width)

        return make

    def _law(self, options: GenerationOptions, sampler: Sampler) -> Law:
        if options.temperature == 0 or self.acceptance == "match":
            return Matching(sampler)
        # A sampler of its own: it follows a history that goes on with proposals.
        drafting = Sampler(options, sampler.vocab_size)
        return Rejection(sampler, drafting, sampler.uniforms())

    @property
    def memory(self) -> tuple[int, int, int]:
        """Bytes of weights, experts and caches of a second model; nothing for other drafters."""
        if self.second is None:
            return 0, 0, 0
        report = self.second.memory
        return report.weights, report.experts, report.kv

    def close(self) -> None:
        """Release a second model."""
        if self.second is not None:
            self.second.close()

    def count(self, stats: SpeculationStats | None) -> None:
        """Add a generation to the sums."""
        if stats is not None:
            self.totals = self.totals + stats


class Drafted:
    """The part of a `Runner` that answers for its drafter."""

    _drafting: Drafting | None
    generate: Callable[..., GenerationResult]

    @property
    def speculation(self) -> SpeculationStats | None:
        """What drafting brought, cumulative since open; None without a drafter."""
        return None if self._drafting is None else self._drafting.totals

    def probe_speculation(
        self, prompt: Prompt, options: GenerationOptions | None = None, **changes: Any
    ) -> SpeculationStats:
        """Generate, 64 tokens at most where nothing else is asked, and say what drafting brought.

        Raises SpeculationUnavailableError where fewer than 2 % of at least 50 first proposals are
        accepted, or nothing is proposed; prompt lookup, which has no weights, is not judged.
        """
        if options is None:
            changes = {"max_new_tokens": PROBE_TOKENS, **changes}
        stats = self.generate(prompt, options, **changes).speculation
        if stats is None:
            raise SpeculationUnavailableError("nothing was drafted: no drafter, or draft_tokens=0")
        stats.check()
        return stats


def open_drafting(
    resolved: Resolved,
    options: OpenOptions,
    engine: Engine,
    tokenizer: Tokenizer | None,
    open_model: Callable[[str, OpenOptions], OpenModel],
) -> Drafting | None:
    """The drafter that was chosen, open; None where none was."""
    if resolved.drafter is None or resolved.acceptance is None:
        return None
    width, acceptance = resolved.draft_width, resolved.acceptance
    if engine.watcher is not None:
        return Drafting(engine.watcher, width, acceptance)
    if resolved.drafter == "prompt_lookup":
        return Drafting(PromptLookup(), width, acceptance)
    name = options.speculation.draft_model
    assert name is not None  # nothing else is chosen
    second = open_model(name, _second_options(resolved, options))
    try:
        drafter = _draft_model(name, second, engine, tokenizer)
    except BaseException:
        second.close()
        raise
    return Drafting(drafter, width, acceptance, second)


def _second_options(resolved: Resolved, options: OpenOptions) -> OpenOptions:
    """A draft model runs where and as the verifying one does; it keeps its conversations."""
    return OpenOptions(
        max_context=resolved.max_context,
        load_guard=options.load_guard,
        expert_cache_slots=options.expert_cache_slots,
        expert_residency=options.expert_residency,
        session_slots=resolved.session_slots,
        prefix_reuse=True,
        prefill_chunk=options.prefill_chunk,
        verify=options.verify,
        dtype=options.dtype,
        device="cpu" if resolved.device == "cpu" else "gpu",
    )


def _draft_model(
    name: str, second: OpenModel, engine: Engine, tokenizer: Tokenizer | None
) -> DraftModel:
    model = second._engine
    assert model is not None
    if not same_vocabulary(tokenizer, second.tokenizer):
        raise SpeculationUnavailableError(
            f"draft_model={name!r} has another vocabulary than the model it drafts for; use a "
            "model of the same tokenizer"
        )
    if tokenizer is None and model.vocab_size != engine.vocab_size:
        raise SpeculationUnavailableError(
            f"draft_model={name!r} has {model.vocab_size} token ids, the model it drafts for "
            f"{engine.vocab_size}, and neither has a tokenizer; use a model of the same vocabulary"
        )
    return DraftModel(model, engine.vocab_size)


def check_draft_tokens(options: GenerationOptions, drafting: Drafting | None) -> None:
    """Refuse a number of proposals that the open drafter does not make."""
    asked = options.draft_tokens
    if not asked:
        return
    if drafting is None:
        raise OptionError(
            f"draft_tokens={asked}, but no drafter is open; name one in speculation when opening"
        )
    if asked > drafting.width:
        raise OptionError(
            f"draft_tokens={asked} exceeds the width {drafting.width} that drafter "
            f"{drafting.drafter.name} was opened with"
        )
