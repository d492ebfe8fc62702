"""Opening the expert store of a resolved residency. Knows the stores and the options they take."""

from __future__ import annotations

import mlx.core as mx

from turbospark.counters import PhaseClock
from turbospark.experts.base import Activation, ExpertStore
from turbospark.experts.mapped import MappedExperts
from turbospark.experts.resident import load_resident
from turbospark.experts.streamed import StreamedExperts
from turbospark.install.packed import PackedLayout
from turbospark.kernels.choices import choices
from turbospark.options import LiveToggles, OpenOptions


def open_experts(
    layout: PackedLayout,
    options: OpenOptions,
    activation: Activation,
    toggles: LiveToggles,
    clock: PhaseClock,
    *,
    residency: str,
    slots: int,
    device: mx.Device,
    dtype: mx.Dtype,
) -> ExpertStore:
    """The store for `residency`; `slots` per layer where it has slots. Raises ReadError."""
    if residency == "resident":
        return load_resident(
            layout,
            activation,
            dtype,
            toggles,
            clock,
            padded_routes=choices(device).padded_routes,
            verify_reads=options.verify_reads,
        )
    # CUDA's gathered products refuse strided matrices.
    strided = device.type == mx.DeviceType.cpu or mx.metal.is_available()
    if residency == "mapped":
        return MappedExperts(
            layout,
            activation,
            slots,
            strided=strided,
            clock=clock,
            toggles=toggles,
            verify_reads=options.verify_reads,
            measure_disk=options.expert_disk_io,
        )
    return StreamedExperts(
        layout,
        activation,
        slots,
        policy=options.expert_cache_policy,
        strided=strided,
        clock=clock,
        toggles=toggles,
        lookahead=options.expert_lookahead,
        verify_reads=options.verify_reads,
        measure_disk=options.expert_disk_io,
    )
