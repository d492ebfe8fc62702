"""The hash of n-grams against the published numbers and a loop over Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

from turbospark.layers.ngram import NgramHash

PUBLISHED = dict(vocab=248320, size=3, per_size=8, base=20_000_000, divisor=128, seed=1234)


def small(size: int = 3, module: int = 0) -> NgramHash:
    return NgramHash.derive(
        vocab=320, size=size, per_size=4, base=200, divisor=16, seed=1234, module=module, eos=7
    )


def loop(found: NgramHash, ids: list[int]) -> list[list[int]]:
    """Token by token: look back until eos or the beginning, which hash as eos."""
    out, offsets = [], np.concatenate([[0], np.cumsum(found.sizes)]).tolist()
    for at, token in enumerate(ids):
        behind, cut = [token], False
        for back in range(1, len(found.multipliers)):
            cut = cut or at < back or (back > 1 and ids[at - back + 1] == found.eos)
            behind.append(found.eos if cut else ids[at - back])
        row = []
        for head, size in enumerate(found.sizes):
            mixed = 0
            for place in range(head // found.per_size + 2):
                mixed ^= behind[place] * found.multipliers[place]
            row.append(mixed % size + offsets[head])
        out.append(row)
    return out


def test_the_published_model_has_these_constants() -> None:
    found = NgramHash.derive(**PUBLISHED, module=0, eos=248044)
    assert found.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (found.sizes[0], found.sizes[-1], len(found.sizes)) == (20000003, 20000171, 16)
    assert (sum(found.sizes), found.rows) == (320001446, 320001536)


def test_a_later_module_takes_the_next_primes() -> None:
    both = small().sizes + small(module=1).sizes
    primes = [n for n in range(200, 2000) if all(n % q for q in range(2, n))]
    assert list(both) == primes[: len(both)]
    assert small().multipliers != small(module=1).multipliers


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_equal_a_loop_however_the_text_is_cut(size: int) -> None:
    found = small(size)
    rng = np.random.default_rng(size)
    ids = rng.integers(0, 320, 60).tolist()
    for at in (0, 11, 12, 30, 32, 33, 34):
        ids[at] = found.eos
    want = loop(found, ids)
    for step in (60, 1, 2, 7):
        register = np.full(size - 1, found.eos)
        got = []
        for at in range(0, 60, step):
            part = np.array(ids[at : at + step])
            got += found.table_rows(part, register).tolist()
            register = found.register_after(part, register)
        assert got == want
    assert max(map(max, want)) < found.rows


def test_what_stands_before_the_end_of_a_text_does_not_count() -> None:
    found = small()
    register = np.full(2, found.eos)
    one, other = ([9, 3, 7, 5, 6], [8, 4, 7, 5, 6])
    a, b = (found.table_rows(np.array(ids), register)[3:] for ids in (one, other))
    assert np.array_equal(a, b)
