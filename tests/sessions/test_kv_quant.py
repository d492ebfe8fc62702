"""Packed caches in whole models: every way to an answer gives the same bits, and layers are named.

The cold side is a runner of its own that never reuses; `kv_quantized_layers` and the bytes of the
caches show that rows really are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conversation import answer, open_cpu, same, tokens_of
from oracle_folders import ORACLES, Oracle

from turbospark.cache.packed import PackedKV, layer_refusal
from turbospark.cache.sparse import PackedRows, SparseKV
from turbospark.cache.specs import FullSpec
from turbospark.errors import SessionFileError, UnsupportedError

# Where the packed layers are: all of two, one under shared and ring layers, one between recurrent
# ones, one with sink logits, one before a last that is left alone, one block-sparse.
LAYERS = {
    "mlx-llama-llama3-4bit": (0, 1),
    "gemma4-e2b": (1,),
    "qwen3_5-irregular": (1,),
    "gpt_oss-mxfp4": (1,),
    "muse_glimmer-mlx": (0,),
    "qwen3_moe-mixed": (0, 1, 2),
    "qwen4_exp-base": (1,),
}
CONTEXT = 320
LONG = {"max_context": CONTEXT, "kv_quant": 4}


def prompt_of(name: str, count: int = 230, seed: int = 0) -> list[int]:
    return tokens_of(Oracle(ORACLES / name), count, seed)


@pytest.mark.parametrize("name", LAYERS)
def test_packed_layers_are_named_and_smaller(name: str, installed: Callable[[str], Path]) -> None:
    with (
        open_cpu(installed(name), max_context=512) as plain,
        open_cpu(installed(name), max_context=512, kv_quant=4) as packed,
    ):
        assert plain.resolved.kv_quantized_layers == ()
        assert packed.resolved.kv_quantized_layers == LAYERS[name]
        assert packed.resolved.kv_quant == "4"
        engine = packed._engine
        assert engine is not None
        held = engine.states.layers
        rows = [c.rows if isinstance(c, SparseKV) else c for c in held]
        found = {i for i, r in enumerate(rows) if isinstance(r, PackedKV | PackedRows)}
        assert found >= set(LAYERS[name])
        assert packed.memory.kv < plain.memory.kv


@pytest.mark.parametrize("name", LAYERS)
def test_answers_are_near_those_of_exact_caches_and_not_the_same(
    name: str, installed: Callable[[str], Path]
) -> None:
    prompt = prompt_of(name)
    with (
        open_cpu(installed(name), max_context=CONTEXT) as plain,
        open_cpu(installed(name), **LONG) as packed,
    ):
        exact, near = (np.array(r.score(prompt)) for r in (plain, packed))
    # Up to the window only half precision differs.
    assert np.abs(exact[:64] - near[:64]).max() < 0.02 * np.abs(exact).max()
    assert not np.array_equal(exact[100:], near[100:])
    # The median: a router may choose another expert.
    assert np.median(np.abs(exact - near)) < 0.15 * exact.std()


@pytest.mark.parametrize("name", LAYERS)
def test_chunks_rows_and_steps_give_the_same_bits(
    name: str, installed: Callable[[str], Path]
) -> None:
    prompt = prompt_of(name)
    with open_cpu(installed(name), **LONG) as runner:
        whole = np.array(runner.score(prompt))
        for chunk in (None, 100, 33):
            runner.reset()
            assert np.array_equal(np.array(runner.prefill(prompt, chunk=chunk)), whole[-1])
        runner.reset()
        runner.prefill(prompt[:150], chunk=64)
        steps = [np.array(runner.step(token)) for token in prompt[150:]]
        assert np.array_equal(np.stack(steps), whole[150:])
        runner.toggles.prefill_rows_attention = False
        assert np.array_equal(np.array(runner.score(prompt)), whole)


@pytest.mark.parametrize("name", LAYERS)
def test_reused_turns_equal_cold_ones(name: str, installed: Callable[[str], Path]) -> None:
    path, prompt = installed(name), prompt_of(name)
    with (
        open_cpu(path, **LONG) as cold,
        open_cpu(path, prefix_reuse=True, prefill_chunk=32, session_slots=2, **LONG) as warm,
    ):
        begun = answer(warm, prompt, 4)
        assert same(begun, answer(cold, prompt, 4))
        held = [*prompt, *begun.tokens[:3]]
        answer(warm, [held[0] ^ 1, 2, 3], 2)  # the conversation is parked, and comes back
        for following, shared in (
            ([*held, 5, 6, 7], len(held)),
            ([*held[:-6], held[-6] ^ 1, 8], len(held) - 6),
            (prompt[:-3], len(prompt) - 4),
            ([*prompt[:100], 9, 9], 100),  # deeper than exact rows are kept
        ):
            again = answer(warm, following, 4)
            assert same(again, answer(cold, following, 4))
            assert again.kept <= shared
            if shared == len(held):
                assert again.kept == shared


@pytest.mark.parametrize("name", LAYERS)
def test_a_saved_conversation_goes_on_as_if_it_had_not_stopped(
    name: str, installed: Callable[[str], Path], tmp_path: Path
) -> None:
    path, prompt, file = installed(name), prompt_of(name), tmp_path / "talk"
    warm = {"prefix_reuse": True, "prefill_chunk": 64, **LONG}
    with open_cpu(path, **warm) as first, open_cpu(path, **warm) as second:
        begun = answer(first, prompt, 4)
        first.save_session(file)
        following = [*prompt, *begun.tokens[:3], 5, 6]
        assert second.load_session(file) == len(prompt) + 3
        theirs = answer(second, following, 40)
        assert theirs.kept == len(prompt) + 3
        assert same(theirs, answer(first, following, 40))
        second.prefix_reuse = False
        assert same(theirs, answer(second, following, 40))


def test_a_conversation_of_other_bits_is_refused(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    name, file = "mlx-llama-llama3-4bit", tmp_path / "talk"
    with open_cpu(installed(name), **LONG) as first:
        first.prefill(prompt_of(name))
        first.save_session(file)
    for other in ("off", 3, 3.5):
        with (
            open_cpu(installed(name), max_context=CONTEXT, kv_quant=other) as second,
            pytest.raises(SessionFileError, match="made with kv_quant 4"),
        ):
            second.load_session(file)


@pytest.mark.parametrize("bits", [2, 3, 3.5, 4])
def test_every_width_runs(bits: float, installed: Callable[[str], Path]) -> None:
    name = "mlx-llama-llama3-4bit"
    with open_cpu(installed(name), max_context=CONTEXT, kv_quant=bits) as runner:
        assert runner.resolved.kv_quant == str(bits)
        keys, values = {2: (2, 2), 3: (3, 3), 3.5: (4, 3), 4: (4, 4)}[bits]
        engine = runner._engine
        assert engine is not None
        spec = engine.states.specs[0]
        assert (spec.key_bits, spec.value_bits) == (keys, values)
        assert np.isfinite(np.array(runner.prefill(prompt_of(name)))).all()


@pytest.mark.parametrize(
    ("name", "bits", "reason"),
    [
        ("llama-base", 4, "heads have 8 dims; works: powers of two 16..512"),
        ("qwen3-base", 2, "24 dims of 2 bits are not whole words; works: 4 bits"),
        ("qwen3_5-base", 4, "no layer but the last attends to all positions"),
        ("mistral-sliding", 4, "no layer but the last attends to all positions"),
        ("deepseek_v2-lite", 4, "its cache already holds compressed latent rows"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(
    name: str, bits: int, reason: str, installed: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedError, match=f"kv_quant={bits} .*{reason}"):
        open_cpu(installed(name), kv_quant=bits)


def test_the_refusal_of_a_width_lists_every_width_that_packs() -> None:
    said = layer_refusal(FullSpec(2, 16, 16), 3, 3)
    assert said == "16 dims of 3 bits are not whole words; works: 2 or 4 bits"
    assert layer_refusal(FullSpec(2, 16, 16), 2, 2) is None
    assert layer_refusal(FullSpec(2, 16, 16), 4, 4) is None
