"""Publishing an install: everything is written aside and appears at once, or not at all.

Knows directories, locks and the order of the last writes. Does not know what is being installed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from turbospark.errors import InstallExistsError, OptionError, SourceError, TurbosparkError
from turbospark.install.arch import ArchConfig
from turbospark.install.files import TEMPLATES, check_relative, parse_json, sync_path, write_file
from turbospark.install.manifest import (
    MAGIC,
    MANIFEST_NAME,
    manifest_bytes,
    read_manifest_bytes,
)
from turbospark.install.opening import STAGING_NAME, Install
from turbospark.install.packed import PackedWriter
from turbospark.install.resident import FILE_NAME, ResidentWriter
from turbospark.install.verify import RECEIPT_NAME, receipt_bytes, sha256_file


class StagedInstall:
    """A directory in the making. Use as a context manager and call `publish` inside it.

    Files go to `path`, a sibling of `dest` named `<dest>.partial-<pid>`. Leaving the block without
    `publish` (an exception, or nothing to say) removes it; a killed process leaves it without a
    manifest, and the next conversion to the same destination removes it.
    """

    def __init__(self, dest: Path | str, force: bool = False) -> None:
        self.dest = Path(os.path.abspath(dest))  # noqa: PTH100 (resolve() would follow a link)
        self.force = force
        self.path = self.dest.with_name(f"{self.dest.name}.partial-{os.getpid()}")
        self.resident: ResidentWriter
        self.experts: PackedWriter
        self._lock = -1

    def __enter__(self) -> StagedInstall:
        check_destination(self.dest, self.force)
        try:
            self.dest.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.dest)
            self._make_directory()
            self._lock = _lock(self.path)
            self.resident = ResidentWriter(self.path / FILE_NAME)
            self.experts = PackedWriter(self.path)
        except BaseException as err:
            self._discard()
            if isinstance(err, OSError):
                raise _unwritable(self.dest, err) from err
            raise
        return self

    def _make_directory(self) -> None:
        try:
            self.path.mkdir()
        except FileExistsError:
            raise InstallExistsError(
                f"{self.dest} is being written by another conversion in {self.path.name}"
            ) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.resident.abort()
        self.experts.abort()
        self._discard()
        if isinstance(error, OSError):  # sources raise SourceError, so this was a write
            raise _unwritable(self.dest, error) from error

    def write_sidecar(self, name: str, data: bytes) -> None:
        """Add a small file beside the weights (tokenizer.json, ...); not part of `files{}`."""
        check_relative(name, "sidecar")
        plain = name.removeprefix(f"{TEMPLATES}/")
        if name in (MANIFEST_NAME, RECEIPT_NAME, FILE_NAME) or "/" in plain:
            raise SourceError(f"sidecar {name} is not a plain name of its own")
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        write_file(path, data)
        sync_path(path.parent)

    def publish(
        self,
        *,
        arch: ArchConfig,
        model_id: str,
        quant: dict[str, Any] | None = None,
        extension: Mapping[str, Any] | None = None,
        source_repo_id: str | None = None,
        source_revision: str | None = None,
    ) -> Path:
        """Close both writers, hash, write receipt and manifest, rename. Returns `dest`.

        Raises SourceError (tensors missing), InstallExistsError, ModelFormatError (our own
        manifest would be refused).
        """
        self.resident.close()
        self.experts.close()
        files = _hashes(self.path)
        data = manifest_bytes(
            arch=arch,
            model_id=model_id,
            files=files,
            num_layers=self.experts.num_layers,
            experts_per_layer=self.experts.count,
            expert_stride=self.experts.stride,
            quant=quant,
            extension=extension,
            source_snapshot_hash=source_revision,
        )
        receipt = receipt_bytes(self.dest, data, files, source_repo_id, source_revision)
        write_file(self.path / RECEIPT_NAME, receipt)
        write_file(self.path / MANIFEST_NAME, data)
        Install.load(self.path).close()
        sync_path(self.path)
        self._rename()
        sync_path(self.dest.parent)
        return self.dest

    def _rename(self) -> None:
        """Move into place. An install that is replaced steps aside first and is removed last."""
        check_destination(self.dest, self.force)
        aside = self.dest.with_name(f"{self.dest.name}.replaced-{os.getpid()}")
        replaced = self.dest.exists()
        fd = -1
        if replaced:
            fd = _lock(self.dest)  # keeps another conversion from tidying it away meanwhile
            self.dest.rename(aside)
        try:
            self.path.rename(self.dest)
        except BaseException as err:
            if replaced:
                aside.rename(self.dest)
            if not isinstance(err, OSError):
                raise
            raise InstallExistsError(f"{self.dest} could not be published: {err.strerror}") from err
        else:
            if replaced:
                shutil.rmtree(aside, ignore_errors=True)
        finally:
            if fd >= 0:
                os.close(fd)

    def _discard(self) -> None:
        fd, self._lock = self._lock, -1
        if fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(fd)


def is_install(path: Path) -> bool:
    """Whether a directory carries a manifest with our magic, readable or not otherwise."""
    try:
        return parse_json(read_manifest_bytes(path), MANIFEST_NAME).get("magic") == MAGIC
    except TurbosparkError:
        return False


def _unwritable(dest: Path, err: OSError) -> TurbosparkError:
    return TurbosparkError(
        f"{dest} cannot be written: {err.strerror or type(err).__name__}; nothing was installed"
    )


def check_destination(dest: Path, force: bool) -> None:
    """Refuse a destination that exists, unless `force` and it is an install or an empty folder."""
    if STAGING_NAME.search(dest.name):
        raise OptionError(
            f"{dest} is named like a conversion in progress, which never opens; choose another name"
        )
    if not os.path.lexists(dest):
        return
    if dest.is_symlink() or not dest.is_dir():
        raise InstallExistsError(f"{dest} exists and is not a directory; choose another name")
    if not force:
        raise InstallExistsError(f"{dest} exists; pass force to replace it")
    if not is_install(dest) and any(dest.iterdir()):
        raise InstallExistsError(f"{dest} exists and is not an install; force does not remove it")


def _hashes(directory: Path) -> dict[str, tuple[int, str]]:
    names = [FILE_NAME]
    names += sorted(f"{p.parent.name}/{p.name}" for p in directory.glob("packed_*/*"))
    return {
        name: ((directory / name).stat().st_size, sha256_file(directory / name)) for name in names
    }


def _lock(path: Path) -> int:
    """Hold a directory for as long as this process lives: a dead owner's lock is free again."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return -1
    return fd


def _remove_stale(dest: Path) -> None:
    """Remove what dead conversions to `dest` left; bring back an install one had moved aside."""
    pattern = re.compile(re.escape(dest.name) + r"\.(partial|replaced)-\d+")
    for path in dest.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if not match or path.is_symlink() or not path.is_dir():
            continue
        fd = _lock(path)
        if fd < 0:
            continue
        if match[1] == "replaced" and not dest.exists():
            path.rename(dest)
        else:
            shutil.rmtree(path, ignore_errors=True)
        os.close(fd)
