"""What packed caches hold: bytes against unpacked ones, and how near rows come back.

    print(turbospark.kv.report(runner))

Knows an open runner's caches. Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import mlx.core as mx

from turbospark import display
from turbospark.cache.packed import PackedKV, packed_part, unpacked
from turbospark.cache.sparse import PackedRows, SparseKV
from turbospark.cache.specs import CacheSpec
from turbospark.errors import UnsupportedError
from turbospark.install.planes import MX_DTYPES
from turbospark.runner import Runner
from turbospark.sizing import kv_bytes

FAR = 1 << 24
"""Positions beyond every window."""


@dataclass(frozen=True)
class Distortion:
    """Mean squared error over mean square of a layer's rows that are held both ways, turned."""

    layer: int
    rows: int
    keys: float
    values: float


@dataclass(frozen=True)
class Bytes:
    """Bytes of some caches as they are, and unpacked: in the runner's dtype, and in 16 bits."""

    held: int
    unpacked: int
    half: int

    @property
    def ratio(self) -> float:
        """How many times as much they take unpacked in the runner's dtype."""
        return self.unpacked / self.held

    @property
    def half_ratio(self) -> float:
        """How many times as much they take in 16 bits."""
        return self.half / self.held


@dataclass(frozen=True)
class KvReport(display.Shown):
    """The caches of one conversation of up to `context` positions, packed layers and all.

    `packed` are the packed layers' keys and values, rows kept exactly counted (`exact_bytes`), and
    `packed_per_token` what one position more takes in them; `in_all` and `per_token` are the caches
    of every layer. `distortion` is measured on the live conversation, and empty until rows have
    been packed.
    """

    kv_quant: str
    balance: str
    dtype: str
    layers: tuple[int, ...]
    layers_in_all: int
    context: int
    packed_per_token: Bytes
    packed: Bytes
    exact_bytes: int
    per_token: Bytes
    in_all: Bytes
    distortion: tuple[Distortion, ...]

    def __str__(self) -> str:
        lines = [f"{name:<14} {value}" for name, value in self._facts().items()]
        lines += [
            f"layer {d.layer:<8} keys {d.keys:.4f}  values {d.values:.4f}  over {d.rows} rows"
            for d in self.distortion
        ]
        return "\n".join(lines)

    def _facts(self) -> dict[str, str]:
        layers = ", ".join(map(str, self.layers))
        return {
            "bits": f"{self.kv_quant}, balance {self.balance}",
            "packed layers": f"{len(self.layers)} of {self.layers_in_all}: {layers}",
            "packed rows": self._beside(self.packed_per_token, _bytes, "per token"),
            "exact rows": f"{_mib(self.exact_bytes)} of packed layers, whatever the context",
            "per token": self._beside(self.per_token, _bytes, "in all layers"),
            "in all": self._beside(self.in_all, _mib, f"at {self.context} positions"),
            "distortion": "relative squared error, measured" if self.distortion else "no row yet",
        }

    def _beside(self, counted: Bytes, shown: Callable[[int], str], where: str) -> str:
        """Bytes beside what unpacked caches take."""
        half = f"{shown(counted.half)} in 16 bits ({counted.half_ratio:.2f} times)"
        if counted.unpacked == counted.half:
            return f"{shown(counted.held)} {where}; unpacked {half}"
        own = f"{shown(counted.unpacked)} in {self.dtype} ({counted.ratio:.2f} times)"
        return f"{shown(counted.held)} {where}; unpacked {own} or {half}"

    def _repr_html_(self) -> str:
        rows = {
            f"layer {d.layer}": f"keys {d.keys:.4f}, values {d.values:.4f}, {d.rows} rows"
            for d in self.distortion
        }
        return display.card("Packed caches", "", display.facts(self._facts() | rows))


def report(runner: Runner) -> KvReport:
    """The packed caches of `runner`'s live conversation. Raises UnsupportedError without any."""
    with runner._exclusive() as engine, mx.stream(engine.device):
        states = engine.states
        parts = {i: p for i, p in enumerate(map(packed_part, states.specs)) if p is not None}
        if not parts:
            raise UnsupportedError(
                f"{runner.path.name} was opened with kv_quant={runner.resolved.kv_quant}: no cache "
                "is packed; open it with kv_quant=4"
            )
        held = {i: _packed(states.layers[i]) for i in parts}
        found = [(i, c.distortion(states.position, states.furthest)) for i, c in held.items()]
        size = MX_DTYPES[runner.resolved.dtype].size
        ring, context = runner.options.swa_ring_capacity, states.max_context
        packed = _in_all(list(parts.values()), context, size, ring)
        per_token = _per_token(list(parts.values()), size, ring)
        capacity = next(iter(held.values())).capacity
        return KvReport(
            kv_quant=runner.resolved.kv_quant,
            balance=runner.resolved.kv_balance,
            dtype=runner.resolved.dtype,
            layers=tuple(parts),
            layers_in_all=runner.arch.num_layers,
            context=context,
            packed_per_token=per_token,
            packed=packed,
            exact_bytes=packed.held - per_token.held * capacity,
            per_token=_per_token(states.specs, size, ring),
            in_all=_in_all(states.specs, context, size, ring),
            distortion=tuple(Distortion(i, *d) for i, d in found if d is not None),
        )


def _bytes(count: int) -> str:
    return f"{count} bytes"


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def _packed(cache: PackedKV | SparseKV) -> PackedKV:
    """The packed rows of a layer."""
    if isinstance(cache, PackedKV):
        return cache
    assert isinstance(cache.rows, PackedRows)  # its spec says so
    return cache.rows.held


def _in_all(specs: Sequence[CacheSpec], context: int, size: int, ring: int | None) -> Bytes:
    """Caches of `context` positions, of `size` bytes an element where they are not packed."""
    plain = list(map(unpacked, specs))
    kinds = ((specs, size), (plain, size), (plain, 2))
    return Bytes(*(kv_bytes(kind, context, each, ring) for kind, each in kinds))


def _per_token(specs: Sequence[CacheSpec], size: int, ring: int | None) -> Bytes:
    """What one position more takes, beyond every window."""
    short, long = (_in_all(specs, context, size, ring) for context in (FAR, 2 * FAR))
    pairs = zip(astuple(short), astuple(long), strict=True)
    return Bytes(*(round((b - a) / FAR) for a, b in pairs))
