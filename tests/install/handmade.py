"""An install as the original writes it, from struct, json and numpy alone: no turbospark code.

Two routed layers, four experts, H = 128, F = 64, affine int4 group 64 with bfloat16 companions.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, WIDTH, VOCAB, LAYERS, EXPERTS, GROUP = 128, 64, 64, 2, 4, 64
PAGE = 16384
Edit = Callable[[dict[str, Any]], None]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """uint16 words of float32 values (truncated)."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def from_bf16(words: np.ndarray) -> np.ndarray:
    return (words.astype("<u4") << 16).view("<f4")


class Int4:
    """Random affine int4 matrix: codes, scale and bias words, and the value of each element."""

    def __init__(self, rows: int, columns: int, rng: np.random.Generator, bits: int = 4) -> None:
        self.codes = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint8)
        self.scales = to_bf16(rng.uniform(0.01, 0.1, (rows, columns // GROUP)).astype("<f4"))
        self.biases = to_bf16(rng.uniform(-0.5, 0.0, (rows, columns // GROUP)).astype("<f4"))
        self.bits = bits

    def packed(self) -> bytes:
        """First code in the lowest bits: for 4 bits the low nibble of byte 0, then its high one."""
        if self.bits == 8:
            return self.codes.tobytes()
        return (self.codes[:, 0::2] | (self.codes[:, 1::2] << 4)).tobytes()

    def planes(self) -> list[bytes]:
        return [self.packed(), self.scales.tobytes(), self.biases.tobytes()]

    def values(self) -> np.ndarray:
        """One element at a time, as the format defines it: scale * q + bias."""
        rows, columns = self.codes.shape
        out = np.zeros((rows, columns), "<f4")
        scales, biases = from_bf16(self.scales), from_bf16(self.biases)
        for r in range(rows):
            for c in range(columns):
                g = c // GROUP
                out[r, c] = scales[r, g] * np.float32(self.codes[r, c]) + biases[r, g]
        return out


def weight_file(tensors: list[tuple[str, int, tuple[int, ...], list[bytes]]]) -> bytes:
    """model_weights.bin of (name, tag, shape, planes)."""
    names = [name.encode() for name, *_ in tensors]
    table = 24 + 72 * len(tensors)
    index_size = -(-(table + sum(map(len, names))) // PAGE) * PAGE
    index, body = bytearray(index_size), bytearray()
    name_at = table
    for i, (_, tag, shape, planes) in enumerate(tensors):
        body += b"\0" * (-len(body) % 4)
        spans = []
        for plane in [*planes, b"", b""][:3]:
            spans.append((index_size + len(body) if plane else 0, len(plane)))
            body += plane
        dims = [*shape, 0, 0, 0, 0][:4]
        entry = struct.pack("<IHBB", name_at, len(names[i]), tag, 0)
        entry += struct.pack("<QQ4I", *spans[0], *dims) + struct.pack("<QQQQ", *spans[1], *spans[2])
        assert len(entry) == 72
        index[24 + 72 * i : 96 + 72 * i] = entry
        index[name_at : name_at + len(names[i])] = names[i]
        name_at += len(names[i])
    struct.pack_into("<QQQ", index, 0, index_size, len(body), len(tensors))
    return bytes(index + body)


def record(parts: dict[str, Int4]) -> tuple[bytes, dict[str, Any]]:
    """(bytes of one expert record before padding, its tensors for layout.json)."""
    data, tensors = b"", {}
    for role, matrix in parts.items():
        rows, columns = matrix.codes.shape
        shapes = [[rows, columns], [rows, columns // GROUP], [rows, columns // GROUP]]
        for suffix, dtype, shape, plane in zip(
            ("", "_scales", "_biases"),
            ("u32", "bf16", "bf16"),
            shapes,
            matrix.planes(),
            strict=True,
        ):
            row = {"offset": len(data), "size": len(plane), "dtype": dtype, "shape": shape}
            tensors[role + suffix] = row
            data += plane
    return data, tensors


ARCH: dict[str, Any] = {
    "hiddenSize": HIDDEN, "ffnIntermediate": 256, "moeIntermediateSize": WIDTH, "numHeads": 4,
    "numKVHeads": 2, "numFullKVHeads": 2, "headDim": 32, "fullHeadDim": 32, "vocabSize": VOCAB,
    "slidingWindow": 0, "finalLogitSoftcap": 0, "ropeTheta": 10000, "fullRopeTheta": 10000.0,
    "partialRotaryFactor": 1, "numLayers": LAYERS, "numExperts": EXPERTS, "topKExperts": 2,
    "tieWordEmbeddings": True, "attentionKEqV": False, "hiddenActivation": "silu",
    "fullAttentionLayerMask": [1, 1], "family": "qwen3moe", "attentionScale": 0.1767766952966369,
}  # fmt: skip

QUANT_SLOT = {
    "weightBits": 4,
    "scheme": "affine",
    "scaleType": "bf16",
    "biasType": "bf16",
    "groupSize": 64,
}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Original:
    """Writes the install; `edit_*` change the JSON before it is written, hashes follow."""

    def __init__(
        self, path: Path, edit_manifest: Edit | None = None, edit_layout: Edit | None = None
    ) -> None:
        rng = np.random.default_rng(7)
        self.path = path
        self.embedding = Int4(VOCAB, HIDDEN, rng)
        self.router = Int4(VOCAB, HIDDEN, rng, bits=8)
        self.norm = rng.standard_normal(HIDDEN).astype("<f4")
        self.experts = [
            [
                {p: Int4(*((HIDDEN, WIDTH) if p == "down" else (WIDTH, HIDDEN)), rng)
                 for p in ("gate", "up", "down")}
                for _ in range(EXPERTS)
            ]
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.files: dict[str, bytes] = {"model_weights.bin": weight_file(self.resident())}
        self._pack(edit_layout)
        manifest = self.manifest()
        if edit_manifest:
            edit_manifest(manifest)
        path.mkdir(parents=True)
        (path / "packed_experts").mkdir()
        for name, data in self.files.items():
            (path / name).write_bytes(data)
        (path / "manifest.json").write_text(json.dumps(manifest))

    def resident(self) -> list[tuple[str, int, tuple[int, ...], list[bytes]]]:
        return [
            ("model.embed_tokens.weight", 4, (VOCAB, HIDDEN), self.embedding.planes()),
            ("model.norm.weight", 1, (HIDDEN,), [to_bf16(self.norm).tobytes()]),
            ("router", 5, (VOCAB, HIDDEN), self.router.planes()),
        ]

    def _pack(self, edit: Edit | None) -> None:
        rows = []
        for layer, experts in enumerate(self.experts):
            data, entries = b"", []
            for e, parts in enumerate(experts):
                body, tensors = record(parts)
                assert len(body) <= PAGE
                row = {"expert": e, "offset": e * PAGE, "size": PAGE, "physicalRank": e}
                entries.append({**row, "tensors": tensors})
                data += body.ljust(PAGE, b"\0")
            name = f"layer_{layer:02d}.bin"
            self.files[f"packed_experts/{name}"] = data
            rows.append({"layer": layer, "file": name, "expertStride": PAGE, "experts": entries})
        layout = {
            "expertStride": PAGE, "numLayers": LAYERS, "expertsPerLayer": EXPERTS, "layers": rows
        }  # fmt: skip
        if edit:
            edit(layout)
        self.files["packed_experts/layout.json"] = json.dumps(layout).encode()

    def manifest(self) -> dict[str, Any]:
        quant = {
            name: dict(QUANT_SLOT)
            for name in ("embedding", "attention", "sharedExpert", "routedExpert")
        }
        return {
            "magic": "GTURBO", "versionMajor": 1, "versionMinor": 0,
            "flags": {"streamingPresent": True, "turboQuantKV": False, "aneSharedExpert": False},
            "modelID": "someone/tiny-moe", "arch": json.loads(json.dumps(ARCH)),
            "quant": {**quant, "router": {**QUANT_SLOT, "weightBits": 8}},
            "files": {n: {"size": len(d), "sha256": sha(d)} for n, d in self.files.items()},
            "expertsPerLayer": EXPERTS, "numLayers": LAYERS, "expertStride": PAGE,
        }  # fmt: skip
