"""What a prompt takes while it is fed: the chunk's share, and never the prompt's logits."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from conversation import open_cpu

from turbospark import Runner, synth

VOCAB = 40_000
MIB = 1 << 20


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thin model with a wide vocabulary: logits of a whole prompt would dwarf all else."""
    return synth(
        "llama",
        tmp_path_factory.mktemp("thin") / "thin",
        layers=2,
        hidden=32,
        heads=1,
        kv_heads=1,
        head_dim=32,
        width=32,
        vocab=VOCAB,
        progress=False,
    )


def peak(runner: Runner, count: int) -> int:
    """Bytes at most held above the open model while a prompt of `count` tokens is fed."""
    prompt = [i % VOCAB for i in range(count)]
    runner.reset()
    runner.prefill(prompt[:8])
    runner.reset()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.prefill(prompt)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("chunk", ["off", 512])
def test_logits_of_a_whole_prompt_are_never_made(install: Path, chunk: str | int) -> None:
    with open_cpu(install, max_context=2100, prefill_chunk=chunk) as runner:
        below, above = peak(runner, 2047), peak(runner, 2049)
        logits = 2047 * VOCAB * 4
        assert above < logits / 4
        assert above < below * 1.5 + MIB


def test_memory_of_a_prompt_follows_the_chunk_and_not_the_prompt(install: Path) -> None:
    with open_cpu(install, max_context=4096, prefill_chunk=128) as runner:
        assert runner._engine is not None
        runner._engine.score_values = 128 * 1024
        short, long = peak(runner, 1024), peak(runner, 4096)
        assert long < short * 1.3
        # Without the bound on scores, the rows of a chunk times all keys are held.
        runner._engine.score_values = None
        assert peak(runner, 4096) > long * 1.5


def test_scoring_may_make_all_logits(install: Path) -> None:
    """`score` is asked for them; this is what the measurement above would see."""
    with open_cpu(install, max_context=600) as runner:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.score(list(range(512)))
        assert mx.get_peak_memory() - before > 512 * VOCAB * 4
