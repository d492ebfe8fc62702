"""Values that no checkpoint has are refused by key before anything is computed from them.

What a conversion accepts must open: each value here once passed the one and failed the other, or
made every logit NaN.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from oracle_folders import ORACLES

from turbospark import convert
from turbospark.errors import SourceError, TurbosparkError, UnsupportedError
from turbospark.families.config import ConfigReader
from turbospark.layers.rope import check_scaling, make_rope

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
NO_NUMBER = ["x", [], {}, True, 0, -1, float("nan"), 1e300]


@pytest.mark.parametrize("value", NO_NUMBER)
@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        (LLAMA3, "factor"),
        (LLAMA3, "low_freq_factor"),
        (LLAMA3, "original_max_position_embeddings"),
        (YARN, "beta_fast"),
        (YARN, "original_max_position_embeddings"),
        (YARN, "attention_factor"),
        ({"type": "linear"}, "factor"),
    ],
)
def test_a_number_that_a_scaling_reads_is_checked(
    scaling: dict[str, Any], key: str, value: Any
) -> None:
    with pytest.raises(SourceError, match=f"rope_scaling: {key} = "):
        check_scaling({**scaling, key: value})


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"type": "linear", "factor": 2}, None, {}])
def test_a_scaling_that_passes_the_check_makes_a_rope(scaling: dict[str, Any] | None) -> None:
    check_scaling(scaling)
    make_rope(8, 1e4, scaling, 4096)


def test_llama3_refuses_equal_frequency_factors_and_a_missing_one() -> None:
    with pytest.raises(SourceError, match="two different numbers"):
        check_scaling({**LLAMA3, "high_freq_factor": 1.0})
    with pytest.raises(SourceError, match="required key high_freq_factor is missing"):
        check_scaling({**LLAMA3, "high_freq_factor": None})


@pytest.mark.parametrize("kind", [[], {}, 5, "made-up"])
def test_a_scaling_type_of_any_kind_is_refused_as_unsupported(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match="rope_scaling type"):
        check_scaling({"rope_type": kind})


def test_counts_bases_and_epsilons_have_bounds() -> None:
    c = ConfigReader({"count": 2**63, "float": 1e300, "base": 1, "eps": -1e-9, "zero": 0})
    for read, key, words in (
        (c.int, "count", "below 2"),
        (c.int, "float", "below 2"),
        (c.theta, "base", "above 1"),
        (c.eps, "eps", "at least 0"),
    ):
        with pytest.raises(SourceError, match=f"{key} = .*{words}"):
            read(key)
    assert c.eps("zero") == 0.0


@pytest.mark.parametrize(
    ("oracle", "change"),
    [
        ("qwen3_moe-base", {"mlp_only_layers": [[]]}),
        ("qwen3_moe-base", {"intermediate_size": 2**63}),
        ("gpt_oss-mxfp4", {"sliding_window": 1e300}),
        ("deepseek_v2-lite", {"v_head_dim": 2**40}),
        ("deepseek_v2-lite", {"rope_scaling": {**YARN, "mscale_all_dim": 1e300}}),
        ("llama-base", {"rope_theta": 0}),
        ("llama-base", {"rms_norm_eps": -1}),
    ],
)
def test_odd_values_are_refused_or_convert_but_never_crash(
    oracle: str, change: dict[str, Any], tmp_path: Path
) -> None:
    source = shutil.copytree(ORACLES / oracle, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    if "mlp_only_layers" in change:  # names no layer, as an empty list does
        convert(source, tmp_path / "out", progress=False)
        return
    with pytest.raises(TurbosparkError) as caught:
        convert(source, tmp_path / "out", progress=False)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
