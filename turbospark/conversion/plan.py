"""Which source tensor provides what: a family's `pieces` inverted and checked.

Knows names, shapes and formats; every fault of a checkpoint's table of contents is found here,
before a weight is read. Does not read or write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import mlx.core as mx

from turbospark.conversion.source import SHOWN_NAMES, SourceTensor, listed
from turbospark.dtypes import Format
from turbospark.errors import SourceError, TurbosparkError, UnsupportedError
from turbospark.families.base import ExpertShape, Family, Piece
from turbospark.install.planes import Planes, plane_shapes
from turbospark.install.record import PROJECTIONS

MAX_DIM = 2**31 - 1  # of an MLX array
Pieces = Callable[[Any, str], "tuple[Piece, ...] | None"]


@dataclass(frozen=True)
class Provider:
    """Where one canonical tensor, or one projection of one expert, comes from.

    `expert` is the entry of the source's leading axis to read (None: the whole tensor); `rows`
    and then `transform` apply to it. `fmt` and `shape` are what comes out. With `parts`, a matrix
    is what they provide, one under another, and `source` is the first one's.
    """

    source: SourceTensor
    fmt: Format
    shape: tuple[int, ...]
    expert: int | None = None
    rows: slice | None = None
    transform: Callable[[Planes], Planes] | None = None
    parts: tuple[Provider, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table kept in a file of its own: runs of rows, in order, from one provider each."""

    name: str
    shape: tuple[int, int]
    parts: tuple[Provider, ...]

    @property
    def fmt(self) -> Format:
        return self.parts[0].fmt


@dataclass
class Plan:
    """Every canonical tensor with its one provider; `experts[layer][role][expert]`; `tables` by
    layer.
    """

    resident: dict[str, Provider] = field(default_factory=dict)
    experts: dict[int, dict[str, list[Provider]]] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)


def expert_name(layer: int, role: str) -> str:
    """Canonical name of one role of a layer's routed experts, as overrides and messages use it."""
    projection, _, bias = role.partition("_")
    return f"model.layers.{layer}.mlp.experts.{projection}_proj.{bias or 'weight'}"


def make_plan(
    family: Family, config: Any, tensors: Mapping[str, SourceTensor], pieces: Pieces
) -> Plan:
    """The plan of a conversion.

    Raises UnsupportedError naming tensors of types that are not read, SourceError naming
    unknown, doubled, misshapen and missing tensors.
    """
    builder = _Builder(family, config)
    for tensor in tensors.values():
        found = pieces(config, tensor.name)
        if found is None:
            builder.unknown.append(f"{tensor.name} ({tensor.stored} {list(tensor.shape)})")
        elif found and tensor.fmt is None:
            builder.unreadable.append(f"{tensor.name} ({tensor.stored})")
        else:
            for piece in found:
                builder.take(tensor, piece)
    return builder.finish()


class _Builder:
    """Collects providers and complaints."""

    def __init__(self, family: Family, config: Any) -> None:
        self.family = family
        self.shapes = family.weight_shapes(config)
        self.expert_shapes = family.expert_shapes(config)
        self.resident: dict[str, Provider] = {}
        self.experts: dict[tuple[int, str], dict[int, Provider]] = {}
        self.table_shapes = family.table_shapes(config)
        self.tables: dict[str, dict[int, Provider]] = {n: {} for n, _ in self.table_shapes.values()}
        self.joined: dict[str, dict[int, Provider]] = {}
        self.unreadable: list[str] = []
        self.unknown: list[str] = []
        self.doubled: list[str] = []
        self.misshapen: list[str] = []

    def take(self, tensor: SourceTensor, piece: Piece) -> None:
        """Enter one piece, or note what is wrong with it."""
        if piece.target in self.shapes and piece.part is not None:
            self.take_rows(tensor, piece, self.joined.setdefault(piece.target, {}))
        elif piece.target in self.shapes:
            provider = self.provider(tensor, piece, self.shapes[piece.target])
            if provider is not None:
                self.enter(self.resident, piece.target, piece.target, provider)
        elif piece.target in self.tables and piece.part is not None:
            self.take_rows(tensor, piece, self.tables[piece.target])
        elif piece.layer in self.expert_shapes and piece.role is not None:
            self.take_routed(tensor, piece, piece.layer, piece.role)
        else:
            self.unknown.append(tensor.name)

    def take_rows(self, tensor: SourceTensor, piece: Piece, parts: dict[int, Provider]) -> None:
        """Enter one run of a matrix's rows; that they add up is seen when all are there."""
        if tensor.fmt is None or len(tensor.shape) != 2 or max(tensor.shape) > MAX_DIM:
            self.misshapen.append(f"{tensor.name} has shape {list(tensor.shape)}; expected rows")
            return
        fmt, shape = outcome(tensor, tensor.shape, piece)
        provider = Provider(tensor, fmt, shape, None, piece.rows, piece.transform)
        assert piece.part is not None  # `take` looked
        self.enter(parts, piece.part, f"{piece.target} part {piece.part}", provider)

    def take_routed(self, tensor: SourceTensor, piece: Piece, layer: int, role: str) -> None:
        """Enter one role of one expert of a layer, or of a stack of all of them."""
        shape, expert = self.expert_shapes[layer], piece.expert
        stacked = expert is None
        if role not in roles(shape):
            self.unknown.append(tensor.name)
            return
        if stacked and tensor.shape[:1] != (shape.count,):
            self.misshapen.append(
                f"{tensor.name} holds {list(tensor.shape)}; expected {shape.count} experts"
            )
            return
        if expert is not None and not 0 <= expert < shape.count:
            self.unknown.append(f"{tensor.name} (of {shape.count} experts)")
            return
        provider = self.provider(tensor, piece, role_shape(shape, role), stacked)
        if provider is None:
            return
        table = self.experts.setdefault((layer, role), {})
        for e in range(shape.count) if expert is None else (expert,):
            one = replace(provider, expert=e) if stacked else provider
            self.enter(table, e, f"{expert_name(layer, role)} of expert {e}", one)

    def enter(self, table: dict[Any, Provider], key: Any, name: str, provider: Provider) -> None:
        if key in table:
            self.doubled.append(
                f"{name} (from {table[key].source.name} and {provider.source.name})"
            )
        table[key] = provider

    def provider(
        self, tensor: SourceTensor, piece: Piece, expected: tuple[int, ...], stacked: bool = False
    ) -> Provider | None:
        shape = tensor.shape[1:] if stacked else tensor.shape
        too_small = math.prod(shape) < math.prod(expected)  # a hostile size never meets a transform
        fmt, found = outcome(tensor, shape, Piece() if too_small else piece)
        if found != expected:
            changed = f", {list(found)} after its transform" if found != tensor.shape else ""
            self.misshapen.append(
                f"{tensor.name} has shape {list(tensor.shape)}{changed}; expected {list(expected)}"
            )
            return None
        return Provider(tensor, fmt, found, None, piece.rows, piece.transform)

    def finish(self) -> Plan:
        """The plan, or one error that tells everything found."""
        if self.unreadable:
            raise UnsupportedError(
                f"{len(self.unreadable)} tensors have a type that is not converted: "
                f"{listed(self.unreadable)}; supported: BF16, F16, F32, MLX-quantized and MXFP4"
            )
        self.doubled += sorted(self.resident.keys() & self.joined.keys())
        faults = [
            f"{len(names)} {what}: {listed(names)}"
            for what, names in (
                ("unknown", self.unknown),
                ("provided twice", self.doubled),
                ("misshapen", self.misshapen),
                ("missing", [] if self.misshapen else self.missing()),
            )
            if names
        ]
        if not faults:
            faults = [
                *(f for n, s in self.table_shapes.values() for f in gaps(n, s, self.tables[n])),
                *(f for n, parts in self.joined.items() for f in gaps(n, self.shapes[n], parts)),
            ]
        if faults:
            raise SourceError(f"tensors do not fit family {self.family.name}: {'; '.join(faults)}")
        self.resident |= {name: self.join(name) for name in self.joined}
        plan = Plan({name: self.resident[name] for name in self.shapes})
        for layer, shape in sorted(self.expert_shapes.items()):
            plan.experts[layer] = {
                role: self.uniform(layer, role, shape.count) for role in roles(shape)
            }
        for layer, (name, rows) in self.table_shapes.items():
            parts = tuple(provider for _, provider in sorted(self.tables[name].items()))
            plan.tables[layer] = Table(name, rows, parts)
        return plan

    def join(self, name: str) -> Provider:
        """A matrix of several runs of rows, in order."""
        parts = tuple(provider for _, provider in sorted(self.joined[name].items()))
        return Provider(parts[0].source, parts[0].fmt, self.shapes[name], parts=parts)

    def missing(self) -> list[str]:
        here = self.resident.keys() | self.joined.keys()
        absent = [name for name in self.shapes if name not in here]
        absent += [name for name, parts in self.tables.items() if not parts]
        for layer, shape in self.expert_shapes.items():
            for role in roles(shape):
                present = self.experts.get((layer, role), {})
                if not present:
                    absent.append(expert_name(layer, role))
                elif len(present) < shape.count:
                    gone = (e for e in range(shape.count) if e not in present)
                    shown = ", ".join(map(str, islice(gone, SHOWN_NAMES)))
                    count = shape.count - len(present)
                    absent.append(f"{expert_name(layer, role)} of {count} experts ({shown})")
        return absent

    def uniform(self, layer: int, role: str, count: int) -> list[Provider]:
        """The providers of all experts, which one record layout must fit."""
        found = [self.experts[layer, role][expert] for expert in range(count)]
        for provider in found:
            if provider.fmt != found[0].fmt:
                raise SourceError(
                    f"{expert_name(layer, role)}: {found[0].source.name} is {found[0].fmt}, "
                    f"{provider.source.name} is {provider.fmt}; experts of a layer must agree"
                )
        return found


def gaps(name: str, shape: tuple[int, ...], parts: Mapping[int, Provider]) -> Iterator[str]:
    """What is wrong with the runs of rows that make up a matrix."""
    absent = sorted(set(range(len(parts))) - set(parts))
    if absent:
        yield f"{name}: part {absent[0]} of its rows is missing"
        return
    found = [p.shape for _, p in sorted(parts.items())]
    rows, columns = sum(s[0] for s in found), {s[1] for s in found}
    if (rows, columns) != (shape[0], {shape[1]}):
        yield f"{name}: {rows} rows of {sorted(columns)} columns; expected {list(shape)}"
    if len({p.fmt for p in parts.values()}) > 1:
        yield f"{name}: parts are stored in different formats"


def roles(shape: ExpertShape) -> list[str]:
    """The roles of a layer's routed experts."""
    return [*PROJECTIONS, *(f"{p}_bias" for p in PROJECTIONS if shape.bias)]


def role_shape(shape: ExpertShape, role: str) -> tuple[int, ...]:
    """Logical shape of one expert's matrix or bias vector."""
    projection, _, bias = role.partition("_")
    rows, columns = shape.matrix(projection)
    return (rows,) if bias else (rows, columns)


def outcome(
    tensor: SourceTensor, shape: tuple[int, ...], piece: Piece
) -> tuple[Format, tuple[int, ...]]:
    """Format and shape after the piece's rows and transform, found without reading a byte.

    MLX arrays are lazy: the piece is applied to zeros that are never evaluated.
    """
    fmt = tensor.fmt
    if fmt is None or any(n > MAX_DIM for n in tensor.shape):
        raise SourceError(f"tensor {tensor.name}: shape {list(tensor.shape)} is too large")
    if piece.rows is None and piece.transform is None:
        return fmt, shape
    if not shape:
        return fmt, shape
    planes = Planes(fmt, shape, *(mx.zeros(s, dtype=d) for s, d in plane_shapes(fmt, shape)))
    try:
        if piece.rows is not None:
            planes = planes.rows(piece.rows)
        if piece.transform is not None:
            planes = piece.transform(planes)
    except TurbosparkError:
        raise
    except (ValueError, IndexError) as error:
        raise SourceError(
            f"tensor {tensor.name}: shape {list(tensor.shape)} does not fit its family: {error}"
        ) from error
    return planes.fmt, tuple(planes.shape)
