"""verify = none, receipt, full: what each one catches, and what a receipt is bound to."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handmade import Original, sha

from turbospark.errors import ChecksumMismatchError, FileSizeError, OptionError, ReceiptInvalidError
from turbospark.install.manifest import Manifest
from turbospark.install.opening import Install
from turbospark.install.verify import sha256_file, verify, write_receipt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An original install with a receipt written by hand."""
    original = Original(tmp_path / "m.gturbo")
    manifest = (original.path / "manifest.json").read_bytes()
    files = {**original.files, "manifest.json": manifest}
    receipt = {
        "schemaVersion": 1,
        "manifestSha256": sha(manifest).upper(),
        "modelDirectoryPath": str(original.path.resolve()),
        "verificationTimestamp": "2026-01-01T00:00:00Z",
        "toolVersion": "0.3.0",
        "files": {n: {"size": len(d), "sha256": sha(d).upper()} for n, d in files.items()},
    }
    (original.path / "verified-install.json").write_text(json.dumps(receipt))
    return original.path


def flip(path: Path, at: int) -> None:
    """Change one byte, keep the size."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def edit_receipt(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    receipt = json.loads((path / "verified-install.json").read_text())
    edit(receipt)
    (path / "verified-install.json").write_text(json.dumps(receipt))


def test_an_intact_install_passes_every_policy(path: Path) -> None:
    for policy in ("none", "receipt", "full"):
        Install.open(path, verify=policy).close()


@pytest.mark.parametrize("name", ["model_weights.bin", "packed_experts/layer_01.bin"])
def test_a_changed_byte_is_found_by_full_alone(path: Path, name: str) -> None:
    flip(path / name, 16384 + 5)
    Install.open(path, verify="none").close()
    Install.open(path, verify="receipt").close()  # the receipt vouches for sizes, as documented
    with pytest.raises(ChecksumMismatchError, match=Path(name).name):
        Install.open(path, verify="full")


def test_sizes_are_checked_under_every_policy(path: Path) -> None:
    with (path / "model_weights.bin").open("ab") as file:
        file.write(b"x")
    for policy in ("none", "receipt", "full"):
        with pytest.raises(FileSizeError):
            Install.open(path, verify=policy)


def test_a_receipt_is_bound_to_the_path(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    text = r"it was issued for .*m\.gturbo, not for .*copy; `turbospark check .*copy --receipt`"
    with pytest.raises(ReceiptInvalidError, match=text):
        Install.open(tmp_path / "copy", verify="receipt")
    (tmp_path / "link").symlink_to(path)  # the same place under another name
    Install.open(tmp_path / "link", verify="receipt").close()


def test_a_receipt_is_bound_to_the_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("tiny-moe", "tiny-mOe"))
    with pytest.raises(ReceiptInvalidError, match="another manifest"):
        Install.open(path, verify="receipt")


EDITS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("schema", lambda r: r.update(schemaVersion=2), "schemaVersion"),
    ("schema bool", lambda r: r.update(schemaVersion=True), "schemaVersion"),
    ("schema absent", lambda r: r.pop("schemaVersion"), "schemaVersion"),
    ("hash kind", lambda r: r.update(manifestSha256=7), "manifestSha256"),
    ("path kind", lambda r: r.update(modelDirectoryPath=["x"]), "issued for"),
    ("files kind", lambda r: r.update(files=[]), "files must be an object"),
    ("missing", lambda r: r["files"].pop("model_weights.bin"), "missing=.*model_weights"),
    ("no manifest", lambda r: r["files"].pop("manifest.json"), "missing=.*manifest.json"),
    ("extra", lambda r: r["files"].update(x={"size": 1, "sha256": ""}), r"extra=\['x'\]"),
    ("row kind", lambda r: r["files"].update({"model_weights.bin": 5}), "model_weights.bin"),
    ("size", lambda r: r["files"]["model_weights.bin"].update(size=1), "model_weights.bin"),
    ("size kind", lambda r: r["files"]["model_weights.bin"].update(size=1.5), "model_weights"),
    ("sha", lambda r: r["files"]["model_weights.bin"].update(sha256="0" * 64), "model_weights"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "text"), [e[1:] for e in EDITS], ids=[e[0] for e in EDITS])
def test_a_wrong_receipt_vouches_for_nothing(path: Path, edit, text: str) -> None:
    edit_receipt(path, edit)
    with pytest.raises(ReceiptInvalidError, match=text):
        Install.open(path, verify="receipt")
    Install.open(path, verify="full").close()


def test_a_missing_or_damaged_receipt_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    receipt = path / "verified-install.json"
    for data in (b"", b"[]", b"\xff", b"[" * 100000):
        receipt.write_bytes(data)
        with pytest.raises(ReceiptInvalidError, match=r"verified-install\.json"):
            Install.open(path, verify="receipt")
    with receipt.open("wb") as file:
        file.truncate(5 << 20)
    with pytest.raises(ReceiptInvalidError, match="exceed the limit of 4194304"):
        Install.open(path, verify="receipt")
    receipt.unlink()
    with pytest.raises(ReceiptInvalidError, match="does not exist"):
        Install.open(path, verify="receipt")
    receipt.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ReceiptInvalidError, match="leads outside"):
        Install.open(path, verify="receipt")


def test_write_receipt_verifies_first_and_then_vouches(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    manifest = Manifest.read(tmp_path / "copy")
    write_receipt(tmp_path / "copy", manifest)
    Install.open(tmp_path / "copy", verify="receipt").close()
    flip(tmp_path / "copy" / "model_weights.bin", 20000)
    with pytest.raises(ChecksumMismatchError):
        write_receipt(tmp_path / "copy", manifest)


def test_an_unknown_policy_is_refused(path: Path) -> None:
    with pytest.raises(OptionError, match="verify='fast' is not one of none, receipt, full"):
        verify(path, Manifest.read(path), "fast")


def test_sha256_file_equals_hashlib_across_chunk_borders(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4097  # a little more than 1 MiB
    (tmp_path / "x").write_bytes(data)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()
