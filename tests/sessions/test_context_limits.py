"""The context is exactly as large as asked, and what does not fit is refused in time (C23)."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation import KINDS, MODELS, answer, open_cpu, tokens_of
from oracle_folders import ORACLES, Oracle

from turbospark import OpenOptions, Runner, convert, resolve
from turbospark.cache.specs import RingSpec
from turbospark.errors import ContextOverflowError, OptionError, UnsupportedError
from turbospark.families import llama
from turbospark.families.base import Capabilities
from turbospark.generation import Finished
from turbospark.layers.weights import Weights
from turbospark.sizing import GIB, kv_bytes

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("prompt_tokens", [63, 64, 65, 200])
def test_prompts_at_the_edge_of_64_positions(
    name: str, prompt_tokens: int, installed: Callable[[str], Path]
) -> None:
    prompt = tokens_of(Oracle(ORACLES / name), prompt_tokens)
    with open_cpu(installed(name), max_context=64) as runner:
        assert runner.max_context == runner.resolved.max_context == 64
        if prompt_tokens == 63:
            result = runner.generate(prompt, max_new_tokens=1, **GREEDY)
            assert len(result.token_ids) == 1 and result.stop_reason == "max_tokens"
            assert result.kv_position == 63
        before = runner.phase_counters.passes
        new = 64 - 63 + 1 if prompt_tokens == 63 else 1
        with pytest.raises(ContextOverflowError) as caught:
            runner.generate(prompt, max_new_tokens=new, **GREEDY)
        error = caught.value
        numbers = (error.prompt_tokens, error.max_new_tokens, error.max_context)
        assert numbers == (prompt_tokens, new, 64)
        assert all(str(number) in str(error) for number in (*numbers, prompt_tokens + new))
        with pytest.raises(ContextOverflowError):
            runner.stream(prompt, max_new_tokens=new)  # not only when the stream is begun
        assert runner.phase_counters.passes == before


@pytest.mark.parametrize("name", KINDS)
def test_an_odd_context_is_honoured_to_the_last_position(
    name: str, installed: Callable[[str], Path]
) -> None:
    prompt = tokens_of(Oracle(ORACLES / name), 17)
    with open_cpu(installed(name), max_context=17) as runner, open_cpu(installed(name)) as roomy:
        # A ring can be as short as the context, so keys may lie in another order.
        tight, wide = answer(runner, prompt[:10], 7), answer(roomy, prompt[:10], 7)
        np.testing.assert_allclose(tight.logits, wide.logits, atol=1e-4, rtol=0)
        runner.reset()
        runner.prefill(prompt)
        assert runner.position == 17
        for call in (lambda: runner.step(1), lambda: runner.prefill([1])):
            with pytest.raises(ContextOverflowError, match="17 tokens \\+ 1 new"):
                call()
        assert runner.position == 17
        assert runner._engine is not None
        with pytest.raises(ContextOverflowError):  # past every check of a request
            list(runner._engine.feed([1], 0, None))
        with pytest.raises(ContextOverflowError):
            runner.score([*prompt, 1])


def test_generating_to_the_end_of_the_context_stops_there_and_says_so(
    installed: Callable[[str], Path],
) -> None:
    with open_cpu(installed("llama-base"), max_context=64) as runner:
        for count in (63, 40):
            prompt = tokens_of(Oracle(ORACLES / "llama-base"), count)
            result = runner.generate(prompt, max_new_tokens=None, **GREEDY)
            assert len(result.token_ids) == 64 - count and result.stop_reason == "context"
            exact = runner.generate(prompt, max_new_tokens=64 - count, **GREEDY)
            assert exact.token_ids == result.token_ids and exact.stop_reason == "max_tokens"
        with pytest.raises(ContextOverflowError):
            runner.generate(tokens_of(Oracle(ORACLES / "llama-base"), 64), max_new_tokens=None)


@pytest.mark.parametrize("name", MODELS)
def test_planned_cache_bytes_are_the_bytes_allocated(
    name: str, installed: Callable[[str], Path]
) -> None:
    specs: list[Any] = []
    for context, ring in ((17, None), (150, None), (150, 20)):
        if ring is not None and not any(isinstance(s, RingSpec) for s in specs):
            continue  # a ring that no layer has is refused
        options = {"max_context": context, "swa_ring_capacity": ring}
        with open_cpu(installed(name), **options) as runner:
            engine = runner._engine
            assert engine is not None
            specs = list(engine.states.specs)
            plan = kv_bytes(specs, context, 4, ring)
            assert runner.memory.kv == plan


# --- the load guard -----------------------------------------------------------------------------


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test when a weight is read."""

    def read(*_: object) -> None:
        raise AssertionError("a weight was read before the refusal")

    monkeypatch.setattr(Weights, "planes", read)


def machine(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr(resolve, "physical_memory", lambda: memory)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", KINDS)
def test_a_context_that_does_not_fit_is_refused_before_a_weight_is_read(
    name: str, installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, 4 * GIB)
    with pytest.raises(OptionError) as caught:
        open_cpu(installed(name), max_context=1 << 24, session_slots=64)
    message = str(caught.value)
    assert "max_context=16777216 needs" in message and "64 session(s)" in message
    assert "0 MiB are available: 4096 MiB memory" in message and "4096 MiB reserve" in message


@pytest.mark.usefixtures("unread")
def test_other_refusals_come_before_a_weight_is_read_too(
    installed: Callable[[str], Path],
) -> None:
    with pytest.raises(OptionError, match=r"swa_ring_capacity=8 is below the attention window 9"):
        open_cpu(installed("mistral-sliding"), swa_ring_capacity=8)
    with pytest.raises(
        OptionError, match=r"load_guard=1000 bytes caps expert slots .*: 0 \+ (\d+) = \1 bytes"
    ):
        open_cpu(installed("llama-base"), load_guard=1000)
    with pytest.raises(OptionError, match=r"comes out at .*, below min_auto_context=1000000"):
        open_cpu(installed("llama-base"), max_context="auto", min_auto_context=1000000)


def test_weights_expanded_for_the_cpu_are_counted_expanded(
    installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = installed("mlx-llama-llama3-4bit")
    with open_cpu(path) as runner:
        held = runner.memory.weights
    assert held > 4 * Path(path, "model_weights.bin").stat().st_size
    seen: list[int] = []
    monkeypatch.setattr(resolve, "check_load", lambda load, *_: seen.append(load.weights))
    open_cpu(path).close()
    assert seen == [held]


@pytest.mark.parametrize("residency", ["resident", "streamed", "mapped"])
def test_planned_expert_bytes_bound_what_is_held(
    residency: str, installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(resolve, "check_load", lambda load, *_: seen.append(load.experts))
    for name in ("mixtral-base", "gpt_oss-mxfp4", "mlx-qwen3_moe-base-4bit", "gpt_oss-bf16"):
        with open_cpu(installed(name), expert_residency=residency) as runner:
            held = runner.memory.experts
            assert held == seen[-1] if residency == "resident" else held <= seen[-1]


def test_auto_is_the_trained_context_and_resolved_says_so(
    installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = installed("llama-base")
    trained = Oracle(ORACLES / "llama-base").config["max_position_embeddings"]
    with open_cpu(path, max_context="auto", load_guard="off") as runner:
        assert runner.max_context == runner.resolved.max_context == trained
        basis = f"trained: the model was trained to {trained}"
        assert runner.resolved.max_context_basis == basis and basis in str(runner.resolved)
    machine(monkeypatch, 1 << 20)
    with pytest.raises(OptionError, match=r"\(memory: KV may take 0 MiB, 0\.25 of 1 MiB memory"):
        open_cpu(path, max_context="auto")
    with open_cpu(path, max_context=99, load_guard="off") as runner:
        assert runner.resolved.max_context_basis == "asked"


def test_auto_is_bounded_by_a_quarter_of_what_the_machine_has_left(
    installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = installed("llama-base")
    config = Oracle(ORACLES / "llama-base").config | {"max_position_embeddings": 1 << 20}
    with open_cpu(path, max_context=1024) as runner:
        per_thousand, weights = runner.memory.kv, runner.memory.weights
    seen = []
    monkeypatch.setattr(resolve, "auto_context", lambda load, *_: seen.append(load) or (16, ""))
    open_cpu(path, max_context="auto").close()
    monkeypatch.undo()
    # Room for three times 1024 positions in a quarter of what is left, and a little.
    machine(monkeypatch, 4 * GIB + weights + 4 * (3 * per_thousand + 100))
    load = replace(seen[0], physical=resolve.physical_memory())
    context, basis = resolve.auto_context(load, config["max_position_embeddings"], "relaxed", 0)
    assert context == 3 * 1024 and basis.startswith("memory: KV may take")


def test_past_the_trained_context_is_a_warning_only(installed: Callable[[str], Path]) -> None:
    path = installed("llama-base")
    trained = Oracle(ORACLES / "llama-base").config["max_position_embeddings"]
    with pytest.warns(UserWarning, match=f"past the {trained} tokens") as caught:
        Runner.open(path, OpenOptions(max_context=trained + 1, device="cpu")).close()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Runner.open(path, OpenOptions(max_context=trained, device="cpu")).close()


# --- what a family cannot do ----------------------------------------------------------------------


def test_what_a_family_cannot_do_is_refused_by_its_own_words(
    installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = installed("llama-base")
    with open_cpu(path, prefill_chunk=64) as runner:
        assert runner.supports_chunked_prefill and runner.chunked_prefill_refusal is None
        assert runner.resolved.prefill_chunk == 64
    unable = Capabilities(
        chunked_prefill="its rows wait for each other",
        prefix_reuse="its tables are not kept",
        session_pool="its tails are not swapped",
    )
    monkeypatch.setattr(llama, "family", replace(llama.family, capabilities=unable))
    for option, cause in (
        ({"prefill_chunk": 64}, "prefill_chunk=64 .* its rows wait for each other"),
        ({"prefix_reuse": True}, "prefix_reuse=True .* its tables are not kept"),
        ({"session_slots": 2}, "session_slots=2 .* its tails are not swapped"),
    ):
        with pytest.raises(UnsupportedError, match=cause):
            open_cpu(path, **option)
    with open_cpu(path) as runner:
        assert not runner.supports_chunked_prefill
        assert runner.chunked_prefill_refusal == "its rows wait for each other"
        assert runner.resolved.prefill_chunk == 1
        runner.generate([1, 2, 3], max_new_tokens=1)
        assert runner.phase_counters.passes == 3
        with pytest.raises(UnsupportedError, match="its rows wait for each other"):
            runner.prefill([1, 2], chunk=2)
        with pytest.raises(UnsupportedError, match="its tables are not kept"):
            runner.prefix_reuse = True


# --- end tokens of an install without a tokenizer -------------------------------------------------


def test_an_install_without_a_tokenizer_stops_at_the_ends_its_configuration_names(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    shutil.copytree(ORACLES / "llama-base", source)
    config = json.loads((source / "config.json").read_text())
    prompt = [1, 2, 3]
    with open_cpu(convert(source, tmp_path / "plain", progress=False)) as runner:
        free = runner.generate(prompt, max_new_tokens=6, **GREEDY).token_ids
    first, second = free[2], free[4]
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [first, 77]}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": second}))
    with open_cpu(convert(source, tmp_path / "stops", progress=False)) as runner:
        assert runner.tokenizer is None
        assert dict(runner.stop_ids) == dict.fromkeys({first, 77, second}, "eos")
        result = runner.generate(prompt, max_new_tokens=6, temperature=0)
        assert result.stop_reason == "eos"
        assert result.stop_token_id == next(t for t in free if t in (first, second))
        *_, last = runner.stream(prompt, max_new_tokens=6, temperature=0)
        assert isinstance(last, Finished) and last.result.token_ids == result.token_ids
