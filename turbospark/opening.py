"""From an install and resolved options to an engine: weights, experts, caches, model.

Knows which room needs what at open. Does not know prompts, nor what a caller may ask for.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from turbospark.cache.pool import SessionPool
from turbospark.cache.specs import CacheSpec
from turbospark.cache.state import LayerStates
from turbospark.counters import PhaseClock
from turbospark.engine import Engine
from turbospark.experts.opening import open_experts
from turbospark.families.base import Family
from turbospark.install.opening import Install
from turbospark.install.planes import MX_DTYPES
from turbospark.kernels.choices import choices
from turbospark.kernels.likeliest import likeliest, likeliest_reference
from turbospark.layers.weights import Weights
from turbospark.options import LiveToggles, OpenOptions
from turbospark.resolve import Resolved

# Toggles that every model's forward pass reads; its expert store adds to them.
PASS_TOGGLES = ("batched_gemv_prefill", "prefill_steel", "prefill_rows_attention")

SCORE_BYTES = 32 << 20
"""Attention scores of one layer and pass on a CPU, where MLX holds all of them: deep in a context
a chunk is fed in smaller passes, so that memory is bounded by the chunk and not by the prompt.
"""


def load(
    install: Install,
    options: OpenOptions,
    family: Family,
    config: Any,
    specs: list[CacheSpec],
    resolved: Resolved,
) -> tuple[Engine, int]:
    """The engine of an install, and the bytes of the weights it holds."""
    device = mx.Device(mx.cpu if resolved.device == "cpu" else mx.gpu)
    dtype = MX_DTYPES[resolved.dtype]
    best = choices(device, options.kernels)
    clock = PhaseClock()
    toggles = LiveToggles(options.toggles, PASS_TOGGLES)
    with mx.stream(device):
        weights = Weights(
            install.resident,
            family.weight_shapes(config),
            dtype,
            expand=resolved.weights == "expanded",
            kernels=best,
        )
        store = None
        if install.experts is not None:
            store = open_experts(
                install.experts,
                options,
                family.expert_activation(config),
                toggles,
                clock,
                residency=resolved.expert_residency,
                slots=resolved.expert_cache_slots,
                device=device,
                dtype=dtype,
            )
        model = family.build(config, weights, store)
        if store is not None:
            toggles.add_effective(store.effective)
        pool = SessionPool(
            resolved.session_slots,
            lambda: LayerStates(
                specs, resolved.max_context, dtype, options.swa_ring_capacity, options.kernels
            ),
        )
    engine = Engine(
        model,
        store,
        pool,
        toggles,
        device=device,
        max_context=resolved.max_context,
        prefill_chunk=resolved.prefill_chunk,
        prefix_reuse=resolved.prefix_reuse,
        clock=clock,
        pick=likeliest if options.kernels == "auto" else likeliest_reference,
        score_values=SCORE_BYTES // (4 * install.arch.num_heads) if device == mx.cpu else None,
    )
    return engine, weights.nbytes
