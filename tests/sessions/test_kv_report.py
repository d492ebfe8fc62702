"""The report on packed caches: bytes by hand, distortion against a numpy comparison."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conversation import open_cpu, tokens_of
from oracle_folders import ORACLES, Oracle

import turbospark.kernels.kv_codec
import turbospark.kv
from turbospark.errors import UnsupportedError

NAME = "mlx-llama-llama3-4bit"  # two layers of two heads of 32


def test_bytes_are_those_of_the_layout(installed: Callable[[str], Path]) -> None:
    with open_cpu(installed(NAME), max_context=512, kv_quant=3.5) as runner:
        report = turbospark.kv.report(runner)
        assert (report.layers, report.layers_in_all, report.context) == ((0, 1), 2, 512)
        # Per layer and head: 32 keys of 4 bits, 32 values of 3, two scales of 2 bytes.
        row, elements = 2 * 2 * (16 + 12 + 4), 2 * 2 * 2 * 32
        assert (
            report.per_token
            == report.packed_per_token
            == (turbospark.kv.Bytes(row, elements * 4, elements * 2))
        )
        assert report.exact_bytes == 2 * 2 * (128 + 4) * 2 * 32 * 2
        assert report.packed == report.in_all
        assert report.in_all.held == runner.memory.kv == 512 * row + report.exact_bytes
        assert report.in_all.ratio == 512 * elements * 4 / runner.memory.kv
        assert report.in_all.half_ratio == report.in_all.ratio / 2
        assert report.distortion == () and "no row yet" in str(report)


def test_layers_that_stay_as_they_are_count_in_all(installed: Callable[[str], Path]) -> None:
    """Three packed layers of four; two heads of 24."""
    with open_cpu(installed("qwen3_moe-mixed"), max_context=500, kv_quant=4) as runner:
        report = turbospark.kv.report(runner)
        assert report.in_all.held == runner.memory.kv
    packed, layer = 3 * 2 * (24 * 8 // 8 + 4), 2 * 2 * 24  # bytes of three, elements of one
    assert report.packed_per_token == turbospark.kv.Bytes(packed, 3 * layer * 4, 3 * layer * 2)
    assert report.per_token == turbospark.kv.Bytes(packed + layer * 4, 4 * layer * 4, 4 * layer * 2)
    exact = 3 * 2 * (128 + 4) * 2 * 24 * 2
    assert report.in_all.held == 512 * packed + exact + 500 * layer * 4
    assert report.in_all.unpacked == 500 * 4 * layer * 4
    want = "552 bytes in all layers; unpacked 1536 bytes in float32 (2.78 times) or 768 bytes in 16"
    assert want in str(report)


def test_half_precision_is_compared_once(installed: Callable[[str], Path]) -> None:
    settings = {"max_context": 512, "kv_quant": 4, "dtype": "bfloat16"}
    with open_cpu(installed(NAME), **settings) as runner:
        report = turbospark.kv.report(runner)
    assert report.in_all.unpacked == report.in_all.half == 512 * 2 * 2 * 2 * 32 * 2
    assert "144 bytes in all layers; unpacked 512 bytes in 16 bits (3.56 times)" in str(report)
    assert "bfloat16" not in str(report)


def test_distortion_is_that_of_the_rows_in_the_cache(installed: Callable[[str], Path]) -> None:
    ids = tokens_of(Oracle(ORACLES / NAME), 300)
    with open_cpu(installed(NAME), max_context=512, kv_quant=4) as runner:
        runner.prefill(ids, chunk=64)
        before = np.array(runner.step(1))
        report = turbospark.kv.report(runner)
        engine = runner._engine
        assert engine is not None
        cache = engine.states.layers[1]
        # 301 positions: packed below 256, exact from 301 - 128 + 1 on, in whole blocks from 192.
        p = np.arange(192, 256)
        exact = np.array(cache.new_values.astype(mx.float32))[:, p % 128]
        scales = np.array(cache.value_scales.astype(mx.float32))[:, p]
        words = np.array(cache.values)[:, 6:8]
        table = turbospark.kernels.kv_codec.levels(4)
        coded = np.empty_like(exact)
        for i, x in enumerate(p):
            pair = x % 8 // 2 * 4 + x % 32 // 8
            word = words[:, i // 32, pair // 4]
            coded[:, i] = table[word >> (pair % 4 * 4 + 16 * (x % 2)) & 15] * scales[:, i, None]
        want = ((exact - coded) ** 2).sum() / (exact**2).sum()
        assert report.distortion[1].rows == 64
        assert abs(report.distortion[1].values / want - 1) < 1e-5
        assert 0.003 < want < 0.02
        runner.reset()
        runner.prefill(ids, chunk=64)
        assert np.array_equal(np.array(runner.step(1)), before)  # reading changed nothing


def test_a_report_shows_itself_as_text_and_html(installed: Callable[[str], Path]) -> None:
    with open_cpu(installed(NAME), max_context=512, kv_quant=4) as runner:
        runner.prefill(tokens_of(Oracle(ORACLES / NAME), 200))
        report = turbospark.kv.report(runner)
    for text in (str(report), report._repr_html_()):
        assert "2 of 2: 0, 1" in text and "layer 1" in text and "keys 0.0" in text


def test_the_module_is_there_without_an_import_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", "import turbospark; turbospark.kv.report"])
    assert done.returncode == 0


LABELS = {
    "kv_quant 4": "4 bits",
    "kv_quant 3.5": "3.5 bits",
    "kv_quant 3": "3 bits",
    "kv_quant 2": "2 bits",
    "kv_quant 4, random ids": "4 bits, tables of random ids",
    "kv_quant 4, tables of 1,024 tokens": "4 bits, tables of 1,024 tokens",
    "kv_quant 3.5, tables of 1,024 tokens": "3.5 bits, tables of 1,024 tokens",
    "kv_quant 3, tables of 1,024 tokens": "3 bits, tables of 1,024 tokens",
    "kv_quant 2, tables of 1,024 tokens": "2 bits, tables of 1,024 tokens",
    "kv_quant 4, not calibrated": "4 bits, not calibrated",
    "plain codec, window": "published codec, 4 bits, same exact rows",
    "affine 4, window": "MLX affine, 4 bits, same exact rows",
    "plain codec": "published codec, 4 bits, all packed",
    "affine 4": "MLX affine, 4 bits, all packed",
}


def test_the_figures_of_the_page_are_those_of_the_results() -> None:
    """Every row of both tables, on held-out program text; a dash where nothing was measured."""
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/results/kv_quality.json").read_text())["rows"]
    want = []
    for length, models in (
        (1024, ("SmolLM2", "qwen2.5", "gemma-3")),
        (4096, ("SmolLM2", "gemma-3")),
    ):
        for side, label in LABELS.items():
            cells = ["—"] * len(models)
            for row in rows:
                if (row["text"], row["tokens"], row["side"]) == ("code", length, side):
                    cell = f"{row['kl']:#.2g}, {100 * row['top1']:.1f} %"
                    if row["attention_error"] is not None:
                        cell += f", {row['attention_error']:#.2g}"
                    cells[[row["model"].startswith(m) for m in models].index(True)] = cell
            if set(cells) != {"—"}:
                want.append((label, " | ".join(cells)))
    page = (root / "docs/kv-cache.md").read_text()
    shown = re.findall(r"^\| (.*(?:bits|codec|affine).*?) \| ((?:—|\d\.\d).+) \|$", page, re.M)
    assert sorted(shown) == sorted(want)


def test_without_packed_caches_there_is_nothing_to_report(
    installed: Callable[[str], Path],
) -> None:
    with (
        open_cpu(installed(NAME)) as runner,
        pytest.raises(UnsupportedError, match="kv_quant=off: no cache is packed"),
    ):
        turbospark.kv.report(runner)
