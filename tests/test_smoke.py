"""The main job in five seconds: convert, open, generate, count. The first test to run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from turbospark import GenerationOptions, OpenOptions, Runner, convert

CHECKPOINT = Path(__file__).parent / "data" / "oracles" / "llama-base"


def test_a_checkpoint_converts_opens_and_continues_as_transformers_does(tmp_path: Path) -> None:
    with np.load(CHECKPOINT / "oracle.npz") as oracle:
        prompt, expected = oracle["input_ids"][0].tolist(), oracle["greedy_ids"].tolist()
        logits = oracle["logits"]
    install = convert(CHECKPOINT, tmp_path / "llama.gturbo", progress=False)
    greedy = GenerationOptions(temperature=0, max_new_tokens=len(expected))
    with Runner.open(install, OpenOptions(device="cpu", max_context=64)) as runner:
        assert np.abs(np.array(runner.score(prompt)) - logits).max() < 1e-3
        scored, buffers = runner.phase_counters, runner.buffer_allocations
        result = runner.generate(prompt, greedy)
        spent = runner.phase_counters - scored
        assert result.token_ids == expected
        assert (result.stop_reason, result.prompt_tokens) == ("max_tokens", len(prompt))
        assert runner.position == len(prompt) + len(expected) - 1  # the last is never fed
        assert runner.buffer_allocations == buffers
    assert spent.calls == len(prompt) + len(expected) - 1
    measured = (result.prefill_seconds + result.decode_seconds) * 1e9
    assert abs(spent.total_ns - measured) < 0.1 * measured  # 15 ms of tiny passes


def test_the_same_weights_in_four_bits_still_run(tmp_path: Path) -> None:
    install = convert(
        CHECKPOINT,
        tmp_path / "llama-4bit.gturbo",
        bits=4,
        group_size=32,
        overrides={"*.down_proj.weight": None},  # 48 columns do not divide into groups
        progress=False,
    )
    with Runner.open(install, OpenOptions(device="cpu", max_context=64)) as runner:
        sampled = [
            runner.generate([1, 2, 3], temperature=1.0, seed=7, max_new_tokens=8, ignore_eos=True)
            for _ in range(2)
        ]
    assert sampled[0].token_ids == sampled[1].token_ids and sampled[0].new_tokens == 8
