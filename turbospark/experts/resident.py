"""All experts in MLX arrays, read once at open. The fastest residency where memory allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx
import numpy as np

from turbospark.counters import PhaseClock
from turbospark.dtypes import Quant
from turbospark.experts.base import Activation, Router, rows_of
from turbospark.experts.mlp import ExpertMLP, StackedMatrix, token_by_token
from turbospark.experts.reader import LayerFile
from turbospark.install.files import read_exactly
from turbospark.install.packed import PackedLayer, PackedLayout
from turbospark.install.planes import empty_planes, host_view
from turbospark.install.record import PROJECTIONS
from turbospark.kernels.experts import Experts, Matrix, stacked
from turbospark.policies import LiveToggles


class ResidentExperts:
    """Every layer's experts stacked [E, rows, words]; router ids index them directly."""

    def __init__(
        self, layers: Mapping[int, ExpertMLP], toggles: LiveToggles, clock: PhaseClock
    ) -> None:
        self.layers = dict(layers)
        self.toggles = toggles
        self.clock = clock

    def routed(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        beside: mx.array | None = None,
    ) -> mx.array:
        """See `ExpertStore.routed`; nothing is waited for, so `beside` needs no start."""
        x, ids, weights = rows_of(x, ids, weights)
        batched = len(x) == 1 or self.toggles.routed_batch_prefill
        self.count(len(x), ids.shape[1], passes=1 if batched else len(x))
        mlp = self.layers[layer]
        return (mlp(x, ids, weights) if batched else token_by_token(mlp, x, ids, weights))[None]

    def count(self, tokens: int, ranks: int, passes: int) -> None:
        """Count that many routes, computed in `passes` groups."""
        self.clock.count("expert_requests", tokens * ranks)
        self.clock.count("expert_hits", tokens * ranks)
        self.clock.count("routed_passes", passes)

    def packed(self, layer: int, glu: str) -> Experts | None:
        """What the routed kernels take of a layer whose activation is `glu`; None where its
        matrices are not packed.
        """
        mlp = self.layers[layer]
        gate, up, down = (_kernel_matrix(m) for m in (mlp.gate, mlp.up, mlp.down))
        if gate is None or up is None or down is None:
            return None
        return Experts(gate, up, down, glu)

    def watch(self, layer: int, router: Router, beside: bool = False) -> None:
        """See `ExpertStore.watch`; there is nothing to look ahead for."""

    def settle(self) -> None:
        """See `ExpertStore.settle`; nothing here outlives a pass."""

    def close(self) -> None:
        """See `ExpertStore.close`."""
        self.layers.clear()

    @property
    def effective(self) -> set[str]:
        return {"routed_batch_prefill"}

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for mlp in self.layers.values() for a in mlp.arrays())

    @property
    def formula(self) -> str:
        return f"all experts of {len(self.layers)} layers"

    @property
    def buffers(self) -> int:
        return sum(len(mlp.arrays()) for mlp in self.layers.values())


def _kernel_matrix(m: StackedMatrix) -> Matrix | None:
    """One projection of all experts as kernels read it; None where it is dense."""
    if not isinstance(m.fmt, Quant) or m.scales is None:
        return None
    _, rows, words = m.weight.shape
    planes = [None if a is None else stacked(a) for a in (m.biases, m.bias)]
    columns = words * 32 // m.fmt.bits
    return Matrix(m.fmt, rows, columns, stacked(m.weight), stacked(m.scales), *planes)


def load_resident(
    layout: PackedLayout,
    activation: Activation,
    dtype: mx.Dtype,
    toggles: LiveToggles,
    clock: PhaseClock,
    padded_routes: int | None = None,
    verify_reads: bool = False,
) -> ResidentExperts:
    """Read every record of the layout; dense weights and affine companions become `dtype`.

    `padded_routes` is handed to every `ExpertMLP`.
    """
    layers = {}
    for index, layer in layout.layers.items():
        if verify_reads:
            _verify(layer)
        layers[index] = replace(_load_layer(layer, activation, dtype), padded_routes=padded_routes)
    return ResidentExperts(layers, toggles, clock)


def _verify(layer: PackedLayer) -> None:
    """Hold every record against the install's checksum before it is loaded role by role."""
    file = LayerFile(layer, verify=True)
    record = np.empty(layer.stride, np.uint8)
    for expert in range(layer.count):
        layer.read_record_into(expert, record)
        file.check(expert, layer.record.planes(record))
    file.close()


def _load_layer(layer: PackedLayer, activation: Activation, dtype: mx.Dtype) -> ExpertMLP:
    gate, up, down = (_load_matrix(layer, name, dtype) for name in PROJECTIONS)
    return ExpertMLP(gate, up, down, activation)


def _load_matrix(layer: PackedLayer, name: str, dtype: mx.Dtype) -> StackedMatrix:
    roles = layer.record.tensors
    tensor = roles[name]
    fmt = tensor.fmt
    planes = empty_planes(fmt, (layer.count, *tensor.shape))
    suffixes = ("", "_scales", "_biases")
    for suffix, array in zip(suffixes, planes.arrays(), strict=False):
        _fill(layer, name + suffix, array)
    bias = None
    if f"{name}_bias" in roles:
        vectors = empty_planes(
            roles[f"{name}_bias"].fmt, (layer.count, *roles[f"{name}_bias"].shape)
        )
        _fill(layer, f"{name}_bias", vectors.weight)
        bias = vectors.dense(dtype)
    if not isinstance(fmt, Quant):
        matrix = StackedMatrix(fmt, planes.dense(dtype), bias=bias)
    elif planes.scales is not None and planes.biases is not None:
        matrix = StackedMatrix(
            fmt,
            planes.weight,
            planes.scales.astype(dtype),
            planes.biases.astype(dtype),
            bias,
        )
    else:
        matrix = StackedMatrix(fmt, planes.weight, planes.scales, None, bias)
    mx.eval(matrix.arrays())
    return matrix


def _fill(layer: PackedLayer, role: str, array: mx.array) -> None:
    """Read one role of every expert straight into rows of `array` [E, ...]."""
    rows = host_view(array).reshape(layer.count, -1)
    offset = layer.record.tensors[role].offset
    for expert in range(layer.count):
        read_exactly(
            layer.fd,
            rows[expert],
            layer.offset(expert) + offset,
            f"{layer.path}: expert {expert} {role}",
        )
