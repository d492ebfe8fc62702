"""Drafting changes how many passes an answer takes, never the answer: float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from toys import LIES, Toy, open_with, prompt_of, right, teach, wrong

from turbospark import GenerationResult, Runner
from turbospark.errors import NonFiniteLogitsError
from turbospark.generation import Token

# One or more of every family: full, ring, shared-ring, latent, recurrent and block-sparse caches,
# experts, n-grams.
FAMILIES = (
    "llama-base", "mistral-sliding", "mixtral-base", "qwen3_moe-base", "qwen2-base",
    "gemma3-text", "gemma4-e2b", "gemma4-26b-a4b", "deepseek_v2-lite", "gpt_oss-mxfp4",
    "muse_glimmer-base", "qwen3_5-base", "qwen3_5_moe-base", "qwen4_exp-base", "qwen4_exp-text",
    "spark2_5-base",
)  # fmt: skip
GREEDY = {"max_new_tokens": 21, "temperature": 0, "ignore_eos": True}
Installed = Callable[[str], Path]


def same_end(a: GenerationResult, b: GenerationResult) -> None:
    """Everything about two results but their cost."""
    for name in (
        "token_ids", "text", "stop_reason", "stop_token_id", "stop_string", "kv_position",
        "kv_backed_token_ids", "seed",
    ):  # fmt: skip
        assert getattr(a, name) == getattr(b, name), name


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_sequential_answer(
    name: str, lie: str, installed: Installed
) -> None:
    prompt, ring = prompt_of(name), {"swa_ring_capacity": 24} if "sliding" in name else {}
    with open_with(installed(name), Toy(), 8, **ring) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        teach(runner, plain.token_ids, LIES[lie])
        for width in range(1, 9):
            drafted = runner.generate(prompt, **GREEDY, draft_tokens=width)
            same_end(drafted, plain)
            stats = drafted.speculation
            assert stats is not None and stats.committed == 20
            assert drafted.phases.passes == 1 + stats.rounds
            if lie == "right":
                assert stats.accepted == stats.committed - stats.rounds and not stats.rollbacks
                assert stats.rounds == -(-20 // (width + 1))
            elif lie == "wrong":
                assert stats.accepted == 0 and stats.rounds == 20
                assert stats.rollbacks == 19  # the last token needs no proposal
            elif width > 2:
                assert stats.rounds == 7 and stats.per_position_acceptance[:3] == (1, 1, 0)


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen3_5-base", "gemma4-e2b"])
def test_a_turned_ring_and_a_recurrent_state_go_back_exactly(
    name: str, installed: Installed
) -> None:
    prompt = prompt_of(name, 70)
    with open_with(installed(name), Toy(), 5, prefix_reuse=True) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        follow = [*prompt, *plain.token_ids, 3, 4, 5]
        runner.reset()
        runner.generate(prompt, **GREEDY, draft_tokens=0)
        expected = runner.generate(follow, **GREEDY, draft_tokens=0)
        runner.reset()
        teach(runner, plain.token_ids, wrong)
        same_end(runner.generate(prompt, **GREEDY), plain)
        teach(runner, expected.token_ids, LIES["right then wrong"])
        again = runner.generate(follow, **GREEDY)
        same_end(again, expected)
        assert again.reused_prefix_tokens == expected.reused_prefix_tokens == 90


def test_streamed_experts_keep_to_their_slots_while_proposals_are_verified(
    installed: Installed,
) -> None:
    name = "qwen3_moe-base"
    options = {"expert_residency": "streamed", "expert_cache_slots": 4}
    prompt = prompt_of(name)
    with open_with(installed(name), Toy(), 8, **options) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        held = runner.memory.experts
        teach(runner, plain.token_ids, wrong)
        drafted = runner.generate(prompt, **GREEDY)
        same_end(drafted, plain)
        assert runner.memory.experts == held
        assert drafted.phases.expert_requests >= plain.phases.expert_requests
        assert drafted.phases.routed_passes > plain.phases.routed_passes


@pytest.mark.parametrize("width", [1, 3, 8])
def test_packed_keys_and_values_are_verified_too(width: int, installed: Installed) -> None:
    prompt = prompt_of("qwen3-base", 230)
    with open_with(installed("qwen3-base"), Toy(), width, kv_quant=4, max_context=400) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        for lie in LIES.values():
            teach(runner, plain.token_ids, lie)
            same_end(runner.generate(prompt, **GREEDY), plain)


# --- stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(9))
def test_an_end_token_inside_an_accepted_block_ends_the_answer_there(
    at: int, installed: Installed
) -> None:
    prompt = prompt_of("qwen3_5-base")
    with open_with(installed("qwen3_5-base"), Toy(), 4) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        stop = {**GREEDY, "stop_token_ids": (plain.token_ids[at],)}
        expected = runner.generate(prompt, **stop, draft_tokens=0)
        teach(runner, plain.token_ids, right)
        drafted = runner.generate(prompt, **stop)
        same_end(drafted, expected)
        assert drafted.stop_reason == "eos"
        # What was verified past the end left no trace.
        after = runner.prefill([7, 8])
        runner.reset()
        assert (after == runner.prefill([*drafted.kv_backed_token_ids, 7, 8])).all().item()


@pytest.mark.parametrize("length", range(1, 12))
def test_an_answer_of_any_length_is_as_long_as_asked(length: int, installed: Installed) -> None:
    prompt = prompt_of("llama-base")
    with open_with(installed("llama-base"), Toy(), 4, max_context=41) as runner:
        asked = {**GREEDY, "max_new_tokens": length}
        plain = runner.generate(prompt, **asked, draft_tokens=0)
        teach(runner, [*plain.token_ids, *range(9)], right)
        drafted = runner.generate(prompt, **asked)
        same_end(drafted, plain)
        assert drafted.new_tokens == length


@pytest.mark.parametrize("after", range(8))
def test_cancelling_takes_effect_at_the_same_token(after: int, installed: Installed) -> None:
    prompt = prompt_of("qwen3_5-base")
    with open_with(installed("qwen3_5-base"), Toy(), 3) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)

        def cancelled(**more: int) -> GenerationResult:
            seen: list[int] = []
            events = runner.stream(prompt, **GREEDY, **more, cancel=lambda: len(seen) >= after)
            for event in events:
                if isinstance(event, Token):
                    seen.append(event.id)
            return event.result

        expected = cancelled(draft_tokens=0)
        teach(runner, plain.token_ids, right)
        same_end(cancelled(), expected)


def test_a_stream_closed_in_the_middle_of_a_round_leaves_the_sequential_state(
    installed: Installed,
) -> None:
    prompt = prompt_of("qwen3_5-base")
    with open_with(installed("qwen3_5-base"), Toy(), 6) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        teach(runner, plain.token_ids, right)
        stream = runner.stream(prompt, **GREEDY)
        made = [e.id for e in (next(stream) for _ in range(6)) if isinstance(e, Token)]
        stream.close()
        held = [*prompt, *made[:-1]]
        assert runner.position == len(held)
        after = runner.step(9)
        runner.reset()
        assert (after == runner.prefill([*held, 9])).all().item()


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}],
    ids=lambda penalty: next(iter(penalty)),
)
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_penalties_and_seeds_see_what_sequential_decoding_sees(
    penalty: dict[str, float], temperature: float, installed: Installed
) -> None:
    prompt = prompt_of("llama-base")
    asked = {**GREEDY, **penalty, "temperature": temperature, "seed": 11}
    with open_with(installed("llama-base"), Toy(), 4) as runner:
        plain = runner.generate(prompt, **asked, draft_tokens=0)
        free = {k: v for k, v in asked.items() if k not in penalty}
        assert plain.token_ids != runner.generate(prompt, **free, draft_tokens=0).token_ids
        for lie in LIES.values():
            teach(runner, plain.token_ids, lie)
            same_end(runner.generate(prompt, **asked), plain)


def test_a_failure_while_tokens_are_taken_leaves_a_session_that_goes_on(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of("qwen3_5-base")
    with open_with(installed("qwen3_5-base"), Toy(), 4) as runner:
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        teach(runner, plain.token_ids, right)
        engine = runner._engine
        assert engine is not None
        verify = engine.verify
        monkeypatch.setattr(engine, "verify", lambda ids: verify(ids) * float("nan"))
        with pytest.raises(NonFiniteLogitsError):
            runner.generate(prompt, **GREEDY)
        monkeypatch.undo()
        assert runner.position == len(prompt) + 1
        same_end(runner.generate(prompt, **GREEDY), plain)


def test_sums_of_a_runner_are_those_of_its_answers(installed: Installed) -> None:
    prompt = prompt_of("llama-base")
    with open_with(installed("llama-base"), Toy([1] * 40, right), 3) as runner:
        results = [runner.generate(prompt, **GREEDY) for _ in range(2)]
        total = runner.speculation
        first, second = (r.speculation for r in results)
        assert total is not None and first is not None and second is not None
        assert total == first + second and total - first == second
        assert runner.generate(prompt, **GREEDY, draft_tokens=0).speculation is None
        assert runner.speculation == total


def test_runners_without_a_drafter_have_no_figures(installed: Installed) -> None:
    with Runner.open(installed("llama-base")) as runner:
        assert runner.speculation is None
        assert runner.resolved.drafter is None and runner.resolved.draft_width == 0
        assert runner.generate([1, 2], max_new_tokens=2).speculation is None
