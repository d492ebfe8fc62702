"""The grammar of the command line: commands, arguments, flags and their help.

Knows words only. Flags that are options of the library take their name, help and default from
`OpenOptions` and `GenerationOptions`, which also check the values. The flags of a command are built
when that command is asked for: the list of commands needs no import.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from turbospark import __version__
from turbospark.cli import speculative, steer

MODEL = "an install: the name of an installed model, or a directory"

# Every other field of OpenOptions is a flag.
NO_FLAG = frozenset({
    "expecting",  # an object
    "prefix_reuse", "session_slots",  # the command decides
    "toggles", "swa_ring_capacity",  # for measuring and testing: bench has --toggle
    "speculation",  # --speculative and its companions say it
    "steering",  # --steering and its companions say it
    "vision_sidecar",  # in no build yet
})  # fmt: skip
# Fields whose flag is not spelled like the field.
SPELLED = {
    "max_new_tokens": ("--max-new", "--max-new-tokens"),
    "stop_token_ids": ("--stop-token-id",),
}
# What the server takes for requests that do not say.
SERVED = frozenset({
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
})  # fmt: skip
SHELLS = ("bash", "zsh", "fish")
INTERACTIVE = {"max_context": "auto", "expert_residency": "auto", "expert_cache_slots": "auto"}
SIZES = (
    "layers", "hidden", "heads", "kv-heads", "head-dim", "width", "vocab", "experts", "top-k",
    "expert-width",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """argparse's, with one line instead of the whole usage when an argument is wrong."""

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The base class's, with the flag that was probably meant."""
        found, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0].replace("_", "-")
            flags = list(self._option_string_actions) if word.startswith("--") else []
            near = [f for f in flags if f.startswith(word)] or get_close_matches(word, flags, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


@dataclass(frozen=True)
class Command:
    """`run` is the function that does it, as "module:name" inside this package."""

    help: str
    run: str
    flags: Callable[[argparse.ArgumentParser], None]


def option_flags(argv: Sequence[str]) -> dict[str, str]:
    """Option -> the flag that gives it to the command that `argv` names."""
    if not argv or argv[0] not in COMMANDS:
        return {}
    given = [a for a in command_parser(argv[0])._actions if a.option_strings]
    spelled = {f[2:].replace("-", "_"): f for a in given for f in a.option_strings}
    return spelled | {a.dest: a.option_strings[0] for a in given}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command that `argv` names; its `run` says what does it."""
    if not argv or argv[0] not in COMMANDS:
        _overview().parse_args(argv)  # shows help or version, or says what is wrong, and exits
    # Intermixed, so that a prompt may stand after flags.
    args = command_parser(argv[0]).parse_intermixed_args(argv[1:])
    args.typed = option_flags(argv)
    return args


def command_parser(name: str) -> Parser:
    """The parser of one command."""
    command = COMMANDS[name]
    parser = Parser(prog=f"turbospark {name}", description=command.help, allow_abbrev=False)
    command.flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=command.run)
    return parser


def _wide(prog: str) -> argparse.HelpFormatter:
    """Help with a line per command; argparse forgets that commands are indented."""
    formatter = argparse.HelpFormatter(prog)
    formatter._action_max_length = max(map(len, COMMANDS)) + 4
    return formatter


def _overview() -> Parser:
    parser = Parser(
        prog="turbospark",
        description="Run large language models locally on MLX.",
        epilog="`turbospark COMMAND --help` shows the arguments of a command. Exit codes: 0 done, "
        "1 refused or failed, 2 a wrong argument or option, 130 Ctrl-C, 141 a closed pipe.",
        allow_abbrev=False,
        formatter_class=_wide,
    )
    parser.add_argument("--version", action="version", version=f"turbospark {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help)
    return parser


# --- values ---------------------------------------------------------------------------------------


def scalar(text: str) -> int | float | str:
    """A number where the text is one; whether it fits is for the options to say."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def override(text: str) -> tuple[str, dict[str, Any] | None]:
    """PATTERN=BITS[,GROUP], PATTERN=MODE or PATTERN=keep -> (pattern, settings)."""
    pattern, equals, value = text.rpartition("=")
    if not equals or not pattern or not value:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PATTERN=BITS, PATTERN=BITS,GROUP, PATTERN=MODE or PATTERN=keep"
        )
    if value == "keep":
        return pattern, None
    numbers = value.split(",")
    if not numbers[0].isdigit():
        return pattern, {"mode": value}
    if len(numbers) > 2 or not all(n.isdigit() for n in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is not BITS or BITS,GROUP")
    return pattern, dict(zip(("bits", "group_size"), map(int, numbers), strict=False))


def token_ids(text: str) -> list[int]:
    """Token ids separated by commas or blanks."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids") from None


def setting(text: str) -> tuple[str, Any]:
    """KEY=JSON -> (key, value)."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=JSON, such as rope_theta=1e6"
        ) from None


# --- flags of options -----------------------------------------------------------------------------


def add_options(
    parser: argparse.ArgumentParser,
    title: str,
    model: Any,
    defaults: dict[str, str],
    without: frozenset[str] = NO_FLAG,
) -> None:
    """A flag for each field of `model`; one that is not given leaves no trace in the namespace.

    `defaults` are shown instead of the model's own where the command chooses others.
    """
    group = parser.add_argument_group(title)
    for name, field in model.model_fields.items():
        if name in without:
            continue
        shown = defaults.get(name, field.default)
        text = f"{field.description}; {field.json_schema_extra['works']} [default: {_word(shown)}]"
        settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        settings["help"] = text.replace("%", "%%")
        if isinstance(field.default, bool):
            settings["action"] = "store_true"
            settings["help"] = field.description
        else:
            settings |= {"type": scalar, "metavar": "VALUE"}
        if isinstance(field.default, tuple):
            settings |= {"action": "append", "help": f"{field.description}; repeatable"}
        if name in ("stop", "json_schema", "regex", "grammar"):
            settings["type"] = str
        group.add_argument(*SPELLED.get(name, (f"--{name.replace('_', '-')}",)), **settings)


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def opening(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of OpenOptions that were given on the command line."""
    from turbospark.options import OpenOptions

    return _given(args, OpenOptions) | speculative.policies(args) | steer.policy(args)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of GenerationOptions that were given on the command line."""
    from turbospark.options import GenerationOptions

    return _given(args, GenerationOptions)


def _given(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    names = set(model.model_fields) - NO_FLAG
    return {name: value for name, value in vars(args).items() if name in names}


# --- commands -------------------------------------------------------------------------------------


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a folder with config.json and safetensors, or a .gguf file")
    _destination(parser)
    parser.add_argument(
        "--drafter", help="the folder of a DFlash2 block drafter made for this model, to go along"
    )
    _quantization(parser)


def _pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repo", help="a repository of the Hugging Face Hub, such as owner/name")
    parser.add_argument("--revision", help="a branch, tag or commit (default: the main branch)")
    parser.add_argument("--file", help="the .gguf file to take, where there are several")
    parser.add_argument("--name", help="the name to install under (default: the repository's)")
    _quantization(parser)


def _destination(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dest", nargs="?", help="the install directory to write, usually NAME.gturbo"
    )
    parser.add_argument(
        "--name", help="instead of a directory: install under this name, as pull does"
    )


def _quantization(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quantization (default: formats stay as they are)")
    group.add_argument("--bits", type=int, help="affine quantization to so many bits")
    group.add_argument("--group-size", type=int, help="columns that share a scale (default: 64)")
    group.add_argument(
        "--mode", default="affine", help="affine (with --bits), mxfp4, mxfp8 or nvfp4"
    )
    group.add_argument(
        "--override",
        action="append",
        default=[],
        type=override,
        metavar="PATTERN=HOW",
        help="another choice for tensors whose name matches: BITS, BITS,GROUP, a mode, or keep; "
        "repeatable, the last match counts",
    )
    parser.add_argument("--force", action="store_true", help="replace an install that exists")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")


def _list(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL)


def _rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the name of an installed model")


def _check(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "--receipt",
        action="store_true",
        help="record the result in the install, so that verify='receipt' accepts it in this place",
    )


def _synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_type", help="model_type as in config.json, such as qwen3_moe")
    _destination(parser)
    group = parser.add_argument_group("sizes (default: those of a small model of the type)")
    for name in SIZES:
        group.add_argument(f"--{name}", type=int, metavar="N")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="KEY=JSON",
        help="any other key of config.json; repeatable",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the weights before quantization")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same weights (default: 0)")
    parser.add_argument(
        "--router-skew",
        type=float,
        default=0.0,
        metavar="X",
        help="let some experts be chosen more often; 0.75 is like real models (default: 0, alike)",
    )
    _quantization(parser)


def _calibrate(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--text", help="a text file to measure on (default: random token ids)")
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens to run through the model (default: 4096, or what it was trained to)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random ids (default: 0)")


def _run(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "prompt", nargs="?", help="what to say to the model; '-' or nothing reads standard input"
    )
    parser.add_argument("--raw", action="store_true", help="continue the text, no chat template")
    parser.add_argument(
        "--ids", type=token_ids, help="a prompt of token ids, such as 1,15043,29892"
    )
    parser.add_argument("--messages-file", help="a JSON file with a list of chat messages")
    _talk(parser)


def _chat(parser: argparse.ArgumentParser) -> None:
    _model(parser)
    _talk(parser)


def _talk(parser: argparse.ArgumentParser) -> None:
    from turbospark.options import GenerationOptions, OpenOptions

    parser.add_argument(
        "--system", action="append", default=[], help="an instruction before the chat; repeatable"
    )
    parser.add_argument(
        "--reasoning",
        default="off",
        help="off, low, medium, high or xhigh, for models that reason (default: off)",
    )
    parser.add_argument("--quiet", action="store_true", help="only the answer, no figures")
    length = {"max_new_tokens": "1024, or what fits the context"}
    add_options(parser, "generation", GenerationOptions, length)
    add_options(parser, "opening", OpenOptions, INTERACTIVE)
    speculative.add_flags(parser, "auto")
    steer.add_flags(parser)


def _serve(parser: argparse.ArgumentParser) -> None:
    from turbospark.options import GenerationOptions, OpenOptions

    _model(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port (default: 8080; 0 takes a free one)"
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="a file with the key that clients must send; needed off the loopback address",
    )
    parser.add_argument("--served-name", help="the model's name in the API (default: its own)")
    parser.add_argument(
        "--queue", type=int, default=32, metavar="N",
        help="requests that may wait; one more is answered 429 (default: 32)",
    )  # fmt: skip
    parser.add_argument(
        "--session-slots", type=int, metavar="N",
        help="conversations whose caches are kept (default: 4; 1 with --no-prefix-reuse)",
    )  # fmt: skip
    parser.add_argument("--no-prefix-reuse", action="store_true", help="feed every prompt in full")
    add_options(
        parser,
        "generation (where a request does not say)",
        GenerationOptions,
        {},
        frozenset(GenerationOptions.model_fields) - SERVED,
    )
    add_options(parser, "opening", OpenOptions, INTERACTIVE)


def _bench(parser: argparse.ArgumentParser) -> None:
    from turbospark.options import OpenOptions

    _model(parser)
    parser.add_argument("--prompt", help="the prompt (default: a built-in text, or random ids)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="its length, by repeating (default: 512)"
    )
    parser.add_argument("--max-new", type=int, default=64, help="tokens to decode (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument(
        "--toggle",
        action="append",
        default=[],
        metavar="NAME=0|1",
        help="switch one way of computing off or on; repeatable",
    )
    parser.add_argument(
        "--mlx-lm",
        metavar="FOLDER",
        help="a checkpoint folder that mlx-lm reads: run it in turn on the same prompt",
    )
    exact = {"max_context": "what the prompt and the answer take"}
    title = "opening (pinned: the environment is not read)"
    add_options(parser, title, OpenOptions, exact, NO_FLAG | {"chat_date", "min_auto_context"})
    speculative.add_flags(parser, "off")
    steer.add_flags(parser)


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")


COMMANDS = {
    name: Command(help, run, flags)
    for name, help, run, flags in (
        ("convert", "make an install from a checkpoint or a GGUF file", "store:convert", _convert),
        ("pull", "install a model of the Hugging Face Hub", "store:pull", _pull),
        ("list", "list the installed models", "store:list_models", _list),
        ("info", "show what an install holds", "store:info", _model),
        ("rm", "delete an installed model", "store:remove", _rm),
        ("check", "hash the weights of an install, and run a token", "store:check", _check),
        ("calibrate", "measure keys, so that --kv-quant loses less", "store:calibrate", _calibrate),
        ("run", "answer one prompt", "talk:run", _run),
        ("chat", "talk with a model; /reset starts again, /quit ends", "talk:chat", _chat),
        ("serve", "answer OpenAI-compatible requests over HTTP", "serve:serve", _serve),
        ("bench", "measure prompt and decode speed", "bench:bench", _bench),
        ("steering", "look at directions, or make them", "steer:steering", steer.add_command),
        ("synth", "write an install with random weights", "store:synthesize", _synth),
        ("completion", "print what a shell needs for Tab", "completion:completion", _completion),
    )
}
