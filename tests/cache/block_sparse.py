"""Rows of block-sparse attention, the blocks that each should choose, and feeding a cache."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from turbospark.cache.sparse import Index, SparseKV
from turbospark.cache.state import LayerStates

HEADS, KV, INDEX_HEADS, INDEX_DIM = 4, 2, 3, 6
Arrays = dict[str, np.ndarray]


def draw(length: int, dim: int, seed: int = 0) -> Arrays:
    """q, k, v and index rows [length, ...]."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (HEADS, dim), "k": (KV, dim), "v": (KV, dim), "queries": (INDEX_HEADS, INDEX_DIM),
        "raw": (INDEX_DIM,),
    }  # fmt: skip
    return {n: rng.standard_normal((length, *s)).astype(np.float32) for n, s in shapes.items()}


def block_key(mean: np.ndarray, block: int) -> np.ndarray:
    """Any function of a block's mean and number will do."""
    return mean * (1 + block % 3) - 0.25 * block % 2


def block_keys(means: mx.array, first: int) -> mx.array:
    """The same for blocks from `first` on."""
    block = first + mx.arange(len(means))[:, None]
    return means * (1 + block % 3) - 0.25 * block % 2


def chosen(a: Arrays, row: int, ratio: int, count: int) -> list[int]:
    """What `row` attends to: its best blocks, the lower first among equals, and the tail."""
    full = (row + 1) // ratio
    scores = []
    for block in range(full):
        mean = a["raw"][block * ratio : (block + 1) * ratio].astype(np.float64).mean(0)
        key = block_key(mean, block)
        liked = [max(float(query @ key), 0.0) for query in a["queries"][row].astype(np.float64)]
        scores.append(sum(liked))
    best = sorted(range(full), key=lambda b: (-scores[b], b))[:count]
    picked = [b * ratio + i for b in sorted(best) for i in range(ratio)]
    return picked + list(range(full * ratio, row + 1))


def feed(memory: LayerStates, a: Arrays, sizes: list[int], dense: bool = False) -> np.ndarray:
    """Rows from the present position on, in passes of these sizes."""
    outputs = []
    cache: SparseKV = memory.layers[0]
    for size in sizes:
        part = slice(memory.position, memory.position + size)
        rows = {name: mx.array(array[part]) for name, array in a.items()}
        index = Index(5, rows["queries"], rows["raw"], block_keys)
        step = memory.begin(size, force_dense=dense)
        scale = a["q"].shape[-1] ** -0.5
        out = cache.attend(rows["q"], rows["k"], rows["v"], index, step, scale)
        mx.eval(out, memory.unevaluated())
        memory.check()
        memory.advance()
        outputs.append(np.array(out))
    return np.concatenate(outputs)


def cuts(length: int, size: int) -> list[int]:
    """Passes of `size` rows that make up `length`."""
    return [min(size, length - at) for at in range(0, length, size)]
