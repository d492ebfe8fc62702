"""docs/adding-a-family.md is true: its example converts, opens and computes what numpy does."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from in_memory import Tensors, random_tensors
from safetensors.numpy import save_file

from turbospark import families as registry
from turbospark.conversion import convert
from turbospark.errors import TurbosparkError
from turbospark.families import family_for_model_type
from turbospark.families.config import ConfigReader
from turbospark.install import arch
from turbospark.options import OpenOptions
from turbospark.runner import Runner

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-family.md"
CONFIG: dict[str, Any] = {
    "model_type": "olmo2", "vocab_size": 51, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 3e-5, "rope_theta": 30000.0, "max_position_embeddings": 256,
}  # fmt: skip
IDS = [3, 17, 29, 8, 3, 30, 11, 2, 50, 7, 19, 4]


def blocks() -> list[str]:
    """The Python blocks of the page that stand at the margin."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.fixture
def olmo2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's file and row, put where the page says."""
    file, row = blocks()
    (tmp_path / "olmo2.py").write_text(file)
    monkeypatch.setattr(registry, "__path__", [*registry.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_ROWS", (*registry._ROWS, *eval(f"({row.strip()})")))
    monkeypatch.setattr(arch, "KNOWN_WIRES", (*arch.KNOWN_WIRES, "olmo2"))
    monkeypatch.delitem(sys.modules, "turbospark.families.olmo2", raising=False)
    module = importlib.import_module("turbospark.families.olmo2")
    yield module
    sys.modules.pop("turbospark.families.olmo2")


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def expected_logits(tensors: Tensors, ids: list[int]) -> np.ndarray:
    """OLMo 2 in float64."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    rows, width, group = len(ids), 16, 2
    angles = np.arange(rows)[:, None] * 30000.0 ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(CONFIG["num_hidden_layers"]):
        m = {n.split(f"layers.{i}.")[1].removesuffix(".weight"): a for n, a in w.items()
             if f"layers.{i}." in n}  # fmt: skip
        q = rms(x @ m["self_attn.q_proj"].T, m["self_attn.q_norm"]).reshape(rows, -1, width)
        k = rms(x @ m["self_attn.k_proj"].T, m["self_attn.k_norm"]).reshape(rows, -1, width)
        v = (x @ m["self_attn.v_proj"].T).reshape(rows, -1, width).repeat(group, axis=1)
        q, k = rotate(q), rotate(k).repeat(group, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) / width**0.5
        scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
        out = out.reshape(rows, -1) @ m["self_attn.o_proj"].T
        x = x + rms(out, m["post_attention_layernorm"])
        gate = x @ m["mlp.gate_proj"].T
        y = (gate / (1 + np.exp(-gate)) * (x @ m["mlp.up_proj"].T)) @ m["mlp.down_proj"].T
        x = x + rms(y, m["post_feedforward_layernorm"])
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return rms(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [False, True])
def test_the_example_converts_opens_and_computes_what_numpy_does(
    olmo2: ModuleType, tmp_path: Path, tied: bool
) -> None:
    family = family_for_model_type("olmo2")
    assert family is olmo2.family
    values = CONFIG | {"tie_word_embeddings": tied}
    tensors = random_tensors(family, family.read_config(ConfigReader(values)))
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(values))
    save_file(tensors, source / "model.safetensors")
    install = convert(source, tmp_path / "olmo2.gturbo", progress=False)
    with Runner.open(install, OpenOptions(device="cpu")) as runner:
        whole = np.array(runner.score(IDS))
        np.testing.assert_allclose(whole, expected_logits(tensors, IDS), atol=1e-4)
        runner.reset()
        np.testing.assert_array_equal(np.array(runner.prefill(IDS, chunk=5)).ravel(), whole[-1])


def test_the_example_refuses_what_it_does_not_compute(olmo2: ModuleType) -> None:
    for change, message in (
        ({"attention_bias": True}, r"attention_bias = True.*supported: False"),
        ({"num_key_value_heads": 3}, r"4 heads and 3 key/value heads"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"longrope"),
    ):
        with pytest.raises(TurbosparkError, match=message):
            olmo2.read_config(ConfigReader(CONFIG | change))


def test_every_file_and_command_of_the_page_exists() -> None:
    page, root = PAGE.read_text(), PAGE.parents[1]
    for name in re.findall(r"`((?:turbospark|tests|docs)/[\w/.-]+)`", page):
        if name != "turbospark/families/olmo2.py":
            assert (root / name).exists(), name
    for name in re.findall(r"`(\w+\.py)`", page):
        assert (root / "turbospark" / "families" / name).is_file(), name
    for target in re.findall(r"\]\(([\w-]+\.md)\)", page):
        assert (root / "docs" / target).is_file(), target
    assert "lint:" in (root / "Makefile").read_text()
