"""Make tests/data/steered.npz: what other implementations answer when their stream is edited.

    python make_steered.py

Needs what make_oracles.py needs. Every checkpoint of `steering_cases.NAMES` is opened with
transformers (float32, eager; spark2_5 with mlx-lm), answers its oracle's prompt as recorded, and
then again for each of EDITS with every decoder layer's output edited. Arrays, per model and edit:

    MODEL/residuals          float32 [layers, hidden] every layer's output at the last position
    MODEL/EDIT/logits        float32 [2, vocab]       of the last two positions
    MODEL/EDIT/coefficients  float32 [layers, vectors] of the last row, nan where uncovered
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from make_oracles import MlxLm, reader_of
from oracle_cases import cases
from steering_cases import EDITS, NAMES, ROWS, Edits, edited

ORACLES = Path(__file__).parent / "oracles"
Edit = Callable[[int, np.ndarray], np.ndarray]


class Recorder:
    """Edits the outputs of layers and remembers the last row's coefficients."""

    def __init__(self, name: str, edits: Edits, layers: int) -> None:
        self.name, self.edits = name, edits
        self.coefficients = np.full((layers, len(edits.vectors)), np.nan, np.float32)

    def __call__(self, layer: int, rows: np.ndarray) -> np.ndarray:
        out, found = edited(self.name, self.edits, layer, rows.astype(np.float64))
        for vector, values in enumerate(found):
            if values is not None:
                self.coefficients[layer, vector] = values[0, -1]
        return out.astype(np.float32)


def decoder_layers(model: Any, count: int) -> list[Any]:
    """The one list of `count` decoder layers in a torch model."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    (found,) = [m for m in lists if fnmatch.fnmatch(type(m[0]).__name__, "*DecoderLayer")]
    return list(found)


def hooked(edit: Edit, layer: int) -> Callable[..., Any]:
    def hook(module: Any, args: Any, out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        new = torch.from_numpy(edit(layer, first.numpy()))
        return (new, *out[1:]) if isinstance(out, tuple) else new

    return hook


class EditedLayer:
    """An mlx-lm layer whose output is edited."""

    def __init__(self, inner: Any, edit: Edit, layer: int) -> None:
        self.inner, self.edit, self.layer = inner, edit, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return mx.array(self.edit(self.layer, np.array(self.inner(*args, **named))))


def answer(reader: Any, ids: np.ndarray, edit: Edit, layers: int) -> np.ndarray:
    """float32 logits [T, vocab] with every layer's output edited."""
    if isinstance(reader, MlxLm):
        plain = reader.model.model.layers
        reader.model.model.layers = [EditedLayer(m, edit, i) for i, m in enumerate(plain)]
        out = reader.answers(ids)[0]
        reader.model.model.layers = plain
        return out
    modules = decoder_layers(reader.model, layers)
    handles = [m.register_forward_hook(hooked(edit, i)) for i, m in enumerate(modules)]
    out = reader.answers(ids)[0]
    for handle in handles:
        handle.remove()
    return out


def main() -> None:
    known, arrays = {case.name: case for case in cases()}, {}
    for name in NAMES:
        case = known[name]
        layers = case.text["num_hidden_layers"]
        reader = reader_of(case)
        reader.load(ORACLES / name)
        with np.load(ORACLES / name / "oracle.npz") as oracle:
            ids, plain = oracle["input_ids"], oracle["logits"]
        if np.abs(reader.answers(ids)[0] - plain).max() > 1e-4:
            raise SystemExit(f"{name}: does not answer as recorded")
        seen: dict[int, np.ndarray] = {}

        def watch(layer: int, rows: np.ndarray, seen: dict[int, np.ndarray] = seen) -> np.ndarray:
            seen[layer] = rows[0, -1].copy()
            return rows

        answer(reader, ids, watch, layers)
        arrays[f"{name}/residuals"] = np.stack([seen[layer] for layer in range(layers)])
        for what, edits in EDITS.items():
            recorder = Recorder(name, edits, layers)
            logits = answer(reader, ids, recorder, layers)
            moved = float(np.abs(logits - plain).max())
            if not 0.05 < moved < 50:
                raise SystemExit(f"{name}/{what}: the edit moves the logits by {moved}")
            arrays[f"{name}/{what}/logits"] = logits[-ROWS:]
            arrays[f"{name}/{what}/coefficients"] = recorder.coefficients
            print(f"{name:24s} {what:8s} {moved:.2f}")
    np.savez_compressed(Path(__file__).parent / "steered.npz", **arrays)


if __name__ == "__main__":
    main()
