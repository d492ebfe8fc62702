"""One open model moving through tokens: chunks, steps, prefix reuse, sessions, counters.

Knows the model, its states and the clock. Does not know text, sampling or the session file's
format. Within a pass only the engine, the expert stores and a drafter's round wait for results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark import session_files
from turbospark.cache.pool import SessionPool
from turbospark.cache.state import LayerStates, Snapshot
from turbospark.counters import PhaseClock
from turbospark.errors import (
    ContextOverflowError,
    EmptyPromptError,
    OptionError,
    SessionBrokenError,
    TokenIdError,
)
from turbospark.experts.base import ExpertStore
from turbospark.families.base import AfterLayer, Model
from turbospark.kernels.likeliest import likeliest_reference
from turbospark.options import LiveToggles
from turbospark.speculation.opening import Watching
from turbospark.speculation.watching import collect
from turbospark.steering import Steering

SMALL_SLICE = 4
"""Rows per pass with `prefill_steel` off: below MLX's switch to its large-M kernels."""
RUNG = 16
"""Rows before a prompt's end at which a recurrent model is remembered, besides chunk ends."""


class Engine:
    """Feeds tokens to a model; implements the protocol that `generation` drives.

    `score_values` bounds rows x keys of one pass, for back ends that hold all scores of a layer at
    once; None where attention is computed without them. `pick` takes the likeliest id of a row.
    """

    def __init__(
        self,
        model: Model,
        store: ExpertStore | None,
        pool: SessionPool,
        toggles: LiveToggles,
        *,
        device: mx.Device,
        max_context: int,
        prefill_chunk: int | None,
        prefix_reuse: bool,
        clock: PhaseClock,
        score_values: int | None = None,
        pick: Callable[[mx.array], mx.array] = likeliest_reference,
        watcher: Watching | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.pool = pool
        self.toggles = toggles
        self.device = device
        self.max_context = max_context
        self.prefill_chunk = prefill_chunk
        self.prefix_reuse = prefix_reuse
        self.vocab_size = model.vocab_size
        self.clock = clock
        self.score_values = score_values
        self.pick = pick
        self.steering: Steering | None = None
        self._probe: dict[int, mx.array] | None = None
        """Where the next passes leave every layer's output, for `residuals`."""
        self.kept = 0
        self.evicted = False
        self.watcher = watcher
        """The open drafter, where it reads every pass."""
        self.run_ahead = False
        """Guess the next token while the last one is sampled; for greedy decoding on a GPU."""
        self._ahead: _Ahead | None = None
        self._newest: _Row | None = None

    @property
    def states(self) -> LayerStates:
        return self.pool.live.states

    @property
    def position(self) -> int:
        return self.states.position

    # --- what generation drives -------------------------------------------------------------------

    def begin(self, ids: Sequence[int]) -> int:
        """Get ready for a prompt: tokens of it that the cache already holds."""
        self._drop_ahead()
        self.kept, self.evicted = 0, False
        if not self.prefix_reuse:
            self.reset(everything=False)
            return 0
        with mx.stream(self.device):
            self.kept = self.pool.try_reuse(ids)
            if self.kept == 0:
                self.evicted = self.pool.start()
        return self.kept

    def prefill_steps(self, ids: Sequence[int], kept: int) -> Iterator[tuple[int, mx.array | None]]:
        """Feed ids[kept:] chunk by chunk; yields (tokens held, None), last (all, [vocab])."""
        yield from self.feed(ids[kept:], kept, self.prefill_chunk)

    def step(self, token: int) -> mx.array:
        """Feed one token -> float32 logits [vocab] of what follows."""
        found = self._take_ahead(token)
        if found is None:
            logits = self._pass([token], head="last")
            assert logits is not None
            found = _Row(logits)
        if self.run_ahead:
            found = self._look_ahead(found)
        self._newest = found
        with self._guarded(), self.clock.phase("final_wait"):
            mx.eval(found.logits)
        return found.logits

    def likeliest(self, logits: mx.array) -> int:
        """The first id of the largest of logits [vocab], -1 if one is not finite; only it is read
        back.
        """
        row = self._newest
        known = row.id if row is not None and row.logits is logits else None
        with self.clock.phase("final_wait"), mx.stream(self.device):
            chosen: int = (self.pick(logits) if known is None else known).item()  # type: ignore
        return chosen

    def finish(self) -> dict[str, Any]:
        """What a result reports about the state it leaves behind."""
        self._drop_ahead()
        return {
            "kv_position": self.position,
            "kv_backed_token_ids": list(self.pool.live.record.tokens),
            "reused_prefix_tokens": self.kept,
            "session_slot_evicted": self.evicted,
        }

    def end_run(self) -> None:
        """After a run, however it ended: nothing of it is in flight or reported again."""
        self._drop_ahead()
        self.run_ahead = False
        self.kept, self.evicted = 0, False

    def reset(self, everything: bool = True) -> None:
        """Forget the live conversation, or every one."""
        self._drop_ahead()
        with mx.stream(self.device):
            if everything:
                self.pool.clear()
            else:
                self.pool.live.reset()

    def save(self, path: Path, binding: Mapping[str, str]) -> None:
        """Write the live session; see `session_files.save`."""
        self._drop_ahead()
        with mx.stream(self.device):
            session_files.save(path, self.pool.live, binding)

    def load(self, path: Path, binding: Mapping[str, str]) -> int:
        """Make a saved session the live one, the present one parked if there is room -> tokens.

        Where the file is refused nothing changes.
        """
        self._drop_ahead()
        with mx.stream(self.device):
            saved = session_files.load(path, self.states, binding, self.vocab_size)
            self.pool.start()
            with self._guarded():
                session_files.put(saved, self.pool.live)
        return self.position

    def close(self) -> None:
        """Release the experts' memory, files and background work."""
        self._drop_ahead()
        if self.store is not None:
            self.store.close()

    # --- passes -----------------------------------------------------------------------------------

    def feed(
        self, ids: Sequence[int], done: int, chunk: int | None
    ) -> Iterator[tuple[int, mx.array | None]]:
        """Feed `ids` after the present position in chunks; only the last row's head is computed."""
        at = 0
        for end in self._ends(len(ids), self._chunk_size(len(ids), chunk)):
            logits = None
            while at < end:
                rows = self._rows(end - at)
                part, at = list(ids[at : at + rows]), at + rows
                logits = self._pass(part, head="last" if at == len(ids) else "none")
            if self.prefix_reuse:
                self.pool.live.keep_snapshot()
            yield done + end, logits

    def verify(self, ids: list[int]) -> mx.array:
        """Feed proposals in one pass that `keep` can cut -> float32 logits [n, vocab]."""
        logits = self._pass(ids, head="all", tape=True)
        assert logits is not None
        return logits

    def keep(self, rows: int) -> None:
        """Cut the pass just verified to its first `rows`, as if it had had no others."""
        with self.working():
            self.states.keep_rows(rows)
            if self.watcher is not None:
                self.watcher.settle(rows, self.states)
            self.pool.live.record.rewind_to(self.position)
            if self.steering is not None:
                self.steering.cut(rows)
            mx.eval(self.states.arrays())

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work on the live session beside the model's own passes: a drafter's."""
        with self._guarded(), mx.stream(self.device):
            yield

    def score(self, ids: Sequence[int], chunk: int | None) -> mx.array:
        """float32 logits [T, vocab] of every position of `ids` fed after the present position."""
        size = self._chunk_size(len(ids), chunk)
        rows, at = [], 0
        while at < len(ids):
            count = min(size, len(ids) - at, self._score_rows())
            logits = self._pass(list(ids[at : at + count]), head="all")
            assert logits is not None
            rows.append(logits)
            at += count
        with self.clock.phase("final_wait"), mx.stream(self.device):
            scores = mx.concatenate(rows, axis=0)
            mx.eval(scores)
        return scores

    def residuals(self, ids: Sequence[int]) -> mx.array:
        """float32 [layers, hidden]: the stream after every layer, as it leaves steering, at the
        last of `ids` fed after the present position.
        """
        if len(ids) > 1:
            for _ in self.feed(ids[:-1], 0, self.prefill_chunk):
                pass
        self._probe = seen = dict[int, mx.array]()
        try:
            self._pass(list(ids[-1:]), head="none")
        finally:
            self._probe = None
        with mx.stream(self.device):
            stream = mx.stack([seen[layer][0, -1] for layer in sorted(seen)]).astype(mx.float32)
            mx.eval(stream)
        return stream

    def set_steering(self, steering: Steering | None) -> None:
        """Edit the stream otherwise from now on; what was cached was computed the old way."""
        self.reset()
        self.steering = steering

    def check(self, ids: Any) -> list[int]:
        """Token ids as a list of ints; refuses none, a foreign type and ids out of range."""
        try:
            tokens = np.asarray(ids)
        except ValueError:  # rows of different lengths
            raise TokenIdError("token ids must be a flat list of integers; found lists") from None
        if not isinstance(ids, np.ndarray) and any(isinstance(t, bool) for t in ids):
            raise TokenIdError("token ids must be integers; found True or False")
        if tokens.size == 0:
            raise EmptyPromptError("the prompt has no tokens; give at least one")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TokenIdError(
                f"token ids must be a flat list of integers; found {type(ids).__name__} "
                f"of {tokens.dtype} with {tokens.ndim} dimensions"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if bad.size:
            raise TokenIdError(
                f"token id {tokens[bad[0]]} at position {bad[0]} is outside the vocabulary "
                f"0..{self.vocab_size - 1}"
            )
        return [int(t) for t in tokens]

    def check_room(self, count: int) -> None:
        """Refuse to feed more than the context holds."""
        if self.position + count > self.max_context:
            raise ContextOverflowError(self.position, count, self.max_context)

    # --- how a prompt is cut ----------------------------------------------------------------------

    @staticmethod
    def _chunk_size(count: int, chunk: int | None) -> int:
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise OptionError(f"chunk={chunk!r} is not valid; give 1 or more, or None")
        return chunk or count

    def _ends(self, count: int, size: int) -> list[int]:
        """Where the chunks of a prompt end.

        A recurrent model can only go back to where its state was kept, and a chat's next prompt
        often differs from this one in its last tokens (a retry, the opening of the reply). So a
        point shortly before the end is kept too, at the price of one small pass.
        """
        ends = {*range(size, count, size), count}
        if self.prefix_reuse and self.states.recurrent and count > RUNG:
            ends.add(count - RUNG)
        return sorted(ends)

    def _rows(self, left: int) -> int:
        """Rows of the next pass within a chunk: as the toggles say, and as scores allow."""
        if self.toggles.batched_gemv_prefill is False:
            return 1
        most = left if self.toggles.prefill_steel else SMALL_SLICE
        return min(most, left, self._score_rows())

    def _score_rows(self) -> int:
        """The most rows n with n * keys <= `score_values`; keys = min(position + n, longest)."""
        if self.score_values is None:
            return self.max_context
        at, values = self.position, self.score_values
        growing = (isqrt(at * at + 4 * values) - at) // 2
        return max(1, growing, values // max(1, self.states.longest))

    # --- one pass ---------------------------------------------------------------------------------

    def _pass(self, ids: list[int], head: str, tape: bool = False) -> mx.array | None:
        """One forward pass over `ids`; head "last" -> [vocab], "all" -> [L, vocab], evaluated.

        With `tape` it may be cut afterwards.
        """
        self._drop_ahead()
        self._newest = None
        self._check_usable(len(ids))
        with self._guarded():
            with self.clock.phase("build"):
                hidden, logits = self._build(mx.array([ids]), head, tape)
            with self.clock.phase("final_wait"):
                result = hidden if logits is None else logits
                mx.eval([result, self.states.unevaluated(), self._coefficients()])
            self.states.check()
            self._commit(ids)
        return logits

    def _build(
        self, ids: mx.array, head: str, tape: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        """The graph of a pass over ids [1, L] at the present position."""
        watcher, taps = self.watcher, {} if self._probe is None else self._probe
        with mx.stream(self.device):
            self.states.begin(
                ids.shape[1],
                self.toggles.prefill_rows_attention is not False,
                tape,
                bool(self.toggles.qsa_force_dense),
            )
            hidden = self.model(ids, self.states, self._after_layer(taps))
            if watcher is not None:
                watcher.watch(ids, hidden, taps, self.states)
            if head == "none":
                return hidden, None
            if head == "last":
                return hidden, self.model.head(hidden[:, -1:])[0, 0]
            return hidden, self.model.head(hidden)[0]

    def _after_layer(self, taps: dict[int, mx.array]) -> AfterLayer | None:
        """What happens to the stream after each layer of one pass: it is steered, then read.

        `taps` receives the outputs that the drafter or a `residuals` call asked for.
        """
        steer = None if self.steering is None else self.steering.begin()
        wanted = self.watcher.taps if self.watcher else ()
        read = collect(taps, wanted if self._probe is None else range(len(self.states.specs)))
        if steer is None or read is None:
            return steer or read
        return lambda layer, hidden: read(layer, steer(layer, hidden))

    def _coefficients(self) -> list[mx.array]:
        return [] if self.steering is None else self.steering.arrays()

    def _commit(self, ids: list[int]) -> None:
        """The pass over `ids` happened: its rows are part of the past now. Call it guarded."""
        self.pool.live.record.record(ids, self.states.position)
        self.states.advance()
        if self.steering is not None:
            self.steering.commit()
        self.clock.count("calls", len(ids))
        self.clock.count("passes")
        self.clock.count("attention_calls", self.states.step.attention_calls)
        self.clock.count("fused_layers", self.states.step.fused_layers)
        for name, amount in self.states.step.counts.items():
            self.clock.count(name, amount)

    def _check_usable(self, rows: int) -> None:
        if self.pool.live.record.tainted:
            raise SessionBrokenError(
                "the last pass on this session failed and its cache cannot be continued; "
                "call reset()"
            )
        self.check_room(rows)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A failure inside leaves the session unusable until it is reset.

        Arrays built but not evaluated belong to this thread; they are evaluated here, so that the
        next pass may run in another.
        """
        try:
            yield
        except BaseException:
            self.pool.live.record.taint()
            mx.eval(self.states.unevaluated())
            if self.store is not None:
                self.store.settle()
            raise

    # --- running ahead ----------------------------------------------------------------------------

    def _look_ahead(self, row: _Row) -> _Row:
        """Start the pass that follows if the most likely token is chosen, before it is read back
        -> the row with that token.

        The device works while the host samples. The pass counts only when `step` confirms its
        token; until then the position has not moved. Whoever waits for an array waits for all that
        was started with it: so an id is started with the pass that gives it, not with the next.
        """
        if self.position >= self.max_context:
            return row
        with self._guarded(), self.clock.phase("build"):
            token = row.id
            if token is None:
                with mx.stream(self.device):
                    token = self.pick(row.logits)
                mx.async_eval(token)
            before = self.states.snapshot()
            _, logits = self._build(token.reshape(1, 1), "last")
            assert logits is not None
            with mx.stream(self.device):
                following = _Row(logits, self.pick(logits))
            mx.async_eval([following.id, logits, self.states.unevaluated(), self._coefficients()])
            self._ahead = _Ahead(token, following, before)
        return _Row(row.logits, token)

    def _take_ahead(self, token: int) -> _Row | None:
        """What the pass in flight gives, not yet waited for, if it was for `token`; else it is
        undone. The next pass is begun before anybody waits for this one.
        """
        ahead = self._ahead
        if ahead is None:
            return None
        self._check_usable(1)
        with self._guarded():
            with self.clock.phase("final_wait"):
                right = ahead.token.item() == token
            if right:
                self._ahead = None
                self._commit([token])
                return ahead.following
        self._drop_ahead()
        return None

    def _drop_ahead(self) -> None:
        """Undo a pass in flight. Its rows lie past the position; recurrent state is put back.

        It is waited for: kernels store rows where MLX does not see it, so that what comes next
        could overtake them.
        """
        if self._ahead is not None:
            mx.eval(self._ahead.following.logits)
            self.states.restore(self._ahead.before)
            self._ahead = None
            self.clock.count("passes_dropped")


@dataclass(frozen=True)
class _Row:
    """Logits [vocab] and the id int32 [1] of the largest, where it was asked for."""

    logits: mx.array
    id: mx.array | None = None


@dataclass(frozen=True)
class _Ahead:
    """A pass in flight: the token it was built for, what it gives, what was before."""

    token: mx.array
    following: _Row
    before: Snapshot
