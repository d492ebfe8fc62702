"""Bytes of packed caches in every family that has them, by the formula of docs/kv-cache.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import turbospark.kv
from turbospark import OpenOptions, Runner
from turbospark.families import families

# An oracle that can be packed, the layers that are, their key/value heads and the dims of each.
PACKED = {
    "llama": ("qwen3_moe-mixed", (0, 1, 2), 2, 24),
    "gemma3": ("gemma3-text", (2,), 1, 24),
    "gemma4": ("gemma4-e2b", (1,), 1, 32),
    "gpt_oss": ("gpt_oss-mxfp4", (1,), 2, 16),
    "muse_glimmer": ("muse_glimmer-mlx", (0,), 1, 16),
    "qwen3_5": ("qwen3_5-irregular", (1,), 2, 32),
    "qwen4_exp": ("qwen4_exp-base", (1,), 2, 16),
    "spark": ("spark2_5-base", (2,), 1, 32),
}
BITS = {2: (2, 2), 3: (3, 3), 3.5: (4, 3), 4: (4, 4)}
CASES = [
    (name, bits)
    for name, (_, _, _, dim) in PACKED.items()
    for bits in BITS
    if bits == 4 or dim % 32 == 0  # other widths would leave words half full
]


def test_every_family_without_a_cause_has_a_row() -> None:
    assert set(PACKED) == {f.name for f in families() if f.capabilities.kv_quant is None}


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_packed_layers_take_what_the_formula_says(
    name: str, bits: float, installed: Callable[[str], Path]
) -> None:
    oracle, layers, heads, dim = PACKED[name]
    options = OpenOptions(device="cpu", dtype="float32", max_context=1000, kv_quant=bits)
    with Runner.open(installed(oracle), options) as runner:
        report = turbospark.kv.report(runner)
        held = runner.memory.kv
    with Runner.open(installed(oracle), options.replace(kv_quant="off")) as runner:
        plain = runner.memory.kv
    token = len(layers) * heads * (dim * sum(BITS[bits]) // 8 + 4)
    exact = len(layers) * heads * 132 * 2 * dim * 2
    assert report.layers == layers
    assert report.packed_per_token.held == token
    assert report.packed.held == 1024 * token + exact  # whole blocks of 32
    assert report.packed.unpacked == 1000 * len(layers) * heads * 2 * dim * 4
    # The report counts what was allocated, and layers that stay as they are.
    assert report.in_all.held == held and report.in_all.unpacked == plain
    assert plain - held == report.packed.unpacked - report.packed.held
