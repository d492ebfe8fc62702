"""Any sequence of what a user can do to a runner, against one that computes everything anew.

Each machine keeps a list of the tokens it believes to be in the live cache; after every rule the
logits must be those of a fresh pass over exactly these tokens, to the bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation import answer, open_cpu
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from turbospark import Runner
from turbospark.generation import Token

CONTEXT = 160
TOKENS = st.integers(0, 5)  # few, so that prompts share prefixes by chance
PROMPTS = st.lists(TOKENS, min_size=1, max_size=45)
CASES: dict[str, dict[str, Any]] = {
    "llama-base": {},
    "mistral-sliding": {"swa_ring_capacity": 14},
    "gemma4-e2b": {"swa_ring_capacity": 20},
    "deepseek_v2-lite": {},
    "qwen3_5-base": {},
}


class Walk(RuleBasedStateMachine):
    """One pooled runner with reuse, one that starts over; `held` is the live conversation."""

    warm: Runner
    cold: Runner

    @initialize()
    def start(self) -> None:
        self.warm.reset()
        self.held: list[int] = []
        self.known: list[list[int]] = []
        self.saved: list[int] | None = None
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.folder.cleanup()

    @property
    def file(self) -> Path:
        return Path(self.folder.name) / "talk"

    def room(self, count: int) -> bool:
        return len(self.held) + count <= CONTEXT

    def expect(self, logits: Any) -> None:
        """`logits` are those after `held`."""
        self.cold.reset()
        assert np.array_equal(np.array(logits), np.array(self.cold.prefill(self.held)))
        assert self.warm.position == len(self.held)

    def converse(self, prompt: list[int], count: int) -> None:
        reply = answer(self.warm, prompt, count)
        expected = answer(self.cold, prompt, count)
        assert reply.tokens == expected.tokens
        assert np.array_equal(reply.logits, expected.logits)
        self.held = [*prompt, *reply.tokens[:-1]]
        self.known = [*self.known[-5:], [*prompt, *reply.tokens]]
        assert self.warm.position == len(self.held)

    @rule(prompt=PROMPTS, count=st.integers(1, 4))
    def a_new_conversation(self, prompt: list[int], count: int) -> None:
        self.converse(prompt, count)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=20), count=st.integers(1, 4))
    def a_further_turn(self, data: st.DataObject, more: list[int], count: int) -> None:
        """Extends, repeats, shortens or leaves an earlier conversation."""
        earlier = data.draw(st.sampled_from(self.known))
        keep = data.draw(st.one_of(st.just(len(earlier)), st.integers(1, len(earlier))))
        prompt = [*earlier[:keep], *more]
        if len(prompt) + count <= CONTEXT:
            self.converse(prompt, count)

    @rule(tokens=PROMPTS, chunk=st.sampled_from([None, 1, 5, 16]))
    def prefill(self, tokens: list[int], chunk: int | None) -> None:
        if self.room(len(tokens)):
            logits = self.warm.prefill(tokens, chunk=chunk)
            self.held += tokens
            self.expect(logits)

    @rule(token=TOKENS)
    def step(self, token: int) -> None:
        if self.room(1):
            logits = self.warm.step(token)
            self.held.append(token)
            self.expect(logits)

    @rule(prompt=st.lists(TOKENS, min_size=34, max_size=80), polls=st.integers(0, 5))
    def cancel(self, prompt: list[int], polls: int) -> None:
        left = iter(range(polls))
        greedy = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        *_, last = self.warm.stream(prompt, cancel=lambda: next(left, None) is None, **greedy)
        self.held = list(last.result.kv_backed_token_ids)
        assert self.warm.position == len(self.held)
        if polls:
            fed = [*prompt, *last.result.token_ids]
            assert self.held == fed[: len(self.held)]

    @rule(prompt=PROMPTS, count=st.integers(1, 3))
    def close(self, prompt: list[int], count: int) -> None:
        stream = self.warm.stream(prompt, max_new_tokens=8, temperature=0, ignore_eos=True)
        made: list[int] = []
        for event in stream:
            made += [event.id] if isinstance(event, Token) else []
            if len(made) == count:
                stream.close()  # type: ignore[attr-defined]
        self.held = [*prompt, *made[:-1]]
        assert self.warm.position == len(self.held)

    @precondition(lambda self: self.held)
    @rule()
    def save(self) -> None:
        self.warm.save_session(self.file)
        self.saved = list(self.held)

    @precondition(lambda self: self.saved)
    @rule()
    def load(self) -> None:
        assert self.saved is not None
        assert self.warm.load_session(self.file) == len(self.saved)
        self.held = list(self.saved)
        self.known = [*self.known[-5:], list(self.saved)]

    @rule()
    def reset(self) -> None:
        self.warm.reset()
        self.held = []


@pytest.mark.parametrize("name", CASES)
def test_no_sequence_of_calls_changes_an_answer(
    name: str, installed: Callable[[str], Path]
) -> None:
    options = {"max_context": CONTEXT, "prefill_chunk": 32, **CASES[name]}
    with (
        open_cpu(installed(name), prefix_reuse=True, session_slots=3, **options) as warm,
        open_cpu(installed(name), **options) as cold,
    ):
        case = type("Case", (Walk,), {"warm": warm, "cold": cold})
        run_state_machine_as_test(
            case,
            settings=settings(
                max_examples=25,
                stateful_step_count=16,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
