"""The same prompt through mlx-lm, for `turbospark bench --mlx-lm`.

Knows mlx-lm's loading and its generation loop. mlx-lm is imported when it is asked for, and nothing
is downloaded: it gets a checkpoint folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from turbospark.errors import MissingDependencyError, OptionError, SourceError


@dataclass(frozen=True)
class PeerRound:
    """One generation of mlx-lm: tokens per second, and the greedy tokens."""

    prefill: float
    decode: float
    token_ids: list[int]


class Peer:
    """A checkpoint opened by mlx-lm, on the device that the runner beside it uses."""

    def __init__(self, folder: str, device: str) -> None:
        path = Path(folder)
        if (path / "manifest.json").exists() or not (path / "config.json").is_file():
            raise OptionError(
                f"--mlx-lm {folder}: expected a checkpoint folder with config.json, as mlx-lm "
                "reads it; the converted install is not one"
            )
        try:
            self.version = version("mlx-lm")
            utils, generate = map(import_module, ("mlx_lm.utils", "mlx_lm.generate"))
        except (ImportError, PackageNotFoundError):
            raise MissingDependencyError(
                "--mlx-lm compares with mlx-lm, which is not installed: pip install mlx-lm"
            ) from None
        self.path = path
        self._device = mx.Device(getattr(mx, device))
        self._generate_step = generate.generate_step
        with mx.stream(self._device):
            try:
                self._model, config = utils.load_model(path)
            except (ValueError, KeyError, FileNotFoundError) as error:
                raise SourceError(f"{path}: mlx-lm cannot load it: {error}") from None
            mx.eval(self._model.parameters())
        arrays: Any = tree_flatten(self._model.parameters())
        self.dtypes = sorted({str(a.dtype).removeprefix("mlx.core.") for _, a in arrays})
        text = config.get("text_config", config)
        self._vocab = int(text["vocab_size"])

    def generate(self, ids: Sequence[int], count: int) -> PeerRound:
        """`count` greedy tokens after `ids`, past end tokens. Raises OptionError."""
        if max(ids) >= self._vocab:
            raise OptionError(
                f"--mlx-lm {self.path}: the prompt has token {max(ids)}, this checkpoint has "
                f"{self._vocab}; give the checkpoint that the install was made from"
            )
        stream = mx.default_stream(self._device)
        with mx.stream(self._device):
            begin = perf_counter()
            steps = self._generate_step(
                mx.array(list(ids)), self._model, max_tokens=count, stream=stream
            )
            tokens = [int(next(steps)[0])]
            first = perf_counter()
            tokens += [int(token) for token, _ in steps]
            end = perf_counter()
        return PeerRound(len(ids) / (first - begin), (len(tokens) - 1) / (end - first), tokens)


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens from the start are the same."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
