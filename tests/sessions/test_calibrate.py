"""Balance tables: what is measured, where it is stored, and what is not taken from a file."""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conversation import answer, open_cpu, same, tokens_of
from oracle_folders import ORACLES, Oracle

from turbospark import OpenOptions, Runner, calibrate, calibration
from turbospark.cache.attend import Step
from turbospark.cache.kv import LinearKV
from turbospark.cache.packed import Balance
from turbospark.cache.specs import FullSpec
from turbospark.calibration import _Watched, measure
from turbospark.errors import (
    IndexCorruptError,
    NonFiniteLogitsError,
    OptionError,
    SessionFileError,
    UnsupportedError,
)
from turbospark.install import balance
from turbospark.install.opening import Install

NAME = "mlx-llama-llama3-4bit"
CPU = OpenOptions(device="cpu")


@pytest.fixture
def copied(installed: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(installed(NAME), tmp_path / "model.gturbo"))


def ids_of(name: str, count: int) -> list[int]:
    return tokens_of(Oracle(ORACLES / name), count)


def recorded(runner: Runner, ids: list[int], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys [KV, n, D] as the cache holds them, and queries caught on their way, in float64."""
    engine = runner._engine
    assert engine is not None
    cache, queries = engine.states.layers[layer], []
    attend = cache.attend

    def spy(q: mx.array, *rest: Any) -> mx.array:
        queries.append(np.array(q[0]).astype(np.float64))
        return attend(q, *rest)

    cache.attend = spy
    runner.prefill(ids)
    del cache.attend
    keys = np.array(cache.arrays()[0][0, :, : len(ids)]).astype(np.float64)
    return keys, np.concatenate(queries, axis=1)


def recorded_sparse(runner: Runner, ids: list[int], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of a block-sparse layer, whose rows come [n, heads, D]."""
    engine = runner._engine
    assert engine is not None
    cache, queries = engine.states.layers[layer], []
    attend = cache.attend

    def spy(q: mx.array, *rest: Any) -> mx.array:
        queries.append(np.array(q).astype(np.float64))
        return attend(q, *rest)

    cache.attend = spy
    runner.prefill(ids)
    del cache.attend
    keys = np.array(cache.arrays()[0][: len(ids)]).astype(np.float64)
    return keys.swapaxes(0, 1), np.concatenate(queries).swapaxes(0, 1)


@pytest.mark.parametrize(
    ("name", "layer"), [(NAME, 1), ("qwen3_5-irregular", 1), ("qwen4_exp-base", 1)]
)
def test_tables_are_means_and_quarter_powers(
    name: str, layer: int, installed: Callable[[str], Path]
) -> None:
    ids = ids_of(name, 150)
    with open_cpu(installed(name)) as runner:
        mean, scale = measure(runner, ids)[layer]
        record = recorded_sparse if name.startswith("qwen4") else recorded
        keys, queries = record(runner, ids, layer)
    heads = len(keys)
    grouped = queries.reshape(heads, -1, *queries.shape[1:])
    for head in range(heads):
        rows, asked = keys[head, 4:], grouped[head][:, 4:].reshape(-1, keys.shape[-1])
        assert np.allclose(mean[head], rows.mean(0), atol=1e-4)
        want = ((asked**2).mean(0) / rows.var(0)) ** 0.25
        want /= np.exp(np.log(want).mean())
        assert np.allclose(scale[head], want, rtol=2e-3)


def test_queries_of_layers_that_share_a_cache_are_counted(
    installed: Callable[[str], Path],
) -> None:
    with open_cpu(installed("gemma4-e2b")) as runner:
        tables = measure(runner, ids_of("gemma4-e2b", 100))
        engine = runner._engine
        assert engine is not None
        assert set(tables) == {1}
        assert all(type(c).__name__ in ("LinearKV", "RingKV") for c in engine.states.layers)


def test_calibrating_stores_tables_that_the_next_open_uses(copied: Path) -> None:
    prompt = ids_of(NAME, 150)
    options = {"kv_quant": 4, "max_context": 320}
    with (
        pytest.warns(UserWarning, match=r"kv_quant=4 without balance tables .*calibrate \S+model"),
        open_cpu(copied, **options) as before,
    ):
        assert before.resolved.kv_balance == "none"
        plain = answer(before, prompt, 4)
    file = calibrate(copied, tokens=200, options=CPU)
    assert file == copied / "kv_balance.safetensors"
    with open_cpu(copied, **options) as first, open_cpu(copied, **options) as second:
        assert first.resolved.kv_balance.startswith("calibrated ")
        balanced = answer(first, prompt, 4)
        assert same(balanced, answer(second, prompt, 4))
        assert not np.array_equal(balanced.logits, plain.logits)
        engine = first._engine
        assert engine is not None
        assert isinstance(engine.states.layers[0].balance, Balance)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_cpu(copied, **options).close()
        with open_cpu(copied) as off:
            assert off.resolved.kv_balance == "none"


def test_provenance_is_recorded_and_equal_runs_write_equal_files(copied: Path) -> None:
    calibrate(copied, tokens=100, seed=3, options=CPU)
    data = (copied / balance.NAME).read_bytes()
    with Install.open(copied) as install:
        found = balance.provenance(install)
        assert found is not None
        assert found["source"] == "random ids, seed 3" and found["tokens"] == "100"
        assert found["install"] == install.manifest.sha256
    calibrate(copied, tokens=100, seed=3, options=CPU)
    assert (copied / balance.NAME).read_bytes() == data
    assert not list(copied.glob(".*"))


def test_a_session_made_with_other_tables_is_refused(copied: Path, tmp_path: Path) -> None:
    options = {"kv_quant": 4, "max_context": 320}
    with open_cpu(copied, **options) as runner:
        runner.prefill(ids_of(NAME, 100))
        runner.save_session(tmp_path / "talk")
    calibrate(copied, tokens=100, options=CPU)
    with (
        open_cpu(copied, **options) as runner,
        pytest.raises(SessionFileError, match="made with kv_balance none"),
    ):
        runner.load_session(tmp_path / "talk")


@pytest.mark.filterwarnings("ignore:max_context=4096 is past")
@pytest.mark.parametrize(("trained", "fed"), [(None, 4096), (131072, 4096), (300, 300), (8, 64)])
def test_without_a_number_tokens_are_4096_or_what_the_model_was_trained_to(
    trained: int | None, fed: int, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def spy(runner: Runner, ids: list[int]) -> balance.Tables:
        seen.append(len(ids))
        return {}

    monkeypatch.setattr(calibration, "measure", spy)
    monkeypatch.setattr(
        calibration, "configured", lambda *_: ({"max_position_embeddings": trained}, 0)
    )
    monkeypatch.setattr(balance, "write", lambda *_: copied)
    calibrate(copied, options=CPU)
    assert seen == [fed]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 63}, r"tokens=63 is not valid; works: an integer 64\.\.16777216"),
        ({"tokens": 1 << 25}, "tokens=33554432 is not valid"),
        ({"tokens": 100.0}, r"tokens=100\.0 is not valid"),
        ({"tokens": True}, "tokens=True is not valid"),
        ({"seed": -1}, "seed=-1 is not valid; works: an integer >= 0"),
        ({"seed": None}, "seed=None is not valid"),
        ({"seed": "x"}, "seed='x' is not valid"),
        ({"text": 5}, "text=5 is not valid; works: a string, or None"),
    ],
    ids=str,
)
def test_impossible_arguments_are_refused(
    change: dict[str, Any], message: str, copied: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        calibrate(copied, **{"tokens": 100, "options": CPU, **change})


def test_a_model_without_such_layers_is_refused(installed: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedError, match="nothing to calibrate"):
        calibrate(installed("deepseek_v2-lite"), tokens=100, options=CPU)


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file with its header changed."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


MEAN = "layers.0.mean"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "of other weights": (
        lambda h: h["__metadata__"].update(install="ab"), r"other weights \(ab\); run `turbospark",
    ),
    "of another version": (lambda h: h["__metadata__"].update(format="x"), "of this version"),
    "without metadata": (lambda h: h.pop("__metadata__"), "of this version"),
    "without a layer": (lambda h: h.pop(MEAN), r"layers.0.mean is None; this model needs F32"),
    "of another shape": (lambda h: h[MEAN].update(shape=[1, 64]), r"this model needs F32 \[2, 32"),
    "of another dtype": (lambda h: h[MEAN].update(dtype="F16"), "this model needs F32"),
    "with wrong offsets": (lambda h: h[MEAN].update(data_offsets=[0, 4]), "do not lead to its"),
    "with offsets past the end": (
        lambda h: h[MEAN].update(data_offsets=[1 << 40, (1 << 40) + 256]), "do not lead to its",
    ),
    "with offsets that are no numbers": (
        lambda h: h[MEAN].update(data_offsets=[0.0, 256.0]), "do not lead to its",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused(kind: str, copied: Path) -> None:
    change, message = DAMAGE[kind]
    rewritten(calibrate(copied, tokens=64, options=CPU), change)
    with pytest.raises(IndexCorruptError, match=message):
        open_cpu(copied, kv_quant=4)
    open_cpu(copied).close()  # nothing reads it without kv_quant


@pytest.mark.parametrize("size", [0, 7, 100, 600])
def test_a_truncated_file_is_refused(size: int, copied: Path) -> None:
    file = calibrate(copied, tokens=64, options=CPU)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(IndexCorruptError, match=balance.NAME):
        open_cpu(copied, kv_quant=4)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (0, np.inf, "layers.0.mean has a value that is not a number"),
        (0, -2e6, r"layer 0 has scales .* and means up to 2e\+06; works: scales"),
        (1, np.nan, "layers.0.scale has a value that is not a number"),
        (1, 0.0, r"layer 0 has scales 0 to"),
        (1, -1.0, r"layer 0 has scales -1 to"),
        (1, 1e-40, r"layer 0 has scales 1e-40 to"),
        (1, 1e7, r"layer 0 has scales .* to 1e\+07"),
    ],
)
def test_impossible_tables_are_refused(part: int, value: float, message: str, copied: Path) -> None:
    calibrate(copied, tokens=64, options=CPU)
    with Install.open(copied) as install:
        tables = balance.read(install, {0: (2, 32), 1: (2, 32)})
        assert tables is not None
        pair = [a.copy() for a in tables[0]]
        pair[part][1, 5] = value
        balance.write(install, {**tables, 0: (pair[0], pair[1])}, {"source": "hand"})
    with pytest.raises(IndexCorruptError, match=message):
        open_cpu(copied, kv_quant=4)


def test_keys_that_are_not_numbers_are_refused_and_nothing_is_written(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = LinearKV.attend

    def broken(self: LinearKV, q: mx.array, *rest: Any) -> mx.array:
        return attend(self, q, *rest) * float("inf")

    monkeypatch.setattr(LinearKV, "attend", broken)
    with pytest.raises(NonFiniteLogitsError, match="layer 1 are not numbers on these 64 tokens"):
        calibrate(copied, tokens=64, options=CPU)
    assert not (copied / balance.NAME).exists()


def test_small_spreads_beside_large_biases_are_measured() -> None:
    """A key bias of 300 squared has no room in float32 for a variance of 1e-4."""
    rng = np.random.default_rng(0)
    keys = (300 + rng.normal(size=(1, 2, 96, 64)) * np.geomspace(0.01, 1, 64)).astype(np.float32)
    queries = rng.normal(size=(1, 4, 96, 64)).astype(np.float32)
    cache = LinearKV(FullSpec(2, 64, 64), 128, mx.float32)
    watched = _Watched(cache, (2, 64))
    for start in (0, 48):
        part = slice(start, start + 48)
        rows = [mx.array(a[:, :, part]) for a in (queries, keys, keys)]
        watched.attend(*rows, Step(start, 48), 0.125)
    mean, scale = watched.tables()
    late = keys[0, :, 4:].astype(np.float64)
    want = (
        (queries[0, :, 4:].reshape(2, -1, 64).astype(np.float64) ** 2).mean(1) / late.var(1)
    ) ** 0.25
    assert np.allclose(mean, late.mean(1), rtol=1e-6)
    assert np.allclose(scale, want / np.exp(np.log(want).mean(-1, keepdims=True)), rtol=1e-3)
