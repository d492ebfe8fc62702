"""Options: defaults of the specification, one-line refusals, JSON, the environment."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from turbospark.errors import OptionError, TurbosparkError
from turbospark.options import (
    DflashPolicy,
    DraftPolicies,
    ExpertResidency,
    GenerationOptions,
    KvQuant,
    LiveToggles,
    LoadGuard,
    MtpPolicy,
    OpenOptions,
    RuntimeToggles,
)


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(OptionError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text, "a refusal is one line"
    assert text[:1].islower() or text[:1].isupper()
    return text


def test_defaults_are_the_pinned_ones():
    options = OpenOptions()
    assert options.max_context == 4096
    assert options.expert_cache_slots == 16
    assert options.expert_residency is ExpertResidency.STREAMED
    assert options.load_guard is LoadGuard.RELAXED
    assert options.kv_quant is KvQuant.OFF
    assert options.speculation == DraftPolicies.off()
    assert options.prefill_chunk == "auto"
    assert options.session_slots == 1
    assert options.prefix_reuse is False
    assert options.expecting is None and options.steering is None
    assert options.verify == "none" and options.dtype == "auto" and options.device == "auto"
    assert options.toggles == RuntimeToggles(
        shared_expert_overlap=True,
        routed_pipeline=True,
        qsa_force_dense=False,
        routed_batch_prefill=True,
        batched_gemv_prefill=None,
        prefill_steel=True,
        mtp_batched_prime=True,
        prefill_rows_attention=True,
    )


def test_generation_defaults_are_the_specification_table():
    options = GenerationOptions()
    assert (options.temperature, options.top_k, options.top_p, options.min_p) == (0.2, 64, 0.95, 0)
    assert options.repetition_penalty == 1
    assert options.presence_penalty == options.frequency_penalty == 0
    assert options.seed is None and options.stop == () and options.stop_token_ids == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_context", 0),
        ("max_context", 2**24 + 1),
        ("max_context", "automatic"),
        ("max_context", True),
        ("max_context", "4096"),
        ("min_auto_context", -1),
        ("load_guard", 0),
        ("load_guard", "tight"),
        ("expert_cache_slots", 0),
        ("expert_residency", "disk"),
        ("expert_cache_policy", "fifo"),
        ("expert_lookahead", 1),
        ("kv_quant", 5),
        ("kv_quant", True),
        ("acceptance", "maybe"),
        ("session_slots", 0),
        ("prefix_reuse", "yes"),
        ("prefill_chunk", 16),
        ("prefill_chunk", 48),
        ("prefill_chunk", 8192),
        ("swa_ring_capacity", 0),
        ("vision_sidecar", 3),
        ("verify", "fast"),
        ("verify_reads", None),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("chat_date", "soon"),
    ],
)
def test_a_bad_open_option_is_refused_by_name_value_and_remedy(field, value):
    text = refusal(OpenOptions, **{field: value})
    assert text.startswith(f"{field}={value!r} is not valid; works: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 257),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_generation_option_is_refused_by_name_value_and_remedy(field, value):
    text = refusal(GenerationOptions, **{field: value})
    assert text.startswith(f"{field}=") and " is not valid; works: " in text


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_context", 1), ("max_context", "auto"), ("load_guard", 1), ("prefill_chunk", 4096),
     ("prefill_chunk", "off"), ("kv_quant", 3.5), ("kv_quant", "3.5"), ("kv_quant", 2)],
)  # fmt: skip
def test_the_edges_of_open_options_are_accepted(field, value):
    OpenOptions(**{field: value})


def test_unknown_options_suggest_the_nearest():
    text = refusal(OpenOptions, max_contxt=1)
    assert text == "unknown option 'max_contxt' in OpenOptions; did you mean 'max_context'?"
    assert "known: " in refusal(GenerationOptions, zzz=1)


def test_options_that_contradict_each_other_are_refused():
    assert "min_auto_context=5" in refusal(OpenOptions, min_auto_context=5)
    OpenOptions(min_auto_context=5, max_context="auto")
    both = refusal(OpenOptions, speculation={"mtp": 2, "dflash": 2})
    assert "name exactly one" in both
    text = refusal(OpenOptions, speculation=DraftPolicies(dflash=2), acceptance="rejection")
    assert "acceptance='rejection'" in text and "works: 'auto' or 'match'" in text
    text = refusal(GenerationOptions, top_k=0)
    assert "top_p=0.95" in text and "needs top_k > 0" in text
    GenerationOptions(top_k=0, top_p=1.0)
    GenerationOptions(top_k=0, temperature=0)


def test_no_path_lets_a_pydantic_error_out():
    for call in (
        lambda: OpenOptions(max_context=0),
        lambda: OpenOptions().replace(max_context=0),
        lambda: OpenOptions.model_validate({"max_context": 0}),
        lambda: OpenOptions.model_validate_json('{"max_context": 0}'),
        lambda: OpenOptions.model_validate_json("{"),
        lambda: OpenOptions.model_validate_json("[]"),
        lambda: OpenOptions(toggles={"prefill_steel": 3}),
        lambda: setattr(OpenOptions(), "max_context", 1),
        lambda: MtpPolicy.fixed(16),
    ):
        with pytest.raises(TurbosparkError) as caught:
            call()
        assert not isinstance(caught.value, ValidationError)
        assert "\n" not in str(caught.value)


def test_nested_refusals_name_the_way_to_the_field():
    assert refusal(OpenOptions, toggles={"prefill_steel": 3}).startswith("toggles: prefill_steel=3")


def test_options_are_frozen_and_replace_revalidates():
    options = OpenOptions()
    assert "use .replace(max_context=...)" in refusal(setattr, options, "max_context", 8)
    assert "cannot be deleted" in refusal(delattr, options, "max_context")
    changed = options.replace(max_context=8)
    assert changed.max_context == 8 and options.max_context == 4096
    refusal(options.replace, min_auto_context=5)


def test_json_round_trip_is_equal():
    options = OpenOptions(
        max_context="auto",
        load_guard=1 << 30,
        kv_quant=3.5,
        speculation=DraftPolicies(mtp=3),
        toggles={"batched_gemv_prefill": False},
        vision_sidecar="auto",
        chat_date="2025-02-03",
    )
    again = OpenOptions.model_validate_json(options.model_dump_json())
    assert again == options
    assert again.speculation.mtp == MtpPolicy.fixed(3)
    generation = GenerationOptions(stop=["a", "b"], seed=2**64 - 1, stop_token_ids=[7])
    assert GenerationOptions.model_validate_json(generation.model_dump_json()) == generation


def test_expecting_survives_json():
    from turbospark.install.arch import ArchConfig

    wanted = ArchConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=0,
        num_heads=4,
        num_kv_heads=2,
        num_full_kv_heads=2,
        head_dim=16,
        full_head_dim=16,
        vocab_size=300,
        sliding_window=0,
        final_logit_softcap=0.0,
        rope_theta=10000.0,
        full_rope_theta=10000.0,
        partial_rotary_factor=1.0,
        num_layers=2,
        num_experts=0,
        top_k_experts=0,
        tie_word_embeddings=True,
        attention_k_eq_v=False,
        hidden_activation="silu",
        full_attention_layer_mask=(1, 1),
        family="llama",
    )
    options = OpenOptions(expecting=wanted)
    again = OpenOptions.model_validate_json(options.model_dump_json())
    assert again == options and again.expecting == wanted
    assert again.expecting.hidden_size == 64
    assert refusal(OpenOptions, expecting="llama").startswith("expecting: 'llama' is not valid")


def test_steering_is_a_policy_or_none():
    works = "works: a SteeringPolicy or None"
    assert refusal(OpenOptions, steering="ablate").endswith(works)
    assert OpenOptions(steering={"vectors": []}).steering.is_active is False


def test_stop_is_one_string_or_several():
    assert GenerationOptions(stop="END").stop == ("END",)
    assert GenerationOptions(stop=["a", "b"]).stop == ("a", "b")


def test_kv_quant_knows_its_bits():
    assert KvQuant(3.5).bits == 3.5 and KvQuant("4").bits == 4 and KvQuant("off").bits is None
    assert str(KvQuant.BITS_3_5) == "3.5"


# --- policies and the environment -------------------------------------------------------------


@pytest.mark.parametrize("policy", [MtpPolicy, DflashPolicy])
@pytest.mark.parametrize(
    ("text", "kind", "width"),
    [
        (None, "auto", None),
        ("", "auto", None),
        ("two", "auto", None),
        ("-1", "auto", None),
        ("0", "off", None),
        ("3", "fixed", 3),
    ],
)
def test_a_draft_variable_maps_to_a_policy(policy, text, kind, width):
    parsed = policy.parse(text)
    assert (parsed.kind, parsed.width) == (kind, width)


def test_draft_widths_end_at_fifteen():
    assert MtpPolicy.fixed(15).draft_width == 15
    assert MtpPolicy.auto().draft_width == 2 and MtpPolicy.off().draft_width == 0
    for width in (0, 16, -1, None):
        refusal(MtpPolicy.fixed, width)
    text = refusal(MtpPolicy.from_env, {"TURBOSPARK_MTP_DRAFT": "99"})
    assert text.startswith("TURBOSPARK_MTP_DRAFT='99'")


def test_policies_from_an_empty_environment_are_automatic():
    assert DraftPolicies.from_env({}) == DraftPolicies(mtp="auto", dflash="auto")


def test_plain_options_never_read_the_environment(monkeypatch):
    monkeypatch.setenv("TURBOSPARK_MTP_DRAFT", "3")
    monkeypatch.setenv("TURBOSPARK_PREFILL_CHUNK", "64")
    monkeypatch.setenv("TURBOSPARK_ROUTED_PIPELINE", "0")
    assert OpenOptions() == OpenOptions.from_env({})
    assert OpenOptions.from_env().speculation.mtp == MtpPolicy.fixed(3)
    assert OpenOptions.from_env().prefill_chunk == 64
    assert OpenOptions.from_env().toggles.routed_pipeline is False


def test_an_argument_beats_its_variable():
    environment = {"TURBOSPARK_PREFILL_CHUNK": "64", "TURBOSPARK_EXPERT_RESIDENCY": "mapped"}
    assert OpenOptions.from_env(environment, prefill_chunk="off").prefill_chunk == "off"
    assert OpenOptions.from_env(environment).expert_residency is ExpertResidency.MAPPED
    bad = {"TURBOSPARK_PREFILL_CHUNK": "no", "TURBOSPARK_MTP_DRAFT": "99"}
    OpenOptions.from_env(bad, prefill_chunk=64, speculation=DraftPolicies.off())


@pytest.mark.parametrize("suffix", [*RuntimeToggles.ENVIRONMENT.values()])
def test_every_toggle_has_a_variable(suffix):
    on = RuntimeToggles.from_env({f"TURBOSPARK_{suffix}": "1"})
    off = RuntimeToggles.from_env({f"TURBOSPARK_{suffix}": "0"})
    assert on != off
    assert "works: 0 or 1" in refusal(RuntimeToggles.from_env, {f"TURBOSPARK_{suffix}": "on"})


@pytest.mark.parametrize("suffix", ["PREFILL_CHUNK", "EXPERT_RESIDENCY", "CHAT_DATE"])
def test_a_bad_variable_is_refused_by_the_variables_name(suffix):
    text = refusal(OpenOptions.from_env, {f"TURBOSPARK_{suffix}": "77x"})
    assert text.startswith(f"TURBOSPARK_{suffix}='77x'")


@pytest.mark.parametrize("text", ["²", "٣", "9" * 5000], ids=["power", "arabic", "long"])
def test_a_variable_that_only_looks_like_a_number_is_refused_in_one_short_line(text):
    said = refusal(OpenOptions.from_env, {"TURBOSPARK_PREFILL_CHUNK": text})
    assert said.startswith(f"TURBOSPARK_PREFILL_CHUNK='{text[:50]}") and "works: " in said
    assert len(said) < 300


def test_interactive_is_automatic_and_never_opens_the_block_drafter_unasked():
    options = OpenOptions.interactive({})
    assert options.max_context == options.expert_cache_slots == "auto"
    assert options.expert_residency is ExpertResidency.AUTO
    assert options.speculation == DraftPolicies(mtp="auto", dflash="off")
    named = OpenOptions.interactive({"TURBOSPARK_DFLASH_DRAFT": "2"})
    assert named.speculation.dflash == DflashPolicy.fixed(2)
    assert OpenOptions.interactive({}, max_context=512).max_context == 512


# --- toggles of an open runner ------------------------------------------------------------------


def test_live_toggles_check_assignments_and_say_what_has_an_effect():
    live = LiveToggles(RuntimeToggles(), {"prefill_steel"})
    assert live.has_effect("prefill_steel") and not live.has_effect("routed_pipeline")
    live.batched_gemv_prefill = False
    assert live.batched_gemv_prefill is False
    assert not live.has_effect("prefill_steel"), "single rows leave nothing to slice"
    refusal(setattr, live, "prefill_steel", "on")
    refusal(setattr, live, "no_such", True)
    refusal(live.has_effect, "no_such")
    with pytest.raises(AttributeError):
        _ = live.no_such
    assert live.snapshot().batched_gemv_prefill is False
