"""One conversion from start to finish.

Knows the order: check everything, write into a staging directory, read it back, publish. Does
not know containers, block types or families.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turbospark.conversion.gguf import CompanionOverflow, GGUFSource
from turbospark.conversion.opening import Checkpoint, open_checkpoint
from turbospark.conversion.quantize import (
    ROUTER,
    Overrides,
    QuantRequest,
    choose_formats,
    is_matrix,
    targets,
)
from turbospark.conversion.transfer import (
    check_tied_head,
    total_bytes,
    write_experts,
    write_resident,
    write_tables,
)
from turbospark.dtypes import Format
from turbospark.errors import SourceError, TurbosparkError
from turbospark.install.arch import ArchConfig, validation_error
from turbospark.install.files import as_path
from turbospark.install.quant import quant_block
from turbospark.install.staging import StagedInstall, check_destination
from turbospark.progress import bar
from turbospark.text.tokenizer import load_with_stops
from turbospark.version import __version__

# Settings that describe the source's storage, which the install's index replaces.
_STORAGE_KEYS = ("quantization", "quantization_config", "torch_dtype", "dtype")
_SPARE_BYTES = 16 << 20  # index, sidecars, manifest, paddings


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint came from, when it is more than a path."""

    repo_id: str | None = None
    revision: str | None = None


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    overrides: Overrides | None = None,
    drafter: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
    origin: Origin | None = None,
) -> Path:
    """Convert a checkpoint into the install directory `dest`, which it returns.

    `source` is a folder with config.json and safetensors (Hugging Face or MLX-quantized), or a
    .gguf file. Formats stay as they are unless `bits` (affine, `group_size` 64 by default) or a
    `mode` of "mxfp4", "mxfp8", "nvfp4" asks for quantization: then embeddings, linear maps and
    experts are quantized, routers to 8 bits, tensors that already are stay untouched. `overrides`
    maps patterns (fnmatch, on canonical names such as "model.layers.*.mlp.down_proj.weight" and
    "model.layers.*.mlp.experts.down_proj.weight") to {"bits", "group_size", "mode"}, or to None
    to keep a tensor as it is; the last match counts. `drafter` is the folder of a DFlash2 block
    drafter made for this model, which goes into the same install.

    Peak memory is the largest stored tensor and a few hundred megabytes. The install appears at
    once when it is complete; `force` replaces an existing one.

    Raises SourceError, UnsupportedError, UnsupportedArchitectureError, OptionError,
    InstallExistsError, MissingDependencyError: all before any weight is read; TurbosparkError
    when the install cannot be written.
    """
    request = QuantRequest.of(bits, group_size, mode, overrides)
    dest, source = as_path(dest, "dest"), as_path(source, "source")
    check_destination(dest, force)
    along = None if drafter is None else as_path(drafter, "drafter")
    with open_checkpoint(source, along) as checkpoint:
        while True:
            try:
                return write_install(checkpoint, dest, request, force, progress, origin or Origin())
            except CompanionOverflow as overflow:
                assert isinstance(checkpoint.source, GGUFSource)  # nothing else raises it
                checkpoint.source.widen(overflow.name)
                checkpoint.make_plan()


def write_install(
    checkpoint: Checkpoint,
    dest: Path,
    request: QuantRequest,
    force: bool,
    progress: bool,
    origin: Origin,
) -> Path:
    """Write and publish the install of an opened checkpoint; returns `dest`."""
    source, plan = checkpoint.source, checkpoint.plan
    formats = choose_formats(plan, request)
    arch = _arch(checkpoint)
    check_tied_head(source, plan)
    total = total_bytes(plan, formats)
    _check_space(dest, total)
    with (
        StagedInstall(dest, force) as staged,
        bar(dest.name, total, "B", progress) as shown,
    ):
        for name, data in source.sidecars.items():
            staged.write_sidecar(name, data)
        # What an open would refuse is refused before the weights are read.
        load_with_stops(staged.path, source.config.get("eos_token_id"))
        _warn_without_tokenizer(checkpoint)
        write_resident(source, plan, formats, staged.resident, shown.update)
        write_experts(source, plan, formats, staged.experts, shown.update)
        write_tables(source, plan, formats, staged.path, shown.update)
        return staged.publish(
            arch=arch,
            model_id=origin.repo_id or source.path.name.removesuffix(".gguf"),
            quant=quant_block(quant_slots(formats, plan_matrices(checkpoint))),
            extension=_extension(checkpoint, formats, origin),
            source_repo_id=origin.repo_id,
            source_revision=origin.revision,
        )


def _arch(checkpoint: Checkpoint) -> ArchConfig:
    try:
        return checkpoint.family.arch(checkpoint.config)
    except ValidationError as error:
        raise SourceError(
            f"the configuration cannot be recorded: {validation_error('manifest.arch', error)}"
        ) from None


def _check_space(dest: Path, total: int) -> None:
    parent = next(p for p in dest.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if total + _SPARE_BYTES > free:
        raise TurbosparkError(f"{dest}: the install needs {total} bytes, the disk has {free} free")


def _warn_without_tokenizer(checkpoint: Checkpoint) -> None:
    path = checkpoint.source.path
    if "tokenizer.json" not in checkpoint.source.sidecars and (path / "tokenizer.model").is_file():
        warnings.warn(
            f"{path.name} has tokenizer.model but no tokenizer.json; the install has no tokenizer "
            "and runs on token ids (transformers can save a tokenizer.json)",
            stacklevel=4,
        )


def _extension(
    checkpoint: Checkpoint, formats: Mapping[str, Format], origin: Origin
) -> dict[str, Any]:
    """Our own section of the manifest; see docs of the format for its keys."""
    source = checkpoint.source
    histogram = Counter(str(fmt) for fmt in formats.values())
    in_repo = origin.repo_id is not None and source.kind != "gguf"
    described: dict[str, Any] = {
        "kind": source.kind,
        "name": origin.repo_id if in_repo else source.path.name,
        "bytes": sum(t.nbytes for t in source.tensors.values()),
    }
    if origin.repo_id is not None:
        described.update(repo=origin.repo_id, revision=origin.revision)
    return {
        "config": {k: v for k, v in source.config.items() if k not in _STORAGE_KEYS},
        "source": described,
        "hasTokenizer": "tokenizer.json" in source.sidecars,
        "converter": __version__,
        "quant": {"formats": dict(histogram.most_common())},
    }


# --- the manifest's quant block -------------------------------------------------------------------

_SLOTS = (
    ("embedding", re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")),
    ("router", ROUTER),
    ("routedExpert", re.compile(r"\.experts\.")),
    ("sharedExpert", re.compile(r"\.(mlp|shared_expert|shared_experts|feed_forward)\.")),
)


def plan_matrices(checkpoint: Checkpoint) -> set[str]:
    """Canonical names of the tensors that the quant block describes."""
    plan = checkpoint.plan
    tables = {table.name for table in plan.tables.values()}
    return {n for n, provider in targets(plan) if n not in tables and is_matrix(n, provider)}


def quant_slots(formats: Mapping[str, Format], matrices: set[str]) -> dict[str, Format]:
    """One format per slot; empty where a slot mixes formats, which the block cannot say."""
    slots: dict[str, Format] = {}
    for name in sorted(matrices):
        slot = next((s for s, pattern in _SLOTS if pattern.search(name)), "attention")
        if slots.setdefault(slot, formats[name]) != formats[name]:
            return {}
    return slots
