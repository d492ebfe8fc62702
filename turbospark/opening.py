"""From an install and resolved options to an engine: weights, experts, caches, model.

Knows which room needs what at open. Does not know prompts, nor what a caller may ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from turbospark.cache.packed import Balance, packed_part
from turbospark.cache.pool import SessionPool
from turbospark.cache.specs import CacheSpec, SparseSpec
from turbospark.cache.state import LayerStates
from turbospark.counters import PhaseClock
from turbospark.engine import Engine
from turbospark.experts.base import ExpertStore
from turbospark.experts.opening import open_experts
from turbospark.families.base import Family
from turbospark.install import balance
from turbospark.install.opening import Install
from turbospark.install.planes import MX_DTYPES, Planes
from turbospark.install.resident import ResidentIndex
from turbospark.install.row_table import RowTable
from turbospark.kernels.choices import choices
from turbospark.kernels.likeliest import likeliest, likeliest_reference
from turbospark.layers.weights import Weights
from turbospark.options import LiveToggles, OpenOptions
from turbospark.progress import DELAY, bar
from turbospark.resolve import Resolved
from turbospark.speculation.opening import open_watching

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
    progress: bool = False,
) -> tuple[Engine, int]:
    """The engine of an install, and the bytes of the weights it holds."""
    whole = resolved.expert_residency == "resident" and install.experts is not None
    held = install.bytes_per_slot * install.arch.num_experts if whole else 0
    total = install.resident_bytes + held
    with bar(install.path.name, total, "B", progress, leave=False, delay=DELAY) as shown:
        reader = _Watched(install.resident, shown.update)
        return _load(install, options, family, config, specs, resolved, reader, held)


class _Watched:
    """Resident tensors whose reads are reported in bytes."""

    def __init__(self, index: ResidentIndex, report: Callable[[int], Any]) -> None:
        self._index = index
        self.report = report

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def read(self, name: str) -> Planes:
        planes = self._index.read(name)
        self.report(sum(array.nbytes for array in planes.arrays()))
        return planes


def _load(
    install: Install,
    options: OpenOptions,
    family: Family,
    config: Any,
    specs: list[CacheSpec],
    resolved: Resolved,
    reader: _Watched,
    held: int,
) -> tuple[Engine, int]:
    device = mx.Device(mx.cpu if resolved.device == "cpu" else mx.gpu)
    clock = PhaseClock()
    toggles = LiveToggles(options.toggles, PASS_TOGGLES)
    with mx.stream(device):
        weights = Weights(
            reader,
            family.weight_shapes(config),
            MX_DTYPES[resolved.dtype],
            expand=resolved.weights == "expanded",
            kernels=choices(device, options.kernels),
            tables=_row_tables(install, family.table_shapes(config), resolved),
        )
        store = _store(install, options, family, config, resolved, toggles, clock, device)
        if store is not None:
            reader.report(held)
        model = family.build(config, weights, store)
        if store is not None:
            toggles.add_effective(store.effective)
        if any(isinstance(spec, SparseSpec) for spec in specs):
            toggles.add_effective({"qsa_force_dense"})
        pool = _sessions(install, options, specs, resolved)
        watcher = open_watching(
            resolved.drafter, family, config, weights, model, lambda: pool.live.states, toggles,
            clock,
        )  # fmt: skip
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
        watcher=watcher,
    )
    held_rows = sum(t.nbytes for t in weights.tables.values() if t.words is not None)
    return engine, weights.nbytes + held_rows


def _store(
    install: Install,
    options: OpenOptions,
    family: Family,
    config: Any,
    resolved: Resolved,
    toggles: LiveToggles,
    clock: PhaseClock,
    device: mx.Device,
) -> ExpertStore | None:
    """Where the experts are; None for a dense model. Raises ReadError."""
    if install.experts is None:
        return None
    return open_experts(
        install.experts,
        options,
        family.expert_activation(config),
        toggles,
        clock,
        residency=resolved.expert_residency,
        slots=resolved.expert_cache_slots,
        device=device,
        dtype=MX_DTYPES[resolved.dtype],
    )


def _sessions(
    install: Install, options: OpenOptions, specs: list[CacheSpec], resolved: Resolved
) -> SessionPool:
    """The caches of every conversation, allocated. Raises IndexCorruptError."""
    tables = _balance(install, specs)
    return SessionPool(
        resolved.session_slots,
        lambda: LayerStates(
            specs,
            resolved.max_context,
            MX_DTYPES[resolved.dtype],
            options.swa_ring_capacity,
            options.kernels,
            tables,
        ),
    )


def _row_tables(
    install: Install, shapes: dict[int, tuple[str, tuple[int, int]]], resolved: Resolved
) -> dict[str, RowTable]:
    """The family's tables by canonical name, mapped or read into memory."""
    tables = {name: install.row_table(layer, name, s) for layer, (name, s) in shapes.items()}
    if resolved.ngram_table == "resident":
        for table in tables.values():
            table.load()
    return tables


def _balance(install: Install, specs: list[CacheSpec]) -> dict[int, Balance]:
    """The tables of packed layers, where the install has them. Raises IndexCorruptError."""
    parts = enumerate(map(packed_part, specs))
    packed = {i: (part.kv_heads, part.dim) for i, part in parts if part is not None}
    found = balance.read(install, packed) if packed else None
    tables = {i: Balance(*map(mx.array, pair)) for i, pair in (found or {}).items()}
    mx.eval([(t.mean, t.scale) for t in tables.values()])
    return tables
