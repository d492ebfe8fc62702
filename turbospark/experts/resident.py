"""All experts in MLX arrays, read once at open. The fastest residency where memory allows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from turbospark.dtypes import Quant
from turbospark.experts.base import Activation, Router
from turbospark.experts.mlp import ExpertMLP, StackedMatrix
from turbospark.install.files import read_exactly
from turbospark.install.packed import PackedLayer, PackedLayout
from turbospark.install.planes import empty_planes, host_view
from turbospark.install.record import PROJECTIONS
from turbospark.policies import LiveToggles


class ResidentExperts:
    """Every layer's experts stacked [E, rows, words]; router ids index them directly."""

    residency = "resident"
    slots = 0

    def __init__(self, layers: Mapping[int, ExpertMLP], toggles: LiveToggles) -> None:
        self.layers = dict(layers)
        self.toggles = toggles

    def routed(
        self,
        layer: int,
        x: mx.array,
        ids: mx.array,
        weights: mx.array,
        beside: mx.array | None = None,
    ) -> mx.array:
        """See `ExpertStore.routed`; nothing is waited for, so `beside` needs no start."""
        rows = x.shape[1]
        x, ids, weights = x.reshape(rows, -1), ids.reshape(rows, -1), weights.reshape(rows, -1)
        if rows == 1 or self.toggles.routed_batch_prefill:
            return self.layers[layer](x, ids, weights)[None]
        each = [
            self.layers[layer](x[t : t + 1], ids[t : t + 1], weights[t : t + 1])
            for t in range(rows)
        ]
        return mx.concatenate(each, axis=0)[None]

    def watch(self, layer: int, router: Router) -> None:
        """See `ExpertStore.watch`; there is nothing to look ahead for."""

    def close(self) -> None:
        """See `ExpertStore.close`."""

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for mlp in self.layers.values() for a in mlp.arrays())

    @property
    def buffers(self) -> int:
        return sum(len(mlp.arrays()) for mlp in self.layers.values())


def load_resident(
    layout: PackedLayout,
    activation: Activation,
    dtype: mx.Dtype,
    toggles: LiveToggles,
    padded_routes: int | None = None,
) -> ResidentExperts:
    """Read every record of the layout; dense weights and affine companions become `dtype`.

    `padded_routes` is handed to every `ExpertMLP`.
    """
    layers = {
        i: replace(_load_layer(layer, activation, dtype), padded_routes=padded_routes)
        for i, layer in layout.layers.items()
    }
    return ResidentExperts(layers, toggles)


def _load_layer(layer: PackedLayer, activation: Activation, dtype: mx.Dtype) -> ExpertMLP:
    fd = os.open(layer.path, os.O_RDONLY)
    try:
        matrices = [_load_matrix(layer, fd, name, dtype) for name in PROJECTIONS]
    finally:
        os.close(fd)
    return ExpertMLP(matrices[0], matrices[1], matrices[2], activation)


def _load_matrix(layer: PackedLayer, fd: int, name: str, dtype: mx.Dtype) -> StackedMatrix:
    roles = layer.record.tensors
    tensor = roles[name]
    fmt = tensor.fmt
    stacked = empty_planes(fmt, (layer.count, *tensor.shape))
    suffixes = ("", "_scales", "_biases")
    for suffix, array in zip(suffixes, stacked.arrays(), strict=False):
        _fill(layer, fd, name + suffix, array)
    bias = None
    if f"{name}_bias" in roles:
        vectors = empty_planes(
            roles[f"{name}_bias"].fmt, (layer.count, *roles[f"{name}_bias"].shape)
        )
        _fill(layer, fd, f"{name}_bias", vectors.weight)
        bias = vectors.dense(dtype)
    if not isinstance(fmt, Quant):
        matrix = StackedMatrix(fmt, stacked.dense(dtype), bias=bias)
    elif stacked.scales is not None and stacked.biases is not None:
        matrix = StackedMatrix(
            fmt,
            stacked.weight,
            stacked.scales.astype(dtype),
            stacked.biases.astype(dtype),
            bias,
        )
    else:
        matrix = StackedMatrix(fmt, stacked.weight, stacked.scales, None, bias)
    mx.eval(matrix.arrays())
    return matrix


def _fill(layer: PackedLayer, fd: int, role: str, array: mx.array) -> None:
    """Read one role of every expert straight into rows of `array` [E, ...]."""
    rows = host_view(array).reshape(layer.count, -1)
    offset = layer.record.tensors[role].offset
    for expert in range(layer.count):
        read_exactly(
            fd,
            rows[expert],
            layer.offset(expert) + offset,
            f"{layer.path.name} expert {expert} {role}",
        )
