"""What packed caches hold: bytes against half precision, and how near rows come back.

    print(turbospark.kv.report(runner))

Knows an open runner's caches. Reading changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from turbospark import display
from turbospark.cache.packed import PackedKV, packed_bytes
from turbospark.cache.specs import PackedSpec
from turbospark.errors import UnsupportedError
from turbospark.runner import Runner


@dataclass(frozen=True)
class Distortion:
    """Mean squared error over mean square of a layer's rows that are held both ways, turned."""

    layer: int
    rows: int
    keys: float
    values: float


@dataclass(frozen=True)
class KvReport(display.Shown):
    """Packed layers of one conversation; bytes are those of all packed layers together.

    `bytes_per_token` counts codes and scales, `exact_bytes` the rows kept as they came whatever
    the context, `nbytes` everything allocated for `context` positions; the `half_` figures are the
    same layers in 16 bits. `distortion` is measured on the live conversation, and empty until rows
    have been packed.
    """

    kv_quant: str
    balance: str
    layers: tuple[int, ...]
    layers_in_all: int
    context: int
    bytes_per_token: int
    half_bytes_per_token: int
    exact_bytes: int
    nbytes: int
    half_nbytes: int
    distortion: tuple[Distortion, ...]

    @property
    def ratio(self) -> float:
        """Half precision over packed, at this context, exact rows counted."""
        return self.half_nbytes / self.nbytes

    def __str__(self) -> str:
        lines = [f"{name:<14} {value}" for name, value in self._facts().items()]
        lines += [
            f"layer {d.layer:<8} keys {d.keys:.4f}  values {d.values:.4f}  over {d.rows} rows"
            for d in self.distortion
        ]
        return "\n".join(lines)

    def _facts(self) -> dict[str, str]:
        layers = ", ".join(map(str, self.layers))
        token = self.half_bytes_per_token / self.bytes_per_token
        return {
            "bits": f"{self.kv_quant}, balance {self.balance}",
            "packed layers": f"{len(self.layers)} of {self.layers_in_all}: {layers}",
            "per token": f"{self.bytes_per_token} bytes, {token:.2f} times less than 16 bits",
            "exact rows": f"{self.exact_bytes / 2**20:.2f} MiB",
            "in all": f"{self.nbytes / 2**20:.2f} MiB at {self.context} positions, "
            f"{self.ratio:.2f} times less",
            "distortion": "relative squared error, measured" if self.distortion else "no row yet",
        }

    def _repr_html_(self) -> str:
        rows = {
            f"layer {d.layer}": f"keys {d.keys:.4f}, values {d.values:.4f}, {d.rows} rows"
            for d in self.distortion
        }
        return display.card("packed caches", "", display.facts(self._facts() | rows))


def report(runner: Runner) -> KvReport:
    """The packed caches of `runner`'s live conversation. Raises UnsupportedError without any."""
    with runner._exclusive() as engine, mx.stream(engine.device):
        states = engine.states
        caches = {
            i: cache
            for i, (cache, spec) in enumerate(zip(states.layers, states.specs, strict=True))
            if isinstance(spec, PackedSpec)
        }
        if not caches:
            raise UnsupportedError(
                f"{runner.path.name} was opened with kv_quant={runner.resolved.kv_quant}: no cache "
                "is packed; open it with kv_quant=4"
            )
        held: dict[int, PackedKV] = caches
        specs = [cache.spec for cache in held.values()]
        half_row = sum(2 * s.kv_heads * s.dim * 2 for s in specs)
        row = sum(s.kv_heads * (s.dim * (s.key_bits + s.value_bits) // 8 + 4) for s in specs)
        nbytes = sum(packed_bytes(s, states.max_context) for s in specs)
        found = [(i, c.distortion(states.position, states.furthest)) for i, c in held.items()]
        return KvReport(
            kv_quant=runner.resolved.kv_quant,
            balance=runner.resolved.kv_balance,
            layers=tuple(held),
            layers_in_all=len(states.specs),
            context=states.max_context,
            bytes_per_token=row,
            half_bytes_per_token=half_row,
            exact_bytes=nbytes - row * next(iter(held.values())).capacity,
            nbytes=nbytes,
            half_nbytes=half_row * states.max_context,
            distortion=tuple(Distortion(i, *d) for i, d in found if d is not None),
        )
