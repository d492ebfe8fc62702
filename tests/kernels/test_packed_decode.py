"""Decode attention over packed rows: emulated launches against a float64 loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from cases import error, floats, normal
from emulator import Emulated, emulate, sparse

from turbospark.kernels import kv_codec as codec
from turbospark.kernels import packed_decode
from turbospark.kernels.packed_attention import Near, Packed
from turbospark.kernels.packed_decode import (
    Tuning,
    launch_combine,
    launch_partial,
    takes,
)
from turbospark.kernels.packed_turn import launch_turn
from turbospark.kernels.source import Launch

RING = 128


@dataclass(frozen=True)
class Case:
    kv: int
    group: int
    dim: int
    length: int
    bits: tuple[int, int] = (4, 4)
    rows: int = 1
    soft_cap: float = 0.0
    sinks: bool = False
    loud: float = 1.0
    tuning: Tuning = field(default_factory=lambda: Tuning(2, 3))

    @property
    def heads(self) -> int:
        return self.kv * self.group

    @property
    def capacity(self) -> int:
        return (self.length + 31) // 32 * 32 + 32

    def query(self) -> mx.array:
        """Turned queries [H, M, D]."""
        return normal((self.heads, self.rows, self.dim), mx.float32, 1, 0.3)

    def exact(self) -> tuple[mx.array, mx.array]:
        """Turned keys and values of all positions, halves [KV, capacity, D]; a few stand out."""
        shape = (self.kv, self.capacity, self.dim)
        k, v = (normal(shape, mx.float32, seed) for seed in (2, 3))
        loud = mx.where(mx.arange(self.capacity)[:, None] % 37 == 5, 3.0, self.loud)
        return k.astype(mx.float16), (v * loud).astype(mx.float16)

    def packed(self) -> Packed:
        parts = []
        for rows, bits, pack in zip(
            self.exact(), self.bits, (codec.pack_keys, codec.pack_values), strict=True
        ):
            codes, scales = codec.quantize_rows(rows, bits)
            parts += [pack(codes, bits), scales]
        return Packed(*parts)

    def near(self) -> Near:
        """The ring as it stands at `length`."""
        slots = np.arange(RING)
        held = slots + (self.length - 1 - slots) // RING * RING
        rings = [a[:, mx.array(np.maximum(held, 0))] for a in self.exact()]
        return Near(0, *rings, *(a[:, :4] for a in self.exact()))

    def logits(self) -> mx.array | None:
        return normal((self.heads, self.rows), mx.float32, 4, 3.0) if self.sinks else None


def loop(case: Case) -> np.ndarray:
    """[M, H * D], turned back, head by head and row by row."""
    q, exact = floats(case.query()), [floats(a) for a in case.exact()]
    packed = case.packed()
    coded = [floats(a) for a in packed.tile(0, case.capacity)]
    out = np.zeros((case.rows, case.heads, case.dim))
    for head in range(case.heads):
        kv = head // case.group
        for m in range(case.rows):
            i = case.length - case.rows + m
            p = np.arange(i + 1)
            near = ((p < 4) | (p // 32 >= i // 32 - 1))[:, None]
            k, v = (np.where(near, a[kv, p], b[kv, p]) for a, b in zip(exact, coded, strict=True))
            scores = k @ q[head, m]
            if case.soft_cap:
                scores = case.soft_cap * np.tanh(scores / case.soft_cap)
            logits = case.logits()
            sink = -np.inf if logits is None else floats(logits)[head, m]
            top = max(scores.max(), sink)
            share = np.exp(scores - top)
            out[m, head] = share @ v / (share.sum() + np.exp(sink - top))
    back = codec.turn_back(mx.array(out.astype(np.float32)), codec.VALUE_SEED)
    return floats(back).reshape(1, case.rows, -1)


def emulated(case: Case, seed: int) -> np.ndarray:
    return run(case, case.packed(), seed)


def run(case: Case, packed: Packed, seed: int, near: Near | None = None) -> np.ndarray:
    length, q = mx.array([case.length], dtype=mx.int32), case.query()
    near = near or case.near()
    first: Emulated = emulate(
        launch_partial(q, packed, near, length, case.tuning, case.soft_cap), seed
    )
    o, ml = (mx.array(a.astype(np.float32)) for a in first.outputs)
    second = launch_combine(q, o, ml, case.logits(), mx.float32, case.tuning)
    return emulate(second, seed).outputs[0]


CASES = {
    "four bits": Case(2, 4, 128, 300),
    "one row in the first block": Case(1, 2, 64, 1),
    "nothing packed yet": Case(2, 2, 64, 63),
    "one block packed": Case(1, 4, 64, 65),
    "a block's last row": Case(1, 4, 64, 96),
    "more splits than blocks": Case(1, 1, 128, 140, tuning=Tuning(1, 7)),
    "many splits": Case(1, 2, 64, 700, tuning=Tuning(1, 40)),
    "keys of four bits, values of three": Case(2, 3, 128, 200, (4, 3)),
    "three bits of 64 dims": Case(2, 2, 64, 230, (3, 3)),
    "three bits of 256 dims": Case(1, 2, 256, 170, (3, 3)),
    "keys of three bits, values of four": Case(1, 5, 64, 200, (3, 4)),
    "two bits": Case(1, 8, 64, 260, (2, 2)),
    "two bits of 128 dims": Case(1, 2, 128, 131, (2, 2)),
    "256 dims": Case(1, 4, 256, 140),
    "queries in two groups": Case(1, 12, 64, 150),
    "three rows over a block's end": Case(1, 3, 64, 194, rows=3),
    "eight rows": Case(2, 2, 64, 163, rows=8),
    "sink logits": Case(2, 2, 64, 170, sinks=True, rows=2),
    "soft cap": Case(1, 4, 128, 150, soft_cap=2.0),
    "faint values": Case(1, 2, 64, 330, loud=1e-4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_launches_equal_a_float64_loop(name: str) -> None:
    case = CASES[name]
    want = loop(case)
    for seed in (0, 1):
        assert error(emulated(case, seed), want) < 2e-3


def test_codes_past_the_exact_rows_are_never_read() -> None:
    case = CASES["four bits"]
    packed = case.packed()
    past = mx.arange(case.capacity) >= (case.length - 1) // 32 * 32 - 32
    scales = [mx.where(past, mx.nan, a) for a in (packed.key_scales, packed.value_scales)]
    marked = Packed(packed.keys, scales[0], packed.values, scales[1])
    assert np.array_equal(run(case, marked, 0), run(case, packed, 0))


def test_caches_past_4_billion_words_are_addressed() -> None:
    # 9 heads of 2^25 positions: the last head's words begin past 2^32.
    small, capacity = Case(9, 1, 128, 80, tuning=Tuning(1, 2)), 1 << 25
    packed = small.packed()
    shapes = {
        "keys": (9, capacity, 16), "key_scales": (9, capacity),
        "values": (9, capacity // 32, 4, 128), "value_scales": (9, capacity),
    }  # fmt: skip
    large = {}
    for name, shape in shapes.items():
        own = getattr(packed, name)
        buffer = sparse(shape, mx.uint32 if name in ("keys", "values") else mx.float16)
        buffer.bits[:, : own.shape[1]] = np.array(
            own if own.dtype == mx.uint32 else own.view(mx.uint16)
        )
        large[name] = buffer
    length, q = mx.array([small.length], dtype=mx.int32), small.query()
    launch = launch_partial(q, packed, small.near(), length, small.tuning)
    words = [sparse((9, capacity // 2), mx.uint32) for _ in range(2)]
    for word, name in zip(words, ("key_scales", "value_scales"), strict=True):
        word.bits[:, :56] = np.array(getattr(packed, name).view(mx.uint32))[:, :56]
    sizes = mx.array([capacity, small.tuning.splits, RING], dtype=mx.int32)
    inputs = [q, large["keys"], words[0], large["values"], words[1], *launch.inputs[5:-1], sizes]
    first = emulate(Launch(launch.plan, inputs))
    o, ml = (mx.array(a.astype(np.float32)) for a in first.outputs)
    second = launch_combine(q, o, ml, None, mx.float32, small.tuning)
    assert error(emulate(second).outputs[0], loop(small)) < 2e-3


# --- turning --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """New rows from the projections."""

    kv: int
    group: int
    dim: int
    rows: int
    length: int
    balanced: bool = False
    dtype: mx.Dtype = mx.float32

    def inputs(self) -> tuple[mx.array, ...]:
        heads = (self.kv * self.group, self.kv, self.kv)
        return tuple(
            normal((1, h, self.rows, self.dim), self.dtype, i) for i, h in enumerate(heads)
        )

    def tables(self) -> tuple[mx.array, mx.array] | tuple[None, None]:
        if not self.balanced:
            return None, None
        shape = (self.kv, self.dim)
        return normal(shape, mx.float32, 7), mx.abs(normal(shape, mx.float32, 8)) + 0.5

    def launch(self) -> Launch:
        ring = mx.zeros((self.kv, RING, self.dim), mx.float16)
        first = mx.zeros((self.kv, 4, self.dim), mx.float16)
        length = mx.array([self.length], dtype=mx.int32)
        near = Near(0, ring, ring, first, first)
        return launch_turn(*self.inputs(), *self.tables(), length, 0.25, near)


def hadamard(n: int) -> np.ndarray:
    """Sylvester's, orthonormal."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def turned(case: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q scaled, k and v, each [heads, M, D], in float64."""
    q, k, v = (floats(a)[0] for a in case.inputs())
    mean, by = case.tables()
    if mean is not None and by is not None:
        q = q / np.repeat(floats(by), case.group, 0)[:, None]
        k = (k - floats(mean)[:, None]) * floats(by)[:, None]
    matrix = hadamard(case.dim)
    signs = [floats(codec.signs(case.dim, s)) for s in (codec.KEY_SEED, codec.VALUE_SEED)]
    return q * signs[0] @ matrix * 0.25, k * signs[0] @ matrix, v * signs[1] @ matrix


TURNS = {
    "one row": Rows(2, 3, 64, 1, 300),
    "balanced": Rows(2, 2, 128, 2, 200, balanced=True),
    "256 dims across the ring's end": Rows(1, 2, 256, 3, 258),
    "first rows": Rows(2, 1, 64, 6, 6),
    "bfloat16": Rows(1, 4, 128, 1, 140, dtype=mx.bfloat16),
}


@pytest.mark.parametrize("name", TURNS)
def test_new_rows_are_turned_and_stored(name: str) -> None:
    case = TURNS[name]
    q, k, v = turned(case)
    for seed in (0, 1):
        got = emulate(case.launch(), seed)
        assert error(got.outputs[0], q) < 1e-5
        at = np.arange(case.length - case.rows, case.length)
        for which, rows in (("keys", k), ("values", v)):
            ring = got.updated[f"new_{which}"]
            assert error(ring[:, at % RING], rows) < 1e-3
            others = np.setdiff1d(np.arange(RING), at % RING)
            assert not ring[:, others].any()
            first = got.updated[f"first_{which}"]
            held = at[at < 4]
            assert np.array_equal(first[:, held], ring[:, held])
            assert len(held) or not first.any()


def test_other_heads_go_to_the_plain_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not takes(128)
    for where in ("cuda", "metal"):
        monkeypatch.setattr(packed_decode, "backend", lambda device, where=where: where)
        assert [d for d in (32, 64, 96, 128, 256, 512) if takes(d)] == (
            [64, 128, 256] if where == "cuda" else []
        )
