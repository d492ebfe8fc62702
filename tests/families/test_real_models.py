"""Opt-in: real GGUF files, converted and run, against another engine's recorded answers.

TURBOSPARK_REAL_MODELS names a folder with the GGUF files and, beside each, FILE.reference.json
(prompt_ids, first_logits_top5, continuation_ids), recorded with transformers on the dequantized
weights in float32.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from turbospark import OpenOptions, Runner, convert

FOLDER = os.environ.get("TURBOSPARK_REAL_MODELS")
REFERENCES = sorted(Path(FOLDER).glob("*.reference.json")) if FOLDER else []
BOUND = 1e-3

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDER, reason="TURBOSPARK_REAL_MODELS is not set"),
]


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.name.split(".gguf")[0])
def test_a_real_file_continues_as_recorded(path: Path, tmp_path: Path) -> None:
    """Each recorded token is fed, so that one near-tie decides about itself only."""
    reference = json.loads(path.read_text())
    model = path.parent / reference["file"]
    if not model.is_file():
        pytest.skip(f"{model.name} is not there")
    assert hashlib.sha256(model.read_bytes()).hexdigest() == reference["sha256"]
    install = convert(model, tmp_path / "model.gturbo", progress=False)
    options = OpenOptions(device="cpu", dtype="float32", max_context=512)
    with Runner.open(install, options) as runner:
        for run in reference["runs"]:
            runner.reset()
            logits = np.array(runner.prefill(run["prompt_ids"]))
            best = run["first_logits_top5"]
            assert np.argsort(-logits)[:5].tolist() == [token for token, _ in best]
            np.testing.assert_allclose(
                logits[[token for token, _ in best]], [value for _, value in best], atol=BOUND
            )
            margins = []
            for token in run["continuation_ids"]:
                assert logits.max() - logits[token] < BOUND, run["prompt"]
                margins.append(np.diff(np.sort(logits)[-2:])[0])
                logits = np.array(runner.step(token))
            assert min(margins) == pytest.approx(run["min_margin"], abs=BOUND)
