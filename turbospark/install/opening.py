"""Opening an install: manifest, sizes, resident index, expert layout, and that they agree.

Knows the order of the checks. Does not know families, tokenizers or how tensors are used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from turbospark.errors import (
    IndexCorruptError,
    MissingFileError,
    PartialInstallError,
    TensorShapeError,
    UnsupportedCapabilityError,
    UnsupportedError,
)
from turbospark.install.arch import ArchConfig
from turbospark.install.files import contained, is_dir, is_file, mode
from turbospark.install.layout import FOLDER
from turbospark.install.manifest import Manifest
from turbospark.install.packed import PackedLayout
from turbospark.install.resident import FILE_NAME, ResidentIndex
from turbospark.install.row_table import RowTable, file_name
from turbospark.install.verify import Policy, verify

VISION_SIDECAR = "vision_sidecar.json"
STAGING_NAME = re.compile(r"\.(partial|replaced)-\d+$")
"""Directories of `staging`: not installs, whatever they hold."""


@dataclass(frozen=True)
class Install:
    """An open install. `config` is the converter's model config, {} for an original install."""

    path: Path
    manifest: Manifest
    arch: ArchConfig
    config: dict[str, Any]
    resident: ResidentIndex
    experts: PackedLayout | None

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        expecting: ArchConfig | None = None,
        verify: Policy = "none",
    ) -> Install:
        """Open and check an install; file sizes always, hashes as `verify` says.

        Raises ModelFormatError and UnsupportedError subclasses that name file and field.
        """
        path = Path(directory)
        if STAGING_NAME.search(path.name):
            raise PartialInstallError(f"{path} is a conversion in progress or one that was killed")
        return cls.load(path, expecting=expecting, verify=verify)

    @classmethod
    def load(
        cls, path: Path, *, expecting: ArchConfig | None = None, verify: Policy = "none"
    ) -> Install:
        """`open` for a directory of any name: a conversion reads back what it wrote."""
        manifest = _read_manifest(path, expecting, verify)
        config = manifest.extension.get("config", {})
        if not isinstance(config, dict):
            raise IndexCorruptError("manifest.turbospark.config must be an object")
        resident = ResidentIndex.open(contained(path, FILE_NAME, "install"))
        try:
            layout = PackedLayout.read(path)
        except BaseException:
            resident.close()
            raise
        install = cls(
            path, manifest, manifest.arch, config, resident, layout if layout.layers else None
        )
        try:
            _check_layout(manifest, layout)
        except BaseException:
            install.close()
            layout.close()
            raise
        return install

    @property
    def resident_bytes(self) -> int:
        """Bytes of the resident tensor region."""
        return self.resident.resident_size

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one expert in every routed layer; 0 for a dense model."""
        return self.experts.bytes_per_slot if self.experts else 0

    def row_table(self, layer: int, name: str, shape: tuple[int, int]) -> RowTable:
        """The mapped table of `layer`, which must have `shape`; it outlives the install.

        Raises MissingFileError, TensorShapeError and what `RowTable.open` raises.
        """
        file = file_name(layer)
        if file not in self.manifest.files:
            raise MissingFileError(
                f"manifest.files lacks {file}, which holds {name}; convert the checkpoint again"
            )
        table = RowTable.open(contained(self.path, file, "install"))
        if table.shape != shape:
            raise TensorShapeError(
                f"{table.path}: {name} has shape {list(table.shape)}; the configuration implies "
                f"{list(shape)}"
            )
        return table

    def sidecar(self, name: str) -> Path | None:
        """A file beside the weights (tokenizer.json, ...), None if the install has none."""
        path = contained(self.path, name, "sidecar")
        return path if is_file(path) else None

    def close(self) -> None:
        """Close all files; harmless when repeated."""
        self.resident.close()
        if self.experts:
            self.experts.close()

    def __enter__(self) -> Install:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read_manifest(path: Path, expecting: ArchConfig | None, policy: Policy) -> Manifest:
    if not is_dir(path):
        raise PartialInstallError(f"{path} is not a directory; an install is a directory")
    if mode(path / VISION_SIDECAR):
        raise UnsupportedCapabilityError(
            f"{path} has {VISION_SIDECAR}: a vision tower on its own, not a model"
        )
    manifest = Manifest.read(path, expecting)
    if manifest.hadamard is not None:
        raise UnsupportedError(
            f"{path}: manifest.hadamard: Hadamard-folded weights are not supported by this build"
        )
    verify(path, manifest, policy)
    return manifest


def _check_layout(manifest: Manifest, layout: PackedLayout) -> None:
    """The manifest and layout.json must tell the same story."""
    experts = manifest.experts_per_layer
    pairs = {
        "expertsPerLayer": (experts, layout.experts_per_layer),
        "expertStride": (manifest.expert_stride, layout.stride),
        "numLayers": (manifest.num_layers if experts else 0, len(layout.layers)),
    }
    for key, (declared, found) in pairs.items():
        if declared != found:
            raise IndexCorruptError(f"manifest.{key} is {declared}; layout.json implies {found}")
    for index, layer in layout.layers.items():
        if index >= manifest.arch.num_layers:
            raise IndexCorruptError(
                f"layout.json has layer {index}; the model has {manifest.arch.num_layers} layers"
            )
        if f"{FOLDER}/{layer.path.name}" not in manifest.files:
            raise IndexCorruptError(
                f"layout.json uses {layer.path.name}, which manifest.files does not list"
            )
