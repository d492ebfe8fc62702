"""Block-sparse attention over packed rows: emulated, plain version, and a float64 loop."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from cases import TOLERANCE, error, floats, normal
from emulator import EmulationError, emulate

from turbospark.cache.sparse import Index, SparseKV
from turbospark.cache.specs import PackedSpec, SparseSpec
from turbospark.cache.state import LayerStates
from turbospark.kernels import kv_codec as codec
from turbospark.kernels import packed_decode, packed_qsa, qsa, qsa_select
from turbospark.kernels.packed_attention import (
    Near,
    Packed,
    first_exact,
    packed_listed_reference,
)
from turbospark.kernels.packed_qsa import PARTIAL_KERNEL, launch_combine, launch_partial
from turbospark.kernels.qsa_attend import listed_tokens
from turbospark.kernels.source import Launch, Plan


@dataclass(frozen=True)
class Case:
    kv: int
    group: int
    dim: int
    rows: int
    start: int
    k: int
    ratio: int
    splits: int
    bits: tuple[int, int] = (4, 4)
    dtype: mx.Dtype = mx.float32

    @property
    def end(self) -> int:
        return self.start + self.rows

    def query(self) -> mx.array:
        """Turned queries [T, H, D]."""
        return normal((self.rows, self.kv * self.group, self.dim), mx.float32, 1, 0.3)

    def exact(self) -> list[mx.array]:
        """Turned keys and values of all positions, halves [KV, capacity, D]."""
        shape = (self.kv, -(-self.end // 32) * 32, self.dim)
        return [normal(shape, mx.float16, seed) for seed in (2, 3)]

    def packed(self) -> Packed:
        parts = []
        packs = (codec.pack_keys, codec.pack_values)
        for rows, bits, pack in zip(self.exact(), self.bits, packs, strict=True):
            codes, scales = codec.quantize_rows(rows, bits)
            parts += [pack(codes, bits), scales]
        return Packed(*parts)

    def near(self) -> Near:
        first = first_exact(self.start)
        keys, values = self.exact()
        held = (mx.contiguous(a[:, first : self.end]) for a in (keys, values))
        return Near(first, *held, keys[:, :4], values[:, :4])

    def lists(self) -> list[np.ndarray]:
        """Ascending blocks of each row, of those that are full."""
        rng = np.random.default_rng(0)
        full = [(self.start + row + 1) // self.ratio for row in range(self.rows)]
        return [np.sort(rng.permutation(count)[: self.k]) for count in full]

    def ids(self) -> mx.array:
        return mx.array(np.stack(self.lists()).astype(np.int32))


def loop(case: Case) -> np.ndarray:
    """[T, H, D], turned back."""
    q, exact = floats(case.query()), [floats(a) for a in case.exact()]
    coded = [floats(a) for a in case.packed().tile(0, exact[0].shape[1])]
    out = np.zeros(q.shape)
    for row, blocks in enumerate(case.lists()):
        i, ratio = case.start + row, case.ratio
        tail = range((i + 1) // ratio * ratio, i + 1)
        p = np.array([b * ratio + j for b in blocks for j in range(ratio)] + list(tail))
        near = ((p < 4) | (p // 32 >= i // 32 - 1))[:, None]
        for head in range(q.shape[1]):
            kv = head // case.group
            k, v = (np.where(near, a[kv, p], b[kv, p]) for a, b in zip(exact, coded, strict=True))
            share = np.exp(k @ q[row, head])
            out[row, head] = share @ v / share.sum()
    return floats(codec.turn_back(mx.array(out.astype(np.float32)), codec.VALUE_SEED))


def emulated(case: Case, seed: int, body: str | None = None) -> np.ndarray:
    """By the launches, the first of them with another body if there is one."""
    q, start = case.query(), mx.array([case.start], dtype=mx.int32)
    first = launch_partial(
        q, case.packed(), case.near(), case.ids(), start, case.ratio, case.splits
    )
    if body is not None:
        kernel = dataclasses.replace(first.plan.kernel, body=body)
        first = Launch(dataclasses.replace(first.plan, kernel=kernel, _calls={}), first.inputs)
    o, ml = (mx.array(a.astype(np.float32)) for a in emulate(first, seed).outputs)
    (got,) = emulate(launch_combine(q, o, ml, case.dtype, case.splits), seed).outputs
    return got.reshape(q.shape)


CASES = {
    "published": Case(2, 12, 256, 1, 301, 20, 4, 3),
    "rows through a block of 32": Case(2, 2, 64, 4, 157, 9, 4, 2),
    "blocks of three": Case(1, 3, 128, 3, 200, 7, 3, 4),
    "blocks of one": Case(2, 1, 64, 2, 199, 31, 1, 2),
    "all exact": Case(1, 2, 64, 2, 50, 9, 4, 9),
    "keys of four bits, values of three": Case(2, 2, 64, 1, 230, 30, 4, 2, (4, 3)),
    "three bits": Case(1, 4, 128, 2, 260, 25, 4, 3, (3, 3)),
    "two bits": Case(1, 2, 256, 1, 180, 20, 4, 2, (2, 2)),
    "bfloat16": Case(2, 4, 128, 1, 230, 19, 4, 3, dtype=mx.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_chosen_positions_equal_a_float64_loop(name: str) -> None:
    case = CASES[name]
    want = loop(case)
    tokens, seen = listed_tokens(case.ids(), case.start, case.ratio)
    plain = packed_listed_reference(
        case.query().swapaxes(0, 1), tokens, seen, case.start, case.packed(), case.near()
    )
    back = codec.turn_back(plain, codec.VALUE_SEED).swapaxes(0, 1)
    assert error(floats(back), want) < 2e-6
    for seed in (0, 1):
        assert error(emulated(case, seed), want) < TOLERANCE[case.dtype]


BUGS = {  # three bits each way where the third is read; two bits or four elsewhere
    "first rows as codes": ("four", "position < 4 || position >= limit", "position >= limit"),
    "a block too few exact": ("four", "(seen - 1) / 32 - 1, 0)", "(seen - 1) / 32, 0)"),
    "the row before": ("four", "position - sizes[3]", "position - sizes[3] - 1"),
    "the neighbour's half of a word": ("three", "(dim / 8 % 2 * 8)", "0"),
    "no third bit of keys": ("three", "& 1u) << 2;\n          kr", "& 0u) << 2;\n          kr"),
    "another pair's third bit": ("three", "(side + pair)) & 1u", "(side + pair / 2)) & 1u"),
    "tokens in order": ("four", "inside % 8 / 2 * 4 + inside / 8", "inside / 2"),
    "values by the scale of keys": ("four", "value_scales[at]", "key_scales[at]"),
}
TRIALS = {
    "four": Case(2, 2, 64, 1, 230, 57, 4, 2),
    "three": Case(1, 2, 128, 1, 200, 50, 4, 2, (3, 3)),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_in_packed_sparse_attention_is_found(name: str) -> None:
    trial, old, new = BUGS[name]
    body, want = PARTIAL_KERNEL.body, loop(TRIALS[trial])
    assert body.count(old) == 1
    assert error(emulated(TRIALS[trial], 0), want) < 3e-6
    try:
        assert error(emulated(TRIALS[trial], 0, body.replace(old, new)), want) > 1e-4
    except EmulationError:
        return


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was launched, once the device claims to be a GPU of CUDA."""
    names: list[str] = []

    def run(plan: Plan, where: str, inputs: list[mx.array]) -> list[mx.array]:
        names.append(plan.kernel.name)
        done = emulate(Launch(plan, inputs))
        pairs = zip(done.outputs, plan.outputs, strict=True)
        return [mx.array(v.astype(np.float32)).astype(dtype) for v, (_, dtype) in pairs]

    monkeypatch.setattr(Plan, "run", run)
    for module in (packed_decode, packed_qsa, qsa):
        monkeypatch.setattr(module, "backend", lambda device: "cuda")
    monkeypatch.setattr(qsa_select, "simdgroups_on", lambda where: 4)  # CUDA's 16 are no one else's
    return names


def test_a_cache_reads_chosen_blocks_by_launches(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in plain MLX are near; a long pass is taken in turns."""
    monkeypatch.setattr(packed_qsa, "PARTIAL_BYTES", 4 * packed_qsa.SPLITS * 4 * 64 * 3)
    spec = SparseSpec(2, 64, 32, 4, 12, PackedSpec(2, 64, 4, 3))
    outs: list[list[np.ndarray]] = []
    for kernels in (False, True):
        states = LayerStates([spec], 256, mx.float32)
        cache = SparseKV(spec, 256, mx.float32, kernels)
        rng = np.random.default_rng(0)
        outs.append([])
        for count in (150, 1, 4, 1):
            drawn = [
                mx.array(rng.standard_normal((count, *shape), np.float32))
                for shape in ((4, 64), (2, 64), (2, 64), (4, 32), (32,))
            ]
            q, k, v, queries, raw = drawn
            launched.clear()
            step = states.begin(count)
            index = Index(0, queries, raw, lambda means, first: means)
            out = cache.attend(q, k, v, index, step, 0.125)
            mx.eval(out, cache.arrays())
            states.advance()
            outs[-1].append(np.array(out))
            chosen = ["qsa_score", "qsa_select"] if kernels else []
            turns = {150: 33, 4: 2, 1: 1}[count]
            both = ["packed_qsa", "packed_combine"] if kernels else []
            assert launched == chosen + both * turns
    for plain, ours in zip(*outs, strict=True):
        assert error(ours, plain) < 3e-6
