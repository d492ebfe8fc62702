"""The DFlash2 block drafter against a numpy drafter that has no cache, and in the round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blocks
import mlx.core as mx
import numpy as np
import pytest
from oracle_folders import ORACLES

from turbospark import DraftPolicies, OpenOptions, Runner, convert
from turbospark.errors import (
    NonFiniteLogitsError,
    SourceError,
    SpeculationUnavailableError,
    UnsupportedError,
)

CPU: dict[str, Any] = {"max_context": 220, "device": "cpu", "dtype": "float32"}
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
PROMPT = [int(i) for i in np.random.default_rng(3).integers(4, 90, 40)]
SOURCE = ORACLES / blocks.BASE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return blocks.drafter(tmp_path_factory.mktemp("drafter") / "d")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return convert(SOURCE, folder.parent / "model", drafter=folder, progress=False)


def opened(path: Path, width: int = 4, **options: Any) -> Runner:
    speculation = DraftPolicies(dflash=width)
    return Runner.open(path, OpenOptions(**{**CPU, **options}, speculation=speculation))


# --- arithmetic -----------------------------------------------------------------------------------


class NumpyDrafter:
    """The drafter in float64 over a whole context at once."""

    def __init__(self, folder: Path, embed: np.ndarray, out: np.ndarray, window: int = 12) -> None:
        tensors = mx.load(str(folder / "model.safetensors"))
        self.t = {k: np.array(v.astype(mx.float32), np.float64) for k, v in tensors.items()}
        self.embed, self.out, self.window = embed, out, window

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * self.t[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.t[f"{name}.weight"].T

    @staticmethod
    def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = positions[:, None, None] / 10000.0 ** (np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    def conv(self, x: np.ndarray, normed: np.ndarray, name: str, side: int) -> np.ndarray:
        deltas = self.linear(normed, f"{name}.kernel_projection").reshape(len(x), 2, 2, -1)
        base = self.t[f"{name}.base_kernel"]
        out = np.zeros_like(x)
        for i in range(len(x)):
            for channel in range(x.shape[1]):
                group = channel // 8
                for tap in range(2):
                    if i - tap >= 0:
                        weight = base[side, tap, channel] + deltas[i, side, tap, group]
                        out[i, channel] += weight * x[i - tap, channel]
        return out

    def attend(self, y: np.ndarray, context: np.ndarray, name: str) -> np.ndarray:
        start, rows = len(context), len(y)
        positions = np.arange(start + rows)
        both = np.concatenate([context, y])
        q = self.linear(y, f"{name}.q_proj").reshape(rows, blocks.HEADS, -1)
        k = self.linear(both, f"{name}.k_proj").reshape(len(both), blocks.KV, -1)
        v = self.linear(both, f"{name}.v_proj").reshape(len(both), blocks.KV, -1)
        q = self.turn(self.norm(q, f"{name}.q_norm"), positions[start:])
        k = self.turn(self.norm(k, f"{name}.k_norm"), positions)
        out = np.zeros_like(q)
        for i in range(rows):
            seen = [p for p in positions if p >= start or start + i - p < self.window]
            for h in range(blocks.HEADS):
                g = h // (blocks.HEADS // blocks.KV)
                scores = k[seen, g] @ q[i, h] * blocks.DIM**-0.5
                mass = np.exp(scores - scores.max())
                out[i, h] = mass / mass.sum() @ v[seen, g]
        return self.linear(out.reshape(rows, -1), f"{name}.o_proj")

    def __call__(self, anchor: int, taps: np.ndarray, count: int) -> tuple[list[int], np.ndarray]:
        """taps [L, 2 * H] of the committed positions -> (proposals, hidden rows)."""
        context = self.norm(self.linear(taps, "fc"), "hidden_norm")
        x = self.embed[[anchor, 3, 3, 3, 3]]
        for i in range(blocks.LAYERS):
            y = self.norm(x, f"layers.{i}.input_layernorm")
            inner = self.conv(y, y, f"layers.{i}.attention_conv", 0)
            inner = self.attend(inner, context, f"layers.{i}.self_attn")
            x = x + self.conv(inner, y, f"layers.{i}.attention_conv", 1)
            y = self.norm(x, f"layers.{i}.post_attention_layernorm")
            inner = self.conv(y, y, f"layers.{i}.mlp_conv", 0)
            gate = self.linear(inner, f"layers.{i}.mlp.gate_proj")
            inner = gate / (1 + np.exp(-gate)) * self.linear(inner, f"layers.{i}.mlp.up_proj")
            inner = self.linear(inner, f"layers.{i}.mlp.down_proj")
            x = x + self.conv(inner, y, f"layers.{i}.mlp_conv", 1)
        hidden = self.norm(x, "norm")[1:]
        selector, before, path = "candidate_selector", anchor, []
        for row in hidden[:count]:
            logits = self.out @ row
            best = np.argsort(-logits)[:4]
            mixed = self.t[f"{selector}.predecessor_codebook"][before] * self.linear(
                row, f"{selector}.hidden_projection"
            )
            scores = logits[best] + self.t[f"{selector}.successor_codebook"][best] @ mixed
            before = int(best[scores.argmax()])
            path.append(before)
        return path, hidden


def tapped(runner: Runner, ids: Sequence[int]) -> np.ndarray:
    """The model's stream after layers 0 and 2, side by side, from a pass without the drafter."""
    engine, found = runner._engine, {}
    assert engine is not None

    def after(layer: int, x: mx.array) -> mx.array:
        found[layer] = x
        return x

    engine.states.reset()
    engine.states.begin(len(ids))
    engine.model(mx.array([list(ids)]), engine.states, after)
    out = np.concatenate([np.array(found[i][0], np.float64) for i in (0, 2)], -1)
    engine.states.reset()
    return out


def tables(path: Path) -> tuple[np.ndarray, np.ndarray]:
    tensors = mx.load(str(SOURCE / "model.safetensors"))
    named = {k: np.array(v.astype(mx.float32), np.float64) for k, v in tensors.items()}
    embed = next(v for k, v in named.items() if k.endswith("embed_tokens.weight"))
    return embed, named.get("lm_head.weight", embed)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("length", [1, 9, 40, 150])
def test_the_drafter_proposes_what_a_numpy_drafter_proposes(
    path: Path, folder: Path, length: int, chunk: int | None
) -> None:
    prompt = (PROMPT * 4)[:length]
    with opened(path, swa_ring_capacity=20) as runner:
        runner.prefill(prompt, chunk=chunk)
        engine = runner._engine
        assert engine is not None and engine.watcher is not None
        drafter: Any = engine.watcher
        with engine.working():
            found = [p.token for p in drafter.propose([*prompt, 11], 4, None)]
            hidden = drafter.model.block(11, length, drafter._caches(engine.states))
            hidden = np.array(hidden[0])
        taps = tapped(runner, prompt)
    expected, rows = NumpyDrafter(folder, *tables(path))(11, taps, 4)
    np.testing.assert_allclose(hidden, rows, atol=1e-4)
    assert found == expected


def test_after_rounds_the_context_is_what_the_committed_tokens_give(path: Path) -> None:
    with opened(path) as runner:
        drafted = runner.generate(PROMPT, **GREEDY)
        assert drafted.speculation is not None and drafted.speculation.rollbacks > 0
        engine = runner._engine
        assert engine is not None
        held = [np.array(a[:, :, : engine.position]) for a in engine.states.layers[-1].arrays()]
        runner.reset()
        runner.prefill(drafted.kv_backed_token_ids)
        for kept, fed in zip(held, engine.states.layers[-1].arrays(), strict=True):
            np.testing.assert_array_equal(kept, np.array(fed[:, :, : kept.shape[2]]))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_answers_are_those_of_sequential_decoding(path: Path, width: int) -> None:
    with opened(path, width, prefix_reuse=True) as runner:
        assert (runner.resolved.drafter, runner.resolved.acceptance) == ("dflash", "match")
        for asked in (GREEDY, {**GREEDY, "temperature": 1.0, "seed": 5}):
            drafted = runner.generate(PROMPT, **asked)
            runner.reset()
            plain = runner.generate(PROMPT, **asked, draft_tokens=0)
            assert drafted.token_ids == plain.token_ids
            assert drafted.kv_backed_token_ids == plain.kv_backed_token_ids
            again = runner.generate([*PROMPT, *drafted.token_ids, 4], **GREEDY)
            assert again.reused_prefix_tokens == 59


def test_rows_that_are_not_finite_are_an_error(path: Path) -> None:
    with opened(path) as runner:
        engine = runner._engine
        assert engine is not None
        drafter: Any = engine.watcher
        drafter.model.successors = drafter.model.successors * float("nan")
        with pytest.raises(NonFiniteLogitsError, match="block drafter's scores are not finite"):
            runner.generate(PROMPT, **GREEDY)


# --- refusals -------------------------------------------------------------------------------------


def test_more_proposals_than_the_block_has_masks_are_refused(path: Path) -> None:
    with pytest.raises(SpeculationUnavailableError, match=r"dflash=fixed\(5\): it makes 4"):
        opened(path, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 48}, "the model's is"),
        ({"architectures": ["DFlashDraftModel"]}, "expected .'DFlash2DraftModel'"),
        ({"dflash_config": {**blocks.OWN, "target_layer_ids": [9]}}, "target_layer_ids = .9."),
        ({"dflash_config": {**blocks.OWN, "target_layer_ids": ["a"]}}, "expected whole numbers"),
        (
            {"dflash_config": {**blocks.OWN, "block_size": 257}},
            "block_size = 257; supported: 2..256",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; the model has 3"),
        ({"dflash_config": {**blocks.OWN, "selector_rank": 7}}, "hidden_projection"),
    ],
    ids=str,
)
def test_a_drafter_that_does_not_fit_is_refused_before_a_weight_is_read(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    other = blocks.drafter(tmp_path / "d", **change)
    with pytest.raises((SourceError, UnsupportedError), match=words):
        convert(SOURCE, tmp_path / "model", drafter=other, progress=False)
    assert not (tmp_path / "model").exists()


def test_drafters_of_other_families_and_of_no_folder_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match="family llama has no dflash drafter"):
        convert(ORACLES / "llama-base", tmp_path / "m", drafter=folder, progress=False)
    with pytest.raises(SourceError, match="expected a DFlash2 folder"):
        convert(SOURCE, tmp_path / "m", drafter=tmp_path / "none", progress=False)


def test_without_asking_nothing_of_the_drafter_is_loaded(path: Path) -> None:
    with Runner.open(path, OpenOptions(**CPU)) as plain, opened(path) as drafting:
        assert plain.memory.weights < drafting.memory.weights
        assert plain.memory.kv < drafting.memory.kv
