"""--steering and its companions, and `turbospark steering`: making and looking at directions.

Knows words, files and ranges of blocks. Does not know how a stream is edited.
"""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turbospark.errors import OptionError

ACTIONS = ("info", "extract")
METHODS = ("mean_difference", "pca")
# Flag -> its attribute; refused where there is no file to apply them to.
COMPANIONS = {
    "--steering-mode": "steering_mode",
    "--steering-scale": "steering_scale",
    "--steering-layers": "steering_layers",
    "--steering-target": "steering_target",
    "--steering-gate": "steering_gate",
}

# --- flags of run, chat and bench -----------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--steering FILE, and what is said about each file."""
    from turbospark.policies import SteeringMode

    group = parser.add_argument_group(
        "steering",
        "Repeatable flags count per file, in order; the last value counts for the files after it.",
    )
    group.add_argument(
        "--steering",
        action="append",
        metavar="FILE",
        help="edit the residual stream along the directions of a control vector (GGUF); repeatable",
    )
    group.add_argument(
        "--steering-mode",
        action="append",
        choices=[str(mode) for mode in SteeringMode],
        help="what an edit does [default: what the file says, or ablate]; repeatable",
    )
    group.add_argument(
        "--steering-scale",
        action="append",
        type=float,
        metavar="X",
        help="strength; 0 changes nothing [default: 1.0]; repeatable",
    )
    group.add_argument(
        "--steering-layers",
        action="append",
        type=blocks,
        metavar="A:B",
        help="only blocks A to B, from 0, both included; either may be left out; repeatable",
    )
    group.add_argument(
        "--steering-target",
        type=float,
        metavar="X",
        help="coefficient that clamp sets [default: 0]",
    )
    group.add_argument(
        "--steering-gate",
        type=float,
        metavar="X",
        help="leave rows whose coefficient is smaller [default: 0, off]",
    )


def blocks(text: str) -> tuple[int, int | None]:
    """A:B -> (first, last); None is the end."""
    first, colon, last = text.partition(":")
    numbers = all(part == "" or (part.isascii() and part.isdigit()) for part in (first, last))
    if not colon or not numbers or (first and last and int(first) > int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B with A <= B, such as 8:20 or 8:")
    return int(first or 0), int(last) if last else None


def policy(args: Namespace) -> dict[str, Any]:
    """`steering` of OpenOptions; empty where no file was given."""
    files = getattr(args, "steering", None)
    given = {flag: getattr(args, name, None) for flag, name in COMPANIONS.items()}
    if not files:
        for flag, value in given.items():
            if value is not None:
                raise OptionError(f"{flag} needs a file to apply to; give --steering FILE")
        return {}
    from turbospark.steering import SteeringPolicy, SteeringSet, SteeringVector

    modes = _each(files, given, "--steering-mode", None)
    scales = _each(files, given, "--steering-scale", 1.0)
    ranges = _each(files, given, "--steering-layers", (0, None))
    vectors = []
    for file, mode, scale, (first, last) in zip(files, modes, scales, ranges, strict=True):
        found = SteeringSet.load(file)
        if (first, last) != (0, None):
            found = found.restrict(first, found.span if last is None else last)
        vectors.append(SteeringVector(found, mode, scale))
    target, gate = args.steering_target or 0.0, args.steering_gate or 0.0
    return {"steering": SteeringPolicy(vectors, target, gate)}


def _each(files: Sequence[str], given: dict[str, Any], flag: str, default: Any) -> list[Any]:
    """A value per file; a short list goes on with its last."""
    values = given[flag] or [default]
    if len(values) > len(files):
        raise OptionError(
            f"{flag} was given {len(values)} times for {len(files)} --steering; at most once each"
        )
    return [*values, *[values[-1]] * (len(files) - len(values))]


# --- turbospark steering --------------------------------------------------------------------------


def add_command(parser: argparse.ArgumentParser) -> None:
    """The arguments of `turbospark steering`."""
    parser.usage = (
        "turbospark steering info FILE\n"
        "       turbospark steering extract MODEL FILE --positive TEXTS --negative TEXTS"
    )
    parser.add_argument("action", choices=ACTIONS, help="look at a file, or make one")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="FILE, or MODEL and FILE")
    group = parser.add_argument_group("extract")
    for name in ("positive", "negative"):
        group.add_argument(f"--{name}", metavar="TEXTS", help="a text file, one prompt per line")
    group.add_argument("--method", choices=METHODS, help="[default: mean_difference]")
    group.add_argument(
        "--raw", action="store_true", help="prompts are continued as they stand, no chat template"
    )
    group.add_argument("--max-context", type=int, help="tokens of the longest prompt")


def steering(args: Namespace) -> int:
    """turbospark steering info FILE, or extract MODEL FILE"""
    extra = {
        "--positive": args.positive,
        "--negative": args.negative,
        "--method": args.method,
        "--raw": args.raw or None,
        "--max-context": args.max_context,
    }
    wanted = {"info": 1, "extract": 2}[args.action]
    if len(args.paths) != wanted:
        shape = {"info": "info FILE", "extract": "extract MODEL FILE"}[args.action]
        raise OptionError(f"steering {args.action} got {len(args.paths)} paths; works: {shape}")
    if args.action == "info":
        for flag, value in extra.items():
            if value is not None:
                raise OptionError(f"{flag} belongs to `steering extract`, not to info")
        return _info(args, args.paths[0])
    for flag in ("--positive", "--negative"):
        if extra[flag] is None:
            raise OptionError(f"steering extract needs {flag} TEXTS, a file with a prompt per line")
    return _extract(args, *args.paths)


def _info(args: Namespace, path: str) -> int:
    from turbospark.cli.console import show, table
    from turbospark.steering import ControlVectorInfo

    info = ControlVectorInfo(path)
    data = {name: value for name, value in vars(info).items() if name != "path"}
    norms = zip(info.covered, info.norms, strict=True)
    text = {
        "file": path,
        "directions": f"{len(info.covered)} of width {info.hidden}, for blocks "
        f"{info.first} to {info.last} of a model of at least {info.span}",
        "mode": info.declared_mode or "ablate, since it names none",
        "made on": info.declared_arch or "it does not say",
        "lengths": ", ".join(f"{block}: {norm:.4g}" for block, norm in norms),
        "beware": "a width that fits does not make it this model's",
    }
    show(args, {"path": path, **data}, table(text))
    return 0


def _extract(args: Namespace, model: str, path: str) -> int:
    from turbospark import OpenOptions, Runner
    from turbospark.cli.console import show
    from turbospark.steering import extract

    ups, downs = (_prompts(name, args.raw) for name in (args.positive, args.negative))
    context = {"max_context": args.max_context} if args.max_context else {}
    with Runner.open(model, OpenOptions.interactive(**context)) as runner:
        watched = sys.stderr.isatty() and not args.json
        made = extract(runner, ups, downs, args.method or METHODS[0], progress=watched)
        made.save(path)
    first, last = made.covered_layers[0], made.covered_layers[-1]
    data = {
        "path": path,
        "hidden": made.hidden,
        "covered": made.covered_layers,
        "declared_arch": made.declared_arch,
        "prompts": [len(ups), len(downs)],
    }
    count = f"{len(ups)} and {len(downs)} prompts"
    text = f"{path}: directions for blocks {first} to {last}, from {count}"
    show(args, data, text)
    return 0


def _prompts(name: str, raw: bool) -> list[Any]:
    """The lines of a file that are not empty, as texts or as what a person says in a chat."""
    try:
        text = Path(name).read_text("utf-8")
    except ValueError:
        raise OptionError(f"{name}: not UTF-8 text") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise OptionError(f"{name}: holds no prompts; expected one per line")
    return [line if raw else [{"role": "user", "content": line}] for line in lines]
