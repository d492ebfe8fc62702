"""Expert layouts made by hand, and what their experts compute in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from turbospark.counters import PhaseClock
from turbospark.dtypes import Format, Quant, affine
from turbospark.experts.mapped import MappedExperts
from turbospark.experts.resident import load_resident
from turbospark.experts.streamed import StreamedExperts
from turbospark.install.packed import PackedLayout, PackedWriter, RecordLayout
from turbospark.install.planes import Planes, quantize
from turbospark.layers.moe import swiglu
from turbospark.options import LiveToggles, RuntimeToggles

H, F = 64, 128
Q4 = affine(4, 32)
Layers = Mapping[int, Mapping[str, Format]]
Dense = dict[tuple[int, int], dict[str, np.ndarray]]


def uniform(layers: int) -> dict[int, dict[str, Format]]:
    return {i: {"gate": Q4, "up": Q4, "down": Q4} for i in range(layers)}


def write_layout(path: Path, layers: Layers, count: int, seed: int = 0) -> PackedLayout:
    """Random experts of hidden size H and width F in the given formats."""
    rng = np.random.default_rng(seed)
    writer = PackedWriter(path)
    for layer, formats in layers.items():
        shapes = {r: ((H, F) if r == "down" else (F, H)) for r in formats}
        writer.begin_layer(
            layer, count, RecordLayout.build({r: (formats[r], shapes[r]) for r in formats})
        )
        for expert in range(count):
            for role, fmt in formats.items():
                values = mx.array(rng.standard_normal(shapes[role]).astype(np.float32) * 0.1)
                writer.write(expert, {role: _stored(values, fmt)})
        writer.end_layer()
    writer.close()
    return PackedLayout.read(path)


def _stored(values: mx.array, fmt: Format) -> Planes:
    if isinstance(fmt, Quant):
        return quantize(values, fmt)
    values = values.astype(getattr(mx, fmt.dtype))
    mx.eval(values)
    return Planes(fmt, values.shape, values)


def dense_experts(layout: PackedLayout) -> Dense:
    """float32 matrices of every (layer, expert), unpacked from the record's bytes by numpy."""
    found: Dense = {}
    for index, layer in layout.layers.items():
        record = np.empty(layer.stride, np.uint8)
        for expert in range(layer.count):
            layer.read_record_into(expert, record)
            planes = {
                role: record[t.offset : t.offset + t.size]
                for role, t in layer.record.tensors.items()
            }
            found[index, expert] = {
                role: _unpack(planes, role, *layer.record.parts()[role])
                for role in ("gate", "up", "down")
            }
    return found


def _unpack(planes: dict[str, np.ndarray], role: str, fmt: Format, shape: tuple) -> np.ndarray:
    if not isinstance(fmt, Quant):
        return _floats(planes[role], fmt.dtype).reshape(shape)
    assert fmt.mode == "affine"
    bits = np.unpackbits(planes[role], bitorder="little").reshape(*shape, fmt.bits)
    codes = bits @ (1 << np.arange(fmt.bits))
    scales, biases = (
        np.repeat(
            _floats(planes[f"{role}_{name}"], fmt.scale_dtype).reshape(shape[0], -1),
            fmt.group_size,
            axis=1,
        )
        for name in ("scales", "biases")
    )
    return (codes * scales + biases).astype(np.float32)


def _floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(dtype).astype(np.float32)


def reference(
    dense: Dense, layer: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """x [T, H], ids and weights [T, k] -> [T, H] in float64."""
    out = np.zeros(x.shape, np.float64)
    for t, row in enumerate(x.astype(np.float64)):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            m = dense[layer, int(expert)]
            gate, up = m["gate"] @ row, m["up"] @ row
            out[t] += weight * (m["down"] @ (gate / (1 + np.exp(-gate)) * up))
    return out


class Store:
    """A store of any residency with its clock and toggles, asked with numpy arrays."""

    def __init__(
        self, layout: PackedLayout, residency: str = "streamed", slots: int = 4, **options
    ) -> None:
        self.clock = PhaseClock()
        self.toggles = LiveToggles(RuntimeToggles(**options.pop("toggles", {})))
        shared = {"clock": self.clock, "toggles": self.toggles}
        if residency == "resident":
            self.store = load_resident(layout, swiglu, mx.float32, self.toggles, self.clock)
        elif residency == "mapped":
            options = {"strided": True, **options}
            self.store = MappedExperts(layout, swiglu, slots, **shared, **options)
        else:
            options = {"policy": "lfu", "strided": True, **options}
            self.store = StreamedExperts(layout, swiglu, slots, **shared, **options)

    def ask(
        self, layer: int, x: np.ndarray, ids: np.ndarray | Sequence, weights: np.ndarray
    ) -> np.ndarray:
        """x [T, H], ids [T, k], weights [T, k] -> [T, H]."""
        y = self.store.routed(
            layer,
            mx.array(x)[None],
            mx.array(np.asarray(ids, np.uint32))[None],
            mx.array(weights)[None],
        )
        return np.array(y)[0]

    @property
    def counters(self):
        return self.clock.snapshot()


def request(rng: np.random.Generator, tokens: int, experts: Sequence[int], k: int):
    """Random rows, distinct experts per row out of `experts`, and weights."""
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.uint32)
    weights = rng.random((tokens, k)).astype(np.float32)
    return rng.standard_normal((tokens, H)).astype(np.float32), ids, weights
