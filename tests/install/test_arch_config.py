"""ArchConfig: manifest spelling, defaults, exact comparison and its wording."""

from __future__ import annotations

import json

import pytest
from handmade import ARCH
from pydantic import ValidationError

from turbospark.errors import ArchMismatchError, IndexCorruptError
from turbospark.install.arch import FAMILY_WIRES, FIELDS, ArchConfig, check_match, manifest_key

# The documented keys in the documented order of comparison, written out by hand.
KEYS = [
    "hiddenSize", "ffnIntermediate", "moeIntermediateSize", "numHeads", "numKVHeads",
    "numFullKVHeads", "headDim", "fullHeadDim", "vocabSize", "slidingWindow", "finalLogitSoftcap",
    "ropeTheta", "fullRopeTheta", "partialRotaryFactor", "numLayers", "numExperts", "topKExperts",
    "tieWordEmbeddings", "attentionKEqV", "hiddenActivation", "fullAttentionLayerMask", "family",
    "attnOutputGate", "attentionScale", "embeddingScaledBySqrtHidden", "routerScaled",
    "ffnSandwichNorms", "sharedExpertGated", "ropeNeoxSubdim", "linearNumKHeads", "linearNumVHeads",
    "linearKeyHeadDim", "linearValueHeadDim", "linearConvKernelSize", "linearOutputGateSigmoid",
    "mlaKvLoraRank", "mlaQLoraRank", "mlaNopeHeadDim", "mlaRopeHeadDim", "mlaVHeadDim",
    "numDenseLeadingLayers", "denseLeadIntermediateSize", "caQLoraRank", "caOLoraRank", "caOGroups",
    "caRopeHeadDim", "caIndexNHeads", "caIndexKvHeads", "caIndexHeadDim", "caIndexTopK",
    "caIndexBudget", "caCSACompressRate", "caHCACompressRate", "caCompressRopeTheta",
    "caRopeScalingFactor", "caRopeScalingOriginalMax", "caRopeScalingBetaFast",
    "caRopeScalingBetaSlow", "hcMult", "hcLowrank", "hcSinkhornIters", "hcEps", "pleNgramSize",
    "pleHeadsPerNgram", "pleNgramVocabSizeBase", "pleMakeDivisibleBy", "pleSplitNgramParts",
    "pleEmbedDim", "pleConvKernelSize", "pleLayerIds", "pleSeed", "pleEosTokenId",
    "numHashRoutedLayers", "routerScoringFunc", "routedScalingFactor", "swigluLimit",
    "ropeScalingFactor", "ropeScalingOriginalContext", "ropeScalingBetaFast", "ropeScalingBetaSlow",
    "ropeScalingMscale", "visionDepth", "visionHiddenSize", "visionIntermediateSize",
    "visionNumHeads", "visionPatchSize", "visionTemporalPatchSize", "visionInChannels",
    "visionSpatialMergeSize", "visionNumPositionEmbeddings", "visionOutHiddenSize",
    "visionMropeSection", "visionStartTokenId", "visionEndTokenId", "visionImageTokenId",
    "visionVideoTokenId", "visionDeepstackVisualIndexes",
]  # fmt: skip


def base(**changes: object) -> ArchConfig:
    return ArchConfig.from_manifest({**ARCH, **changes})


def other(value: object) -> object:
    """A different value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "qwen3" if value in FAMILY_WIRES else "other"
    if isinstance(value, tuple):
        return [9, *value][: max(len(value), 1)]
    return value + 1


def test_every_key_is_written_in_the_documented_spelling_and_order() -> None:
    assert list(base().to_manifest()) == KEYS
    assert len(set(KEYS)) == len(FIELDS)


def test_the_manifest_form_round_trips_through_json_exactly() -> None:
    arch = base(attentionScale=0.11472138679292612, ropeTheta=1e7, hcEps=1e-6, pleLayerIds=[2])
    text = json.dumps(arch.to_manifest())
    assert ArchConfig.from_manifest(json.loads(text)) == arch
    assert '"ropeTheta": 10000000,' in text and "0.11472138679292612" in text


def test_integers_and_whole_floats_mean_the_same() -> None:
    assert base(ropeTheta=10000) == base(ropeTheta=10000.0)


@pytest.mark.parametrize("name", FIELDS)
def test_a_difference_in_any_single_field_is_named(name: str) -> None:
    actual = base()
    expecting = ArchConfig(**{**dict(actual), name: other(getattr(actual, name))})
    with pytest.raises(ArchMismatchError) as caught:
        check_match(expecting, actual)
    assert caught.value.field == manifest_key(name)
    assert caught.value.expected == getattr(expecting, name)
    assert caught.value.actual == getattr(actual, name)


def test_the_first_difference_in_documented_order_is_reported() -> None:
    actual = base()
    for i, key in enumerate(KEYS[:-1]):
        if key == "fullAttentionLayerMask":
            continue
        values = {n: other(getattr(actual, n)) for n in FIELDS[i:]}
        with pytest.raises(ArchMismatchError) as caught:
            check_match(ArchConfig(**{**dict(actual), **values}), actual)
        assert caught.value.field == key


def test_the_wording_has_key_then_found_then_expected() -> None:
    actual = base()

    def message(**changes: object) -> str:
        with pytest.raises(ArchMismatchError) as caught:
            check_match(ArchConfig(**{**dict(actual), **changes}), actual)
        return str(caught.value)

    assert message(num_kv_heads=8) == "manifest.arch.numKVHeads = 2; expected 8"
    assert message(rope_theta=1e6) == "manifest.arch.ropeTheta = 10000.0; expected 1000000.0"
    assert message(hidden_activation="gelu") == (
        'manifest.arch.hiddenActivation = "silu"; expected "gelu"'
    )
    assert message(tie_word_embeddings=False) == (
        "manifest.arch.tieWordEmbeddings = true; expected false"
    )
    assert message(full_attention_layer_mask=(0, 1)) == (
        "manifest.arch.fullAttentionLayerMask = [1, 1]; expected [0, 1]"
    )


def test_floats_are_compared_exactly() -> None:
    with pytest.raises(ArchMismatchError, match="attentionScale"):
        check_match(base(attentionScale=0.17677669529663687), base())


@pytest.mark.parametrize("bad", [256, -1, 2**40])
def test_mask_values_outside_a_byte_are_a_mismatch_not_a_wrap(bad: int) -> None:
    with pytest.raises(ArchMismatchError, match="fullAttentionLayerMask"):
        base(fullAttentionLayerMask=[1, bad])


def test_the_gemma_block_defaults_to_gemma_and_the_rest_to_none() -> None:
    arch = ArchConfig.from_manifest({k: v for k, v in ARCH.items() if k in KEYS[:21]})
    assert arch.family == "gemma4" and arch.attention_scale == 1.0
    assert arch.embedding_scaled_by_sqrt_hidden and arch.router_scaled and arch.ffn_sandwich_norms
    assert not (arch.attn_output_gate or arch.shared_expert_gated or arch.rope_neox_subdim)
    rest = {n: getattr(arch, n) for n in FIELDS[29:]}
    assert rest.pop("router_scoring_func") == "softmax"
    assert rest.pop("routed_scaling_factor") == 1.0
    assert rest.pop("vision_mrope_section") == (0, 0, 0)
    assert not any(rest.values())


def test_the_class_refuses_unknown_fields_and_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ArchConfig(**dict(base()), rms_eps=1e-6)
    with pytest.raises(ValidationError):
        base().hidden_size = 5


def test_infinite_numbers_are_refused() -> None:
    with pytest.raises(IndexCorruptError, match="ropeTheta"):
        base(ropeTheta=float("inf"))
