"""From a path to a checked source, its family and its plan.

Knows which kinds of checkpoint there are and which file shows the kind. Reads headers only.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turbospark.conversion.gguf import GGUFSource
from turbospark.conversion.grafting import Grafted
from turbospark.conversion.plan import Pieces, Plan, make_plan
from turbospark.conversion.safetensors import SafetensorsSource, read_config
from turbospark.conversion.source import Files, LocalFiles, TensorSource
from turbospark.conversion.transfer import HEAD
from turbospark.errors import SourceError, UnsupportedError
from turbospark.families import family_for_gguf, family_for_model_type
from turbospark.families.base import Family
from turbospark.families.config import ConfigReader
from turbospark.families.dflash_shapes import PREFIX
from turbospark.families.names import plain_name
from turbospark.text.gguf_tokenizer import tokenizer_files_from_gguf

ACCEPTED = "a folder with config.json and safetensors, or a .gguf file"


@dataclass
class Checkpoint:
    """An opened source with the family that reads it and the plan of its tensors."""

    source: TensorSource
    family: Family
    pieces: Pieces
    config: Any
    plan: Plan = field(default_factory=Plan)

    def make_plan(self) -> None:
        """Plan from the source's tensors as they are declared now."""
        self.plan = make_plan(self.family, self.config, self.source.tensors, self.pieces)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


def open_checkpoint(path: Path, drafter: Path | None = None) -> Checkpoint:
    """Open a checkpoint folder or GGUF file and plan its conversion; no weight is read.

    `drafter` is the folder of a block drafter that goes along.

    Raises SourceError, UnsupportedError, UnsupportedArchitectureError, MissingDependencyError.
    """
    if drafter is not None and not (drafter / "config.json").is_file():
        raise SourceError(f"drafter {drafter}: {_found(drafter)}; expected a DFlash2 folder")
    if path.is_file() and path.suffix == ".gguf":
        if drafter is not None:
            raise UnsupportedError(
                f"drafter {drafter} with {path.name}: a drafter goes with a folder of safetensors"
            )
        return open_gguf(LocalFiles(path.parent), path.name)
    if path.is_dir() and (path / "config.json").is_file():
        return open_folder(LocalFiles(path), LocalFiles(drafter) if drafter else None)
    raise SourceError(f"{path}: {_found(path)}; expected {ACCEPTED}")


def open_folder(files: Files, drafter: Files | None = None) -> Checkpoint:
    """Open and plan a checkpoint with config.json and safetensors, and a drafter's."""
    config = read_config(files)
    family = family_for_model_type(str(config.get("model_type")))
    own = SafetensorsSource(files, config)
    source: TensorSource = own
    _settle_head(config, own.tensors)
    _check_layers(config.get("num_hidden_layers"), "config.json: num_hidden_layers", own.tensors)
    if drafter is not None:
        config["dflash"] = read_config(drafter)
        _check_drafter(config["dflash"], family)
        source = Grafted(own, SafetensorsSource(drafter, config["dflash"]), PREFIX)
    source.config = family.complete_config(config, {n: t.shape for n, t in source.tensors.items()})
    family_config = family.read_config(ConfigReader(source.config, "config.json"))
    checkpoint = _planned(Checkpoint(source, family, family.pieces, family_config))
    try:
        _check_derived(own, family.derived(family_config))
    except BaseException:
        source.close()
        raise
    return checkpoint


def _settle_head(config: dict[str, Any], names: Collection[str]) -> None:
    """Whether the head is tied, where config.json contradicts itself: one that is there is used."""
    if config.get("tie_word_embeddings", False) is None:
        plain = {plain_name(name) for name in names}
        config["tie_word_embeddings"] = plain.isdisjoint({HEAD, f"model.{HEAD}"})


def _check_derived(source: SafetensorsSource, derived: Mapping[str, list[int]]) -> None:
    """Refuse a checkpoint whose whole numbers are not those that the family will compute."""
    for name in source.tensors:
        expected = derived.get(plain_name(name) or "")
        if expected is not None and (found := source.integers(name)) != expected:
            raise SourceError(
                f"{name} holds {found[:4]}; config.json implies {expected[:4]}: the sizes or the "
                "seed of its n-grams are of another model"
            )


def _check_drafter(config: Mapping[str, Any], family: Family) -> None:
    if "dflash" not in family.capabilities.drafters:
        raise UnsupportedError(f"family {family.name} has no dflash drafter; leave drafter out")
    found = config.get("architectures")
    if found != ["DFlash2DraftModel"]:
        raise SourceError(f"drafter: architectures = {found}; expected ['DFlash2DraftModel']")


def _check_layers(count: object, what: str, tensors: Collection[str]) -> None:
    """Refuse a number of layers that no table of contents backs, before anything is sized by it."""
    if isinstance(count, (int, float)) and count > len(tensors):
        raise SourceError(f"{what} = {count}; the checkpoint has {len(tensors)} tensors")


def open_gguf(files: Files, name: str) -> Checkpoint:
    """Open and plan a GGUF file, or the split model it belongs to."""
    source = GGUFSource(files, name, gguf_config, tokenizer_files)
    family = family_for_gguf(source.metadata["general.architecture"])
    if family.gguf_pieces is None:
        raise UnsupportedError(f"family {family.name} does not read GGUF files")
    family_config = family.read_config(ConfigReader(source.config, "GGUF metadata"))
    return _planned(Checkpoint(source, family, family.gguf_pieces, family_config))


def _planned(checkpoint: Checkpoint) -> Checkpoint:
    checkpoint.make_plan()  # no file is open yet, so that nothing is to be closed when it raises
    return checkpoint


def gguf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The config.json keys that a GGUF file implies."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise SourceError(f"GGUF metadata: general.architecture is {architecture!r}")
    family = family_for_gguf(architecture)
    if family.gguf_config is None:
        raise UnsupportedError(f"family {family.name} does not read GGUF files")
    key = f"{architecture}.block_count"
    _check_layers(metadata.get(key), f"GGUF metadata: {key}", shapes)
    try:
        return family.gguf_config(metadata, shapes)
    except (TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise SourceError(
            f"GGUF metadata of architecture {architecture} has a value of the wrong kind: {error}"
        ) from error


_TOKENIZER_LISTS: dict[str, Any] = {
    "tokens": str,
    "merges": str,
    "scores": (int, float),
    "token_type": int,
}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The tokenizer files of a GGUF; without a readable vocabulary none, and a warning."""
    try:
        for name, kind in _TOKENIZER_LISTS.items():
            values = metadata.get(f"tokenizer.ggml.{name}", [])
            if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
                raise SourceError(f"tokenizer.ggml.{name} is not a list of the expected kind")
        return tokenizer_files_from_gguf(metadata)
    except (SourceError, UnicodeEncodeError) as error:
        warnings.warn(f"the install gets no tokenizer and runs on token ids: {error}", stacklevel=5)
        return {}


def _found(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return f"is a {path.suffix or 'plain'} file"
    if not path.is_dir():
        return "is neither a folder nor a file"
    if (path / "manifest.json").is_file():
        return "is already a .gturbo install"
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    if ggufs:
        return f"is a folder without config.json; name the file itself, such as {ggufs[0]}"
    return "is a folder without config.json"
