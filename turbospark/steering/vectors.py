"""Directions and what is to be done with them: sets, vectors, and the policy of a whole model.

Knows numbers per block and one-line refusals. Does not know MLX, nor how a row is edited.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from turbospark import display
from turbospark.errors import OptionError
from turbospark.policies import FrozenOptions, Real, SteeringMode, option, short
from turbospark.steering import files

if TYPE_CHECKING:
    from turbospark.install.arch import ArchConfig

Direction = np.ndarray
"""float32 [hidden], read-only, not normalized."""


@dataclass(frozen=True, eq=False, init=False)
class SteeringSet:
    """A direction for some of a model's blocks, as a file holds them.

    `layers[i]` is what block i (from 0) is steered along, or None; the last entry is not None.
    `declared_mode` and `declared_arch` are what the file says about itself, `source` where it came
    from. Raises OptionError when there is no direction, widths differ, a value is not finite, or a
    declaration is not a text.
    """

    layers: tuple[Direction | None, ...]
    declared_mode: SteeringMode | None = None
    declared_arch: str | None = None
    source: str = ""

    def __init__(
        self,
        layers: Iterable[Any],
        declared_mode: SteeringMode | str | None = None,
        declared_arch: str | None = None,
        source: str = "",
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise OptionError(
                f"unknown option {name!r} in SteeringSet; known: layers, declared_mode, "
                "declared_arch, source"
            )
        self._keep("layers", tuple(_directions(layers)))
        try:
            self._keep("declared_mode", None if declared_mode is None else _as_mode(declared_mode))
        except ValueError as error:
            raise OptionError(f"declared_mode: {error}") from None
        self._keep("declared_arch", None if declared_arch is None else _text(declared_arch))
        self._keep("source", _text(source, "source"))

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, directions: Mapping[int, Any], **declared: Any) -> SteeringSet:
        """A set from block -> direction (anything numpy reads as a row of finite floats)."""
        if not isinstance(directions, Mapping):
            raise OptionError(
                f"directions={short(directions)} is not valid; works: a mapping of blocks to rows"
            )
        bad = [b for b in directions if type(b) is not int or not 0 <= b <= files.MAX_BLOCK]
        if bad:
            raise OptionError(f"block {short(bad[0])}; expected 0..{files.MAX_BLOCK}")
        span = max(directions, default=-1) + 1
        return cls(tuple(directions.get(i) for i in range(span)), **declared)

    @classmethod
    def load(cls, path: str | Path) -> SteeringSet:
        """Read a control-vector file of llama.cpp, repeng or turbospark. Raises SteeringFileError.

        Blocks count from 0; only files with layer_base 0 name block 0, and `save` refuses it.
        """
        found = files.read(path)
        return cls.of(
            found.directions,
            declared_mode=found.mode,
            declared_arch=found.arch,
            source=str(path),
        )

    def save(self, path: str | Path) -> None:
        """Write a file that llama.cpp and repeng read. Raises SteeringFileError."""
        files.write(path, files.Contents(self.directions, self.declared_mode, self.declared_arch))

    @property
    def directions(self) -> dict[int, Direction]:
        """Block -> direction, where there is one."""
        return {i: d for i, d in enumerate(self.layers) if d is not None}

    @property
    def covered_layers(self) -> tuple[int, ...]:
        """Blocks that have a direction."""
        return tuple(self.directions)

    @property
    def hidden(self) -> int:
        """Width of every direction."""
        return len(self.directions[self.covered_layers[0]])

    @property
    def span(self) -> int:
        """Layers that a model needs at least."""
        return len(self.layers)

    def restrict(self, start: int, end: int) -> SteeringSet:
        """Only blocks start..end, both included. Raises OptionError when none is covered."""
        for name, block in (("start", start), ("end", end)):
            if type(block) is not int:
                raise OptionError(f"restrict: {name}={short(block)} is not valid; works: a block")
        kept = {b: d for b, d in self.directions.items() if start <= b <= end}
        if not kept:
            covered = self.covered_layers
            raise OptionError(
                f"blocks {start}..{end} have no direction in {self}; works: a range that meets "
                f"{covered[0]}..{covered[-1]}"
            )
        return SteeringSet.of(
            kept,
            declared_mode=self.declared_mode,
            declared_arch=self.declared_arch,
            source=self.source,
        )

    def validate(self, arch: ArchConfig) -> None:
        """Refuse a model that these directions do not fit. Raises OptionError."""
        if self.hidden != arch.hidden_size:
            raise OptionError(
                f"steering: {self} has directions of width {self.hidden} (first at block "
                f"{self.covered_layers[0]}), but this model has hidden_size {arch.hidden_size}; "
                "use a set made on this model"
            )
        if self.span > arch.num_layers:
            raise OptionError(
                f"steering: {self} has a direction for block {self.span - 1}, but this model's "
                f"last is {arch.num_layers - 1}; use a set made on this model, or restrict it to "
                f"0..{arch.num_layers - 1}"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of blocks and values."""
        digest = hashlib.sha256()
        for block, values in self.directions.items():
            digest.update(f"{block} {len(values)}\n".encode())
            digest.update(values.tobytes())
        return digest.hexdigest()

    def _key(self) -> tuple[Any, ...]:
        return self.digest, self.declared_mode, self.declared_arch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringSet) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return self.source or f"a set of {len(self.covered_layers)} directions"

    def __repr__(self) -> str:
        covered = self.covered_layers
        return (
            f"<SteeringSet {self}: {len(covered)} directions of width {self.hidden}, "
            f"blocks {covered[0]}..{covered[-1]}>"
        )


def _directions(layers: Any) -> list[Direction | None]:
    """The rows of a set, checked; the last is not None."""
    try:
        rows = list(islice(layers, files.MAX_BLOCK + 2))
    except TypeError:
        raise OptionError(f"layers={short(layers)} is not valid; works: a list of rows") from None
    if len(rows) > files.MAX_BLOCK + 1:
        raise OptionError(
            f"a steering set of more than {files.MAX_BLOCK + 1} layers; expected blocks "
            f"0..{files.MAX_BLOCK}"
        )
    found = [None if row is None else _direction(block, row) for block, row in enumerate(rows)]
    while found and found[-1] is None:
        found.pop()
    widths = {len(d) for d in found if d is not None}
    if len(widths) != 1:
        words = f"widths {sorted(widths)}" if widths else "no direction"
        raise OptionError(f"a steering set with {words}; expected directions of one width")
    return found


def _direction(block: int, values: Any) -> Direction:
    try:
        given = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: bfloat16, which numpy lacks
        given = np.empty(0, dtype=object)
    if given.dtype.kind not in "fiu":
        raise OptionError(
            f"direction of block {block} is {short(values)}; expected a row of real numbers"
        )
    with np.errstate(over="ignore"):  # refused below
        row = np.array(given, dtype=np.float32)
    if row.ndim != 1 or row.size == 0:
        raise OptionError(
            f"direction of block {block} has shape {list(row.shape)}; expected one axis"
        )
    if not np.isfinite(row).all():
        raise OptionError(
            f"direction of block {block} holds values that are not finite in float32; expected "
            "finite numbers"
        )
    row.flags.writeable = False
    return row


def _text(value: Any, name: str = "declared_arch") -> str:
    """A text that a file can hold."""
    try:
        value.encode("utf-8", "surrogateescape")
    except (AttributeError, UnicodeEncodeError):
        raise OptionError(f"{name}={short(value)} is not valid; works: a text") from None
    return str(value)


# --- options --------------------------------------------------------------------------------------


def _as_set(value: Any) -> Any:
    """A SteeringSet, or what `_set_json` made of one."""
    if isinstance(value, SteeringSet):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("directions"), dict):
        raise ValueError(f"{short(value)} is not valid; works: a SteeringSet")
    try:
        rows = {int(b): _floats(text) for b, text in value["directions"].items()}
        mode = value.get("declared_mode")
        declared = None if mode is None else SteeringMode(mode)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not what a SteeringSet was written as: {error}") from None
    arch, source = value.get("declared_arch"), value.get("source", "")
    return SteeringSet.of(rows, declared_mode=declared, declared_arch=arch, source=source)


def _floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4")


def _set_json(value: SteeringSet) -> dict[str, Any]:
    """Directions as base64 of little-endian float32."""
    texts = {
        str(block): base64.b64encode(row.astype("<f4").tobytes()).decode()
        for block, row in value.directions.items()
    }
    return {
        "directions": texts,
        "declared_mode": value.declared_mode,
        "declared_arch": value.declared_arch,
        "source": value.source,
    }


Set = Annotated[Any, PlainValidator(_as_set), PlainSerializer(_set_json, when_used="json")]


def _as_mode(value: Any) -> Any:
    works = [m.value for m in SteeringMode]
    if not isinstance(value, str) or value not in works:
        raise ValueError(f"{short(value)} is not valid; works: {', '.join(works)}")
    return SteeringMode(value)


Mode = Annotated[SteeringMode, BeforeValidator(_as_mode)]


class SteeringVector(FrozenOptions):
    """A set, what to do with it, and how strongly. Raises OptionError.

    Without a `mode` the file's own counts, and without that, "ablate". `alpha` 0 changes nothing in
    every mode; 1 is the whole edit.
    """

    set: Set = option(None, "a SteeringSet", "the directions")
    mode: Mode = option(
        SteeringMode.ABLATE,
        "'ablate', 'add', 'clamp' or 'renorm'",
        "what an edit does; the file's own mode, or ablate, when not given",
    )
    alpha: Real = option(1.0, "a finite number", "strength; 0 changes nothing")

    def __init__(
        self,
        set: SteeringSet | None = None,
        mode: SteeringMode | str | None = None,
        alpha: float = 1.0,
        **unknown: Any,
    ) -> None:
        fields: dict[str, Any] = {"set": set, "mode": mode, "alpha": alpha, **unknown}
        super().__init__(**fields)

    @model_validator(mode="before")
    @classmethod
    def _default_mode(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mode") is None:
            found = values.get("set")
            if isinstance(found, dict):  # a set as it is written to JSON
                declared = found.get("declared_mode")
            else:
                declared = getattr(found, "declared_mode", None)
            return {**values, "mode": declared or cls.model_fields["mode"].default}
        return values

    def __str__(self) -> str:
        return f"{self.mode}@{self.alpha:g}"


class SteeringPolicy(display.Shown, FrozenOptions):
    """Every edit of a model's residual stream, in the order they are applied. Raises OptionError.

    At a block each vector reads the row that the one before it left, so order matters. `target` is
    the coefficient that "clamp" sets; rows whose coefficient is below `gate` stay as they are. Both
    count for all vectors.
    """

    vectors: tuple[SteeringVector, ...] = option(
        (), "a list of SteeringVector", "applied in this order"
    )
    target: Real = option(0.0, "a finite number", "coefficient that clamp sets")
    gate: Annotated[Real, Field(ge=0)] = option(
        0.0, "a finite number >= 0 (0 is off)", "leave rows whose |coefficient| is below it"
    )

    def __init__(
        self,
        vectors: Iterable[SteeringVector] = (),
        target: float = 0.0,
        gate: float = 0.0,
        **unknown: Any,
    ) -> None:
        listed = (vectors,) if isinstance(vectors, SteeringVector) else vectors
        fields: dict[str, Any] = {"vectors": listed, "target": target, "gate": gate, **unknown}
        super().__init__(**fields)

    @classmethod
    def off(cls) -> SteeringPolicy:
        """No edit: the same graph as without a policy."""
        return cls()

    @classmethod
    def single(
        cls,
        set: SteeringSet,
        mode: SteeringMode | str | None = None,
        alpha: float = 1.0,
        *,
        target: float = 0.0,
        gate: float = 0.0,
    ) -> SteeringPolicy:
        """A policy of one vector."""
        return cls((SteeringVector(set, mode, alpha),), target, gate)

    @property
    def is_active(self) -> bool:
        """Whether there is anything to apply; also with every alpha at 0."""
        return bool(self.vectors)

    @property
    def covered_layers(self) -> tuple[int, ...]:
        """Blocks that at least one vector covers."""
        return tuple(sorted({b for v in self.vectors for b in v.set.covered_layers}))

    @property
    def digest(self) -> str:
        """SHA-256 of everything that changes what a model computes; "off" without a vector."""
        if not self.vectors:
            return "off"
        parts = [f"{v.mode} {v.alpha!r} {v.set.digest}" for v in self.vectors]
        parts += [f"{self.target!r} {self.gate!r}"]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def line(self, layers: int) -> str | None:
        """One line for people about a model of so many layers; None when off."""
        if not self.vectors:
            return None
        return self._told(f"{len(self.covered_layers)} of {layers} layers")

    def __str__(self) -> str:
        return self._told(f"{len(self.covered_layers)} layers") if self.vectors else "off"

    def _repr_html_(self) -> str:
        parts = []
        for vector in self.vectors:
            blocks = vector.set.covered_layers
            norms = {b: float((d * d).sum()) ** 0.5 for b, d in vector.set.directions.items()}
            words = f"lengths of the directions at layers {blocks[0]} to {blocks[-1]}"
            parts.append(display.facts({str(vector): words}))
            parts.append(
                display.strip([norms.get(block) for block in range(blocks[-1] + 1)], words)
            )
        return display.card("Steering", str(self), *parts)

    def _told(self, covered: str) -> str:
        extra = f", target {self.target:g}" if self._clamps() else ""
        extra += f", gate {self.gate:g}" if self.gate > 0 else ""
        if len(self.vectors) == 1:
            return f"{self.vectors[0]} on {covered}{extra}"
        clauses = [f"{v} ({len(v.set.covered_layers)} layers)" for v in self.vectors]
        return f"{len(clauses)} vectors on {covered}: {', '.join(clauses)}{extra}"

    def _clamps(self) -> bool:
        return any(v.mode is SteeringMode.CLAMP for v in self.vectors)
