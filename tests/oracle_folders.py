"""The checkpoints of tests/data/oracles and the answers stored beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

ORACLES = Path(__file__).parent / "data" / "oracles"
NAMES = sorted(path.parent.name for path in ORACLES.glob("*/oracle.npz"))


@dataclass(frozen=True)
class Oracle:
    """One checkpoint folder and the answers a correct runtime gives."""

    path: Path

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.path / "oracle.npz") as arrays:
            return dict(arrays)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    @property
    def ids(self) -> list[int]:
        return self._arrays["input_ids"][0].tolist()

    @property
    def logits(self) -> np.ndarray:
        """float32 [T, vocab]."""
        return self._arrays["logits"]

    @property
    def greedy_ids(self) -> list[int]:
        return self._arrays["greedy_ids"].tolist()

    @property
    def greedy_logits(self) -> np.ndarray:
        """float32 [16, vocab]: what each greedy id was taken from."""
        return self._arrays["greedy_logits"]
