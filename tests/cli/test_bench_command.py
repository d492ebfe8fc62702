"""bench: figures that can be repeated, with everything they depend on beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turbospark import Runner
from turbospark.cli.peer import agreeing

Command = Callable[..., Any]
SHORT = ("--prompt-tokens", 20, "--max-new", 5, "--rounds", 2)


def test_every_figure_has_its_conditions_beside_it(turbospark: Command) -> None:
    data = json.loads(turbospark("bench", "tiny", *SHORT, "--json").out)
    for name in ("prefill", "decode"):
        speed = data[f"{name}_tokens_per_second"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert data["prompt"] == {"tokens": 20, "from": "a built-in text"}
    assert (data["new_tokens"], data["rounds"]) == (5, 2)
    assert data["counters"]["calls"] == 2 * (20 + 4)  # the warm-up round is not counted
    assert data["resolved"]["max_context"] == 25 and data["toggles"]["prefill_steel"] is True
    assert {"turbospark", "mlx", "python"} <= set(data["versions"])
    assert data["machine"]["cores"] >= 1 and data["machine"]["memory_bytes"] > 1 << 28
    assert data["peak_resident_bytes"] > data["memory"]["weights"] > 0


def test_prompt_lookup_that_guesses_wrong_is_measured_all_the_same(turbospark: Command) -> None:
    lookup = ("--speculative", 4, "--speculative-drafter", "lookup")
    found = turbospark("bench", "wordless", "--prompt-tokens", 64, *SHORT[2:], *lookup, "--json")
    assert found.code == 0 and json.loads(found.out)["speculation"]["drafter"] == "prompt_lookup"


def test_the_text_says_the_same(turbospark: Command) -> None:
    text = turbospark("bench", "tiny", *SHORT).out
    for word in (
        "prefill ",
        "decode ",
        "over 2 rounds",
        "machine ",
        "mlx ",
        "toggles ",
        "backend ",
    ):
        assert word in text
    assert "max_context          25" in text and "final_wait" in text and "expert hits" not in text


def test_the_prompt_is_repeated_to_its_length(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    real = Runner.generate
    monkeypatch.setattr(
        Runner, "generate", lambda self, ids, options: seen.append(ids) or real(self, ids, options)
    )
    found = turbospark("bench", "tiny", *SHORT, "--prompt", "abc", "--json")
    assert json.loads(found.out)["prompt"] == {"tokens": 20, "from": "the prompt given"}
    assert len(seen) == 3 and seen[0] == (seen[0][:3] * 7)[:20]


def test_a_model_without_a_tokenizer_is_measured_on_random_ids(turbospark: Command) -> None:
    data = json.loads(turbospark("bench", "wordless", *SHORT, "--json").out)
    assert data["prompt"] == {"tokens": 20, "from": "random token ids (no tokenizer)"}


def test_experts_and_toggles_are_told(turbospark: Command, tmp_path: Path) -> None:
    turbospark("synth", "qwen3_moe", tmp_path / "moe", "--layers", 2)
    words = ["--expert-cache-slots", 8, "--toggle", "routed_batch_prefill=0"]
    data = json.loads(turbospark("bench", tmp_path / "moe", *SHORT, *words, "--json").out)
    counters = data["counters"]
    assert data["toggles"]["routed_batch_prefill"] is False
    assert data["resolved"]["expert_cache_slots"] == 8
    assert data["expert_hit_rate"] == counters["expert_hits"] / counters["expert_requests"]
    assert "expert hits" in turbospark("bench", tmp_path / "moe", *SHORT).out


# --- mlx-lm beside it -----------------------------------------------------------------------------

CHECKPOINT = Path(__file__).parents[1] / "data" / "oracles" / "qwen2-base-float32"


@pytest.fixture
def checkpoint(turbospark: Command, tmp_path: Path) -> tuple[Path, Path]:
    """A float32 checkpoint and its install."""
    assert turbospark("convert", CHECKPOINT, tmp_path / "q.gturbo").code == 0
    return CHECKPOINT, tmp_path / "q.gturbo"


def test_mlx_lm_gets_the_same_prompt_and_gives_the_same_tokens(
    turbospark: Command, checkpoint: tuple[Path, Path]
) -> None:
    pytest.importorskip("mlx_lm")
    folder, install = checkpoint
    data = json.loads(turbospark("bench", install, *SHORT, "--mlx-lm", folder, "--json").out)
    other = data["mlx_lm"]
    assert other["agreeing_tokens"] == data["new_tokens"] == 5
    assert other["dtypes"] == ["float32"] and "mlx-lm" in data["versions"]
    assert other["decode_tokens_per_second"]["median"] > 0
    text = turbospark("bench", install, *SHORT, "--mlx-lm", folder).out
    assert "mlx-lm decode" in text and "the first 5 of 5 tokens are the same" in text


def test_a_comparison_needs_a_checkpoint_of_the_same_vocabulary(
    turbospark: Command, checkpoint: tuple[Path, Path]
) -> None:
    pytest.importorskip("mlx_lm")
    found = turbospark("bench", "tiny", *SHORT, "--mlx-lm", CHECKPOINT, "--prompt", "éé")
    assert found.code == 2 and "give the checkpoint that the install was made from" in found.err


def test_without_mlx_lm_the_comparison_says_what_to_install(
    turbospark: Command, checkpoint: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, install = checkpoint
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", None)
    found = turbospark("bench", install, *SHORT, "--mlx-lm", folder)
    assert (found.code, found.out) == (1, "") and "pip install mlx-lm" in found.err
    found = turbospark("bench", install, *SHORT, "--mlx-lm", install)
    assert found.code == 2 and "expected a checkpoint folder with config.json" in found.err


@pytest.mark.parametrize(
    ("ours", "theirs", "same"), [([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([5], [6], 0)]
)
def test_agreement_is_counted_from_the_start(ours: list[int], theirs: list[int], same: int) -> None:
    assert agreeing(ours, theirs) == same
