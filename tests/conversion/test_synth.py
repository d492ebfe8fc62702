"""Synthetic installs: every model type opens and runs; the same arguments give the same bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turbospark import Runner
from turbospark.dtypes import MXFP4, MXFP8, NVFP4, Format, Raw, affine
from turbospark.errors import InstallExistsError, OptionError, UnsupportedError
from turbospark.families import families
from turbospark.install.opening import Install
from turbospark.synthesis import CONFIGS, RandomSource, _formatted, _plan, synth, synth_config


def make(model_type: str, dest: Path, **options: Any) -> Path:
    return synth(model_type, dest, progress=False, **options)


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"bits": 4}], ids=["plain", "4-bit"])
def test_every_model_type_runs(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    with Runner.open(make(model_type, tmp_path / "m.gturbo", **options)) as runner:
        logits = np.array(runner.score(list(range(3, 20))))
    assert np.isfinite(logits).all() and logits.std() > 0.05
    assert len(set(logits.argmax(-1).tolist())) > 4  # the input matters


def test_every_family_has_a_synthetic_configuration() -> None:
    without = [f.name for f in families() if not set(f.model_types) & set(CONFIGS)]
    assert without == []


def hashes(path: Path) -> dict[str, str]:
    with Install.open(path) as install:
        return {name: entry.sha256 for name, entry in install.manifest.files.items()}


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    made = [
        hashes(make("qwen3_moe", tmp_path / f"{i}.gturbo", bits=4, seed=seed))
        for i, seed in enumerate((5, 5, 6))
    ]
    assert made[0] == made[1]
    weights = [name for name in made[0] if name.endswith(".bin")]
    assert all(made[0][name] != made[2][name] for name in weights)
    assert len({made[0][name] for name in weights}) == len(weights)  # layers differ


def test_experts_and_their_projections_differ(tmp_path: Path) -> None:
    with Install.open(make("mixtral", tmp_path / "m.gturbo", bits=8)) as install:
        layer = install.experts.layers[0]  # type: ignore[union-attr]
        records = np.empty((layer.count, layer.stride), np.uint8)
        for expert, row in enumerate(records):
            layer.read_record_into(expert, row)
        gate, up = layer.tensor("gate"), layer.tensor("up")
        words = [r[t.offset : t.offset + t.size].tobytes() for r in records for t in (gate, up)]
        assert len(set(words)) == 2 * layer.count


def test_sizes_replace_those_of_the_small_configuration(tmp_path: Path) -> None:
    sizes = {
        "layers": 3, "hidden": 64, "heads": 8, "kv_heads": 1, "head_dim": 16, "width": 96,
        "vocab": 300, "experts": 6, "top_k": 2, "expert_width": 32,
    }  # fmt: skip
    path = make("qwen3_moe", tmp_path / "m.gturbo", **sizes, settings={"rope_theta": 5e5})
    with Install.open(path) as install:
        a = install.arch
        found = (a.num_layers, a.hidden_size, a.num_heads, a.num_kv_heads, a.head_dim)
        assert found == (3, 64, 8, 1, 16)
        assert (a.vocab_size, a.num_experts, a.top_k_experts, a.moe_intermediate_size) == (
            300, 6, 2, 32,
        )  # fmt: skip
        assert a.rope_theta == 5e5 and len(install.experts.layers) == 3  # type: ignore[union-attr]
        assert install.manifest.extension["source"]["kind"] == "synthetic"


def test_patterns_by_layer_follow_the_number_of_layers() -> None:
    types = synth_config("qwen3_5_text", {"layers": 6})["layer_types"]
    assert [t.split("_")[0] for t in types] == ["linear"] * 3 + ["full", "linear", "full"]


@pytest.mark.parametrize(
    "fmt",
    [Raw("bfloat16"), Raw("float16"), Raw("float32"), affine(2, 32), affine(4, 64), affine(5, 128),
     affine(8, 64, "float16"), MXFP4, MXFP8, NVFP4],
    ids=str,
)  # fmt: skip
def test_matrices_of_every_format_have_about_unit_gain(fmt: Format) -> None:
    """Variance 1 / columns, mean near 0: activations neither vanish nor explode."""
    config = synth_config("llama", {"hidden": 1024})
    family = families()[0]
    from turbospark.families.config import ConfigReader

    plan = _plan(family, family.read_config(ConfigReader(config)), Raw("float32"))
    chosen = {n: fmt if len(p.shape) == 2 else Raw("float32") for n, p in plan.resident.items()}
    source = RandomSource("llama", config, 1, _formatted(plan, chosen))
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.array(source.read(name).dense(mx.float32))
    assert values.shape == (256, 1024) and np.isfinite(values).all()
    gain = values.std() * math.sqrt(1024)
    assert 0.6 < gain < 1.6, gain
    assert abs(values.mean()) < 0.1 / math.sqrt(1024)
    part = source.read(name, rows=slice(3, 9))
    np.testing.assert_array_equal(np.array(part.dense(mx.float32)), values[3:9])


@pytest.mark.parametrize("bits", [None, 4])
def test_a_skewed_router_prefers_some_experts(tmp_path: Path, bits: int | None) -> None:
    def norms(skew: float) -> list[np.ndarray]:
        path = make(
            "qwen3_moe", tmp_path / f"{skew}", experts=32, bits=bits, router_skew=skew, force=True
        )
        with Install.open(path) as install:
            names = [f"model.layers.{i}.mlp.gate.weight" for i in range(4)]
            matrices = [np.array(install.resident.read(n).dense(mx.float32)) for n in names]
        return [np.linalg.norm(m, axis=1) for m in matrices]

    for plain, skewed in zip(norms(0.0), norms(0.75), strict=True):
        np.testing.assert_allclose(
            np.sort(skewed / plain)[::-1], np.arange(1, 33.0) ** -0.75, rtol=0.05
        )
    assert len({int(row.argmax()) for row in norms(0.75)}) > 1  # each layer has its own order


@pytest.mark.parametrize("model_type", ["qwen4_exp", "gemma3", "qwen3_5_moe"])
def test_the_type_of_a_whole_model_makes_its_text_half(model_type: str) -> None:
    made = synth_config(model_type, {"layers": 2})
    assert made == synth_config(f"{model_type}_text", {"layers": 2})
    assert made["model_type"] == f"{model_type}_text"


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    dest = tmp_path / "m.gturbo"
    with pytest.raises(OptionError, match="no synthetic configuration for 'gpt2'; known: llama"):
        make("gpt2", dest)
    with pytest.raises(OptionError, match="experts=8: llama has no such size"):
        make("llama", dest, experts=8)
    with pytest.raises(OptionError, match="expert_width=8: llama has no such size"):
        make("llama", dest, expert_width=8)
    with pytest.raises(OptionError, match="router_skew=-1"):
        make("qwen3_moe", dest, router_skew=-1)
    with pytest.raises(OptionError, match="dtype='int8'"):
        make("llama", dest, dtype="int8")
    with pytest.raises(UnsupportedError, match="100 columns, group_size 64"):
        make("llama", dest, width=100, bits=4)
    assert not dest.exists()
    make("llama", dest)
    with pytest.raises(InstallExistsError):
        make("llama", dest)
