"""The one generation loop: prompt ids in, events out, a result at the end.

Knows tokens, text, stopping and time. Does not know models: what it drives is the small `Engine`
protocol below, which a runner implements and a test can script.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from turbospark.counters import PhaseClock
from turbospark.errors import (
    ContextOverflowError,
    EmptyPromptError,
    TokenIdError,
    TokenizerMissingError,
    TurbosparkError,
)
from turbospark.options import GenerationOptions
from turbospark.progress import DELAY, bar
from turbospark.result import GenerationResult
from turbospark.sampling import Sampler
from turbospark.speculation.rounds import Rounds
from turbospark.text.grammar import Constraint
from turbospark.text.stops import StopMatcher
from turbospark.text.tokenizer import Tokenizer
from turbospark.text.turns import Piece, Splitter

STOP_REASONS = (
    "end_of_turn",
    "tool_calls",
    "eos",
    "stop_string",
    "max_tokens",
    "context",
    "grammar",
    "cancelled",
)


class Engine(Protocol):
    """A model moving through tokens. Logits are float32 [vocab_size], evaluated."""

    max_context: int
    vocab_size: int
    clock: PhaseClock

    def begin(self, ids: Sequence[int]) -> int:
        """Get ready for a prompt -> tokens of it already in the cache (fewer than all)."""

    def prefill_steps(self, ids: Sequence[int], kept: int) -> Iterator[tuple[int, Any | None]]:
        """Feed ids[kept:], yielding (tokens held, None) per chunk and (all, logits) at the end."""

    def step(self, token: int) -> Any:
        """Feed one token -> logits of what follows."""

    def likeliest(self, logits: Any) -> int:
        """The first id of the largest of those logits; -1 if one of them is not finite."""

    def finish(self) -> Mapping[str, Any]:
        """Fields of `GenerationResult` that only the engine knows (`kv_position`, ...)."""


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefill:
    """`done` of `total` prompt tokens are in the cache."""

    done: int
    total: int


@dataclass(frozen=True)
class Token:
    """Generated token number `index` (from 0). `delta` is the text it made certain; it may be
    empty inside a character, for special tokens, and while a stop string may be forming.
    """

    index: int
    id: int
    delta: str


@dataclass(frozen=True)
class Tail:
    """Text that was held back until the end."""

    text: str

    @property
    def delta(self) -> str:
        """The same under a token's name, so that both can be printed alike."""
        return self.text


@dataclass(frozen=True)
class Finished:
    """The last event of every generation that was not closed."""

    result: GenerationResult


Event = Prefill | Token | Tail | Finished


# --- the loop ---------------------------------------------------------------------------------


def generate_events(
    engine: Engine,
    prompt_ids: Sequence[int],
    options: GenerationOptions,
    tokenizer: Tokenizer | None = None,
    stop_ids: Mapping[int, str] | None = None,
    cancel: Callable[[], bool] | None = None,
    speculate: Callable[[Sampler], Rounds] | None = None,
    constraint: Constraint | None = None,
) -> Generator[Event, None, None]:
    """Generate from `prompt_ids`; the last event is `Finished`.

    `stop_ids`: end token -> stop reason. `cancel` is asked before every chunk of the prompt and
    before every further token, never in the middle of a pass; closing the iterator cancels too.
    The last token of a run is never fed. `speculate` makes the rounds that take the place of single
    steps. Before any compute raises EmptyPromptError, TokenIdError,
    ContextOverflowError, TokenizerMissingError.
    """
    admit(engine, prompt_ids, options, tokenizer)
    ends = stop_ids or {}
    run = _Run(engine, list(prompt_ids), options, tokenizer, ends, cancel, speculate, constraint)
    try:
        while not run.finished:
            with engine.clock.phase("loop"):  # closed before yielding: consumers are not timed
                events = run.advance()
            yield from events
    finally:
        run.close()


def collect(events: Iterable[Event]) -> GenerationResult:
    """Run a generation to its end and return its result."""
    for event in events:
        if isinstance(event, Finished):
            return event.result
    raise TurbosparkError("the events ended without a result; was the stream closed?")


def with_progress(events: Iterable[Event], answer: int | None = None) -> Iterator[Event]:
    """The same events, with a bar for the prompt and, where `answer` says how many tokens it may
    have, one for the answer. A prompt that is read quickly draws none.
    """
    prompt = made = None
    try:
        for event in events:
            if isinstance(event, Prefill):
                prompt = prompt or bar("prompt", event.total, "token", leave=False, delay=DELAY)
                prompt.update(event.done - prompt.n)
            elif prompt is not None and answer is not None and made is None:
                prompt.close()
                made = bar("answer", answer, "token", leave=False, delay=DELAY)
            if isinstance(event, Token) and made is not None:
                made.update(1)
            yield event
    finally:
        for open_bar in (prompt, made):
            if open_bar is not None:
                open_bar.close()


def pieces(events: Iterator[Event], split: Splitter) -> Iterator[Piece | Prefill | Finished]:
    """Events of a generation with its text taken apart; closing it closes `events`."""
    with closing(events):  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Token):
                yield from split.push(event.id)
            elif isinstance(event, Finished):
                yield from split.finish()
                yield event
            elif isinstance(event, Prefill):
                yield event


def admit(
    engine: Engine,
    prompt_ids: Sequence[int],
    options: GenerationOptions,
    tokenizer: Tokenizer | None,
) -> None:
    """Refuse what cannot be generated, before anything is computed."""
    if len(prompt_ids) == 0:
        raise EmptyPromptError("the prompt has no tokens; give at least one")
    for position, token in enumerate(prompt_ids):
        if not 0 <= token < engine.vocab_size:
            raise TokenIdError(
                f"token id {token} at position {position} is outside the vocabulary "
                f"0..{engine.vocab_size - 1}"
            )
    wanted = options.max_new_tokens or 1
    if len(prompt_ids) + wanted > engine.max_context:
        raise ContextOverflowError(len(prompt_ids), wanted, engine.max_context)
    if tokenizer is None and any(options.stop):
        raise TokenizerMissingError(
            f"stop={options.stop!r} needs a tokenizer, and the install has no tokenizer.json; "
            "use stop_token_ids"
        )


class Sink:
    """Takes committed tokens and decides, in one fixed order, whether the run ends.

    Order: end token (not shown, not counted), stop string, token limit, end of the context.
    Cancelling comes after all of them, so that a run which ends by itself is never reported as
    cancelled.
    """

    def __init__(
        self,
        history: list[int],
        options: GenerationOptions,
        tokenizer: Tokenizer | None,
        stop_ids: Mapping[int, str],
        clock: PhaseClock,
        max_context: int,
    ) -> None:
        self.history = history
        self.prompt_len = len(history)
        self.reason: str | None = None
        self.stop_token_id: int | None = None
        self.stop_string: str | None = None
        limit = options.max_new_tokens
        self._limit = max_context - self.prompt_len if limit is None else limit
        self._full = "context" if limit is None else "max_tokens"
        self._ends = {
            **dict.fromkeys(options.stop_token_ids, "eos"),
            **({} if options.ignore_eos else stop_ids),
        }
        self._detokenizer = tokenizer.detokenizer() if tokenizer is not None else None
        self._matcher = StopMatcher(options.stop)
        self._pieces: list[str] = []
        self._clock = clock

    @property
    def generated(self) -> list[int]:
        return self.history[self.prompt_len :]

    @property
    def left(self) -> int:
        """How many more tokens may come."""
        return self._limit - (len(self.history) - self.prompt_len)

    @property
    def text(self) -> str | None:
        return "".join(self._pieces) if self._detokenizer is not None else None

    def commit(self, token: int) -> list[Event]:
        """Take one token -> its events; sets `reason` when the run is over."""
        end = self._ends.get(token)
        if end is not None:
            self.stop_token_id = token
            return self.end(end)
        index = len(self.history) - self.prompt_len
        self.history.append(token)
        events: list[Event] = [Token(index, token, self._delta(token))]
        if self._matcher.matched is not None:
            self.reason, self.stop_string = "stop_string", self._matcher.matched
        elif index + 1 >= self._limit:
            events += self.end(self._full)
        return events

    def end(self, reason: str) -> list[Event]:
        """End the run for `reason` -> the text that was still held back, if any."""
        self.reason = reason
        if self._detokenizer is None:
            return []
        with self._clock.phase("detokenize"):
            tail = self._matcher.push(self._detokenizer.flush()) + self._matcher.finish()
        if not tail:
            return []
        self._pieces.append(tail)
        return [Tail(tail)]

    def _delta(self, token: int) -> str:
        if self._detokenizer is None:
            return ""
        with self._clock.phase("detokenize"):
            delta = self._matcher.push(self._detokenizer.push(token))
        self._pieces.append(delta)
        return delta


class _Run:
    """One generation as a sequence of `advance` calls, each a pass of the model at most."""

    def __init__(
        self,
        engine: Engine,
        ids: list[int],
        options: GenerationOptions,
        tokenizer: Tokenizer | None,
        stop_ids: Mapping[int, str],
        cancel: Callable[[], bool] | None,
        speculate: Callable[[Sampler], Rounds] | None,
        constraint: Constraint | None,
    ) -> None:
        self.finished = False
        self._engine = engine
        self._ids = ids
        self._cancel = cancel
        self._constraint = constraint
        self._sampler = Sampler(options, engine.vocab_size, constraint)
        self._rounds = None if speculate is None else speculate(self._sampler)
        self._seed = self._sampler.seed if options.temperature > 0 else None
        self._sink = Sink(list(ids), options, tokenizer, stop_ids, engine.clock, engine.max_context)
        self._before = engine.clock.snapshot()
        self._prompt: Iterator[tuple[int, Any | None]] | None = None
        self._done = -1
        self._logits: Any | None = None
        self._pending: int | None = None
        self._mark = 0.0
        self._prefill_seconds = self._decode_seconds = 0.0

    def advance(self) -> list[Event]:
        """Do the next piece of work -> its events."""
        self._mark = perf_counter()
        if self._cancel is not None and self._cancel():
            return self._finish(self._sink.end("cancelled"))
        if self._logits is None and self._pending is None:
            events = self._feed_prompt()
            self._prefill_seconds += perf_counter() - self._mark
            return events
        events = self._next_token()
        if self._sink.reason is not None:
            return self._finish(events)
        self._decode_seconds += perf_counter() - self._mark
        return events

    def close(self) -> None:
        """Let go of a prompt that is not completely fed, or of a round that is not used up."""
        close = getattr(self._prompt, "close", None)
        if close is not None:
            close()
        if self._rounds is not None:
            self._rounds.stop()

    def _feed_prompt(self) -> list[Event]:
        if self._prompt is None:
            self._prompt = iter(
                self._engine.prefill_steps(self._ids, self._engine.begin(self._ids))
            )
        done, self._logits = next(self._prompt)
        if self._rounds is not None and self._logits is not None:
            self._rounds.begin(self._ids)
        if done == self._done:  # logits that come apart from the last chunk
            return []
        self._done = done
        return [Prefill(done, len(self._ids))]

    def _next_token(self) -> list[Event]:
        sink = self._sink
        if self._pending is not None and self._rounds is not None:
            token = self._rounds.token(sink.history, sink.prompt_len, sink.left)
        else:
            if self._pending is not None:
                self._logits = self._engine.step(self._pending)
            with self._engine.clock.phase("sampling"):
                token = self._choose()
        self._logits, self._pending = None, token
        events = sink.commit(token)
        if self._constraint is not None and sink.reason is None:
            with self._engine.clock.phase("sampling"):
                over = self._constraint.ended(sink.generated)
            events += sink.end("grammar") if over else []
        return events

    def _choose(self) -> int:
        """The next token; greedy decoding reads back its id alone, unless logits are faulty."""
        token = self._engine.likeliest(self._logits) if self._sampler.takes_likeliest else -1
        if token >= 0:
            return token
        return self._sampler.sample(self._logits, self._sink.history, self._sink.prompt_len)

    def _finish(self, events: list[Event]) -> list[Event]:
        if self._rounds is not None:
            self._rounds.stop()
        sink, elapsed = self._sink, perf_counter() - self._mark
        if self._pending is None:
            self._prefill_seconds += elapsed
        else:
            self._decode_seconds += elapsed
        self.finished = True
        result = GenerationResult(
            token_ids=sink.generated,
            text=sink.text,
            stop_reason=sink.reason or "cancelled",
            prompt_tokens=sink.prompt_len,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            stop_token_id=sink.stop_token_id,
            stop_string=sink.stop_string,
            seed=self._seed,
            speculation=None if self._rounds is None else self._rounds.stats(),
            phases=self._engine.clock.snapshot() - self._before,
            **self._engine.finish(),
        )
        return [*events, Finished(result)]
