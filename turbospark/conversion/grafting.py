"""Two checkpoints as one source: a model's, and a drafter's under a prefix of its own.

Knows names. Does not know file formats or families.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from turbospark.conversion.source import SourceTensor, TensorSource
from turbospark.install.planes import Planes


class Grafted:
    """`model` with the tensors of `drafter` beside its own, each name after `prefix`."""

    def __init__(self, model: TensorSource, drafter: TensorSource, prefix: str) -> None:
        self.model, self.drafter, self.prefix = model, drafter, prefix
        self.kind: str = model.kind
        self.path: Path = model.path
        self.config: dict[str, Any] = model.config

    @property
    def sidecars(self) -> dict[str, bytes]:
        """The model's tokenizer and generation files."""
        return self.model.sidecars

    @cached_property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor of both."""
        own = {self.prefix + name: t for name, t in self.drafter.tensors.items()}
        return {**self.model.tensors, **{name: _named(t, name) for name, t in own.items()}}

    def read(self, name: str, expert: int | None = None, rows: slice | None = None) -> Planes:
        """As the source that has it."""
        if name.startswith(self.prefix):
            return self.drafter.read(name[len(self.prefix) :], expert, rows)
        return self.model.read(name, expert, rows)

    def close(self) -> None:
        """Close the files of both."""
        self.model.close()
        self.drafter.close()


def _named(t: SourceTensor, name: str) -> SourceTensor:
    return SourceTensor(name, t.shape, t.fmt, t.stored, t.nbytes)
