"""Prompt lookup and draft models: what they propose, where they are refused, how they are asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from toys import prompt_of

from turbospark import DraftPolicies, OpenOptions, Runner, SpeculationStats, synth
from turbospark.cli.console import flags
from turbospark.cli.parser import opening, parse
from turbospark.errors import OptionError, SpeculationUnavailableError
from turbospark.policies import MtpPolicy
from turbospark.speculation.choose import Choice, Offer, choose
from turbospark.speculation.lookup import PromptLookup

Installed = Callable[[str], Path]
CPU = {"max_context": 128, "device": "cpu", "dtype": "float32"}
GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


# --- prompt lookup --------------------------------------------------------------------------------


def proposed(history: list[int], count: int) -> list[int]:
    lookup = PromptLookup()
    lookup.begin(history)
    lookup.keep(len(lookup.propose(history, 4, None)) + 1)  # all of the first 4 were accepted
    return [p.token for p in lookup.propose(history, count, None)]


def naive(history: list[int], count: int) -> list[int]:
    """The longest of 4, 3, 2 newest tokens that occurred before; the latest occurrence."""
    for size in (4, 3, 2):
        for at in range(len(history) - size - 1, -1, -1):
            if len(history) > size and history[at : at + size] == history[-size:]:
                start, text = at + size, list(history)
                while len(text) < start + count:
                    text.append(text[len(text) - len(history) + start])
                return text[start : start + count]
    return []


def test_lookup_proposes_what_followed_before() -> None:
    assert proposed([5, 6, 7, 8, 9, 1, 5, 6, 7], 3) == [8, 9, 1]
    assert proposed([5, 6, 1, 5, 6, 2, 9, 5, 6], 1) == [2]
    assert proposed([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1) == [9]  # three tokens before two
    assert proposed([1, 2, 3, 4], 4) == proposed([7], 4) == proposed([7, 7], 2) == []


def test_a_loop_goes_on_past_the_end() -> None:
    assert proposed([9, 1, 2, 3, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert proposed([4, 4, 4], 3) == [4, 4, 4]


def test_lookup_proposes_more_while_all_is_accepted_and_less_when_not() -> None:
    history, lookup = [7] * 9, PromptLookup()
    lookup.begin(history)
    made = []
    for kept in (5, 9, 12, 4, 1, 1, 2):
        made.append(len(lookup.propose(history, 15, None)))
        lookup.keep(kept)
    assert made == [4, 8, 15, 12, 4, 1, 1]
    assert len(lookup.propose(history, 15, None)) == 2
    lookup.begin(history)
    assert len(lookup.propose(history, 3, None)) == 3


def test_lookup_agrees_with_a_search_from_the_end_while_a_history_grows() -> None:
    rng = np.random.default_rng(0)
    history = rng.integers(0, 3, 4).tolist()
    lookup = PromptLookup()
    lookup.begin(history)
    for token in rng.integers(0, 3, 150).tolist():
        assert [p.token for p in lookup.propose(history, 4, None)] == naive(history, 4)
        history.append(token)


def test_lookup_is_exact_and_saves_passes_where_an_answer_repeats(installed: Installed) -> None:
    prompt = prompt_of("llama-base")
    with Runner.open(installed("llama-base"), OpenOptions(**CPU)) as runner:
        plain = runner.generate(prompt, **{**GREEDY, "max_new_tokens": 60})
    policy = DraftPolicies(prompt_lookup=8)
    with Runner.open(installed("llama-base"), OpenOptions(**CPU, speculation=policy)) as runner:
        # The prompt now holds the answer, so that the next one can be looked up.
        said = [*prompt, *plain.token_ids[:30], *prompt, *plain.token_ids[:3]]
        drafted = runner.generate(said, **GREEDY)
        again = runner.generate(said, **GREEDY, draft_tokens=0)
        assert drafted.token_ids == again.token_ids
        assert runner.resolved.drafter == "prompt_lookup" and runner.resolved.acceptance == "match"


# --- draft models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-base", "qwen3_5-base", "mistral-sliding", "gpt_oss-mxfp4"])
def test_a_model_that_drafts_for_itself_is_always_right(name: str, installed: Installed) -> None:
    path, prompt = installed(name), prompt_of(name)
    policy = DraftPolicies(draft_model=path, draft_model_width=3)
    options = OpenOptions(**CPU, speculation=policy)
    with Runner.open(path, options) as runner:
        for asked in (GREEDY, {**GREEDY, "temperature": 1.0, "seed": 4}):
            drafted = runner.generate(prompt, **asked)
            stats = drafted.speculation
            assert stats is not None and stats.per_position_acceptance == (1, 1, 1)
            assert stats.rounds == 6 and stats.committed == 23
        plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
        assert runner.generate(prompt, **GREEDY).token_ids == plain.token_ids
        assert runner.memory.weights > 1.9 * runner._weights_bytes


@pytest.mark.parametrize("name", ["qwen3_5-base", "llama-base"])
def test_another_model_drafts_and_conversations_are_kept_apart(
    name: str, installed: Installed, tmp_path: Path
) -> None:
    with Runner.open(installed(name), OpenOptions(**CPU)) as alone:
        vocab = alone.vocab_size
        prompts = [prompt_of(name)[:n] for n in (1, 9, 20)]
        wanted = [alone.generate(p, **GREEDY).token_ids for p in prompts]
    other = synth(
        "qwen3_5_text" if "3_5" in name else "llama", tmp_path / "other", vocab=vocab,
        progress=False, **tiny_models.SIZES,
    )  # fmt: skip
    policy = DraftPolicies(draft_model=str(other), draft_model_width=4)
    options = OpenOptions(**CPU, speculation=policy, prefix_reuse=True, session_slots=2)
    with Runner.open(installed(name), options) as runner:
        for _ in range(2):
            for prompt, tokens in zip(prompts, wanted, strict=True):
                drafted = runner.generate(prompt, **GREEDY)
                assert drafted.token_ids == tokens
                assert drafted.speculation is not None and drafted.speculation.rollbacks > 0
        sampled = runner.generate(prompts[2], temperature=1.0, seed=1, max_new_tokens=20)
        assert sampled.speculation is not None and sampled.speculation.rounds > 0


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    ours = tiny_models.talking(tmp_path / "ours")
    wordless = tiny_models.wordless(tmp_path / "wordless")
    with pytest.raises(SpeculationUnavailableError, match="has another vocabulary than"):
        Runner.open(ours, speculation=DraftPolicies(draft_model=wordless))
    wide = synth("llama", tmp_path / "wide", vocab=384, progress=False, **tiny_models.SIZES)
    with pytest.raises(
        SpeculationUnavailableError, match=r"has 384 token ids, .* 320, and neither"
    ):
        Runner.open(wordless, speculation=DraftPolicies(draft_model=wide))


# --- choosing -------------------------------------------------------------------------------------

WHOLE = {name: (f"{name}.fc.weight",) for name in ("mtp", "dflash")}
BOTH = Offer("qwen3_5", ("mtp", "dflash"), {"mtp.fc.weight", "dflash.fc.weight"}, WHOLE)
ONLY_MTP = Offer("qwen3_5", ("mtp", "dflash"), {"mtp.fc.weight"}, WHOLE)
ONLY_DFLASH = Offer("qwen3_5", ("mtp", "dflash"), {"dflash.fc.weight"}, WHOLE)
NONE = Offer("qwen3_5", ("mtp", "dflash"), {"lm_head.weight"}, WHOLE)
LLAMA = Offer("llama", (), {"mtp.fc.weight"})


@pytest.mark.parametrize(
    ("policies", "offer", "chosen"),
    [
        ({}, BOTH, None),
        ({"mtp": 3, "dflash": "auto"}, BOTH, ("mtp", 3)),
        ({"mtp": "auto", "dflash": 4}, BOTH, ("dflash", 4)),
        ({"mtp": "auto", "dflash": "auto"}, BOTH, ("dflash", 2)),
        ({"mtp": "auto", "dflash": "auto"}, ONLY_MTP, ("mtp", 2)),
        ({"mtp": "auto", "dflash": "auto"}, NONE, None),
        ({"mtp": "auto", "prompt_lookup": "auto"}, NONE, ("prompt_lookup", 8)),
        ({"mtp": "auto", "prompt_lookup": 3}, BOTH, ("prompt_lookup", 3)),
        ({"mtp": "auto", "draft_model": "m"}, BOTH, ("draft_model", 4)),
    ],
)
def test_at_most_one_drafter_is_chosen_in_the_documented_order(
    policies: dict[str, object], offer: Offer, chosen: tuple[str, int] | None
) -> None:
    found = choose(DraftPolicies(**policies), offer)
    assert (found.drafter, found.width) == (chosen or (None, 0))


def test_a_named_drafter_that_is_not_there_is_refused_with_what_would_bring_it() -> None:
    with pytest.raises(SpeculationUnavailableError, match=r"mtp=fixed.2.: this install has no mtp"):
        choose(DraftPolicies(mtp=2), NONE)
    with pytest.raises(SpeculationUnavailableError, match=r"no dflash.fc.weight; converting with"):
        choose(DraftPolicies(dflash=2), ONLY_MTP)
    # The architecture first: nobody is sent to fetch weights that cannot help.
    with pytest.raises(SpeculationUnavailableError, match="family llama has no mtp drafter"):
        choose(DraftPolicies(mtp=MtpPolicy.fixed(2)), LLAMA)
    assert "family llama has no mtp" in str(choose(DraftPolicies(mtp="auto"), LLAMA).note)
    assert choose(DraftPolicies(), NONE) == Choice(None)


def test_auto_says_which_flag_starts_a_dflash_drafter_that_lies_unused() -> None:
    note = str(choose(DraftPolicies(mtp="auto"), ONLY_DFLASH).note)
    assert note.endswith("its DFlash2 drafter starts when it is named: dflash=2")
    assert flags(note, {}).endswith("starts when it is named: --speculative-drafter dflash")
    assert choose(DraftPolicies(dflash=2), ONLY_DFLASH).drafter == "dflash"
    assert "DFlash2" not in str(choose(DraftPolicies(mtp="auto"), NONE).note)
    assert choose(DraftPolicies(), ONLY_DFLASH) == Choice(None)


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ({"mtp": 2, "prompt_lookup": 2}, "mtp=fixed.2. and prompt_lookup=fixed.2. are named"),
        ({"draft_model": "m", "dflash": 2}, "dflash=fixed.2. and draft_model='m' are named"),
        ({"draft_model_width": 3}, "draft_model_width=3 has no effect without draft_model"),
        ({"draft_model": ""}, "draft_model='' is not valid"),
    ],
)
def test_policies_that_contradict_each_other_are_refused(
    policies: dict[str, object], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        DraftPolicies(**policies)


def test_an_acceptance_without_effect_is_refused(installed: Installed) -> None:
    with pytest.raises(OptionError, match="acceptance='match' has no effect: speculation is off"):
        OpenOptions(acceptance="match")
    with pytest.raises(OptionError, match=r"names prompt_lookup=fixed\(2\); works"):
        OpenOptions(acceptance="rejection", speculation=DraftPolicies(prompt_lookup=2))
    automatic = OpenOptions(speculation=DraftPolicies(mtp="auto"), acceptance="match")
    with pytest.raises(OptionError, match=r"no drafter is open .family llama has no mtp"):
        Runner.open(installed("llama-base"), automatic)
    lookup = DraftPolicies(prompt_lookup="auto")
    with pytest.raises(OptionError, match="and prompt_lookup has none"):
        Runner.open(installed("llama-base"), speculation=lookup, acceptance="rejection")


def test_a_ring_without_room_to_go_back_is_refused(installed: Installed) -> None:
    options = {**CPU, "swa_ring_capacity": 10, "speculation": DraftPolicies(prompt_lookup=8)}
    with pytest.raises(OptionError, match="prompt_lookup may propose 8 tokens; use at least"):
        Runner.open(installed("mistral-sliding"), OpenOptions(**options))


def test_a_number_of_proposals_is_held_against_the_open_drafter(installed: Installed) -> None:
    with Runner.open(installed("llama-base"), OpenOptions(**CPU)) as runner:
        with pytest.raises(OptionError, match="draft_tokens=2, but no drafter is open"):
            runner.generate([1], draft_tokens=2, max_new_tokens=2)
        assert runner.generate([1], draft_tokens=0, max_new_tokens=2).new_tokens == 2
    options = OpenOptions(**CPU, speculation=DraftPolicies(prompt_lookup=3))
    with (
        Runner.open(installed("llama-base"), options) as runner,
        pytest.raises(OptionError, match="draft_tokens=4 exceeds the width 3 that drafter"),
    ):
        runner.generate([1], draft_tokens=4, max_new_tokens=2)


# --- the probe ------------------------------------------------------------------------------------


def test_a_probe_fails_where_first_proposals_are_hardly_ever_accepted(
    installed: Installed,
) -> None:
    broken = SpeculationStats("mtp", 2, rounds=100, offered=(100, 1), matched=(1, 0))
    with pytest.raises(SpeculationUnavailableError, match=r"1 of 100 first proposals .* than 2%"):
        broken.check()
    SpeculationStats("mtp", 2, rounds=100, offered=(100, 2), matched=(2, 0)).check()
    SpeculationStats("mtp", 2, rounds=49, offered=(49, 0), matched=(0, 0)).check()  # too few
    with pytest.raises(SpeculationUnavailableError, match="0 of 50 first proposals"):
        SpeculationStats("mtp", 2, rounds=50, offered=(50, 0), matched=(0, 0)).check()
    for offered in ((100, 0), (0, 0)):  # no weights that could be broken
        SpeculationStats("prompt_lookup", 2, rounds=100, offered=offered, matched=(0, 0)).check()
    with pytest.raises(SpeculationUnavailableError, match="proposed nothing in 9 rounds"):
        SpeculationStats("mtp", 2, rounds=9, offered=(0, 0), matched=(0, 0)).check()
    with (
        Runner.open(installed("llama-base"), OpenOptions(**CPU)) as runner,
        pytest.raises(SpeculationUnavailableError, match="nothing was drafted"),
    ):
        runner.probe_speculation([1, 2], max_new_tokens=2)
    path = installed("llama-base")
    options = OpenOptions(**CPU, speculation=DraftPolicies(draft_model=path))
    with Runner.open(path, options) as runner:
        assert (
            runner.probe_speculation([1, 2], ignore_eos=True).committed == 63
        )  # of 64, by default
        stats = runner.probe_speculation([1, 2], **GREEDY)
        assert (
            stats.per_position_acceptance
            == (1, 1, 1, 1)
            == tuple(stats.as_dict()["per_position_acceptance"])
        )
        assert "draft_model, up to 4 proposals: 5 rounds, 4.60 tokens each" in str(stats)


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", None),
        ("--speculative off", {}),
        ("--speculative auto", {"mtp": "auto"}),
        ("--speculative-drafter lookup", {"prompt_lookup": 8}),
        ("--speculative 3 --speculative-drafter lookup", {"prompt_lookup": 3}),
        ("--speculative 5 --speculative-drafter mtp", {"mtp": 5}),
        ("--speculative-drafter dflash", {"dflash": 2}),
        ("--draft-model m", {"draft_model": "m"}),
        ("--draft-model m --speculative 2", {"draft_model": "m", "draft_model_width": 2}),
    ],
)
def test_flags_become_policies(flags: str, wanted: dict[str, object] | None) -> None:
    for command in ("run", "chat", "bench"):
        given = opening(parse([command, "m", *flags.split()]))
        assert given.get("speculation") == wanted
        if wanted:
            DraftPolicies(**wanted)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--speculative 16", "--speculative 16 is not valid; works: off, auto"),
        ("--speculative 0", "--speculative 0 is not valid"),
        ("--speculative off --draft-model m", "--speculative off, but a drafter was named"),
        ("--draft-model m --speculative-drafter mtp", "both name who drafts"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        opening(parse(["run", "m", *flags.split()]))


def test_a_number_alone_takes_the_drafter_that_is_there_or_says_why_not(
    installed: Installed,
) -> None:
    path = str(installed("llama-base"))
    with pytest.raises(SpeculationUnavailableError, match="--speculative 2: family llama has no"):
        opening(parse(["run", path, "--speculative", "2"]))
