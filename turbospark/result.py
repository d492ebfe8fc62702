"""What a generation made and what it cost.

Knows figures. Does not know how tokens are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turbospark import display
from turbospark.counters import PhaseCounters
from turbospark.speculation.stats import SpeculationStats


@dataclass(frozen=True)
class GenerationResult(display.Shown):
    """What a generation made and what it cost. Seconds are the runner's own: time that the
    consumer of a stream takes between two events is nobody's.
    """

    token_ids: list[int]
    """Generated ids; the end token that stopped them is not among them."""
    text: str | None
    """Their text up to a stop string; None when the install has no tokenizer."""
    stop_reason: str
    """One of `generation.STOP_REASONS`."""
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    stop_token_id: int | None = None
    """The end token that was sampled, when one stopped the generation."""
    stop_string: str | None = None
    seed: int | None = None
    """The seed in force, also when it came from the clock; None when greedy."""
    kv_position: int = 0
    kv_backed_token_ids: list[int] = field(default_factory=list, repr=False)
    reused_prefix_tokens: int = 0
    session_slot_evicted: bool = False
    peak_memory_pressure: str | None = None
    speculation: SpeculationStats | None = None
    """What drafting brought; None when nothing was drafted."""
    phases: PhaseCounters = field(default_factory=PhaseCounters, repr=False)
    """Counters of this generation alone."""

    @property
    def new_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens actually fed per second; None when nothing was measured."""
        fed = self.prompt_tokens - self.reused_prefix_tokens
        return fed / self.prefill_seconds if self.prefill_seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens per second; None when there are none."""
        return self.new_tokens / self.decode_seconds if self.new_tokens else None

    def _repr_html_(self) -> str:
        text = self.text if self.text is not None else ", ".join(map(str, self.token_ids))
        parts = display.quoted(text), display.facts(self.figures())
        return display.card("Answer", f"{self.new_tokens} tokens", *parts)

    def figures(self) -> dict[str, str | None]:
        """How it ended and how fast it came, in words; None for what did not happen."""
        reused = f", {self.reused_prefix_tokens} reused" if self.reused_prefix_tokens else ""
        end = self.stop_reason
        if self.stop_string is not None:
            end += f": {self.stop_string!r}"
        elif self.stop_token_id is not None:
            end += f": token {self.stop_token_id}"
        fed = f"{self.prompt_tokens} tokens{reused} in {self.prefill_seconds:.2f} s"
        made = f"{self.new_tokens} tokens in {self.decode_seconds:.2f} s"
        hits = self.phases.expert_hit_rate
        return {
            "stopped": end,
            "prompt": _joined(fed, display.speed(self.prefill_tokens_per_second)),
            "answer": _joined(made, display.speed(self.decode_tokens_per_second)),
            "seed": None if self.seed is None else str(self.seed),
            "expert hits": None if hits is None else f"{hits:.1%}",
            "speculation": None if self.speculation is None else str(self.speculation),
        }

    def __str__(self) -> str:
        return self.text if self.text is not None else str(self.token_ids)


def _joined(*words: str | None) -> str:
    return ", ".join(word for word in words if word)
