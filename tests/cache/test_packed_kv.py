"""Packed caches: what each row reads against a float64 loop, chunks and rewinds to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from turbospark.cache.packed import Balance, PackedKV, packed_bytes
from turbospark.cache.specs import FullSpec, PackedSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import UnsupportedError
from turbospark.kernels import kv_codec as codec
from turbospark.sizing import kv_bytes


@dataclass(frozen=True)
class Case:
    kv: int
    group: int
    dim: int
    key_bits: int
    value_bits: int
    length: int
    balanced: bool = False
    sinks: bool = False

    @property
    def spec(self) -> PackedSpec:
        return PackedSpec(self.kv, self.dim, self.key_bits, self.value_bits)

    def rows(self) -> list[np.ndarray]:
        """q [H, n, D], k and v [KV, n, D]; keys with a mean and channels that stand out."""
        random = np.random.default_rng(self.length)
        heads = (self.kv * self.group, self.kv, self.kv)
        q, k, v = (random.standard_normal((h, self.length, self.dim), np.float32) for h in heads)
        k[..., 1] = k[..., 1] * 4 + 9
        return [q, k, v]

    def balance(self) -> Balance | None:
        if not self.balanced:
            return None
        random = np.random.default_rng(5)
        mean = random.standard_normal((self.kv, self.dim), np.float32)
        scale = random.uniform(0.5, 2.0, (self.kv, self.dim)).astype(np.float32)
        return Balance(mx.array(mean), mx.array(scale))

    def logits(self) -> np.ndarray | None:
        heads = self.kv * self.group
        return np.linspace(-2, 3, heads, dtype=np.float32) if self.sinks else None


def states_of(case: Case, context: int | None = None) -> LayerStates:
    context = context or case.length
    balance = case.balance()
    return LayerStates(
        [case.spec], context, mx.float32, balance=None if balance is None else {0: balance}
    )


def feed(
    states: LayerStates, case: Case, stops: Sequence[int], rows_attention: bool = True
) -> np.ndarray:
    """The rows up to each stop, one pass each -> [H, n, D] of what was attended."""
    q, k, v = case.rows()
    sinks = case.logits()
    logits = None if sinks is None else mx.array(sinks)
    out = []
    for stop in stops:
        part = slice(states.position, stop)
        step = states.begin(stop - states.position, rows_attention)
        arrays = [mx.array(a[None, :, part]) for a in (q, k, v)]
        out.append(states.layers[0].attend(*arrays, step, case.dim**-0.5, logits))
        mx.eval(out[-1], states.arrays())
        states.advance()
    return np.array(mx.concatenate(out, axis=2))[0]


def round_trip(rows: np.ndarray, seed: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as read exactly and as read packed, both turned back, in float64."""
    turned = codec.half(codec.turn(mx.array(rows), seed))
    codes, scales = codec.quantize_rows(turned, bits)
    packed = codec.turn_back(codec.dequantize(codes, scales, bits), seed)
    return (np.array(a).astype(np.float64) for a in (codec.turn_back(turned, seed), packed))


def loop(case: Case) -> np.ndarray:
    """Row by row: the first four keys and those from the block before on exact, others packed."""
    q, k, v = case.rows()
    balance, sinks = case.balance(), case.logits()
    mean = np.zeros((case.kv, case.dim)) if balance is None else np.array(balance.mean)
    scale = np.ones((case.kv, case.dim)) if balance is None else np.array(balance.scale)
    # As it is done, so that half precision rounds alike.
    even = (k - mean[:, None].astype(np.float32)) * scale[:, None].astype(np.float32)
    keys, coded_keys = round_trip(even, codec.KEY_SEED, case.key_bits)
    values, coded_values = round_trip(v, codec.VALUE_SEED, case.value_bits)
    q = q.astype(np.float64)
    out = np.zeros_like(q)
    for head in range(len(q)):
        kv = head // case.group
        for i in range(case.length):
            p = np.arange(i + 1)
            exact = (p < 4) | (p // 32 >= i // 32 - 1)
            read = np.where(exact[:, None], keys[kv, p], coded_keys[kv, p])
            read = read / scale[kv] + mean[kv]
            scores = read @ q[head, i] * case.dim**-0.5
            top = max(scores.max(), -np.inf if sinks is None else sinks[head])
            share = np.exp(scores - top)
            total = share.sum() + (0.0 if sinks is None else np.exp(sinks[head] - top))
            rows = np.where(exact[:, None], values[kv, p], coded_values[kv, p])
            out[head, i] = share @ rows / total
    return out


CASES = {
    "four bits": Case(2, 3, 64, 4, 4, 300),
    "keys of four bits, values of three": Case(1, 2, 32, 4, 3, 330),
    "two bits": Case(2, 1, 128, 2, 2, 161),
    "three bits, 256 dims": Case(1, 2, 256, 3, 3, 130),
    "balance": Case(2, 2, 64, 4, 4, 140, balanced=True),
    "sink logits": Case(2, 2, 16, 4, 4, 140, sinks=True),
    "sink logits and balance": Case(2, 2, 64, 3, 4, 140, balanced=True, sinks=True),
    "96 dims": Case(1, 4, 96, 3, 2, 100),
    "shorter than the window": Case(2, 2, 64, 4, 4, 63),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_a_float64_loop(name: str) -> None:
    case = CASES[name]
    got = feed(states_of(case), case, [case.length])
    assert np.abs(got - loop(case)).max() < 2e-5


@pytest.mark.parametrize("name", CASES)
def test_no_chunking_changes_a_bit(name: str) -> None:
    case = CASES[name]
    whole = feed(states_of(case), case, [case.length])
    n = case.length
    for stops in (
        list(range(1, n + 1)),
        [*range(7, n, 7), n],
        [*range(32, n, 32), n],
        sorted({3, 15, n - 40, n - 1, n}),
    ):
        states = states_of(case)
        assert np.array_equal(feed(states, case, stops), whole)
    states = states_of(case)
    assert np.array_equal(feed(states, case, [n], rows_attention=False), whole)
    assert states.step.attention_calls == n


@pytest.mark.parametrize("name", ["four bits", "balance", "three bits, 256 dims"])
def test_longer_contexts_hold_bits_over_tiles(name: str) -> None:
    base = CASES[name]
    case = Case(base.kv, base.group, base.dim, base.key_bits, base.value_bits, 700, base.balanced)
    whole = feed(states_of(case), case, [700])
    assert np.array_equal(feed(states_of(case), case, [512, 600, *range(601, 701)]), whole)


def test_each_row_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    quantize = codec.quantize_rows

    def counting(x: mx.array, bits: int) -> Any:
        rows.append(x.shape[-2])
        return quantize(x, bits)

    monkeypatch.setattr(codec, "quantize_rows", counting)
    case = CASES["four bits"]
    feed(states_of(case), case, [100, 150, *range(151, 301)])
    # Keys and values; at 300 the rows before block 8 are packed.
    assert sum(rows) == 2 * 256 and len(rows) == 2 * 7


@pytest.mark.parametrize("back", [1, 33, 64, 76])
def test_a_rewind_leaves_what_a_cold_cache_has(back: int) -> None:
    case = CASES["four bits"]
    whole = feed(states_of(case), case, [300])
    states = states_of(case)
    feed(states, case, [250, *range(251, 301)])
    states.rewind(300 - back)
    assert np.array_equal(feed(states, case, [300]), whole[:, 300 - back :])


def test_a_rewind_past_the_exact_rows_is_refused() -> None:
    case = CASES["four bits"]
    states = states_of(case)
    feed(states, case, [300])
    # 128 rows are kept, one of them may be overwritten: 173 on. Row 224 reads exactly from 192 on.
    assert states.rewind_refusal(224) is None
    assert "exact rows of a packed cache" in (states.rewind_refusal(223) or "")
    with pytest.raises(UnsupportedError, match=r"cannot rewind from 300 to 150: .* keeps 128"):
        states.rewind(150)
    states.rewind(0)
    assert np.array_equal(feed(states, case, [300]), feed(states_of(case), case, [300]))


def test_a_context_that_the_ring_holds_goes_back_anywhere() -> None:
    case = Case(2, 2, 64, 4, 4, 128)
    states = states_of(case)
    whole = feed(states, case, [128])
    for to in (127, 100, 5):
        states.rewind(to)
        assert np.array_equal(feed(states, case, [128]), whole[:, to:])


def formula(spec: PackedSpec, context: int) -> int:
    """Codes and half-precision scales of whole blocks, 4 first and at most 128 new rows exact."""
    rows = (context + 31) // 32 * 32
    bits = rows * spec.dim * (spec.key_bits + spec.value_bits) + 2 * 16 * rows
    return spec.kv_heads * (bits // 8 + 2 * 2 * spec.dim * (4 + min(128, rows)))


@pytest.mark.parametrize("bits", [(2, 2), (3, 3), (4, 3), (4, 4)])
@pytest.mark.parametrize("context", [1, 100, 161, 4096])
def test_buffers_hold_what_the_formula_says(bits: tuple[int, int], context: int) -> None:
    spec = PackedSpec(2, 64, *bits)
    cache = PackedKV(spec, context)
    assert sum(a.nbytes for a in cache.arrays()) == formula(spec, context)
    specs = [spec, FullSpec(2, 64, 64), RingSpec(2, 64, 64, 50)]
    states = LayerStates(specs, context, mx.float32)
    assert states.nbytes == kv_bytes(specs, context, 4, None)
    assert packed_bytes(spec, context) == formula(spec, context)


def test_bytes_at_32k_are_a_quarter_of_half_precision() -> None:
    plain = 32768 * 8 * 128 * 2 * 2
    for bits, ratio in {(4, 4): 3.80, (4, 3): 4.30, (3, 3): 5.00, (2, 2): 7.30}.items():
        assert plain / packed_bytes(PackedSpec(8, 128, *bits), 32768) >= ratio


def test_attention_never_expands_the_whole_cache() -> None:
    case = Case(4, 1, 128, 1, 4, 4)
    case = Case(4, 1, 128, 4, 4, 1)
    context = 16384
    states = states_of(case, context)
    states.position = states.furthest = context - 1  # rows never written are zeros
    step = states.begin(1)
    row = mx.ones((1, 4, 1, 128))
    states.layers[0].new_keys[:] = mx.zeros((4, 128, 128), mx.float16)
    mx.eval(states.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(states.layers[0].attend(row, row, row, step, 0.1))
    # In half precision the keys and values alone are 32 MiB.
    assert mx.get_peak_memory() - before < 32 << 20
