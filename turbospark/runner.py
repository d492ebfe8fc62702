"""An open model: the public surface of the library.

Knows how the rooms are put together at open, and answers for what is open. Does not know how a
token is made (`engine`), chosen (`sampling`) or spelled (`text`).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from turbospark import display, memory
from turbospark.counters import PhaseCounters
from turbospark.drafting import Drafted, Drafting, check_draft_tokens, open_drafting
from turbospark.engine import Engine
from turbospark.errors import (
    OptionError,
    RunnerBusyError,
    RunnerClosedError,
    UnsupportedError,
)
from turbospark.families import family_for_wire
from turbospark.families.base import Family
from turbospark.generation import (
    Event,
    Finished,
    GenerationResult,
    Prefill,
    admit,
    collect,
    generate_events,
    pieces,
    with_progress,
)
from turbospark.install.arch import ArchConfig
from turbospark.install.files import as_path
from turbospark.install.models import resolve as resolve_path
from turbospark.install.opening import Install
from turbospark.memory import MemoryReport
from turbospark.opening import load
from turbospark.options import GenerationOptions, LiveToggles, OpenOptions
from turbospark.policies import short
from turbospark.resolve import Resolved, configured, resolve, resolve_caches, resolve_context
from turbospark.runner_card import card
from turbospark.speculation.opening import drafter_specs
from turbospark.steered import Steered, placed
from turbospark.steering import SteeringPolicy
from turbospark.text.grammar import Constraint, one_call
from turbospark.text.prompts import Prompt, encode, needed
from turbospark.text.tokenizer import Tokenizer, load_with_stops
from turbospark.text.turns import Piece, answer_only, splitter


class Runner(display.Shown, Steered, Drafted):
    """A model ready to generate; made by `Runner.open`.

    Usable from any thread; one generation runs at a time. Other threads wait for their turn,
    a second generation begun by the same thread while a stream is open is refused.
    """

    def __init__(
        self,
        path: Path,
        options: OpenOptions,
        resolved: Resolved,
        family: Family,
        arch: ArchConfig,
        engine: Engine,
        weights_bytes: int,
        tokenizer: Tokenizer | None,
        stop_ids: Mapping[int, str],
        manifest_sha256: str,
        drafting: Drafting | None,
    ) -> None:
        self.path = path
        self.options = options
        self.resolved = resolved
        self.arch = arch
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        """Token id -> stop reason, for every end token of the model."""
        self._family = family
        # What caches depend on besides tokens and shapes.
        self._binding = {
            "install": manifest_sha256,
            "about_install": path.name,
            "dtype": resolved.dtype,
            "kv_quant": resolved.kv_quant,
            "kv_balance": resolved.kv_balance,
            "drafter": engine.watcher.name if engine.watcher is not None else "none",
        }
        self._steer(SteeringPolicy.of(options.steering))
        self._engine: Engine | None = engine
        self._drafting = drafting
        self._weights_bytes = weights_bytes
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._process = os.getpid()

    @classmethod
    def open(
        cls,
        model: str | Path,
        options: OpenOptions | None = None,
        *,
        progress: bool = False,
        **changes: Any,
    ) -> Runner:
        """Open an install by path or by the name of an installed model.

        `changes` are OpenOptions fields: `Runner.open(model, max_context=8192)`. `progress` shows
        a bar while weights are read. Everything that can be refused is refused here: raises
        ModelFormatError and its subclasses for the files, OptionError and UnsupportedError for the
        options.
        """
        options = OpenOptions.of(options).replace(**changes)
        path = resolve_path(model)
        install = Install.open(path, expecting=options.expecting, verify=options.verify)
        try:
            return cls._build(install, options, progress)
        finally:
            install.close()

    @classmethod
    def _build(cls, install: Install, options: OpenOptions, progress: bool) -> Runner:
        family = family_for_wire(install.arch.family)
        values, config = configured(install, family)
        resolved = resolve(options, install, family, values["model_type"], config)
        specs = resolve_caches(options, family, family.cache_specs(config))
        specs += drafter_specs(resolved.drafter, family, config)
        trained = values.get("max_position_embeddings")
        resolved = resolve_context(resolved, options, install, specs, trained)
        steering = placed(options.steering, family, resolved, install.arch)
        engine, weights_bytes = load(install, options, family, config, specs, resolved, progress)
        engine.set_steering(steering)
        eos = values.get("eos_token_id")
        tokenizer, stops = load_with_stops(install.path, eos)
        return cls(
            install.path,
            options,
            resolved,
            family,
            install.arch,
            engine,
            weights_bytes,
            tokenizer,
            stops,
            install.manifest.sha256,
            open_drafting(resolved, options, engine, tokenizer, cls.open),
        )

    # --- token level ------------------------------------------------------------------------------

    def prefill(self, ids: Sequence[int], *, chunk: int | None = None) -> mx.array:
        """Feed `ids` after the present position -> float32 logits [vocab] of what follows.

        `chunk` overrides the opened `prefill_chunk` for this call. Raises EmptyPromptError,
        TokenIdError, ContextOverflowError before any compute.
        """
        if chunk is not None and not self.supports_chunked_prefill:
            raise UnsupportedError(f"prefill(chunk={chunk}): {self.chunked_prefill_refusal}")
        with self._exclusive() as engine:
            tokens = engine.check(ids)
            engine.check_room(len(tokens))
            size = engine.prefill_chunk if chunk is None else chunk
            *_, (_, logits) = engine.feed(tokens, 0, size)
            assert logits is not None
            return logits

    def step(self, token: int) -> mx.array:
        """Feed one token -> float32 logits [vocab] of what follows."""
        with self._exclusive() as engine:
            (token,) = engine.check([token])
            engine.check_room(1)
            return engine.step(token)

    def score(self, ids: Sequence[int]) -> mx.array:
        """Teacher-forced float32 logits [T, vocab] of `ids`, from an empty cache."""
        with self._exclusive() as engine:
            tokens = engine.check(ids)
            engine.reset(everything=False)
            engine.check_room(len(tokens))
            return engine.score(tokens, engine.prefill_chunk)

    def reset(self) -> None:
        """Forget every conversation, parked ones too; buffers stay."""
        with self._exclusive() as engine:
            engine.reset()

    def save_session(self, path: str | Path) -> None:
        """Write the live conversation (tokens, caches, snapshots) to one safetensors file.

        The file appears whole or not at all, and only a runner of the same install, dtype and
        cache layout can load it. Raises SessionFileError, SessionBrokenError,
        OptionError.
        """
        with self._exclusive() as engine:
            engine.save(as_path(path, "path"), self._binding)

    def load_session(self, path: str | Path) -> int:
        """Make a saved conversation the live one -> its number of tokens.

        The present one is parked when `session_slots` leave room, else forgotten. With
        `prefix_reuse` the next prompt continues from what it shares, without it a prompt forgets
        the session, with a warning; `prefill` and `step` always continue it. Raises
        SessionFileError, and then nothing has changed.
        """
        with self._exclusive() as engine:
            return engine.load(as_path(path, "path"), self._binding)

    # --- text level -------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        progress: bool = False,
        **changes: Any,
    ) -> GenerationResult:
        """Generate from a text, chat messages or token ids, and wait for the whole answer.

        `progress` shows a bar of what takes more than a moment, prompt and answer.
        """
        events = self.stream(prompt, options, **changes)
        if progress:
            limit = GenerationOptions.of(options).replace(**changes).max_new_tokens
            events = with_progress(events, limit or self.max_context)
        return collect(events)

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        cancel: Callable[[], bool] | None = None,
        **changes: Any,
    ) -> Iterator[Event]:
        """Events of a generation as they happen; closing the iterator cancels it.

        A string is continued as it stands; a list of messages goes through the chat template.
        `changes` are GenerationOptions fields. Refusals are raised by this call, not by the
        iterator.
        """
        chosen = GenerationOptions.of(options).replace(**changes)
        if cancel is not None and not callable(cancel):
            raise OptionError(f"cancel={short(cancel)}; expected a function without arguments")
        engine = self._open_engine()
        tokens = engine.check(self.encode(prompt))
        admit(engine, tokens, chosen, self.tokenizer)
        check_draft_tokens(chosen, self._drafting)
        constraint = Constraint.of(chosen, self.tokenizer, engine.vocab_size)
        if engine.pool.live.loaded and not engine.prefix_reuse:
            warnings.warn(
                f"this prompt forgets the loaded session of {engine.position} tokens, since "
                "prefix_reuse is off; set runner.prefix_reuse = True to continue it",
                stacklevel=2,
            )
        return self._events(tokens, chosen, cancel, constraint)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: GenerationOptions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        reasoning: str = "off",
        cancel: Callable[[], bool] | None = None,
        **changes: Any,
    ) -> Iterator[Piece | Prefill | Finished]:
        """The answer to `messages` taken apart: Content, Reasoning, ToolCall, ReleasedToolSpan.

        `tools` are JSON schemas as the OpenAI API takes them; `tool_choice` is auto, required (the
        answer is one call) or a tool's name (a call of this one); `reasoning` is off, low, medium,
        high or xhigh. Prefill comes before; Finished, with the text as written, at the end.
        Refusals are raised by this call.
        """
        tokenizer = needed(self.tokenizer, "a chat", self.path)
        chosen = GenerationOptions.of(options).replace(**changes)
        prompt = tokenizer.render(
            messages, tools=tools, reasoning=reasoning, now=self.options.chat_date
        )
        held = "" if chosen.constraint is None else chosen.constraint[0]
        calls = tool_choice != "auto"
        if held and (tools or calls):
            raise OptionError(f"{held} leaves no room for calls; give tools or {held}, not both")
        if calls:
            chosen, held = chosen.replace(grammar=one_call(tools, tool_choice)), "tool_choice"
        if held:
            prompt = answer_only(prompt, tokenizer.dialect.name, held, reasoning)
        ids = tokenizer.encode(prompt, add_special=False)
        split = splitter(tokenizer, prompt, tools, chosen.stop, whole_call=calls)
        return pieces(self.stream(ids, chosen, cancel=cancel), split)

    def _events(
        self,
        tokens: list[int],
        options: GenerationOptions,
        cancel: Callable[[], bool] | None,
        constraint: Constraint | None,
    ) -> Iterator[Event]:
        with self._exclusive() as engine:
            drafting = self._drafting
            speculate = None if drafting is None else drafting.rounds(engine, options)
            engine.run_ahead = speculate is None and self._runs_ahead(options)
            events = generate_events(
                engine,
                tokens,
                options,
                self.tokenizer,
                self.stop_ids,
                cancel,
                speculate,
                constraint,
            )
            try:
                with closing(events):
                    for event in events:
                        if drafting is not None and isinstance(event, Finished):
                            drafting.count(event.result.speculation)
                        yield event
                        self._owner = threading.get_ident()  # another thread may continue
            finally:
                engine.end_run()

    def _runs_ahead(self, options: GenerationOptions) -> bool:
        """Whether a guessed next pass pays: greedy on a GPU, and nothing read on a guess."""
        if self._family.reads_ids:
            return False
        resident = self.arch.num_experts == 0 or self.resolved.expert_residency == "resident"
        return self.resolved.device == "gpu" and options.temperature == 0 and resident

    def encode(self, prompt: Prompt, **template: Any) -> list[int]:
        """Token ids of a text, of chat messages (through the template), or the ids themselves."""
        dated = {"now": self.options.chat_date, **template}
        return encode(prompt, self.tokenizer, self.path, dated)

    # --- what is open -----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens in the live cache."""
        return self._open_engine().position

    @property
    def max_context(self) -> int:
        """Positions the cache was allocated for."""
        return self.resolved.max_context

    @property
    def vocab_size(self) -> int:
        """Rows of the output head; may exceed the tokenizer's count."""
        return self._open_engine().vocab_size

    @property
    def buffer_allocations(self) -> int:
        """Buffers this runner allocated (KV, state, expert slots); flat while decoding."""
        engine = self._open_engine()
        kv = sum(s.states.buffers for s in engine.pool.sessions)
        return kv + (engine.store.buffers if engine.store is not None else 0)

    @property
    def memory(self) -> MemoryReport:
        """Planned bytes of this runner, and MLX's live figures for the whole process."""
        drafting = self._drafting.memory if self._drafting else (0, 0, 0)
        return memory.report(self._open_engine(), self._weights_bytes, drafting)

    @property
    def phase_counters(self) -> PhaseCounters:
        """Cumulative since open; reading never evaluates anything."""
        return self._open_engine().clock.snapshot()

    @property
    def expert_cache_slots(self) -> int:
        """Resolved slots per layer; 0 for a dense model."""
        return self.resolved.expert_cache_slots

    @property
    def expert_residency(self) -> str:
        """Resolved residency, never "auto"."""
        return self.resolved.expert_residency

    @property
    def session_slots(self) -> int:
        """Conversations kept: one live, the rest parked."""
        return self.resolved.session_slots

    @property
    def supports_chunked_prefill(self) -> bool:
        """Whether prompts are fed in chunks."""
        return self.chunked_prefill_refusal is None

    @property
    def chunked_prefill_refusal(self) -> str | None:
        """Why prompts cannot be fed in chunks; None when they can."""
        return self._family.capabilities.chunked_prefill

    @property
    def toggles(self) -> LiveToggles:
        """The eight switches, assignable; `has_effect(name)` tells which this model reads."""
        return self._open_engine().toggles

    @property
    def prefix_reuse(self) -> bool:
        """Whether the next prompt may continue from what the cache already holds."""
        return self._open_engine().prefix_reuse

    @prefix_reuse.setter
    def prefix_reuse(self, enabled: bool) -> None:
        cause = self._family.capabilities.prefix_reuse
        if enabled and cause is not None:
            raise UnsupportedError(f"prefix_reuse: not by family {self._family.name}: {cause}")
        if not isinstance(enabled, bool):
            raise OptionError(f"prefix_reuse={short(enabled)} is not valid; works: True or False")
        self._open_engine().prefix_reuse = enabled

    # --- lifetime ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the model's memory; a closed runner refuses every call."""
        with self._exclusive() as engine:
            engine.close()
            self._engine = None
            if self._drafting is not None:
                self._drafting.close()
        mx.clear_cache()

    @property
    def closed(self) -> bool:
        """Whether the model has been let go."""
        return self._engine is None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._engine is None:
            return
        try:
            self.close()
        except RunnerBusyError:
            if kind is None:  # an error on its way out says more than an open stream
                raise

    def __reduce__(self) -> str:
        raise UnsupportedError(
            f"a Runner cannot be copied or pickled; open {self.path} again where it is needed"
        )

    def _repr_html_(self) -> str:
        return card(self)

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else f"position {self._engine.position}"
        return f"<Runner {self.path.name}: {self.resolved.model_type}, {state}>"

    def _open_engine(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise RunnerClosedError(f"{self.path.name} is closed; open it again")
        if self._process != os.getpid():  # MLX's threads stay behind: a pass would never end
            raise UnsupportedError(
                f"{self.path.name} was opened before this process was forked; open it here"
            )
        return engine

    @contextmanager
    def _exclusive(self) -> Iterator[Engine]:
        """The engine for one caller at a time."""
        self._open_engine()  # a fork may have left the lock held for ever
        me = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            if self._owner == me:
                raise RunnerBusyError(
                    "this thread already has a generation open on this runner; "
                    "exhaust or close the stream first"
                )
            self._lock.acquire()
        self._owner = me
        try:
            yield self._open_engine()
        finally:
            self._owner = None
            self._lock.release()
