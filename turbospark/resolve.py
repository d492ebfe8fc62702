"""From what was asked to what will run: options are resolved once, here, and read from there.

Knows every rule that depends on the machine, the install and the family together. Does not
allocate anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import mlx.core as mx

from turbospark import display
from turbospark.cache.packed import packed_part, packed_specs
from turbospark.cache.pool import MAX_SNAPSHOTS
from turbospark.cache.specs import CacheSpec, RingSpec
from turbospark.cache.state import ring_capacity
from turbospark.dtypes import Quant, Raw
from turbospark.errors import IndexCorruptError, OptionError, UnsupportedError
from turbospark.experts.mapped import scratch_bytes, zero_copy
from turbospark.experts.reader import DiskMeter
from turbospark.families.base import Family
from turbospark.families.config import ConfigReader
from turbospark.install import balance
from turbospark.install.files import printable
from turbospark.install.opening import Install
from turbospark.install.packed import PackedLayer, PackedLayout, RecordTensor
from turbospark.install.planes import MX_DTYPES
from turbospark.install.record import PROJECTIONS, RecordLayout
from turbospark.install.row_table import FOLDER as TABLES
from turbospark.kernels.choices import choices
from turbospark.options import ExpertResidency, OpenOptions
from turbospark.sizing import (
    Load,
    auto_context,
    auto_residency,
    auto_slots,
    check_load,
    physical_memory,
)
from turbospark.speculation.choose import MARKS, WITH_PROBABILITIES, Choice, Offer, choose
from turbospark.speculation.opening import whole, widest
from turbospark.steering import SteeringPolicy


@dataclass(frozen=True)
class Resolved(display.Shown):
    """What an open runner really uses; the answer to every "auto"."""

    family: str
    model_type: str
    device: str
    dtype: str
    weights: str
    """"packed" as stored, or "expanded" to `dtype` at open."""
    max_context: int
    max_context_basis: str
    """Where max_context comes from: "asked", or what bound "auto"."""
    prefill_chunk: int | None
    """Prompt tokens per pass; None feeds a prompt in one pass."""
    session_slots: int
    prefix_reuse: bool
    expert_residency: str
    expert_mapping: str | None
    """How mapped experts are used, "zero-copy" or "copied per use"; None when not mapped."""
    expert_cache_slots: int
    ngram_table: str | None
    """Where tables of hashed n-grams live; None for a model without them."""
    kv_quant: str
    kv_quantized_layers: tuple[int, ...]
    kv_balance: str
    """The tables that packed keys are balanced with: "calibrated" and their digest, or "none"."""
    kernels: str
    """"auto" where passes of few rows may run through kernels of our own, else "reference"."""
    drafter: str | None
    draft_width: int
    """Proposals per round at most; 0 without a drafter."""
    draft_note: str | None
    """Why a drafter that was left to "auto" is not open."""
    acceptance: str | None
    """How sampled proposals are accepted; None without a drafter."""
    steering: str | None
    """The edits in force, in one line; None when off."""
    verify: str

    def as_dict(self) -> dict[str, Any]:
        """Field name to value."""
        return asdict(self)

    def _shown(self) -> dict[str, Any]:
        """What people look at: a dense model, which has no slots, shows nothing of experts."""
        rows = self.as_dict().items()
        return {n: v for n, v in rows if self.expert_cache_slots or not n.startswith("expert_")}

    def _repr_html_(self) -> str:
        return display.options(self._shown(), "Resolved options")

    def __str__(self) -> str:
        return "\n".join(f"{name:<20} {value}" for name, value in self._shown().items())


def configured(install: Install, family: Family) -> tuple[dict[str, Any], Any]:
    """The configuration that an install carries, as it stands and as `family` reads it.

    Raises IndexCorruptError for a `model_type` of another family, and what `read_config` raises.
    """
    values = install.config or family.config_from_arch(install.arch)
    kind = values.get("model_type")
    if kind not in family.model_types:
        raise IndexCorruptError(
            f"{install.path}: manifest.turbospark.config.model_type = {printable(repr(kind))} is "
            f"none of family {family.name}; expected one of {', '.join(family.model_types)}"
        )
    return values, family.read_config(ConfigReader(values, str(install.path / "manifest.json")))


def resolve(
    options: OpenOptions, install: Install, family: Family, model_type: str, config: Any
) -> Resolved:
    """Choose and refuse; raises OptionError or UnsupportedError naming the option."""
    refuse_unsupported(options, family)
    _refuse_idle(options, install)
    _warn_unreachable(options)
    device = resolve_device(options.device)
    residency, slots = _experts(options, install)
    dtype = _dtype(options.dtype, device, install)
    mapping = None
    if install.experts is not None:
        check_experts(install.experts, options, residency, device, dtype)
        if residency == "mapped":
            mapping = "zero-copy" if zero_copy(install.experts) else "copied per use"
    best = choices(mx.Device(getattr(mx, device)), options.kernels)
    drafters, tensors = family.capabilities.drafters, set(install.resident.names)
    offer = Offer(family.name, drafters, tensors, whole(family, config), widest(config))
    choice = choose(options.speculation, offer)
    chunks = {"off": None, "auto": best.prefill_chunk}
    chunk = 1 if family.capabilities.chunked_prefill else options.prefill_chunk
    return Resolved(
        family=family.name,
        model_type=model_type,
        device=device,
        dtype=dtype,
        weights="expanded" if device == "cpu" else "packed",
        max_context=0 if options.max_context == "auto" else options.max_context,
        max_context_basis="asked",
        prefill_chunk=chunks[chunk] if isinstance(chunk, str) else chunk,
        session_slots=options.session_slots,
        prefix_reuse=options.prefix_reuse,
        expert_residency=residency,
        expert_mapping=mapping,
        expert_cache_slots=slots,
        ngram_table=options.ngram_table if _tables(install) else None,
        kv_quant=str(options.kv_quant),
        kv_quantized_layers=(),
        kv_balance="none",
        kernels="reference" if best == best.without_kernels() else "auto",
        drafter=choice.drafter,
        draft_width=choice.width,
        draft_note=choice.note,
        acceptance=_acceptance(options.acceptance, choice),
        steering=SteeringPolicy.of(options.steering).line(install.arch.num_layers),
        verify=options.verify,
    )


def resolve_caches(
    options: OpenOptions, family: Family, specs: Sequence[CacheSpec]
) -> list[CacheSpec]:
    """What each layer will remember, packed where `kv_quant` asks for it.

    Raises UnsupportedError when no layer, or not every one that should, can be packed.
    """
    keys, values = options.kv_quant.key_bits, options.kv_quant.value_bits
    if keys is None or values is None:
        return list(specs)
    packed, reason = packed_specs(specs, keys, values)
    if reason is None and not any(packed_part(s) for s in packed):
        reason = "no layer but the last attends to all positions with keys and values of its own"
    if reason is not None:
        raise UnsupportedError(
            f"kv_quant={options.kv_quant} cannot pack the caches of this {family.name} model: "
            f"{reason}; leave kv_quant at 'off'"
        )
    return packed


def resolve_context(
    resolved: Resolved,
    options: OpenOptions,
    install: Install,
    specs: Sequence[CacheSpec],
    trained: int | None,
) -> Resolved:
    """Settle max_context and hold the plan against the machine's memory, before a weight is read.

    `trained` is the context that the model was trained to, None where nothing says. Raises
    OptionError.
    """
    load = Load(
        physical=physical_memory(),
        weights=_weight_bytes(resolved, install),
        experts=_expert_bytes(resolved, install),
        specs=tuple(specs),
        itemsize=MX_DTYPES[resolved.dtype].size,
        sessions=resolved.session_slots,
        ring=options.swa_ring_capacity,
        snapshots=MAX_SNAPSHOTS if resolved.prefix_reuse else 0,
    )
    if options.max_context == "auto":
        context, basis = auto_context(load, trained, options.load_guard, options.min_auto_context)
        resolved = replace(resolved, max_context=context, max_context_basis=basis)
    else:
        check_load(load, options.max_context, options.load_guard)
        _warn_past_training(options.max_context, trained)
    _check_ring(options.swa_ring_capacity, resolved.max_context, specs)
    _check_slack(options.swa_ring_capacity, resolved, specs)
    layers = tuple(i for i, spec in enumerate(specs) if packed_part(spec))
    tables = balance.digest(install) if layers else None
    name = "none" if tables is None else f"calibrated {tables[:16]}"
    if layers and tables is None:
        _warn_uncalibrated(options, install)
    return replace(resolved, kv_quantized_layers=layers, kv_balance=name)


def _acceptance(asked: str, choice: Choice) -> str | None:
    """How sampled proposals are accepted; refuses what the chosen drafter cannot do."""
    if choice.drafter is None:
        if asked != "auto":
            raise OptionError(
                f"acceptance={asked!r} has no effect: no drafter is open"
                + (f" ({choice.note})" if choice.note else "")
            )
        return None
    drawn = choice.drafter in WITH_PROBABILITIES
    if asked == "rejection" and not drawn:
        raise OptionError(
            f"acceptance='rejection' needs a drafter with probabilities, and "
            f"{choice.drafter} has none; works: 'auto' or 'match'"
        )
    return ("rejection" if drawn else "match") if asked == "auto" else asked


def _check_slack(capacity: int | None, resolved: Resolved, specs: Sequence[CacheSpec]) -> None:
    """Refuse a ring from which the proposals of a round could not be taken back."""
    for spec in specs:
        if isinstance(spec, RingSpec) and spec.window < resolved.max_context:
            rows = ring_capacity(spec.window, resolved.max_context, capacity)
            if rows < resolved.max_context and rows - spec.window < resolved.draft_width:
                raise OptionError(
                    f"swa_ring_capacity={capacity} leaves {rows - spec.window} slots beside the "
                    f"window {spec.window}, but {resolved.drafter} may propose "
                    f"{resolved.draft_width} tokens; use at least "
                    f"{spec.window + resolved.draft_width}"
                )


def _warn_past_training(context: int, trained: int | None) -> None:
    if trained is not None and context > trained:
        warnings.warn(
            f"max_context={context} is past the {trained} tokens that the model was trained to; "
            "what it says there may be worthless",
            stacklevel=5,  # the caller of Runner.open
        )


def _warn_uncalibrated(options: OpenOptions, install: Install) -> None:
    warnings.warn(
        f"kv_quant={options.kv_quant} without balance tables may have several times the error, and "
        "ruins models whose keys have large biases (Qwen2.5); run `turbospark calibrate "
        f"{install.path}` once",
        stacklevel=5,  # the caller of Runner.open
    )


def _warn_unreachable(options: OpenOptions) -> None:
    if options.session_slots > 1 and not options.prefix_reuse:
        warnings.warn(
            f"session_slots={options.session_slots} without prefix_reuse allocates caches that no "
            "prompt finds again; use prefix_reuse=True, or session_slots=1",
            stacklevel=5,  # the caller of Runner.open
        )


def _check_ring(capacity: int | None, context: int, specs: Sequence[CacheSpec]) -> None:
    """Refuse a ring that no layer has, and one that is shorter than a window which does turn."""
    if capacity is not None and not any(isinstance(s, RingSpec) for s in specs):
        raise OptionError(
            f"swa_ring_capacity={capacity} has no effect: no layer of this model attends to a "
            "sliding window; leave it at None"
        )
    windows = [s.window for s in specs if isinstance(s, RingSpec) and s.window < context]
    if capacity is not None and capacity < max(windows, default=0):
        raise OptionError(
            f"swa_ring_capacity={capacity} is below the attention window {max(windows)} of this "
            f"model; use at least {max(windows)}, or None"
        )


def _tables(install: Install) -> list[int]:
    """Bytes of the files of the install's tables."""
    files = install.manifest.files.items()
    return [entry.size for name, entry in files if name.startswith(f"{TABLES}/")]


def _weight_bytes(resolved: Resolved, install: Install) -> int:
    """Bytes of the resident tensors as they will be computed with, idle drafters left out."""
    tables = sum(_tables(install)) if resolved.ngram_table == "resident" else 0
    idle = tuple(f"{name}." for name in MARKS if name != resolved.drafter)
    used = [entry for entry in install.resident if not entry.name.startswith(idle)]
    if resolved.weights == "packed":
        return tables + sum(size for entry in used for _, size in entry.planes)
    itemsize = MX_DTYPES[resolved.dtype].size
    return tables + sum(prod(entry.shape) * itemsize for entry in used)


def _expert_bytes(resolved: Resolved, install: Install) -> int:
    if install.experts is None:
        return 0
    layers = install.experts.layers.values()
    if resolved.expert_residency == "resident":
        itemsize = MX_DTYPES[resolved.dtype].size
        return sum(layer.count * _record_bytes(layer.record, itemsize) for layer in layers)
    if resolved.expert_residency == "mapped":
        return scratch_bytes(install.experts, resolved.expert_cache_slots)
    return resolved.expert_cache_slots * install.bytes_per_slot


def _record_bytes(record: RecordLayout, itemsize: int) -> int:
    """Bytes of one resident expert: floats are cast to the activations' type, codes are kept."""
    return sum(
        prod(t.shape) * itemsize if isinstance(t.fmt, Raw) and t.dtype != "uint8" else t.size
        for t in record.tensors.values()
    )


def refuse_unsupported(options: OpenOptions, family: Family) -> None:
    """Refuse every option whose feature this build or family does not have."""
    if options.vision_sidecar is not None:
        raise UnsupportedError(
            f"vision_sidecar={options.vision_sidecar} is not supported by this build (family "
            f"{family.name}); leave vision_sidecar at its default"
        )
    can = family.capabilities
    causes = {
        "prefix_reuse": (options.prefix_reuse, can.prefix_reuse),
        "session_slots": (options.session_slots > 1, can.session_pool),
        "kv_quant": (options.kv_quant.bits is not None, can.kv_quant),
        "prefill_chunk": (isinstance(options.prefill_chunk, int), can.chunked_prefill),
    }
    for name, (wanted, cause) in causes.items():
        if wanted and cause is not None:
            raise UnsupportedError(
                f"{name}={getattr(options, name)} is not supported by family {family.name}: "
                f"{cause}; leave {name} at its default"
            )


def _refuse_idle(options: OpenOptions, install: Install) -> None:
    """Refuse what was asked for by name and would change nothing in this install."""
    if options.ngram_table == "resident" and not _tables(install):
        raise OptionError(
            "ngram_table='resident' has no effect: this install has no tables of hashed n-grams; "
            "leave it at 'mapped'"
        )
    if not options.expert_lookahead:
        return
    if install.experts is None:
        raise OptionError(
            "expert_lookahead=True has no effect: this model has no routed experts; leave it False"
        )
    if options.expert_residency in (ExpertResidency.MAPPED, ExpertResidency.RESIDENT):
        raise OptionError(
            f"expert_lookahead=True has no effect with expert_residency="
            f"'{options.expert_residency}': experts are read ahead into slots, so it takes "
            "'streamed'"
        )


def resolve_device(asked: str) -> str:
    """ "cpu" or "gpu"; refuses a GPU that MLX does not have."""
    gpu = mx.is_available(mx.gpu)
    if asked == "gpu" and not gpu:
        raise OptionError(
            "device='gpu' was asked, but this MLX has no GPU back end; use device='cpu', or "
            "install turbospark[cuda12] or turbospark[cuda13]"
        )
    if asked == "auto":
        return "gpu" if gpu and mx.default_device() == mx.gpu else "cpu"
    return asked


def _dtype(asked: str, device: str, install: Install) -> str:
    """Activations: float32 on a CPU, else what the install's matrices carry."""
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    weight: dict[str, int] = dict.fromkeys(MX_DTYPES, 0)
    for name in install.resident.names:
        entry = install.resident.entry(name)
        if len(entry.shape) < 2:
            continue
        if isinstance(entry.fmt, Quant):
            weight[entry.fmt.scale_dtype] += entry.size
        elif isinstance(entry.fmt, Raw):
            weight[entry.fmt.dtype] += entry.size
    return "float16" if weight["float16"] > weight["bfloat16"] else "bfloat16"


def check_experts(
    experts: PackedLayout, options: OpenOptions, residency: str, device: str, dtype: str
) -> None:
    """Refuse what cannot be done with these expert records here."""
    formats = {t.fmt for layer in experts.layers.values() for t in _matrices(layer)}
    if device == "cpu" and dtype != "float32" and any(isinstance(f, Raw) for f in formats):
        raise OptionError(
            f"dtype={dtype!r} on a CPU: this install's experts are not quantized, and MLX "
            "multiplies those in float32 only there; use dtype='float32'"
        )
    if options.verify_reads:
        missing = [i for i, layer in experts.layers.items() if layer.checksums is None]
        if missing:
            raise OptionError(
                f"verify_reads=True needs a checksum of every expert record, and layer "
                f"{missing[0]} of this install has none; use verify='full', or convert it again"
            )
        if residency == "mapped" and zero_copy(experts):
            raise OptionError(
                "verify_reads=True cannot see what MLX reads from a mapping by itself; use "
                "verify='full' or expert_residency='streamed'"
            )
    if options.expert_disk_io and residency != "resident" and not DiskMeter.PATH.exists():
        raise OptionError(
            f"expert_disk_io=True needs {DiskMeter.PATH}, which this system does not have; "
            "use expert_disk_io=False"
        )


def _matrices(layer: PackedLayer) -> list[RecordTensor]:
    return [layer.tensor(projection) for projection in PROJECTIONS]


def _experts(options: OpenOptions, install: Install) -> tuple[str, int]:
    """(residency, slots per layer); a dense model answers what was asked, with 0 slots."""
    asked = options.expert_residency
    if install.experts is None:
        return "streamed" if asked is ExpertResidency.AUTO else str(asked), 0
    physical, resident = physical_memory(), install.resident_bytes
    per_slot, count = install.bytes_per_slot, install.arch.num_experts
    residency = str(asked)
    if asked is ExpertResidency.AUTO:
        residency = auto_residency(physical, resident, per_slot, zero_copy(install.experts))
    wanted = options.expert_cache_slots
    slots = min(auto_slots(physical, resident, per_slot) if wanted == "auto" else wanted, count)
    if residency == "resident":
        slots = count  # all are held, whatever a cache would have kept
    if residency == "mapped":
        slots = max(slots, install.arch.top_k_experts)  # a scratch, not a cache
    if residency == "streamed" and slots < install.arch.top_k_experts:
        raise OptionError(
            f"expert_cache_slots={slots} is too few: every token is routed to "
            f"{install.arch.top_k_experts} of {count} experts; use at least "
            f"{install.arch.top_k_experts}"
        )
    return residency, slots
