"""An install small enough to make in a test and complete enough to talk with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_tokenizers

from turbospark import synth

SIZES: dict[str, Any] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "width": 64,
}


def wordless(path: Path, **sizes: Any) -> Path:
    """A random llama of 320 rows without a tokenizer."""
    return synth("llama", path, vocab=320, progress=False, **{**SIZES, **sizes})


def talking(path: Path, template: str | None = None, **sizes: Any) -> Path:
    """The same with a byte-level tokenizer and a ChatML template (or `template`)."""
    tiny_tokenizers.write(wordless(path, **sizes), config={}, generation={}, template=template)
    return path
