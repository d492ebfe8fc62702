"""Moving tensors from a source into the files of an install, one at a time.

Knows the plan's providers, row-wise quantization and the two writers. Does not know containers
or families. Peak memory: one stored tensor, plus a few megabytes of rows while quantizing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from turbospark.conversion.plan import Plan, Provider, expert_name
from turbospark.conversion.quantize import changed
from turbospark.conversion.source import TensorSource
from turbospark.dtypes import Format, Quant
from turbospark.errors import SourceError
from turbospark.families.names import plain_name
from turbospark.install.packed import PackedWriter, RecordLayout
from turbospark.install.planes import Planes, empty_planes, host_view, quantize
from turbospark.install.resident import ResidentWriter
from turbospark.install.row_table import RowTableWriter, file_name, row_bytes

HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"

_BLOCK_VALUES = 1 << 20  # MLX quantizes with temporaries of up to 64 bytes per value
Advance = Callable[[int], object]  # told the bytes written


def total_bytes(plan: Plan, formats: Mapping[str, Format]) -> int:
    """Bytes of weights the plan will write, padding left out."""
    total = sum(sum(formats[n].plane_bytes(p.shape)) for n, p in plan.resident.items())
    for layer, roles in plan.experts.items():
        for role, providers in roles.items():
            fmt = formats[expert_name(layer, role)]
            total += sum(sum(fmt.plane_bytes(p.shape)) for p in providers)
    return total + sum(
        t.shape[0] * row_bytes(formats[t.name], t.shape[1]) for t in plan.tables.values()
    )


def write_resident(
    source: TensorSource,
    plan: Plan,
    formats: Mapping[str, Format],
    writer: ResidentWriter,
    advance: Advance,
) -> None:
    """Declare and write every resident tensor."""
    for name, provider in plan.resident.items():
        writer.add(name, formats[name], provider.shape)
    for name, provider in plan.resident.items():
        planes = fetch(source, provider, formats[name])
        writer.write(name, planes)
        advance(sum(a.nbytes for a in planes.arrays()))
        del planes
        mx.clear_cache()


def write_experts(
    source: TensorSource,
    plan: Plan,
    formats: Mapping[str, Format],
    writer: PackedWriter,
    advance: Advance,
) -> None:
    """Write every routed layer, one projection of one expert at a time."""
    for layer, roles in plan.experts.items():
        parts = {role: (formats[expert_name(layer, role)], p[0].shape) for role, p in roles.items()}
        count = len(next(iter(roles.values())))
        writer.begin_layer(layer, count, RecordLayout.build(parts))
        for expert in range(count):
            for role, providers in roles.items():
                planes = fetch(source, providers[expert], parts[role][0])
                writer.write(expert, {role: planes})
                advance(sum(a.nbytes for a in planes.arrays()))
                del planes
            mx.clear_cache()
        writer.end_layer()


def write_tables(
    source: TensorSource,
    plan: Plan,
    formats: Mapping[str, Format],
    directory: Path,
    advance: Advance,
) -> None:
    """Write every table into a file of its own below `directory`, in blocks of rows."""
    for layer, table in plan.tables.items():
        fmt = formats[table.name]
        writer = RowTableWriter(directory / file_name(layer), fmt, table.shape)
        try:
            for part in table.parts:
                for block in _row_blocks(source, part):
                    packed = _in_format(block, fmt)
                    writer.write(packed)
                    advance(packed.shape[0] * writer.stride)
                    mx.clear_cache()
            writer.close()
        finally:
            writer.abort()


def _in_format(block: Planes, fmt: Format) -> Planes:
    if changed(fmt, block.fmt):
        assert isinstance(fmt, Quant)  # `changed` said so
        return quantize(block.weight, fmt)
    return block


def check_tied_head(source: TensorSource, plan: Plan) -> None:
    """Refuse to leave out an output head that is not the table it is said to be tied to."""
    table = plan.resident.get(TABLE)
    if table is None or HEAD in plan.resident:
        return
    for name, head in source.tensors.items():
        if plain_name(name) != HEAD:
            continue
        alike = (head.fmt, head.shape) == (table.source.fmt, table.source.shape)
        if not alike or not _equal(source, table, replace(table, source=head)):
            raise SourceError(
                f"{name} differs from {table.source.name}, but tie_word_embeddings is true and "
                "would leave it out; set tie_word_embeddings to false in config.json to keep "
                "both, or remove the head"
            )


def _equal(source: TensorSource, one: Provider, other: Provider) -> bool:
    pairs = zip(_row_blocks(source, one), _row_blocks(source, other), strict=True)
    return all(
        mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()
        for left, right in pairs
        for a, b in zip(left.arrays(), right.arrays(), strict=True)
    )


def fetch(source: TensorSource, provider: Provider, fmt: Format) -> Planes:
    """The evaluated planes of one canonical tensor in its stored format `fmt`."""
    if provider.parts:
        return _joined([fetch(source, part, fmt) for part in provider.parts], provider.shape)
    if not changed(fmt, provider.fmt):
        return _gather(source, provider)
    planes = empty_planes(fmt, provider.shape)
    done = 0
    for block in _row_blocks(source, provider):
        done = _copy_rows(block, fmt, planes, done)
    return planes


def _joined(parts: list[Planes], shape: tuple[int, ...]) -> Planes:
    """Matrices of the same columns one under another."""
    planes = zip(*(p.arrays() for p in parts), strict=True)
    arrays = [mx.concatenate(list(runs)) for runs in planes]
    mx.eval(arrays)
    return Planes(parts[0].fmt, shape, *arrays)


def _gather(source: TensorSource, provider: Provider) -> Planes:
    name, rows = provider.source.name, provider.rows
    if provider.transform is None and (rows is None or rows.step in (None, 1)):
        return source.read(name, provider.expert, rows)
    planes = source.read(name, provider.expert)
    if rows is not None:
        planes = planes.rows(rows)
    if provider.transform is not None:
        planes = provider.transform(planes)
    mx.eval(planes.arrays())
    return planes


def _row_blocks(source: TensorSource, provider: Provider) -> Iterator[Planes]:
    """The float matrix of a provider in blocks of rows, read block by block where possible."""
    rows, columns = provider.shape
    step = max(_BLOCK_VALUES // columns, 1)
    chosen = provider.rows or slice(0, rows)
    if provider.transform is None and chosen.step in (None, 1):
        first = chosen.start or 0
        for at in range(first, first + rows, step):
            block = slice(at, min(at + step, first + rows))
            yield source.read(provider.source.name, provider.expert, block)
    else:
        whole = _gather(source, provider)
        for at in range(0, rows, step):
            yield whole.rows(slice(at, min(at + step, rows)))


def _copy_rows(block: Planes, fmt: Format, planes: Planes, done: int) -> int:
    """Quantize `block` into rows `done` onwards of `planes`; the next row to fill."""
    assert isinstance(fmt, Quant)  # `changed` said so
    packed = quantize(block.weight, fmt)
    for target, part in zip(planes.arrays(), packed.arrays(), strict=True):
        width = target.nbytes // target.shape[0]
        view = host_view(target)[done * width : done * width + part.nbytes]
        view[:] = host_view(mx.contiguous(part))
    mx.clear_cache()
    return done + block.shape[0]
