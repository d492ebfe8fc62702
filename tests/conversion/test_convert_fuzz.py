"""Damaged checkpoints: any flipped bytes end in a named refusal or in a conversion, nothing else.

The seeds are fixed, so that a failure repeats; the message tells which one it was.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    LLAMA,
    MOE,
    llama_tensors,
    moe_tensors,
    save_folder,
    save_gguf,
    store_experts,
)

from turbospark.conversion.gguf import CompanionOverflow
from turbospark.conversion.opening import open_checkpoint
from turbospark.conversion.transfer import fetch
from turbospark.errors import SourceError, TurbosparkError

ROUNDS = 60


def flipped(data: bytes, span: int, seed: int) -> bytes:
    """One to three bytes of the first `span` replaced."""
    rng = np.random.default_rng(seed)
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        changed[rng.integers(0, min(span, len(data)))] = rng.integers(0, 256)
    return bytes(changed)


def read_all(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for provider in checkpoint.plan.resident.values():
            fetch(checkpoint.source, provider, provider.fmt)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gguf", "gguf with experts", "safetensors", "config.json"])
def test_flipped_bytes_are_refused_by_name_or_harmless(tmp_path: Path, kind: str) -> None:
    resident, experts = moe_tensors()
    if kind.startswith("gguf"):
        path = source = tmp_path / "m.gguf"
        if kind == "gguf":
            save_gguf(path, llama_tensors(), "Q4_0")
        else:
            save_gguf(path, resident, "Q8_0", "qwen3moe", experts)
    else:
        source = save_folder(tmp_path / "f", resident | store_experts(experts, "fused"), MOE)
        path = source / ("config.json" if kind == "config.json" else "model.safetensors")
    data = path.read_bytes()
    refused = 0
    for seed in range(ROUNDS):
        path.write_bytes(flipped(data, 3000, seed))
        try:
            read_all(source)
        except (TurbosparkError, CompanionOverflow):
            refused += 1
        except BaseException as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}")
    assert refused > ROUNDS // 4
    with warnings.catch_warnings():
        path.write_bytes(data)
        read_all(source)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "num_attention_heads"])
@pytest.mark.parametrize("value", [10**6, 2**31 - 1, 10**18])
def test_absurd_sizes_are_refused_before_anything_is_made_that_large(
    tmp_path: Path, key: str, value: int
) -> None:
    resident, experts = moe_tensors()
    settings = MOE | {key: value, "num_key_value_heads": 1}
    tensors = resident | store_experts(experts, "stacked")
    with pytest.raises(SourceError):
        open_checkpoint(save_folder(tmp_path / "f", tensors, settings))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("block_count", r"llama\.block_count = 4294967295; the checkpoint has 21 tensors"),
        ("attention.head_count", r"blk\.0\.attn_q\.weight has shape"),
        ("attention.key_length", r"blk\.0\.attn_q\.weight has shape"),
    ],
)
def test_absurd_numbers_in_gguf_metadata_are_refused(
    tmp_path: Path, key: str, message: str
) -> None:
    path = save_gguf(tmp_path / "m.gguf", llama_tensors(), "F16")
    data = path.read_bytes()
    uint32 = b"\x04\0\0\0"
    at = data.index(f"llama.{key}".encode() + uint32) + len(f"llama.{key}") + 4
    huge = 2**32 - 1 if key == "block_count" else 2**31 - 2
    path.write_bytes(data[:at] + huge.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(SourceError, match=message):
        open_checkpoint(path)


def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "f", llama_tensors(), LLAMA)
    for text in ("[]", "3", "null", '{"a": NaN}', "{", json.dumps(LLAMA)[:-1]):
        (folder / "config.json").write_text(text)
        with pytest.raises(SourceError, match=r"config\.json"):
            open_checkpoint(folder)
