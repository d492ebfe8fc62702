"""Commands about installs: make, fetch, list, describe, check, delete.

Knows files and manifests. Does not generate, apart from the one token of `check`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import turbospark
from turbospark.cli.console import note, show, size, table
from turbospark.cli.parser import SIZES
from turbospark.errors import ModelFormatError, OptionError, UnsupportedError
from turbospark.families import family_for_wire
from turbospark.install import balance
from turbospark.install.manifest import Manifest
from turbospark.install.models import install_path, installed, models_dir, resolve
from turbospark.install.models import remove as remove_installed
from turbospark.install.opening import Install
from turbospark.install.verify import verify, write_receipt
from turbospark.text.template import ChatTemplate
from turbospark.text.tokenizer import Tokenizer


def convert(args: Namespace) -> int:
    """turbospark convert SRC DST"""
    path = turbospark.convert(
        args.source, _destination(args), drafter=args.drafter, **_quantization(args)
    )
    return _wrote(args, path)


def pull(args: Namespace) -> int:
    """turbospark pull REPO"""
    chosen = {"revision": args.revision, "file": args.file, "name": args.name}
    return _wrote(args, turbospark.pull(args.repo, **chosen, **_quantization(args)))


def synthesize(args: Namespace) -> int:
    """turbospark synth TYPE DST"""
    names = [name.replace("-", "_") for name in SIZES]
    path = turbospark.synth(
        args.model_type,
        _destination(args),
        **{name: getattr(args, name) for name in names},
        settings=dict(args.set),
        dtype=args.dtype,
        seed=args.seed,
        router_skew=args.router_skew,
        **_quantization(args),
    )
    return _wrote(args, path)


def _destination(args: Namespace) -> Path:
    """The directory given, or the place of the name given in the store."""
    if (args.dest is None) == (args.name is None):
        given = "both were" if args.dest else "neither was"
        raise OptionError(f"DEST or --name NAME says where the install goes, and {given} given")
    if args.name is None:
        return Path(args.dest)
    return install_path(args.name)


def _quantization(args: Namespace) -> dict[str, Any]:
    return {
        "bits": args.bits,
        "group_size": args.group_size,
        "mode": args.mode,
        "overrides": dict(args.override),
        "force": args.force,
        "progress": not args.no_progress and sys.stderr.isatty(),
    }


def _wrote(args: Namespace, path: Path) -> int:
    found = _files(path)
    data = {"path": path, "bytes": found, "formats": _formats(Manifest.read(path))}
    show(args, data, f"wrote {path} ({size(found)})")
    return 0


def _files(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _formats(manifest: Manifest) -> dict[str, int]:
    """Format -> number of tensors, as the converter counted them; {} for other writers."""
    quant = manifest.extension.get("quant")
    formats = quant.get("formats") if isinstance(quant, dict) else None
    return formats if isinstance(formats, dict) else {}


# --- list, rm -------------------------------------------------------------------------------------


def list_models(args: Namespace) -> int:
    """turbospark list"""
    models = installed()
    kinds = [_kind(model.path) for model in models]
    width = max((len(model.name) for model in models), default=0)
    rows = list(zip(models, kinds, strict=True))
    lines = [f"{m.name:<{width}}  {size(m.size):>10}  {_spelled(kind)}" for m, kind in rows]
    data = [{"name": m.name, "path": m.path, "bytes": m.size, **kind} for m, kind in rows]
    show(args, data, "\n".join(lines) or f"no model is installed in {models_dir()}")
    return 0


def _kind(path: Path) -> dict[str, Any]:
    """Family and model type, as `info` names them; what is wrong where they cannot be read."""
    try:
        manifest = Manifest.read(path)
        family = family_for_wire(manifest.arch.family)
        values = manifest.extension.get("config") or family.config_from_arch(manifest.arch)
    except (ModelFormatError, UnsupportedError) as error:
        return {"family": f"damaged: {error}", "model_type": None}
    found = values.get("model_type") if isinstance(values, dict) else None
    return {"family": family.name, "model_type": found}


def _spelled(kind: dict[str, Any]) -> str:
    return kind["family"] + (f" ({kind['model_type']})" if kind["model_type"] else "")


def remove(args: Namespace) -> int:
    """turbospark rm MODEL"""
    path = remove_installed(args.model)
    show(args, {"removed": path}, f"removed {path}")
    return 0


# --- info -----------------------------------------------------------------------------------------


def info(args: Namespace) -> int:
    """turbospark info MODEL"""
    path = resolve(args.model)
    with Install.open(path) as install:
        data = _describe(install)
    show(args, data, table(_readable(data)))
    return 0


def _readable(data: dict[str, Any]) -> dict[str, Any]:
    """The rows a person wants to see first."""
    source, tokenizer = data["source"] or {}, data["tokenizer"]
    named = [v for k, v in source.items() if k != "bytes" and v is not None]
    routed = (
        f"{data['experts']} per layer, {data['experts_per_token']} per token "
        f"({size(data['expert_bytes'])})"
    )
    refused = [name for name, cause in data["capabilities"].items() if isinstance(cause, str)]
    return {
        "model": data["model"],
        "family": _spelled(data),
        "source": ", ".join(map(str, named)),
        "size": size(data["bytes"]),
        "formats": ", ".join(f"{count} x {name}" for name, count in data["formats"].items()),
        "layers": f"{data['layers']} of width {data['hidden_size']}",
        "experts": routed if data["experts"] else "none, a dense model",
        "vocabulary": data["vocab_size"],
        "context": data["trained_context"],
        "tokenizer": ", ".join(f"{k} {v}" for k, v in tokenizer.items())
        if tokenizer
        else "none: prompts are token ids",
        "refuses": ", ".join(refused),
        "path": data["path"],
    }


def _describe(install: Install) -> dict[str, Any]:
    arch, manifest = install.arch, install.manifest
    family = family_for_wire(arch.family)
    values = install.config or family.config_from_arch(arch)
    tokenizer = Tokenizer.load(install.path)
    source = manifest.extension.get("source")
    return {
        "path": install.path,
        "model": manifest.model_id,
        "family": family.name,
        "model_type": values.get("model_type"),
        "bytes": _files(install.path),
        "resident_bytes": install.resident_bytes,
        "expert_bytes": install.bytes_per_slot * arch.num_experts,
        "layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "vocab_size": arch.vocab_size,
        "experts": arch.num_experts,
        "experts_per_token": arch.top_k_experts,
        "trained_context": values.get("max_position_embeddings"),
        "formats": _formats(manifest),
        "source": source if isinstance(source, dict) else None,
        "converter": manifest.extension.get("converter"),
        "tokenizer": _tokenizer(tokenizer),
        "capabilities": vars(family.capabilities),
        "arch": arch.to_manifest(),
        "config": values,
    }


def _tokenizer(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    return {
        "tokens": tokenizer.vocab_size,
        "dialect": tokenizer.dialect.name,
        "template": tokenizer.template.source if tokenizer.template.text else None,
        "reasoning": tokenizer.template.reasoning_support,
        "tools": _tools(tokenizer.template),
        "stops": sorted(tokenizer.stop_ids),
    }


def _tools(template: ChatTemplate) -> str:
    """Whether the template shows tools to the model."""
    try:
        return "read" if template.reads_tools else "none"
    except ModelFormatError:
        return "broken template"


# --- calibrate ------------------------------------------------------------------------------------


def calibrate(args: Namespace) -> int:
    """turbospark calibrate MODEL"""
    text = None
    if args.text is not None:
        try:
            text = Path(args.text).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--text {args.text} cannot be read: {error}") from None
    path = turbospark.calibrate(args.model, text=text, tokens=args.tokens, seed=args.seed)
    with Install.open(path.parent) as install:
        source = balance.provenance(install)
    show(args, {"path": path, "measured": source}, f"wrote {path} ({size(path.stat().st_size)})")
    return 0


# --- check ----------------------------------------------------------------------------------------


def check(args: Namespace) -> int:
    """turbospark check MODEL"""
    path = resolve(args.model)
    with Install.open(path) as install:
        manifest = install.manifest
    if args.receipt:
        write_receipt(path, manifest)
    else:
        watched = sys.stderr.isatty() and not args.json
        verify(path, manifest, "full", (lambda name: note(f"hashing {name}")) if watched else None)
    options = turbospark.OpenOptions(max_context=2)
    with turbospark.Runner.open(path, options) as runner:
        result = runner.generate([0], max_new_tokens=1, temperature=0)
    total = sum(entry.size for entry in manifest.files.values())
    data = {
        "path": path,
        "files": len(manifest.files),
        "bytes": total,
        "manifest_sha256": manifest.sha256,
        "stop_reason": result.stop_reason,
        "receipt": args.receipt,
    }
    show(args, data, f"{path}: {len(manifest.files)} files, {size(total)}: whole, and it runs")
    return 0
