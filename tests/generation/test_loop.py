"""The generation loop, driven by an engine that plays back a script instead of a model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, write

from turbospark import counters, generation
from turbospark.counters import PHASES, PhaseClock
from turbospark.errors import (
    ContextOverflowError,
    EmptyPromptError,
    NonFiniteLogitsError,
    TokenIdError,
    TokenizerMissingError,
    TurbosparkError,
)
from turbospark.generation import (
    Finished,
    Prefill,
    Tail,
    Token,
    collect,
    generate_events,
)
from turbospark.options import GenerationOptions
from turbospark.text.tokenizer import Tokenizer

VOCAB = 300
EOT = 258  # <|im_end|> of the byte-level tokenizer


class Script:
    """An engine whose next token is the next one of a list; records everything it is asked."""

    def __init__(
        self, tokens, chunk=4, max_context=64, kept=0, work=0.0, separate=False, sleep=None
    ):
        self.tokens = list(tokens)
        self.chunk = chunk
        self.max_context = max_context
        self.vocab_size = VOCAB
        self.clock = PhaseClock()
        self.kept = kept
        self.work = work
        self.separate = separate
        self.sleep = sleep or (lambda seconds: None)
        self.log: list[object] = []
        self.fed: list[int] = []

    def logits(self) -> np.ndarray:
        with self.clock.phase("build"):
            self.sleep(self.work)
            row = np.zeros(VOCAB, dtype=np.float32)
            row[self.tokens.pop(0) if self.tokens else 0] = 5.0
            return row

    def begin(self, ids):
        self.log.append("begin")
        self.fed = list(ids[: self.kept])
        return self.kept

    def prefill_steps(self, ids, kept) -> Iterator[tuple[int, np.ndarray | None]]:
        try:
            for at in range(kept, len(ids), self.chunk):
                part = ids[at : at + self.chunk]
                self.fed += part
                self.log.append(("chunk", len(part)))
                last = at + self.chunk >= len(ids)
                if last and not self.separate:
                    yield len(self.fed), self.logits()
                else:
                    yield len(self.fed), None
            if self.separate:
                yield len(self.fed), self.logits()
        finally:
            self.log.append("prompt closed")

    def step(self, token):
        self.fed.append(token)
        self.log.append(("step", token))
        return self.logits()

    def likeliest(self, logits):
        return int(np.argmax(logits)) if np.isfinite(logits).all() else -1

    def finish(self):
        return {
            "kv_position": len(self.fed),
            "kv_backed_token_ids": list(self.fed),
            "reused_prefix_tokens": self.kept,
        }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("tokenizer"), byte_level()))


def ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


def run(engine, options=None, tokenizer=None, prompt=(1, 2, 3), cancel=None, **changes):
    options = (options or GenerationOptions(temperature=0, max_new_tokens=20)).replace(**changes)
    stops = tokenizer.stop_ids if tokenizer else {}
    events = list(generate_events(engine, list(prompt), options, tokenizer, stops, cancel))
    assert isinstance(events[-1], Finished)
    assert not any(isinstance(event, Finished) for event in events[:-1])
    return events, events[-1].result


def text_of(events) -> str:
    return "".join(
        e.delta if isinstance(e, Token) else e.text for e in events if isinstance(e, (Token, Tail))
    )


# --- the shape of a run ---------------------------------------------------------------------------


def test_events_come_in_order_and_join_to_the_text(tokenizer):
    engine = Script([*ids("hey"), EOT])
    events, result = run(engine, tokenizer=tokenizer, prompt=range(6))
    assert events[:2] == [Prefill(4, 6), Prefill(6, 6)]
    assert [e for e in events if isinstance(e, Token)] == [
        Token(i, id_, char) for i, (id_, char) in enumerate(zip(ids("hey"), "hey", strict=True))
    ]
    assert text_of(events) == result.text == "hey"
    assert result.token_ids == ids("hey") and result.new_tokens == 3
    assert result.prompt_tokens == 6 and result.stop_reason == "end_of_turn"
    assert str(result) == "hey"


def test_the_last_token_of_a_run_is_never_fed(tokenizer):
    engine = Script(ids("abcdef"))
    _, result = run(engine, tokenizer=tokenizer, max_new_tokens=4)
    assert result.token_ids == ids("abcd") and result.stop_reason == "max_tokens"
    assert engine.fed == [1, 2, 3, *ids("abc")]
    assert result.kv_position == 6 and result.kv_backed_token_ids == engine.fed


def test_the_kept_prefix_is_not_fed_again(tokenizer):
    engine = Script([EOT], kept=5)
    events, result = run(engine, tokenizer=tokenizer, prompt=range(8))
    assert engine.log[:2] == ["begin", ("chunk", 3)]
    assert result.reused_prefix_tokens == 5 and events[0] == Prefill(8, 8)
    assert result.prefill_tokens_per_second == 3 / result.prefill_seconds


def test_logits_may_come_apart_from_the_last_chunk(tokenizer):
    events, result = run(Script([EOT], separate=True), tokenizer=tokenizer)
    assert [e for e in events if isinstance(e, Prefill)] == [Prefill(3, 3)]
    assert result.stop_reason == "end_of_turn"


def test_without_a_tokenizer_ids_run_and_text_is_none():
    events, result = run(Script([7, 8, 9]), max_new_tokens=3)
    assert result.token_ids == [7, 8, 9] and result.text is None and str(result) == "[7, 8, 9]"
    assert all(e.delta == "" for e in events if isinstance(e, Token))


def test_a_row_longer_than_the_tokenizer_is_no_problem(tokenizer):
    assert tokenizer.vocab_size < VOCAB
    _, result = run(Script([*ids("a"), VOCAB - 1, *ids("b"), EOT]), tokenizer=tokenizer)
    assert result.text == "ab" and result.new_tokens == 3


# --- stop reasons -----------------------------------------------------------------------------


def test_every_source_of_end_tokens_stops_and_says_which(tokenizer, tmp_path):
    folder = write(
        tmp_path,
        byte_level(),
        config={"eos_token": "<|endoftext|>"},
        generation={"eos_token_id": [7]},
        model_config={"eos_token_id": [5, 9]},
    )
    ends = Tokenizer.load(folder)
    endoftext = ends.token_to_id("<|endoftext|>")
    for end, reason in [
        (5, "eos"),
        (9, "eos"),
        (7, "eos"),
        (endoftext, "eos"),
        (EOT, "end_of_turn"),
    ]:
        engine = Script([65, end, 66])
        events, result = run(engine, tokenizer=ends)
        assert (result.stop_reason, result.stop_token_id) == (reason, end)
        assert result.token_ids == [65] and end not in engine.fed
        assert result.text == ends.decode([65])
        assert not any(isinstance(e, Token) and e.id == end for e in events)


def test_a_tool_call_marker_stops_as_tool_calls(tmp_path):
    harmony = ("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|end|>")
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(harmony)))
    call, inner = tokenizer.token_to_id("<|call|>"), tokenizer.token_to_id("<|end|>")
    _, result = run(Script([inner, 65, call]), tokenizer=tokenizer)
    assert result.stop_reason == "tool_calls" and result.token_ids == [inner, 65]


def test_extra_stop_ids_stop_and_ignore_eos_leaves_only_them(tokenizer):
    _, result = run(Script([65, 66]), tokenizer=tokenizer, stop_token_ids=[66])
    assert (result.stop_reason, result.stop_token_id) == ("eos", 66)
    engine = Script([EOT, 65, 66])
    _, result = run(engine, tokenizer=tokenizer, ignore_eos=True, stop_token_ids=[66])
    assert result.token_ids == [EOT, 65] and result.stop_token_id == 66
    assert result.text == tokenizer.decode([EOT, 65])


def test_an_end_token_beats_the_limit_and_the_limit_beats_cancelling(tokenizer):
    _, result = run(Script([65, EOT]), tokenizer=tokenizer, max_new_tokens=2)
    assert result.stop_reason == "end_of_turn"
    calls = iter([False, False, True])
    _, result = run(
        Script([65, 66]), tokenizer=tokenizer, max_new_tokens=1, cancel=lambda: next(calls)
    )
    assert result.stop_reason == "max_tokens"


def test_a_stop_string_beats_the_limit(tokenizer):
    _, result = run(Script(ids("abc")), tokenizer=tokenizer, stop="c", max_new_tokens=3)
    assert (result.stop_reason, result.stop_string, result.text) == ("stop_string", "c", "ab")
    assert result.token_ids == ids("abc")


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one END two", ["END"], "one "),
        ("a\n\nUser: b", ["\n\nUser:", "zzz"], "a"),
        ("社区停x", ["停"], "社区"),
        ("é\u0301é停", ["\u0301é"], "é"),
        ("👍🏽 stop👍", ["🏽 s"], "👍"),
    ],
)
def test_stop_strings_are_found_across_tokens_and_characters(tokenizer, text, stops, shown):
    engine = Script(ids(text))
    events, result = run(engine, tokenizer=tokenizer, stop=stops, max_new_tokens=50)
    assert result.stop_reason == "stop_string" and result.stop_string in stops
    assert text_of(events) == result.text == shown


def test_what_only_began_like_a_stop_string_is_released_at_the_end(tokenizer):
    events, result = run(Script([*ids("go EN"), EOT]), tokenizer=tokenizer, stop="END")
    assert events[-2] == Tail("EN") and result.text == "go EN"
    assert "".join(e.delta for e in events if isinstance(e, (Token, Tail))) == result.text


def test_an_unfinished_character_is_flushed_once(tokenizer):
    events, result = run(Script(ids("a社")[:-1]), tokenizer=tokenizer, max_new_tokens=3)
    assert events[-2] == Tail("\ufffd") and result.text == "a\ufffd"
    assert result.text == tokenizer.decode(result.token_ids)


@settings(max_examples=50, deadline=None)
@given(text=st.text("ab社é👍", min_size=1, max_size=8), stop=st.text("ab社", max_size=2))
def test_any_text_with_any_stop_ends_where_the_stop_begins(tokenizer, text, stop):
    tokens = ids(text)
    events, result = run(Script(tokens), tokenizer=tokenizer, stop=stop, max_new_tokens=len(tokens))
    expected = text[: text.index(stop)] if stop and stop in text else text
    assert text_of(events) == result.text == expected


# --- cancelling -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(8))
def test_cancelling_at_any_point_ends_with_what_there_is(tokenizer, after):
    polls = iter([False] * after + [True] * 100)
    engine = Script(ids("abcdefgh"), chunk=2)
    events, result = run(engine, tokenizer=tokenizer, prompt=range(6), cancel=lambda: next(polls))
    assert result.stop_reason == "cancelled"
    chunks, tokens = min(after, 3), max(0, after - 3)
    assert len([e for e in events if isinstance(e, Prefill)]) == chunks
    assert result.token_ids == ids("abcdefgh")[:tokens]
    assert engine.fed == [*range(2 * chunks), *result.token_ids[:-1]]
    assert result.text == text_of(events) == "abcdefgh"[:tokens]
    assert (result.decode_seconds > 0) is (tokens > 0)


def test_cancelling_when_a_token_arrives_computes_no_further_one(tokenizer):
    seen: list[Token] = []
    engine = Script(ids("abcdef"))
    options = GenerationOptions(temperature=0, max_new_tokens=6)
    for event in generate_events(
        engine, [1], options, tokenizer, {}, cancel=lambda: len(seen) == 2
    ):
        if isinstance(event, Token):
            seen.append(event)
    assert event.result.stop_reason == "cancelled" and event.result.new_tokens == 2
    assert engine.fed == [1, *ids("a")]


@pytest.mark.parametrize("steps", range(1, 6))
def test_closing_the_iterator_cancels_and_the_next_run_is_as_a_first_one(tokenizer, steps):
    engine = Script(ids("abcdefgh"), chunk=2)
    events = generate_events(
        engine, [1, 2, 3], GenerationOptions(temperature=0, max_new_tokens=8), tokenizer, {}
    )
    for _ in range(steps):
        next(events)
    events.close()
    assert engine.log[-1] == "prompt closed" if steps < 2 else "prompt closed" in engine.log
    log = list(engine.log)
    assert list(events) == [] and engine.log == log
    engine.tokens = [*ids("xy"), EOT]
    _, result = run(engine, tokenizer=tokenizer)
    assert result.text == "xy" and engine.fed == [1, 2, 3, *ids("xy")]


def test_an_error_in_a_pass_reaches_the_caller_and_leaves_the_clock_usable(tokenizer):
    class Broken(Script):
        def step(self, token):
            with self.clock.phase("build"):
                raise OSError("disk gone")

    engine = Broken(ids("ab"))
    with pytest.raises(OSError, match="disk gone"):
        run(engine, tokenizer=tokenizer)
    with engine.clock.phase("loop"):
        pass


def test_collect_needs_a_run_that_ended(tokenizer):
    options = GenerationOptions(temperature=0, max_new_tokens=2)
    assert collect(generate_events(Script(ids("ab")), [1], options, tokenizer, {})).text == "ab"
    with pytest.raises(TurbosparkError, match="without a result"):
        collect([])


# --- admission --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "numbers"),
    [
        ([], {}, EmptyPromptError, ["no tokens"]),
        ([1, VOCAB], {}, TokenIdError, ["300", "position 1", "0..299"]),
        ([1, 2, -1], {}, TokenIdError, ["-1", "position 2", "0..299"]),
        (range(60), {"max_new_tokens": 5}, ContextOverflowError, ["60", "5", "64", "65"]),
        (range(64), {"max_new_tokens": 1}, ContextOverflowError, ["64", "1"]),
        (range(200), {"max_new_tokens": 1}, ContextOverflowError, ["200", "64"]),
        ([1], {"stop": "x"}, TokenizerMissingError, ["stop="]),
    ],
)
def test_what_cannot_run_is_refused_before_any_compute(prompt, changes, error, numbers):
    engine = Script([1])
    with pytest.raises(error) as caught:
        run(engine, prompt=prompt, **changes)
    assert engine.log == [] and all(number in str(caught.value) for number in numbers)


def test_the_exact_limit_is_honoured():
    engine = Script([7] * 10)
    _, result = run(engine, prompt=range(63), max_new_tokens=1)
    assert result.stop_reason == "max_tokens" and result.kv_position == 63
    engine = Script([7] * 100, max_context=17)
    _, result = run(engine, prompt=range(7), max_new_tokens=10)
    assert result.new_tokens == 10 and len(engine.fed) == 16


def test_non_finite_logits_end_the_run_with_an_error():
    class Bad(Script):
        def logits(self):
            return np.full(VOCAB, np.nan, dtype=np.float32)

    with pytest.raises(NonFiniteLogitsError):
        run(Bad([]))


# --- sampling, seeds and time -----------------------------------------------------------------


def test_a_seeded_run_repeats_and_the_clocks_seed_is_reported():
    options = GenerationOptions(temperature=2.0, top_k=0, top_p=1.0, seed=3, max_new_tokens=10)
    first, second = (run(Script([]), options)[1] for _ in range(2))
    assert first.token_ids == second.token_ids and first.seed == 3
    free = run(Script([]), options, seed=None)[1]
    again = run(Script([]), options, seed=free.seed)[1]
    assert free.seed is not None and again.token_ids == free.token_ids
    assert run(Script([]), temperature=0)[1].seed is None


def test_penalties_see_prompt_and_generated_tokens_as_documented():
    class Flat(Script):
        def logits(self):
            row = np.zeros(VOCAB, dtype=np.float32)
            row[:4] = [1.0, 0.9, 0.8, 0.7]
            return row

    _, result = run(Flat([]), prompt=[0], presence_penalty=2.0, max_new_tokens=4)
    assert result.token_ids == [0, 1, 2, 3], "the prompt's 0 was not counted"


class VirtualTime:
    """Time that passes only when work is done or the clock is read (a microsecond each)."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0
        monkeypatch.setattr(counters, "perf_counter_ns", self.read)
        monkeypatch.setattr(generation, "perf_counter", lambda: self.read() / 1e9)

    def read(self) -> int:
        self.now += 1_000
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.fixture
def virtual(monkeypatch):
    return VirtualTime(monkeypatch)


def test_buckets_add_up_to_the_wall_time_of_a_generation(tokenizer, virtual):
    engine = Script(ids("abcdefgh" * 4), work=0.002, sleep=virtual.sleep)
    _, result = run(engine, tokenizer=tokenizer, max_new_tokens=30, prompt=range(20))
    wall, phases = virtual.now, result.phases
    assert phases.total_ns == sum(getattr(phases, f"{name}_ns") for name in PHASES)
    assert phases.total_ns == pytest.approx(wall, rel=0.02)
    assert result.prefill_seconds + result.decode_seconds == pytest.approx(wall / 1e9, rel=0.02)
    assert 30 * 2e6 <= phases.build_ns < 30 * 2.1e6
    assert phases.sampling_ns == 30 * 1_000 and phases.detokenize_ns == 31 * 1_000
    assert result.prefill_seconds == pytest.approx(0.002, rel=0.02)


def test_the_consumers_time_is_nobodys(tokenizer, virtual):
    engine = Script(ids("abcd"), sleep=virtual.sleep)
    options = GenerationOptions(temperature=0, max_new_tokens=4)
    events = []
    for event in generate_events(engine, [1], options, tokenizer, {}):
        virtual.sleep(1)
        events.append(event)
    result = events[-1].result
    assert virtual.now > 5e9
    assert result.prefill_seconds + result.decode_seconds < 0.001
    assert result.phases.total_ns < 1e6


def test_the_counters_of_a_result_are_its_own(tokenizer, virtual):
    engine = Script([EOT], work=0.01, sleep=virtual.sleep)
    run(engine, tokenizer=tokenizer)
    engine.tokens = [EOT]
    _, result = run(engine, tokenizer=tokenizer)
    assert result.phases.total_ns == pytest.approx(engine.clock.snapshot().total_ns / 2, rel=0.01)
