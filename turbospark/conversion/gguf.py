"""A GGUF file, or one split over several, as a source of tensors.

Knows shards and how to turn runs of blocks into planes with bounded memory. Does not know block
layouts (`ggml.py`), the container (`gguf_header.py`) or families.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from turbospark.conversion.ggml import CODECS, Codec, load_decoder, type_name
from turbospark.conversion.gguf_header import GGUFHeader, GGUFTensor, read_header
from turbospark.conversion.source import Files, OpenFiles, SourceTensor, listed, read_into
from turbospark.dtypes import Quant, Raw
from turbospark.errors import SourceError, UnsupportedError
from turbospark.install.planes import Planes, empty_planes, host_view

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
_CHUNK_VALUES = 1 << 22


class CompanionOverflow(Exception):
    """A block scale does not fit fp16 companions; converting again with `widen` does."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


class GGUFSource:
    """See `TensorSource`; `configure` turns metadata into the configuration.

    Raises UnsupportedError listing every tensor whose type is not read, MissingDependencyError
    when a type needs the gguf package and it is not installed.
    """

    kind = "gguf"

    def __init__(
        self,
        files: Files,
        name: str,
        configure: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], dict[str, Any]],
        sidecars: Callable[[Mapping[str, Any]], dict[str, bytes]],
    ) -> None:
        self.path = files.where / name
        header = read_shards(files, name)
        self.metadata, self._table = header.metadata, header.tensors
        check_types(self._table)
        self._wide: set[str] = set()
        self._open = OpenFiles()
        decoded = any(CODECS[t.type].needs_package for t in self._table.values())
        self._decode: Any = load_decoder() if decoded else None
        self.config = configure(self.metadata, {n: t.shape for n, t in self._table.items()})
        self._make_sidecars = sidecars

    @cached_property
    def sidecars(self) -> dict[str, bytes]:
        """See `TensorSource`."""
        return self._make_sidecars(self.metadata)

    @property
    def tensors(self) -> dict[str, SourceTensor]:
        """The tensor table in the formats `read` returns."""
        return {
            name: SourceTensor(
                name, row.shape, self._format(row), type_name(row.type), row.nbytes or 0
            )
            for name, row in self._table.items()
        }

    def widen(self, name: str) -> None:
        """From now on give tensor `name` float32 companions."""
        self._wide.add(name)

    def _format(self, row: GGUFTensor) -> Raw | Quant:
        target = CODECS[row.type].target
        if row.name in self._wide and isinstance(target, Quant):
            return Quant(target.mode, target.bits, target.group_size, "float32")
        return target

    def read(self, name: str, expert: int | None = None, rows: slice | None = None) -> Planes:
        """Evaluated planes of tensor `name`; see `TensorSource.read`. `rows` has no step.

        Raises CompanionOverflow when fp16 companions cannot hold its scales.
        """
        row = self._table[name]
        codec, shape, first = CODECS[row.type], row.shape, 0  # `first` counts values
        if expert is not None:
            shape = shape[1:]
            first = expert * math.prod(shape)
        if rows is not None:
            start, stop, _ = rows.indices(shape[0])
            first += start * math.prod(shape[1:])
            shape = (stop - start, *shape[1:])
        planes = empty_planes(self._format(row), shape)
        offset = row.offset + first // codec.values * codec.nbytes
        if codec.values == 1:
            where = f"{row.file.name}: tensor {name}"
            read_into(self._open.fd(row.file), host_view(planes.weight), offset, where)
        else:
            self._fill(row, codec, planes, offset)
        return planes

    def _fill(self, row: GGUFTensor, codec: Codec, planes: Planes, offset: int) -> None:
        """Unpack the blocks from `offset` on into `planes`, a few megabytes at a time."""
        views = [host_view(a) for a in planes.arrays()]
        total = math.prod(planes.shape) // codec.values
        step = max(_CHUNK_VALUES // codec.values, 1)
        for done in range(0, total, step):
            count = min(step, total - done)
            blocks = np.empty((count, codec.nbytes), dtype=np.uint8)
            where = f"{row.file.name}: tensor {row.name}"
            at = offset + done * codec.nbytes
            read_into(self._open.fd(row.file), blocks.reshape(-1), at, where)
            parts = self._unpack(row, codec, planes.fmt, blocks)
            for view, part in zip(views, parts, strict=True):
                start = view.size // total * done
                view[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)

    def _unpack(
        self, row: GGUFTensor, codec: Codec, fmt: Raw | Quant, blocks: np.ndarray
    ) -> list[np.ndarray]:
        if codec.unpack is None:
            with np.errstate(invalid="ignore", over="ignore"):  # reported just below
                values = self._decode(blocks, codec.name)
            if not np.isfinite(values).all():
                raise self._not_finite(row)
            return [values]
        words, scales, biases = codec.unpack(blocks)
        words = np.ascontiguousarray(words)
        if biases is None:
            if (scales == 255).any():  # e8m0's NaN
                raise self._not_finite(row)
            return [words, np.ascontiguousarray(scales)]
        if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
            raise self._not_finite(row)
        if isinstance(fmt, Quant) and fmt.scale_dtype == "float16":
            if max(np.abs(scales).max(), np.abs(biases).max()) > np.finfo(np.float16).max:
                raise CompanionOverflow(row.name)
            scales, biases = scales.astype(np.float16), biases.astype(np.float16)
        return [words, np.ascontiguousarray(scales), np.ascontiguousarray(biases)]

    def _not_finite(self, row: GGUFTensor) -> SourceError:
        return SourceError(
            f"{row.file.name}: tensor {row.name} ({type_name(row.type)}) holds a scale that is "
            "not finite; the file is damaged"
        )

    def close(self) -> None:
        """Close the files."""
        self._open.close()


def check_types(table: Mapping[str, GGUFTensor]) -> None:
    """Refuse types that are not converted, naming every tensor that has one."""
    bad = [f"{t.name} ({type_name(t.type)})" for t in table.values() if t.type not in CODECS]
    if bad:
        supported = ", ".join(c.name for c in CODECS.values())
        raise UnsupportedError(
            f"{len(bad)} tensors have a type that is not converted: {', '.join(bad)}; "
            f"supported: {supported}"
        )


def shard_names(name: str) -> list[str]:
    """The names of all shards of a split model, or just `name`."""
    match = _SHARD.match(name)
    if match is None or not 1 <= int(match["no"]) <= int(match["count"]):
        return [name]
    count = match["count"]
    return [f"{match['stem']}-{i + 1:05d}-of-{count}.gguf" for i in range(int(count))]


def read_shards(files: Files, name: str) -> GGUFHeader:
    """The header of a GGUF file, joined over all shards when it is one of a split model."""
    names = shard_names(name)
    present = set(files.names())
    missing = [n for n in names if n not in present]
    if missing:
        raise SourceError(f"{files.where}: missing GGUF files: {listed(missing)}")
    headers = [read_header(files, n) for n in names]
    count = headers[0].metadata.get("split.count", len(names))
    if count != len(names) and (count, len(names)) != (0, 1):
        raise SourceError(
            f"{name}: split.count is {count}; expected that many files named like "
            f"model-00001-of-00003.gguf, found {len(names)}"
        )
    tensors: dict[str, GGUFTensor] = {}
    for shard, header in zip(names, headers, strict=True):
        for key, tensor in header.tensors.items():
            if key in tensors:
                raise SourceError(f"tensor {key} is in both {tensors[key].file.name} and {shard}")
            tensors[key] = tensor
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise SourceError(
            f"{names[0]}: the shards hold {len(tensors)} tensors; expected {expected}"
        )
    return GGUFHeader(headers[0].metadata, tensors)
