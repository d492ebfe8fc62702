"""Installing a model from the Hugging Face Hub: look first, then download, then convert.

Knows repositories and their files through huggingface-hub. Does not know containers or families.
"""

from __future__ import annotations

import glob
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from turbospark.conversion import Origin, convert
from turbospark.conversion.gguf import shard_names
from turbospark.conversion.opening import Checkpoint, open_folder, open_gguf
from turbospark.conversion.quantize import Overrides, QuantRequest, choose_formats
from turbospark.conversion.safetensors import INDEX, SIDECARS, weight_files
from turbospark.conversion.source import listed
from turbospark.errors import OptionError, SourceError
from turbospark.install.files import TEMPLATES
from turbospark.install.models import install_path
from turbospark.install.staging import check_destination

T = TypeVar("T")
_BLOCK = 1 << 20  # bytes of one ranged request while reading headers


def pull(
    repo: str,
    *,
    revision: str | None = None,
    file: str | None = None,
    name: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    overrides: Overrides | None = None,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Install a model of the Hub under `name` (by default the repository's); returns its path.

    Only headers are read before everything that can be refused has been: architecture,
    quantization, tensor names and shapes, options. Then the weights are downloaded into the
    Hub's own cache, which keeps whole files when interrupted, and converted as `convert` does.
    `file` names the .gguf to use where a repository has several.

    Raises what `convert` raises, and SourceError when the Hub does not answer.
    """
    request = QuantRequest.of(bits, group_size, mode, overrides)
    dest = install_path(name or repo)
    check_destination(dest, force)
    folder, _, file_name = (file or "").rpartition("/")
    files = HubFiles(repo, revision, folder)
    checkpoint, wanted = _look(files, file_name or None)
    choose_formats(checkpoint.plan, request)
    local = files.download(wanted, progress)
    return convert(
        local / checkpoint.source.path.name if checkpoint.source.kind == "gguf" else local,
        dest,
        bits=bits,
        group_size=group_size,
        mode=mode,
        overrides=overrides,
        force=force,
        progress=progress,
        origin=Origin(repo, files.commit),
    )


def _look(files: HubFiles, file: str | None) -> tuple[Checkpoint, list[str]]:
    """The planned checkpoint, from its headers alone, and the names of the files it needs."""
    names = files.names()
    ggufs = [n for n in names if n.endswith(".gguf")]
    if file is None and "config.json" in names and any(n.endswith(".safetensors") for n in names):
        checkpoint = open_folder(files)
        weights, places = weight_files(files)
        others = [n for n in (*SIDECARS, INDEX, "tokenizer.model") if n in names]
        return checkpoint, [*weights, *(others if places else [n for n in others if n != INDEX])]
    if file is None:
        firsts = [n for n in ggufs if shard_names(n)[0] == n]
        if len(firsts) > 1:
            raise SourceError(f"{files.where} has several models; file= chooses: {listed(firsts)}")
        if not firsts:
            raise SourceError(
                f"{files.where}: neither config.json with safetensors nor a .gguf file here; "
                f"the repository has: {listed(files.everything) or 'no files'}"
            )
        file = firsts[0]
    if file not in ggufs:
        raise OptionError(
            f"file={file!r} is not a GGUF file of {files.where}; it has: {listed(ggufs) or 'none'}"
        )
    return open_gguf(files, file), shard_names(file)


class HubFiles:
    """The files of one revision of a repository; see `conversion.source.Files`.

    Every request names the commit that the revision meant at the start.
    """

    def __init__(self, repo: str, revision: str | None, folder: str = "") -> None:
        import huggingface_hub
        import huggingface_hub.errors  # the package does not load it by itself
        import huggingface_hub.utils

        self._hub: Any = huggingface_hub
        self.repo = repo
        self.where = Path(repo, folder)
        self._prefix = f"{folder}/" if folder else ""
        info = self._ask(
            lambda: self._hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
        )
        self.commit: str = info.sha
        sizes = {s.rfilename: s.size for s in info.siblings or ()}
        self.everything = sorted(sizes)
        inside = {n.removeprefix(self._prefix): n for n in sizes if n.startswith(self._prefix)}
        self._sizes = {
            n: sizes[full]
            for n, full in inside.items()
            if "/" not in n.removeprefix(f"{TEMPLATES}/")
        }

    def names(self) -> list[str]:
        """Names of the files at the top level and in the folder of chat templates, sorted."""
        return sorted(self._sizes)

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """A file read in ranges over the network, and its size."""
        size = self._sizes.get(name)
        if size is None:
            raise SourceError(f"{self.where}: no file {name} of known size")
        path = f"{self.repo}@{self.commit}/{self._prefix}{name}"
        remote = self._ask(lambda: self._hub.HfFileSystem().open(path, "rb", block_size=_BLOCK))
        return io.BufferedReader(_Remote(remote, self._ask), _BLOCK), size

    def download(self, names: list[str], progress: bool) -> Path:
        """Download what the Hub's cache has not yet got into it; the folder the files are in."""
        patterns = [glob.escape(self._prefix + name) for name in names]
        stop = threading.Event()
        # The client waits for whole files when it is interrupted; in a thread of its own it can be
        # told to stop, which its bars do at the next piece.
        with ThreadPoolExecutor(1) as thread:
            try:
                snapshot = thread.submit(
                    self._hub.snapshot_download,
                    self.repo,
                    revision=self.commit,
                    allow_patterns=patterns,
                    tqdm_class=_bar(self._hub.utils.tqdm, stop, progress),
                )
                return Path(self._ask(snapshot.result), self._prefix)
            except BaseException:
                stop.set()
                raise

    def _ask(self, request: Callable[[], T]) -> T:
        """Run a request; what the Hub client raises becomes a SourceError."""
        error_type = self._hub.errors.HfHubHTTPError
        try:
            return request()
        except (OSError, error_type, *error_type.__bases__) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()
            # "404 Client Error." is followed by what is not there, or is not shown to this account.
            reason = " ".join(line.strip() for line in said if line.strip())[:300]
            raise SourceError(f"{self.where}: the Hub request failed: {reason}") from error


def _bar(base: Any, stop: threading.Event, shown: bool) -> Any:
    """A kind of the client's progress bar that may show nothing, and ends a download on `stop`."""

    class Bar(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs if shown else {**kwargs, "disable": True}))

        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise KeyboardInterrupt
            return super().update(n)

    return Bar


class _Remote(io.RawIOBase):
    """A remote file as raw input, so that a buffer can sit on it and its errors are ours."""

    def __init__(self, file: Any, ask: Callable[[Callable[[], Any]], Any]) -> None:
        self._file, self._ask = file, ask

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._ask(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
