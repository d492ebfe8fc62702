"""Pulling from the Hub: a client that serves a local folder stands at the huggingface-hub border.

What is tested is our side of it: nothing is downloaded that could have been refused, only the
needed files are, and always of one commit.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub
import numpy as np
import pytest
import tiny_tokenizers
from checkpoints import LLAMA, MOE, llama_tensors, moe_tensors, save_folder, save_gguf
from safetensors.numpy import save_file

from turbospark import pull
from turbospark.conversion.safetensors import INDEX
from turbospark.errors import (
    InstallExistsError,
    OptionError,
    SourceError,
    UnsupportedArchitectureError,
    UnsupportedError,
)
from turbospark.install.models import installed
from turbospark.install.opening import Install
from turbospark.text.tokenizer import Tokenizer

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class FakeHub:
    """One repository, `owner/model`, whose files are those of `folder`."""

    folder: Path
    snapshot: Path
    downloads: list[list[str]] = field(default_factory=list)
    ranges: dict[str, int] = field(default_factory=dict)
    failure: Exception | None = None

    def model_info(self, repo: str, *, revision: str | None, files_metadata: bool) -> Any:
        if self.failure is not None:
            raise self.failure
        assert repo == "owner/model" and revision in (None, "v2", COMMIT) and files_metadata
        files = [p for p in sorted(self.folder.rglob("*")) if p.is_file()]
        siblings = [
            {"rfilename": p.relative_to(self.folder).as_posix(), "size": p.stat().st_size}
            for p in files
        ]
        return huggingface_hub.ModelInfo(id=repo, sha=COMMIT, siblings=siblings)

    def open(self, path: str, mode: str, block_size: int) -> BinaryIO:
        name = path.removeprefix(f"owner/model@{COMMIT}/")
        assert name != path and mode == "rb" and block_size >= 1 << 16
        hub = self

        class Counting:
            def __init__(self) -> None:
                self.file = (hub.folder / name).open("rb")

            def read(self, count: int) -> bytes:
                hub.ranges[name] = hub.ranges.get(name, 0) + count
                return self.file.read(count)

            def close(self) -> None:
                self.file.close()

        return Counting()  # type: ignore[return-value]

    def snapshot_download(
        self, repo: str, *, revision: str, allow_patterns: list[str], tqdm_class: type | None
    ) -> str:
        assert repo == "owner/model" and revision == COMMIT
        got = []
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            name = path.relative_to(self.folder).as_posix()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in allow_patterns):
                (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, self.snapshot / name)
                got.append(name)
        self.downloads.append(got)
        return str(self.snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "repo", tmp_path / "snapshot" / COMMIT)
    fake.folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path / "home"))
    return fake


def get(**options: Any) -> Path:
    return pull("owner/model", progress=False, **options)


def save_shards(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    places = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for shard in sorted(set(places.values())):
        save_file({n: tensors[n] for n in names if places[n] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


# --- what works -----------------------------------------------------------------------------------


def test_a_repository_is_installed_under_its_name(hub: FakeHub, tmp_path: Path) -> None:
    save_folder(hub.folder, llama_tensors(), LLAMA)
    path = get(revision="v2")
    assert path == tmp_path / "home" / "models" / "owner--model.gturbo"
    assert [m.name for m in installed()] == ["owner/model"]
    with Install.open(path, verify="receipt") as install:
        source = install.manifest.extension["source"]
        assert (source["repo"], source["revision"], source["name"]) == (
            "owner/model", COMMIT, "owner/model",
        )  # fmt: skip
        assert install.manifest.model_id == "owner/model"
        assert install.manifest.source_snapshot_hash == COMMIT
        np.testing.assert_array_equal(
            np.array(install.resident.read("lm_head.weight").weight),
            llama_tensors()["lm_head.weight"],
        )


def test_only_the_files_of_the_model_are_downloaded(hub: FakeHub) -> None:
    save_shards(hub.folder, llama_tensors(), LLAMA)
    tiny_tokenizers.write(hub.folder)
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (hub.folder / name).write_text("{}")
    (hub.folder / "onnx").mkdir()
    (hub.folder / "onnx" / "config.json").write_text("{}")
    get()
    expected = ["config.json", INDEX, "tokenizer.json"]
    expected += [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert hub.downloads == [sorted(expected)]


def test_the_template_for_prompts_with_tools_comes_along(hub: FakeHub) -> None:
    save_folder(hub.folder, llama_tensors(), LLAMA)
    tiny_tokenizers.write(hub.folder, template="D {{ messages }}")
    beside = hub.folder / "additional_chat_templates"
    beside.mkdir()
    (beside / "tool_use.jinja").write_text("T {{ tools[0].function.name }}")
    (beside / "rag.jinja").write_text("R")
    path = get()
    assert [n for n in hub.downloads[0] if "/" in n] == ["additional_chat_templates/tool_use.jinja"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    assert tokenizer.render([{"role": "user", "content": "hi"}], tools=tools) == "T f"


def test_looking_reads_headers_and_not_weights(hub: FakeHub) -> None:
    tensors = llama_tensors()
    tensors["model.embed_tokens.weight"] = np.zeros((100_000, 64), np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_folder(hub.folder, tensors, LLAMA | {"vocab_size": 100_000})
    (hub.folder / "model.safetensors").rename(hub.folder / "weights.safetensors")
    get()
    assert max(hub.ranges.values()) <= 2 << 20
    assert (hub.folder / "weights.safetensors").stat().st_size > 50_000_000


def test_options_reach_the_conversion(hub: FakeHub) -> None:
    save_folder(hub.folder, llama_tensors(), LLAMA)
    overrides = {"lm_head.weight": None}
    path = get(name="mine", bits=8, group_size=32, overrides=overrides)
    assert path.name == "mine.gturbo"
    with Install.open(path) as install:
        assert str(install.resident.entry("model.embed_tokens.weight").fmt).startswith("affine 8")
        assert str(install.resident.entry("lm_head.weight").fmt) == "float32"


@pytest.mark.parametrize("file", ["b.gguf", "sub/c.gguf"])
def test_one_gguf_of_several_is_chosen_by_name(hub: FakeHub, file: str) -> None:
    (hub.folder / "sub").mkdir()
    for name in ("a.gguf", "b.gguf", "sub/c.gguf"):
        save_gguf(hub.folder / name, llama_tensors(), "Q8_0")
    with Install.open(get(file=file)) as install:
        assert install.manifest.extension["source"]["name"] == Path(file).name
    assert hub.downloads == [[file]]


def test_the_only_gguf_needs_no_name_and_brings_its_shards(hub: FakeHub) -> None:
    save_gguf(hub.folder / "whole.gguf", llama_tensors(), "F16")
    get()
    assert hub.downloads == [["whole.gguf"]]


# --- what is refused before the download ----------------------------------------------------------


def refused(hub: FakeHub, kind: type[Exception], message: str, **options: Any) -> None:
    with pytest.raises(kind, match=message):
        get(**options)
    assert hub.downloads == [] and installed() == []


def test_an_unsupported_architecture_is_refused_before_the_download(hub: FakeHub) -> None:
    save_folder(hub.folder, llama_tensors(), LLAMA | {"model_type": "mamba"})
    refused(hub, UnsupportedArchitectureError, "'mamba' is not supported")
    assert "model.safetensors" not in hub.ranges


def test_an_unsupported_gguf_is_refused_before_the_download(hub: FakeHub) -> None:
    save_gguf(hub.folder / "m.gguf", {}, "F32", "bert")
    refused(hub, UnsupportedArchitectureError, "'bert' is not supported")


def test_an_unsupported_quantization_is_refused_before_the_download(hub: FakeHub) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    save_folder(hub.folder, llama_tensors(), config)
    refused(hub, UnsupportedError, "quant_method = 'awq'")


def test_tensors_that_do_not_fit_are_refused_before_the_download(hub: FakeHub) -> None:
    save_folder(hub.folder, llama_tensors() | {"model.extra": np.zeros(3, np.float32)}, LLAMA)
    refused(hub, SourceError, r"1 unknown: model\.extra")


def test_missing_experts_are_refused_before_the_download(hub: FakeHub) -> None:
    save_shards(hub.folder, moe_tensors()[0], MOE)
    refused(hub, SourceError, r"missing: model\.layers\.0\.mlp\.experts\.gate_proj\.weight")


def test_a_missing_shard_is_refused_before_the_download(hub: FakeHub) -> None:
    save_shards(hub.folder, llama_tensors(), LLAMA)
    (hub.folder / "model-00002-of-00002.safetensors").unlink()
    refused(hub, SourceError, "missing shards: model-00002")


def test_options_that_cannot_be_honoured_are_refused_before_the_download(hub: FakeHub) -> None:
    save_folder(hub.folder, llama_tensors(), LLAMA)
    refused(hub, UnsupportedError, "group_size 128; works", bits=4, group_size=128)
    refused(hub, OptionError, "match no tensor: nope", overrides={"nope": None})
    refused(hub, OptionError, "model name '../up'", name="../up")
    refused(hub, OptionError, r"file='x\.gguf' is not a GGUF file", file="x.gguf")


def test_several_ggufs_without_a_choice_are_refused_by_name(hub: FakeHub) -> None:
    for name in ("a.gguf", "b.gguf"):
        save_gguf(hub.folder / name, llama_tensors(), "F16")
    refused(hub, SourceError, r"several models; file= chooses: a\.gguf, b\.gguf")


def test_a_repository_without_a_model_is_refused_with_what_it_has(hub: FakeHub) -> None:
    (hub.folder / "pytorch_model.bin").write_text("x")
    refused(hub, SourceError, r"the repository has: pytorch_model\.bin")


def test_an_installed_model_is_not_pulled_again_unless_forced(hub: FakeHub) -> None:
    save_folder(hub.folder, llama_tensors(), LLAMA)
    get()
    with pytest.raises(InstallExistsError, match="pass force"):
        get()
    assert len(hub.downloads) == 1
    get(force=True)
    assert len(hub.downloads) == 2


@pytest.mark.parametrize("failure", [OSError("no route"), ConnectionError("offline mode")])
def test_a_hub_that_does_not_answer_is_a_source_error(hub: FakeHub, failure: Exception) -> None:
    hub.failure = failure
    refused(hub, SourceError, f"owner/model: the Hub request failed: {failure}")


def test_a_fresh_process_that_cannot_reach_the_hub_says_so_in_one_line(tmp_path: Path) -> None:
    """Here the tests have loaded modules of the client that a user's process has not."""
    found = subprocess.run(
        [sys.executable, "-m", "turbospark", "pull", "owner/model"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TURBOSPARK_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("turbospark: owner/model: the Hub request failed: ")
    assert found.stderr.count("\n") == 1


def test_an_interrupted_download_ends_at_the_next_piece(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(hub.folder, llama_tensors(), LLAMA)
    ended = threading.Event()

    def endless(repo: str, *, tqdm_class: type, **_: Any) -> str:
        bar = tqdm_class(total=1)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            for _piece in range(1000):
                time.sleep(0.01)
                bar.update(1)
        except KeyboardInterrupt:
            ended.set()
            raise
        return str(hub.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", endless)
    with pytest.raises(KeyboardInterrupt):
        get()
    assert ended.wait(60) and installed() == []


def test_errors_of_the_client_itself_are_source_errors(hub: FakeHub) -> None:
    """A transport error of whichever HTTP library the client is built on."""
    base = huggingface_hub.errors.HfHubHTTPError.__mro__[1]
    hub.failure = base("404 Client Error.\n\nRepository Not Found for url\n" + "x" * 500)
    message = "the Hub request failed: 404 Client Error. Repository Not Found for url x{250,260}$"
    refused(hub, SourceError, message)
