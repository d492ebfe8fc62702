"""A manifest whose configuration is another family's is refused by name at open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turbospark import OpenOptions, Runner
from turbospark.errors import IndexCorruptError


@pytest.mark.parametrize("kind", ["x", "gemma3_text", None, [1]])
def test_a_model_type_of_another_family_is_refused(
    kind: Any, installed: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "m.gturbo"
    shutil.copytree(installed("qwen3_moe-base"), path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["turbospark"]["config"]["model_type"] = kind
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(IndexCorruptError, match=r"config\.model_type = .* none of family llama"):
        Runner.open(path, OpenOptions(device="cpu"))
