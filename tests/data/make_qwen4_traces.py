"""Make tests/data/qwen4_traces.npz: what qwen4_exp computes on the way to its logits.

    python make_qwen4_traces.py

Needs what make_oracles.py needs. The checkpoints of NAMES are opened with transformers (float32,
eager). A prompt with ends of text in it (one, then two in a row, then one more near the end) is
drawn until no choice of blocks or experts is close, and answered in one pass. Arrays, per model:

    MODEL/ids       int32   [T]
    MODEL/logits    float32 [T, vocab]
    MODEL/dense     float32 [T, vocab]         with every visible position attended
    MODEL/streams   float32 [layers, T, wide]  all residual streams after every layer
    MODEL/rows/I    int32   [T, heads]         rows that layer I reads of its n-gram table
    MODEL/sees/I    bool    [T, T]             positions (columns) that layer I attends to
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_oracles import Transformers, lower_first, reader_of
from make_steered import decoder_layers
from oracle_cases import cases

ORACLES = Path(__file__).parent / "oracles"
NAMES = ("qwen4_exp-base", "qwen4_exp-text")
SEED = 20260101
TOKENS = 60
ENDS = (18, 31, 32, 55)
CUT_GAP, ROUTE_GAP, DENSE_APART = 1e-3, 1e-3, 1e-2


class Watcher:
    """Hooks on a model: after `answer`, what the last pass computed on the way."""

    def __init__(self, reader: Transformers) -> None:
        self.reader, self.dense = reader, False
        self.streams: dict[int, np.ndarray] = {}
        self.sees: dict[int, np.ndarray] = {}
        self.rows: dict[int, np.ndarray] = {}
        for i, layer in enumerate(
            decoder_layers(reader.model, reader.case.text["num_hidden_layers"])
        ):
            layer.register_forward_hook(self._keeper(self.streams, i, lambda out: out[0]))
            if hasattr(layer, "self_attn"):
                indexer = layer.self_attn.indexer
                indexer.register_forward_hook(self._keeper(self.sees, i, lambda out: out[0, 0]))
                indexer.register_forward_hook(self._all_if_dense)
            if layer.ple is not None:
                table = layer.ple.ple_embedding.ngram_embedding
                table.register_forward_pre_hook(self._row_keeper(i))

    def _keeper(
        self, kept: dict[int, np.ndarray], layer: int, part: Callable[[Any], torch.Tensor]
    ) -> Callable[..., None]:
        def hook(module: Any, args: Any, out: Any) -> None:
            kept[layer] = part(out).numpy().copy()

        return hook

    def _row_keeper(self, layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            self.rows[layer] = args[0][0].numpy().astype(np.int32)

        return hook

    def _all_if_dense(self, module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(out) if self.dense else out

    def answer(self, ids: np.ndarray, dense: bool = False) -> np.ndarray:
        """float32 logits [T, vocab] of one pass over ids [T]."""
        self.dense = dense
        return self.reader.answers(ids[None])[0]


class Cuts:
    """torch.topk that remembers how close choices of blocks were: they alone rank a flat list."""

    def __init__(self) -> None:
        self.gap = np.inf

    def __call__(self, values: torch.Tensor, k: int, dim: int = -1, **more: Any) -> Any:
        if values.ndim == 1 and k < len(values):
            best = values.sort(descending=True).values
            self.gap = min(self.gap, float(best[k - 1] - best[k]))
        return lower_first(values, k, dim, **more)


def drawn(vocab: int, end: int, attempt: int) -> np.ndarray:
    """int32 [TOKENS] with ends of text at ENDS."""
    ids = np.random.default_rng([SEED, attempt]).integers(8, vocab, TOKENS).astype(np.int32)
    ids[list(ENDS)] = end
    return ids


def trace(name: str, cuts: Cuts) -> dict[str, np.ndarray]:
    """The arrays of one model, without its name."""
    case = next(case for case in cases() if case.name == name)
    reader = reader_of(case)
    assert isinstance(reader, Transformers)
    reader.load(ORACLES / name)
    watcher, end = Watcher(reader), case.text["eos_token_id"]
    end = end[0] if isinstance(end, list) else end
    for attempt in range(200):
        ids, cuts.gap = drawn(case.text["vocab_size"], end, attempt), np.inf
        logits = watcher.answer(ids)
        found = {"ids": ids, "logits": logits}
        found["streams"] = np.stack([watcher.streams[i] for i in sorted(watcher.streams)])
        found |= {f"rows/{i}": rows for i, rows in watcher.rows.items()}
        found |= {f"sees/{i}": mask for i, mask in watcher.sees.items()}
        if cuts.gap < CUT_GAP or reader.gaps[0] < ROUTE_GAP or not reader.steady(ids[None]):
            continue
        found["dense"] = watcher.answer(ids, dense=True)
        apart = float(np.abs(found["dense"] - logits).max())
        if apart > DENSE_APART:
            print(f"{name}: attempt {attempt}, cuts {cuts.gap:.1e}, dense apart {apart:.2f}")
            return found
    raise SystemExit(f"{name}: no prompt is clear enough")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cuts = Cuts()
    torch.topk = torch.Tensor.topk = lambda values, *how, **named: cuts(values, *how, **named)
    arrays = {f"{name}/{key}": a for name in NAMES for key, a in trace(name, cuts).items()}
    np.savez_compressed(Path(__file__).parent / "qwen4_traces.npz", **arrays)


if __name__ == "__main__":
    main()
