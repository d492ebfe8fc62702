"""Where the time of a runner goes: disjoint wall-clock buckets and cumulative counts.

Knows names and arithmetic. Does not know what the phases do, and reading never computes anything.
MLX evaluates lazily, so time lands in the bucket where an evaluation is waited for, not where the
operation was written.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from time import perf_counter_ns
from typing import Any

from turbospark import display

# Disjoint by construction: a nested phase's time is taken out of the phase around it.
PHASE_WORDS = {
    "build": "building the graph, and products on a CPU",
    "eval_wait": "waiting for a layer's router",
    "final_wait": "waiting for the logits",
    "router": "routing on the host",
    "expert_io": "reading missing experts",
    "bind": "uploading routes",
    "pipeline_wait": "waiting for routed work",
    "sampling": "choosing tokens",
    "detokenize": "spelling tokens",
    "loop": "stop checks and events",
}
PHASES = tuple(PHASE_WORDS)


@dataclass(frozen=True)
class PhaseCounters(display.Shown):
    """A snapshot, cumulative since open; `later - earlier` gives what happened between.

    Every `*_ns` except `*_gpu_ns` is wall time in nanoseconds, and the buckets add up to
    `total_ns`. None means not measured here, never zero: MLX's Python API has no device
    timestamps, so the three `*_gpu_ns` are None.
    """

    calls: int = 0
    """Forward passes, counted per token also inside chunks."""
    passes: int = 0
    """Model invocations: a chunk of a prompt is one."""
    attention_calls: int = 0
    """Attention products, over all layers: one per layer and pass, or per row of it."""
    fused_layers: int = 0
    """Layers that ran as a few fused launches, over all passes (`kernels`)."""
    delta_rows: int = 0
    """Rows that passed gated delta nets by kernels of our own, over all layers (`kernels`)."""
    qsa_rows_dense: int = 0
    """Query rows that block-sparse layers attended densely: few keys, or `qsa_force_dense`."""
    qsa_rows_sparse: int = 0
    """Query rows that attended to chosen blocks, over all layers."""
    qsa_blocks_scored: int = 0
    qsa_blocks_selected: int = 0
    passes_dropped: int = 0
    """Passes begun for a token that was not chosen, and undone."""
    total_ns: int = 0
    """Everything below: forward passes, sampling, detokenizing and the loop around them."""
    build_ns: int = 0
    """Host time of a forward pass outside the other buckets: building and encoding the graph, and
    on a CPU the products that numpy computes (`kernels.host_product`)."""
    eval_wait_ns: int = 0
    """Blocked on a layer's result inside a pass (router readback)."""
    final_wait_ns: int = 0
    """Blocked on the logits at the end of a pass."""
    router_ns: int = 0
    """Host routing: top-k and the plan of cache slots."""
    expert_io_ns: int = 0
    """Blocking reads of missing experts."""
    bind_ns: int = 0
    """Uploading routing weights and slot indices."""
    pipeline_wait_ns: int = 0
    """Waiting for the previous layer's routed work before its slots may be overwritten."""
    sampling_ns: int = 0
    detokenize_ns: int = 0
    loop_ns: int = 0
    """The generation loop itself: stop checks, events, bookkeeping."""
    attention_gpu_ns: int | None = None
    routed_gpu_ns: int | None = None
    final_gpu_ns: int | None = None
    expert_requests: int = 0
    """Experts asked for: top-k per layer and token; each distinct one once in a chunk that is read
    or copied group by group.
    """
    expert_hits: int = 0
    expert_io_bytes_requested: int = 0
    expert_io_bytes_physical: int | None = None
    """Bytes that reached the disk; None unless it was measured (see `expert_io_samples`)."""
    expert_io_samples: int = 0
    """Reads whose physical bytes were measured; check it before dividing."""
    routed_passes: int = 0
    """Groups of routes computed at once: one per layer and token, or group of a chunk."""
    routed_deferred: int = 0
    """Layers whose routed output was left to finish under the next layer (`routed_pipeline`)."""
    shared_started: int = 0
    """Shared experts started before their layer's reads (`shared_expert_overlap`)."""
    prefetch_requests: int = 0
    prefetch_hits: int = 0
    prefetch_bytes: int = 0

    def __sub__(self, earlier: PhaseCounters) -> PhaseCounters:
        """Field by field; a field that either side did not measure stays None."""

        def minus(name: str) -> Any:
            new, old = getattr(self, name), getattr(earlier, name)
            return None if new is None or old is None else new - old

        return PhaseCounters(**{f.name: minus(f.name) for f in fields(self)})

    @property
    def forward_ns(self) -> int:
        """`total_ns` without sampling, detokenizing and the loop."""
        return self.total_ns - self.sampling_ns - self.detokenize_ns - self.loop_ns

    @property
    def expert_hit_rate(self) -> float | None:
        """Hits per request, or None when nothing was requested."""
        return self.expert_hits / self.expert_requests if self.expert_requests else None

    def as_dict(self) -> dict[str, int | None]:
        """Field name to value, in declaration order."""
        return asdict(self)

    @property
    def _by_kernels(self) -> str | None:
        """What ran by kernels of our own, in words; None for nothing."""
        if not (self.fused_layers or self.delta_rows):
            return None
        return f"{self.fused_layers} fused layers, {self.delta_rows} gated delta rows"

    def _repr_html_(self) -> str:
        phases = [(n, getattr(self, f"{n}_ns")) for n in PHASE_WORDS]
        total, calls = max(self.total_ns, 1), max(self.calls, 1)
        rows = [
            (i, (n, f"{ns / 1e6:.1f} ms", f"{ns / 1e6 / calls:.3f} ms/token", f"{ns / total:.1%}",
                 PHASE_WORDS[n]))
            for i, (n, ns) in enumerate(phases) if ns
        ]  # fmt: skip
        hits, reads = self.expert_hit_rate, display.size(self.expert_io_bytes_requested)
        counts = display.facts({
            "experts": None if hits is None else f"{self.expert_requests} requested, "
            f"{self.expert_hits} held ({hits:.1%}), {reads} read",
            "prefetch": f"{self.prefetch_requests} requested, {self.prefetch_hits} used"
            if self.prefetch_requests else None,
            "kernels": self._by_kernels,
            "dropped": f"{self.passes_dropped} passes" if self.passes_dropped else None,
        })  # fmt: skip
        stack = display.bar([(n, ns, f"{ns / 1e6:.1f} ms, {ns / total:.1%}") for n, ns in phases])
        note = f"{self.total_ns / 1e6:.1f} ms for {self.calls} tokens in {self.passes} passes"
        return display.card("Phases", note, stack, display.legend(rows), counts)

    def __str__(self) -> str:
        lines = [f"{'phase':<16}{'ms':>12}{'ms/call':>10}{'share':>8}"]
        total, calls = max(self.total_ns, 1), max(self.calls, 1)
        for name in ("total", *PHASES):
            ns = getattr(self, f"{name}_ns")
            if ns or name == "total":
                ms = ns / 1e6
                lines.append(f"{name:<16}{ms:>12.2f}{ms / calls:>10.3f}{ns / total:>8.1%}")
        lines.append(f"{'calls':<16}{self.calls:>12} tokens in {self.passes} passes")
        if self._by_kernels:
            lines.append(f"kernels: {self._by_kernels}")
        if self.expert_requests:
            lines.append(
                f"experts: {self.expert_requests} requested, {self.expert_hits} hit "
                f"({self.expert_hits / self.expert_requests:.1%}), "
                f"{self.expert_io_bytes_requested / 2**20:.1f} MiB read"
            )
        if self.prefetch_requests:
            lines.append(f"prefetch: {self.prefetch_requests} requested, {self.prefetch_hits} used")
        return "\n".join(lines)


class PhaseClock:
    """Accumulates `PhaseCounters`; one thread at a time.

    `with clock.phase("router"):` charges the block to that bucket. Phases nest, and the inner
    one's time is not the outer one's, so buckets never overlap. A phase must be closed before its
    function yields: a suspended generator would charge the consumer's time.
    """

    def __init__(self) -> None:
        self._spent = dict.fromkeys(PHASES, 0)
        self._counts: dict[str, int] = {}
        self._open: list[str] = []
        self._mark = 0
        self._phases = {name: _Phase(self, name) for name in PHASES}

    def phase(self, name: str) -> _Phase:
        """A context manager charging its block to bucket `name`, one of `PHASES`."""
        return self._phases[name]

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a count field of `PhaseCounters` (`calls`, `expert_hits`, ...)."""
        self._counts[name] = self._counts.get(name, 0) + amount

    def snapshot(self, **measured: int | None) -> PhaseCounters:
        """The state now, closed phases only; `measured` sets count fields that others keep."""
        spent = {f"{name}_ns": ns for name, ns in self._spent.items()}
        values: dict[str, Any] = {**spent, **self._counts, **measured}
        return PhaseCounters(total_ns=sum(spent.values()), **values)

    def _enter(self, name: str) -> None:
        now = perf_counter_ns()
        if self._open:
            self._spent[self._open[-1]] += now - self._mark
        self._open.append(name)
        self._mark = now

    def _exit(self, name: str, failed: bool) -> None:
        now = perf_counter_ns()
        if failed and name in self._open:
            # An interrupt can strike between an inner phase's opening and its block.
            while self._open[-1] != name:
                self._open.pop()
        if not self._open or self._open[-1] != name:
            raise RuntimeError(
                f"phase {name!r} closed while {self._open} are open; "
                "a generator must not yield inside a phase"
            )
        self._open.pop()
        self._spent[name] += now - self._mark
        self._mark = now


class _Phase:
    """The reusable context manager of one bucket; the clock holds all state."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._clock._enter(self._name)

    def __exit__(self, kind: object, *_: object) -> None:
        self._clock._exit(self._name, kind is not None)
