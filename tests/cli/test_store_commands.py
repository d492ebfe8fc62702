"""convert, synth, pull, list, info, check and rm, on installs that hold real bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import turbospark as library
from turbospark.install.opening import Install

Command = Callable[..., Any]
CHECKPOINT = Path(__file__).parents[1] / "data" / "oracles" / "llama-base"


def test_convert_writes_what_the_library_writes(turbospark: Command, tmp_path: Path) -> None:
    found = turbospark("convert", CHECKPOINT, tmp_path / "a.gturbo")
    assert found.code == 0 and found.err == ""
    assert found.out.startswith(f"wrote {tmp_path / 'a.gturbo'} (")
    library.convert(CHECKPOINT, tmp_path / "b.gturbo", progress=False)
    weights = [tmp_path / f"{x}.gturbo" / "model_weights.bin" for x in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_local_conversion_is_installed_under_a_name(
    turbospark: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    assert turbospark("convert", CHECKPOINT, "--name", "me/llama").code == 0
    assert turbospark("synth", "llama", "--name", "drawn", "--layers", 1).code == 0
    assert (tmp_path / "models" / "me--llama.gturbo" / "manifest.json").is_file()
    names = [row["name"] for row in json.loads(turbospark("list", "--json").out)]
    assert names == ["drawn", "me/llama"]
    assert turbospark("info", "me/llama").code == 0


def test_quantizing_what_is_quantized_says_what_it_is(turbospark: Command, tmp_path: Path) -> None:
    quantized = CHECKPOINT.parent / "mlx-llama-llama3-4bit"
    found = turbospark("convert", quantized, tmp_path / "q", "--bits", 8, "--group-size", 32)
    assert found.code == 2
    assert (
        "--bits 8, --group-size 32, --mode affine: nothing to quantize, every matrix" in found.err
    )
    assert "{" not in found.err and "already quantized (affine " in found.err


def test_convert_quantizes_as_asked(turbospark: Command, tmp_path: Path) -> None:
    asked = ["--bits", 4, "--group-size", 32, "--override", "*.q_proj.weight=8,32"]
    asked += ["--override", "*down_proj*=keep", "--override", "*o_proj*=mxfp8"]
    found = turbospark("convert", CHECKPOINT, tmp_path / "q.gturbo", *asked, "--json")
    data = json.loads(found.out)
    assert data["path"] == str(tmp_path / "q.gturbo")
    with Install.open(tmp_path / "q.gturbo") as install:
        formats = {name: str(install.resident.entry(name).fmt) for name in install.resident.names}
    assert formats["model.layers.0.mlp.down_proj.weight"] == "bfloat16"
    assert formats["model.layers.0.self_attn.q_proj.weight"].startswith("affine 8-bit group 32")
    assert formats["model.layers.0.self_attn.o_proj.weight"] == "mxfp8"
    assert formats["model.layers.0.mlp.up_proj.weight"].startswith("affine 4-bit group 32")
    assert set(data["formats"]) == set(formats.values())


def test_convert_refuses_to_replace_unless_forced(turbospark: Command, tmp_path: Path) -> None:
    dest = tmp_path / "a.gturbo"
    quantized = ["--mode", "mxfp4", "--override", "*down_proj*=keep"]
    assert turbospark("convert", CHECKPOINT, dest, *quantized).code == 0
    assert "mxfp4" in turbospark("info", dest).out
    found = turbospark("convert", CHECKPOINT, dest)
    assert found.code == 1 and "exists" in found.err
    assert turbospark("convert", CHECKPOINT, dest, "--force").code == 0
    assert "mxfp4" not in turbospark("info", dest).out


@pytest.mark.parametrize(("flag", "shown"), [([], True), (["--no-progress"], False)])
def test_progress_is_shown_at_a_terminal_only_unless_it_is_off(
    flag: list[str],
    shown: bool,
    turbospark: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    dest = tmp_path / "a.gturbo"
    plain = turbospark("convert", CHECKPOINT, dest)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(
        library, "convert", lambda *a, progress, **k: asked.append(progress) or dest
    )
    turbospark("convert", CHECKPOINT, dest, *flag)
    assert plain.err == "" and asked == [shown]


def test_synth_resizes_a_small_model(turbospark: Command, tmp_path: Path) -> None:
    sizes = {
        "layers": 3, "hidden": 96, "heads": 6, "kv-heads": 3, "head-dim": 16, "width": 80,
        "vocab": 70, "experts": 5, "top-k": 2, "expert-width": 32,
    }  # fmt: skip
    words = [word for name, n in sizes.items() for word in (f"--{name}", n)]
    extra = ["--set", "rope_theta=5e5", "--bits", 8, "--group-size", 32, "--dtype", "float16"]
    made = turbospark("synth", "qwen3_moe", tmp_path / "s.gturbo", *words, *extra)
    assert made.code == 0, made.err
    config = json.loads(turbospark("info", tmp_path / "s.gturbo", "--json").out)["config"]
    keys = {
        "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 80, "vocab_size": 70,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "rope_theta": 5e5,
    }  # fmt: skip
    assert {key: config[key] for key in keys} == keys
    assert "affine 8-bit group 32 float16" in turbospark("info", tmp_path / "s.gturbo").out


def test_synth_draws_by_its_seed(turbospark: Command, tmp_path: Path) -> None:
    small = ["--layers", 1, "--hidden", 32, "--vocab", 8, "--width", 32]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        turbospark("synth", "llama", tmp_path / name, *small, "--seed", seed)
    a, b, c = ((tmp_path / name / "model_weights.bin").read_bytes() for name in "abc")
    assert a == b != c


def test_pull_passes_on_everything(
    turbospark: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(library, "pull", lambda repo, **k: seen.append((repo, k)) or model)
    words = ["--revision", "v1", "--file", "x.gguf", "--name", "n", "--bits", 5, "--force"]
    found = turbospark("pull", "o/r", *words, "--mode", "affine", "--override", "a=keep")
    assert found.code == 0 and str(model) in found.out
    assert seen == [
        (
            "o/r",
            {
                "revision": "v1", "file": "x.gguf", "name": "n", "bits": 5, "group_size": None,
                "mode": "affine", "overrides": {"a": None}, "force": True, "progress": False,
            },
        )
    ]  # fmt: skip


def test_list_shows_every_model_and_damage(
    turbospark: Command, store: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(store / "models", tmp_path / "models")
    shutil.copytree(model, tmp_path / "models" / "torn.gturbo")
    manifest = tmp_path / "models" / "torn.gturbo" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"versionMajor": 1', '"versionMajor": 9'))
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    lines = turbospark("list").out.splitlines()
    assert [line.split()[0] for line in lines] == ["tiny", "torn", "wordless"]
    assert lines[0].endswith("llama (llama)") and "damaged: manifest version 9" in lines[1]
    rows = json.loads(turbospark("list", "--json").out)
    size = sum(p.stat().st_size for p in model.rglob("*") if p.is_file())
    assert rows[0] == {
        "name": "tiny",
        "path": str(tmp_path / "models" / "tiny.gturbo"),
        "bytes": size,
        "family": "llama",
        "model_type": "llama",
    }


def test_an_empty_store_says_where_it_is(
    turbospark: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    assert turbospark("list").out == f"no model is installed in {tmp_path / 'models'}\n"
    assert json.loads(turbospark("list", "--json").out) == []


def test_info_tells_what_an_install_holds(turbospark: Command, model: Path, tmp_path: Path) -> None:
    text = turbospark("info", "tiny").out
    assert "llama (llama)" in text and "2 of width 64" in text and "none, a dense model" in text
    assert "dialect chatml" in text and "template chat_template.jinja" in text
    assert "none: prompts are token ids" in turbospark("info", "wordless").out
    data = json.loads(turbospark("info", model, "--json").out)
    assert (data["layers"], data["vocab_size"], data["experts"]) == (2, 320, 0)
    assert data["arch"]["headDim"] == 16 and data["tokenizer"]["tokens"] == 259
    assert data["tokenizer"]["tools"] == "none"
    turbospark("synth", "mixtral", tmp_path / "moe", "--layers", 1)
    assert "8 per layer, 2 per token" in turbospark("info", tmp_path / "moe").out


def test_check_reads_every_byte(turbospark: Command, model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy.gturbo")
    good = turbospark("check", copy, "--json")
    assert good.code == 0 and json.loads(good.out)["stop_reason"] == "max_tokens"
    weights = copy / "model_weights.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # padding: only a hash can see it
    weights.write_bytes(data)
    bad = turbospark("check", copy)
    assert bad.code == 1 and "model_weights.bin: sha256" in bad.err


def test_check_refuses_a_model_that_does_not_run(turbospark: Command, tmp_path: Path) -> None:
    folder = shutil.copytree(CHECKPOINT, tmp_path / "source")
    turbospark("convert", folder, tmp_path / "a.gturbo")
    with Install.open(tmp_path / "a.gturbo") as install:
        offset = install.resident.entry("model.norm.weight").offset
    weights = tmp_path / "a.gturbo" / "model_weights.bin"
    data = bytearray(weights.read_bytes())
    data[offset : offset + 2] = b"\xff\x7f"  # a NaN in bfloat16
    weights.write_bytes(data)
    _accept(tmp_path / "a.gturbo")
    found = turbospark("check", tmp_path / "a.gturbo")
    assert found.code == 1 and "logits are not finite" in found.err


def _accept(install: Path) -> None:
    """Make the manifest vouch for the weights as they are."""
    from turbospark.install.verify import sha256_file

    manifest = install / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["model_weights.bin"]["sha256"] = sha256_file(install / "model_weights.bin")
    manifest.write_text(json.dumps(content))


def test_check_renews_the_receipt_of_a_moved_install(
    turbospark: Command, model: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(model, tmp_path / "moved.gturbo")
    refused = turbospark("run", moved, "--ids", "1", "--max-new", 1, "--verify", "receipt")
    assert refused.code == 1 and "issued for" in refused.err
    assert turbospark("check", moved).code == 0
    assert turbospark("run", moved, "--ids", "1", "--verify", "receipt").code == 1
    assert turbospark("check", moved, "--receipt").code == 0
    assert turbospark("run", moved, "--ids", "1", "--max-new", 1, "--verify", "receipt").code == 0


def test_rm_deletes_an_installed_model_only(
    turbospark: Command, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(store / "models", tmp_path / "models")
    monkeypatch.setenv("TURBOSPARK_HOME", str(tmp_path))
    gone = tmp_path / "models" / "tiny.gturbo"
    assert turbospark("rm", gone).code == 1 and gone.is_dir()
    assert json.loads(turbospark("rm", "tiny", "--json").out) == {"removed": str(gone)}
    assert not gone.exists() and (tmp_path / "models" / "wordless.gturbo").is_dir()
