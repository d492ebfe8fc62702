"""Seeded damage to each metadata file: it opens or raises one of our errors, nothing else."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from handmade import Original

from turbospark.errors import TurbosparkError
from turbospark.install.opening import Install
from turbospark.install.packed import PackedLayout
from turbospark.install.resident import ResidentIndex

ROUNDS = 300


def damage(data: bytes, rng: random.Random) -> bytes:
    """Flip bits, overwrite, cut, repeat or insert a piece."""
    out = bytearray(data)
    at = rng.randrange(len(out))
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.randint(1, 4)):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at : at + rng.randint(1, 8)] = bytes(rng.randrange(256) for _ in range(8))
    elif kind == 2:
        del out[at:]
    elif kind == 3:
        out[at:at] = out[at : at + rng.randint(1, 200)]
    else:
        del out[at : at + rng.randint(1, 40)]
    return bytes(out)


def replace_values(value: Any, rng: random.Random) -> None:
    """Put something odd at one random place of a JSON document."""
    odd = [None, True, -1, 0, 1.5, 2**63, 2**64 - 1, 10**19, "", "x", "../x", [], {}, [[]], "\0"]
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        child = value[key]
        if isinstance(child, (dict, list)) and child and rng.random() < 0.8:
            value = child
            continue
        if rng.random() < 0.2:
            del value[key]
        else:
            value[key] = rng.choice(odd)
        return


def use(path: Path) -> bool:
    """Open and read everything; True if it opened."""
    try:
        with Install.open(path, verify="receipt") as install:
            for name in install.resident.names:
                install.resident.read(name)
            for layer in install.experts.layers.values() if install.experts else ():
                layer.read_record_into(layer.count - 1, bytearray(layer.stride))
        return True
    except TurbosparkError as err:
        assert str(err) and "\n" not in str(err)
        return False


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("fuzz") / "m")


def fix_sizes(original: Original) -> None:
    """Let the manifest agree with the damaged file, so that the damage itself is met."""
    manifest = original.manifest()
    for name in manifest["files"]:
        manifest["files"][name]["size"] = (original.path / name).stat().st_size
    (original.path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["manifest.json", "packed_experts/layout.json"])
def test_damaged_json_never_escapes_as_another_error(clean: Original, name: str, seed: int) -> None:
    fix_sizes(clean)
    path = clean.path / name
    data = path.read_bytes()
    rng = random.Random(seed)
    refused = 0
    try:
        for _ in range(ROUNDS // 3):
            if rng.random() < 0.5:
                path.write_bytes(damage(data, rng))
            else:
                document = json.loads(data)
                replace_values(document, rng)
                path.write_text(json.dumps(document))
            if name != "manifest.json":
                fix_sizes(clean)
                try:
                    PackedLayout.read(clean.path).close()
                except TurbosparkError:
                    refused += 1
            use(clean.path)
    finally:
        path.write_bytes(data)
    if name != "manifest.json":
        assert refused > ROUNDS // 5


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_index_never_escapes_as_another_error(clean: Original, seed: int) -> None:
    path = clean.path / "model_weights.bin"
    data = path.read_bytes()
    used = 24 + 72 * 3 + 60  # header, table, names
    rng = random.Random(seed)
    refused = 0
    try:
        for _ in range(ROUNDS):
            head = damage(data[:used], rng)
            path.write_bytes(head[:used] + data[len(head[:used]) :] if rng.random() < 0.7 else head)
            try:
                index = ResidentIndex.open(path)
                for name in index.names:
                    index.read(name)
                index.close()
            except TurbosparkError:
                refused += 1
    finally:
        path.write_bytes(data)
    assert refused > ROUNDS // 4


def test_every_field_of_the_index_survives_every_extreme_value(clean: Original) -> None:
    path = clean.path / "model_weights.bin"
    data = path.read_bytes()
    fields = [(at, "<Q") for at in (0, 8, 16)]
    for entry in range(3):
        start = 24 + 72 * entry
        fields += [(start + at, "<Q") for at in (8, 16, 40, 48, 56, 64)]
        fields += [(start + at, "<I") for at in (0, 24, 28, 32, 36)]
        fields += [(start + 4, "<H"), (start + 6, "<B")]
    try:
        for at, code in fields:
            bits = 8 * struct.calcsize(code)
            for value in (0, 1, 2 ** (bits - 1), 2**bits - 1, 2 ** (bits - 1) - 1):
                broken = bytearray(data)
                struct.pack_into(code, broken, at, value)
                path.write_bytes(broken)
                try:
                    index = ResidentIndex.open(path)
                    for name in index.names:
                        index.read(name)
                    index.close()
                except TurbosparkError:
                    continue
    finally:
        path.write_bytes(data)


def test_the_undamaged_install_still_opens(clean: Original) -> None:
    fix_sizes(clean)
    with Install.open(clean.path, verify="full"):
        pass
