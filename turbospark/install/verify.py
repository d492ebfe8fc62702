"""Is an install what its manifest says: sizes, SHA-256 of every file, and the receipt of both.

Knows hashes and the receipt. Does not know what the files mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from turbospark.errors import (
    ChecksumMismatchError,
    MissingFileError,
    OptionError,
    ReadError,
    ReceiptInvalidError,
    TurbosparkError,
)
from turbospark.install.files import check_size, contained, printable, read_json, regular_size
from turbospark.install.manifest import MANIFEST_NAME, Manifest
from turbospark.version import __version__

RECEIPT_NAME = "verified-install.json"
RECEIPT_CAP = 4 << 20
_CHUNK = 1 << 20

Policy = Literal["none", "receipt", "full"]


def sha256_file(path: Path) -> str:
    """Lower-case hex SHA-256, read 1 MiB at a time. Raises ReadError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as err:
        raise ReadError(f"{path}: cannot be read: {err.strerror}") from err
    return digest.hexdigest()


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Every file of the manifest exists inside the install with its declared size; stat only.

    Raises MissingFileError, FileSizeError, IndexCorruptError (a link that leads outside).
    """
    for name, entry in manifest.files.items():
        check_size(contained(directory, name, "manifest.files"), entry.size)


def verify(
    directory: Path | str,
    manifest: Manifest,
    policy: Policy,
    on_file: Callable[[str], None] | None = None,
) -> None:
    """Check an install: "none" sizes only, "receipt" sizes and the receipt, "full" every byte.

    Raises FileSizeError, ChecksumMismatchError, ReceiptInvalidError, OptionError.
    """
    directory = Path(directory)
    if policy not in ("none", "receipt", "full"):
        raise OptionError(f"verify={policy!r} is not one of none, receipt, full")
    check_sizes(directory, manifest)
    if policy == "receipt":
        _check_receipt(directory, manifest)
    if policy == "full":
        for name, entry in manifest.files.items():
            if on_file:
                on_file(name)
            found = sha256_file(directory / name)
            if found != entry.sha256.lower():
                raise ChecksumMismatchError(
                    f"{directory / name}: sha256 {found}; "
                    f"manifest.files says {entry.sha256.lower()}; install it again"
                )


# --- receipt --------------------------------------------------------------------------------------


def receipt_bytes(
    destination: Path,
    manifest_data: bytes,
    files: dict[str, tuple[int, str]],
    source_repo_id: str | None = None,
    source_revision: str | None = None,
) -> bytes:
    """A receipt that vouches for `files` (size, sha256) at the canonical path of `destination`."""
    sha = hashlib.sha256(manifest_data).hexdigest()
    rows = {**files, MANIFEST_NAME: (len(manifest_data), sha)}
    receipt: dict[str, Any] = {
        "schemaVersion": 1,
        "manifestSha256": sha,
        "modelDirectoryPath": str(destination.resolve()),
        "sourceRepoId": source_repo_id,
        "sourceRevision": source_revision,
        "verificationTimestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "toolVersion": f"turbospark-python {__version__}",
        "files": {name: {"size": size, "sha256": sha} for name, (size, sha) in rows.items()},
    }
    return json.dumps(receipt, indent=1).encode()


def write_receipt(directory: Path | str, manifest: Manifest) -> None:
    """Verify every byte of an install and record it, replacing an older receipt."""
    directory = Path(directory)
    verify(directory, manifest, "full")
    data = (directory / MANIFEST_NAME).read_bytes()
    files = {name: (entry.size, entry.sha256.lower()) for name, entry in manifest.files.items()}
    partial = directory / f"{RECEIPT_NAME}.partial"
    partial.write_bytes(receipt_bytes(directory, data, files))
    partial.replace(directory / RECEIPT_NAME)


def _invalid(directory: Path, detail: str) -> ReceiptInvalidError:
    return ReceiptInvalidError(
        f"{directory / RECEIPT_NAME}: {detail}; "
        f"`turbospark check {directory} --receipt` hashes every file and writes a new receipt"
    )


def _check_receipt(directory: Path, manifest: Manifest) -> None:
    try:
        path = contained(directory, RECEIPT_NAME, "receipt")
        receipt = read_json(path, RECEIPT_CAP)
    except MissingFileError:
        raise _invalid(directory, "the receipt does not exist") from None
    except TurbosparkError as err:
        raise _invalid(directory, str(err)) from None
    if receipt.get("schemaVersion") != 1 or type(receipt["schemaVersion"]) is not int:
        raise _invalid(directory, "schemaVersion is not 1")
    if _hash(receipt.get("manifestSha256")) != manifest.sha256:
        raise _invalid(directory, "it was issued for another manifest (manifestSha256 differs)")
    if receipt.get("modelDirectoryPath") != str(directory.resolve()):
        raise _invalid(
            directory,
            f"it was issued for {printable(str(receipt.get('modelDirectoryPath')))}, "
            f"not for {directory.resolve()}",
        )
    _check_receipt_files(directory, manifest, receipt.get("files"))


def _check_receipt_files(directory: Path, manifest: Manifest, rows: Any) -> None:
    wanted = {name: (entry.size, entry.sha256.lower()) for name, entry in manifest.files.items()}
    wanted[MANIFEST_NAME] = (regular_size(directory / MANIFEST_NAME), manifest.sha256)
    if not isinstance(rows, dict):
        raise _invalid(directory, "files must be an object")
    missing, extra = sorted(set(wanted) - set(rows)), sorted(set(rows) - set(wanted))
    if missing or extra:
        shown = f"missing={missing[:5]} extra={[printable(name) for name in extra[:5]]}"
        raise _invalid(directory, f"files differ from the manifest's: {shown}")
    for name, (size, sha) in wanted.items():
        row = rows[name]
        good = isinstance(row, dict) and type(row.get("size")) is int
        if not good or row["size"] != size or _hash(row.get("sha256")) != sha:
            raise _invalid(directory, f"size or sha256 of {name} differs from the manifest's")


def _hash(value: object) -> str | None:
    return value.lower() if isinstance(value, str) else None
