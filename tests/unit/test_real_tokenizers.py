"""Opt-in: tokenizers of real GGUF files against recorded ids and texts.

TURBOSPARK_REAL_MODELS names a folder with the GGUF files and, beside each, FILE.reference.json
(prompts, prompt_ids, continuation_ids, text) recorded with another engine.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from turbospark.text.gguf_tokenizer import tokenizer_files_from_gguf
from turbospark.text.tokenizer import Tokenizer

FOLDER = os.environ.get("TURBOSPARK_REAL_MODELS")
REFERENCES = sorted(Path(FOLDER).glob("*.reference.json")) if FOLDER else []

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDER, reason="TURBOSPARK_REAL_MODELS is not set"),
]


def metadata_of(path: Path) -> dict:
    reader = pytest.importorskip("gguf").GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."}


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.name.split(".gguf")[0])
def test_a_real_files_tokenizer_makes_the_recorded_ids_and_texts(path, tmp_path):
    reference = json.loads(path.read_text())
    model = path.parent / reference["file"]
    if not model.is_file():
        pytest.skip(f"{model.name} is not there")
    assert hashlib.sha256(model.read_bytes()).hexdigest() == reference["sha256"]
    for name, data in tokenizer_files_from_gguf(metadata_of(model)).items():
        (tmp_path / name).write_bytes(data)
    tokenizer = Tokenizer.load(tmp_path)
    for run in reference["runs"]:
        if run["chat"]:
            ids = tokenizer.encode_chat([{"role": "user", "content": run["prompt"]}])
        else:
            ids = tokenizer.encode(run["prompt"])
        assert ids == run["prompt_ids"]
        produced = run["continuation_ids"]
        assert tokenizer.decode(produced, skip_special=False) == run["text"]
        stream = tokenizer.detokenizer()
        text = "".join(map(stream.push, produced)) + stream.flush()
        assert text == tokenizer.decode(produced)
        ends = [id_ for id_ in produced if id_ in tokenizer.stop_ids]
        assert ends in ([], produced[-1:]), "only the last id may be an end token"
