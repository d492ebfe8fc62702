"""What is easily got wrong in qwen4_exp, planted one at a time: each must be noticed.

A row replaces text in the source of one of our functions; what test_qwen4_traces.py compares with
the reference must then differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from planting import plant
from qwen4_trace import NAMES, ROOM, WAYS, Trace, expected, faults

from turbospark import OpenOptions, Runner
from turbospark.cache.sparse import SparseKV
from turbospark.cache.specs import SparseSpec
from turbospark.errors import UnsupportedError
from turbospark.families import qwen4_config, qwen4_exp
from turbospark.families.qwen4_exp import Attention, Layer, Model
from turbospark.kernels import qsa_attend, qsa_score
from turbospark.layers.gated_delta import GatedDeltaNet
from turbospark.layers.hyper import GroupedNorm, HyperConnection, HyperMixer
from turbospark.layers.mlp import SharedExpertMLP
from turbospark.layers.ngram import NgramEmbedding, NgramHash, NgramShape
from turbospark.layers.weights import Weights

BASE = NAMES[0]

SCORES = (qsa_score, "block_scores_reference")
RELU = "liked = mx.maximum(products.reshape(rows, heads, blocks), 0.0)\n    scores = mx.sum(liked,"
COMPLETE = "mx.arange(blocks) < complete[:, None], scores"
INDEXER = (qwen4_config, "_indexer", "Indexer(heads, dim, budget, ratio)")
INDEX = (Attention, "_index")
TURNED = "self._turn(keys, first, every=self.indexer.ratio)[:, 0]"
SPLIT = "q, gate = mx.split(q.reshape(rows, self.heads, -1), 2, axis=-1)"
ROOT = "mx.sign(fit) * mx.sqrt(mx.maximum(mx.abs(fit), 1e-6))"
CUT_OFF = "token = np.where(places[-1] == self.eos, self.eos, token)"

MISTAKES: dict[str, tuple[Any, str, str, str]] = {
    # Which blocks are chosen.
    "the ReLU after the sum over heads": (
        *SCORES, RELU,
        "scores = mx.maximum(mx.sum(products.reshape(rows, heads, blocks), axis=1), 0.0)\n"
        "    scores = mx.sum(scores[:, None],",
    ),
    "no ReLU": (
        *SCORES, "mx.maximum(products.reshape(rows, heads, blocks), 0.0)",
        "products.reshape(rows, heads, blocks)",
    ),
    "blocks that are not full": (*SCORES, "(start + 1 + mx", "(start + ratio + mx"),
    "the newest block always": (
        *SCORES, COMPLETE,
        f"{COMPLETE} + 1e6 * (mx.arange(blocks) == complete[:, None] - 1)",
    ),
    "the first block always": (*SCORES, COMPLETE, f"{COMPLETE} + 1e6 * (mx.arange(blocks) == 0)"),
    "a block too few": (*INDEXER, "Indexer(heads, dim, budget - ratio, ratio)"),
    "a block too many": (*INDEXER, "Indexer(heads, dim, budget + ratio, ratio)"),
    "all positions one row too long": (SparseSpec, "dense_keys", "self.ratio - 1", "self.ratio"),
    "full attention taken by its name": (SparseKV, "attend", "if not step.force_dense", "if False"),
    "the open block left out": (qsa_attend, "listed_tokens", "tail < visible", "tail < 0"),
    "a block where its last position stands": (
        *INDEX, TURNED,
        "self._turn(self._turn(keys, first, every=self.indexer.ratio).swapaxes(0, 1), "
        "self.indexer.ratio - 1)[0]",
    ),
    "a block where its number stands": (*INDEX, TURNED, "self._turn(keys, first)[:, 0]"),
    "block keys not turned": (*INDEX, TURNED, "keys[:, 0]"),
    "keys normed before the mean": (*INDEX, "start), raw", "start), self.index_k_norm(raw)"),
    "index queries not turned": (*INDEX, "self._turn(queries, start)", "queries"),
    "index queries not normed": (*INDEX, "self.index_q_norm(", "mx.contiguous("),
    "the open block lost between passes": (
        SparseKV, "_store_index", "self.open[:held]", "mx.zeros_like(self.open[:held])",
    ),
    # Attention.
    "gate before query": (Attention, "__call__", "q, gate =", "gate, q ="),
    "all queries before all gates": (
        Attention, "__call__", SPLIT,
        "q, gate = (a.reshape(rows, self.heads, -1) for a in mx.split(q, 2, axis=-1))",
    ),
    "no gate": (Attention, "__call__", "out * mx.sigmoid(gate)", "out"),
    # Norms and streams.
    "a centred norm after the delta net": (
        GatedDeltaNet, "__init__", 'w.array(f"{name}.norm', '1.0 + w.array(f"{name}.norm',
    ),
    "written to the normed streams": (
        Layer, "__call__", "written(x, weights, self.mixer(",
        "written(self.read_mixer.mixer.norm(x), weights, self.mixer(",
    ),
    "a norm after the last mixer": (
        Model, "final_norm", "self.read(hidden)[0]",
        "mx.fast.rms_norm(self.read(hidden)[0], None, 1e-6)",
    ),
    "one norm over all streams": (GroupedNorm, "__call__", "self.streams, -1", "1, -1"),
    "the sum of the streams": (HyperMixer, "__call__", "mx.mean(", "mx.sum("),
    "the mix not divided by the streams": (HyperMixer, "__call__", "low / self.streams", "low"),
    "writes not doubled": (HyperConnection, "__call__", "2.0 * ", ""),
    "writes not divided by the streams": (
        HyperConnection, "__call__", "inject / self.streams", "inject",
    ),
    "streams element by element": (
        qwen4_exp, "written", "spread.reshape", "spread.swapaxes(-1, -2).reshape",
    ),
    # n-grams.
    "ends of text forgotten": (NgramHash, "_context", CUT_OFF, "pass"),
    "an end of text cuts itself off": (NgramHash, "_context", "if back > 1", "if back > 0"),
    "token 0 before the first": (NgramShape, "memory", "self.hash.eos", "0"),
    "a sum for an exclusive or": (NgramHash, "table_rows", "mixed ^ (", "mixed + ("),
    "the last tokens in the other order": (
        NgramEmbedding, "__call__", "newest[None]", "newest[None, ::-1]",
    ),
    "the convolution's past lost": (
        NgramEmbedding, "__call__", "[memory.conv,", "[mx.zeros_like(memory.conv),",
    ),
    "layers counted from 0": (qwen4_config, "_ngrams", "[i - 1 for", "[i for"),
    "instead of the stream": (Layer, "__call__", "x + self.ngrams(", "self.ngrams("),
    "no root": (NgramEmbedding, "_gate", ROOT, "fit"),
    "a root without a sign": (NgramEmbedding, "_gate", "mx.sign(fit) * ", ""),
    "a convolution of neighbours": (
        NgramEmbedding, "_conv", "tap * self.shape.dilation", "tap + 0 * self.shape.dilation",
    ),
    "silu twice": (
        NgramEmbedding, "__call__", "silu(self._conv(joined, rows))",
        "silu(silu(self._conv(joined, rows)))",
    ),
    "values not normed before the convolution": (
        NgramEmbedding, "__call__", "self.norm_conv(values)", "values",
    ),
    # What the delta net and the experts are told.
    "the other output gate": (Layer, "__init__", "c.output_gate ==", "c.output_gate !="),
    "routing weights the other way": (Layer, "__init__", "c.norm_topk", "not c.norm_topk"),
    "the shared expert without its gate": (SharedExpertMLP, "__call__", "mx.sigmoid(share) * ", ""),
}  # fmt: skip


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def noticed(path: Path, name: str, patch: pytest.MonkeyPatch) -> list[str]:
    """The first differences from the reference, over all ways of feeding the prompt."""
    with Runner.open(path, OpenOptions(**ROOM)) as runner:
        trace, want = Trace(runner, patch), expected(name)
        return next((found for way in WAYS if (found := faults(trace, want, way))), [])


@pytest.mark.parametrize("title", MISTAKES)
def test_a_planted_mistake_is_noticed(
    title: str, installed: Callable[[str], Path], patch: pytest.MonkeyPatch
) -> None:
    paths = [installed(name) for name in NAMES]
    plant(patch, *MISTAKES[title])
    try:
        for name, path in zip(NAMES, paths, strict=True):
            assert noticed(path, name, patch) != []
    except UnsupportedError as refusal:
        assert "ple_layer_ids" in str(refusal)


@pytest.mark.parametrize(
    "end",
    [
        "self_attn.q_norm.weight", "self_attn.k_norm.weight", "q_layernorm.weight",
        "k_layernorm.weight", "hc_norm.weight", "norm_key.weight", "norm_query.weight",
        "norm_conv.weight",
    ],
)  # fmt: skip
def test_a_norm_that_is_not_centred_is_noticed(
    end: str, installed: Callable[[str], Path], patch: pytest.MonkeyPatch
) -> None:
    path, norm = installed(BASE), Weights.norm

    def plain(w: Weights, name: str, eps: float, centred: bool = False) -> Any:
        return norm(w, name, eps, centred and not name.endswith(end))

    patch.setattr(Weights, "norm", plain)
    assert noticed(path, BASE, patch) != []


def test_choosing_all_blocks_earlier_changes_nothing(
    installed: Callable[[str], Path], patch: pytest.MonkeyPatch
) -> None:
    """Where as many blocks are full as are chosen, both ways attend to the same."""
    paths = [installed(name) for name in NAMES]
    plant(
        patch,
        SparseSpec,
        "dense_keys",
        "(self.chosen + 1) * self.ratio - 1",
        "self.chosen * self.ratio",
    )
    for name, path in zip(NAMES, paths, strict=True):
        assert noticed(path, name, patch) == []
