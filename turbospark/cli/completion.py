"""`turbospark completion`: what a shell needs to complete commands, flags, values and models.

Knows three shells, and reads the grammar: a new command or flag is completed without a line here.
Installed models are looked up by the shell itself at every Tab, which starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from turbospark.cli.console import show
from turbospark.cli.parser import COMMANDS, SHELLS, command_parser
from turbospark.cli.steer import METHODS
from turbospark.dtypes import MODES
from turbospark.options import GenerationOptions, OpenOptions
from turbospark.policies import SteeringMode
from turbospark.text.template import REASONING_LEVELS

# Flags that are no options of the library, and the words they take.
WORDS = {
    "reasoning": REASONING_LEVELS,
    "mode": ("affine", *MODES),
    "steering_mode": tuple(str(mode) for mode in SteeringMode),
    "method": METHODS,
}
MODELS = "${TURBOSPARK_HOME:-$HOME/.turbospark}/models"


def completion(args: Namespace) -> int:
    """turbospark completion SHELL"""
    script = _WRITERS[args.shell](*map(_grammar, COMMANDS))
    show(args, {"shell": args.shell, "script": script}, script.rstrip("\n"))
    return 0


@dataclass(frozen=True)
class Flag:
    """One flag: its spellings, its help, whether a value follows, and the values that are words."""

    names: list[str]
    help: str
    valued: bool
    values: list[str]


@dataclass(frozen=True)
class Grammar:
    """What may follow one command; `first` is what its first argument is."""

    name: str
    help: str
    flags: list[Flag]
    first: Literal["model", "word", "file", "nothing"]
    words: list[str]


def _grammar(name: str) -> Grammar:
    actions = command_parser(name)._actions
    positional = next((a for a in actions if not a.option_strings), None)
    words = [str(choice) for choice in positional.choices or ()] if positional else []
    first: Any = "nothing"
    if positional is not None:
        first = "model" if positional.dest == "model" else "word" if words else "file"
    return Grammar(
        name,
        COMMANDS[name].help,
        [_flag(action) for action in actions if action.option_strings],
        first,
        words,
    )


def _flag(action: argparse.Action) -> Flag:
    """A flag of argparse's; those that are options of the library know their words."""
    fields = {**GenerationOptions.model_fields, **OpenOptions.model_fields}
    field = fields.get(action.dest)
    valued = action.nargs != 0
    values = list(WORDS.get(action.dest, ()))
    if field is not None and valued:
        values = _words(field.annotation)
    text = (action.help or "").replace("%%", "%")
    return Flag(list(action.option_strings), text, valued, values)


def _words(kind: Any) -> list[str]:
    """The values that an option's type spells out: "auto", "off", 128."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(member) for member in kind]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [word for part in get_args(kind) for word in _words(part)]


# --- bash -----------------------------------------------------------------------------------------


def _bash(*commands: Grammar) -> str:
    names = " ".join(c.name for c in commands)
    flags = "\n".join(
        f"        {c.name}) flags={shlex.quote(' '.join(n for f in c.flags for n in f.names))} ;;"
        for c in commands
    )
    valued: dict[str, list[str]] = {n: f.values for c in commands for f in c.flags if f.values
                                    for n in f.names}  # fmt: skip
    values = "\n".join(
        f"        {flag}) words={shlex.quote(' '.join(words))} ;;" for flag, words in valued.items()
    )
    firsts = "\n".join(
        f"        {c.name}) words={shlex.quote(' '.join(c.words))} ;;" for c in commands if c.words
    )
    with_model = "|".join(c.name for c in commands if c.first == "model")
    return f"""\
# bash completion of turbospark: eval "$(turbospark completion bash)"
_turbospark() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[1]}} flags='' words='' path
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W '{names} --help --version' -- "$cur"))
        return
    fi
    case $command in
{flags}
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
        return
    fi
    case $before in
{values}
    esac
    if [[ -z $words ]] && (( COMP_CWORD == 2 )); then
        case $command in
{firsts}
        {with_model})
            for path in "{MODELS}"/*.gturbo; do
                path=${{path##*/}} words+=" ${{path%.gturbo}}"
            done
            words=${{words// \\*}} ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _turbospark turbospark
"""


# --- zsh ------------------------------------------------------------------------------------------


def _zsh(*commands: Grammar) -> str:
    described = "\n".join(f"        {_zsh_quote(f'{c.name}:{c.help}')}" for c in commands)
    cases = "\n".join(_zsh_case(c) for c in commands)
    return f"""\
#compdef turbospark
# zsh completion of turbospark: eval "$(turbospark completion zsh)"
_turbospark_models() {{
    local -a models
    models=("{MODELS}"/*.gturbo(N:t:r))
    compadd -a models
    _files -/
}}
_turbospark() {{
    local -a commands
    commands=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
compdef _turbospark turbospark
"""


def _zsh_case(command: Grammar) -> str:
    specs = []
    for flag in command.flags:
        text = flag.help.replace("[", "(").replace("]", ")").replace(":", ";")
        value = f":value:({' '.join(flag.values)})" if flag.valued else ""
        specs += [_zsh_quote(f"*{name}[{text}]{value}") for name in flag.names]
    first = {
        "model": ["'1:model:_turbospark_models'"],
        "word": [_zsh_quote(f"1:word:({' '.join(command.words)})")],
        "file": ["'1:file:_files'"],
        "nothing": [],
    }[command.first]
    lines = [*specs, *first, *(["'*:file:_files'"] if first else [])]
    return f"    {command.name}) _arguments \\\n        " + " \\\n        ".join(lines) + " ;;"


def _zsh_quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish -----------------------------------------------------------------------------------------


def _fish(*commands: Grammar) -> str:
    lines = [
        "# fish completion of turbospark: turbospark completion fish | source",
        "function __turbospark_models",
        "    set -l home ~/.turbospark",
        "    set -q TURBOSPARK_HOME; and set home $TURBOSPARK_HOME",
        "    for path in $home/models/*.gturbo",
        "        basename $path .gturbo",
        "    end",
        "end",
        "complete -c turbospark -n __fish_use_subcommand -f",
    ]
    for command in commands:
        lines.append(
            f"complete -c turbospark -n __fish_use_subcommand -a {command.name} "
            f"-d {_fish_quote(command.help)}"
        )
        inside = f"complete -c turbospark -n '__fish_seen_subcommand_from {command.name}'"
        if command.first == "model":
            lines.append(f"{inside} -a '(__turbospark_models)'")
        if command.words:
            lines.append(f"{inside} -f -a {_fish_quote(' '.join(command.words))}")
        lines += [_fish_flag(inside, flag) for flag in command.flags]
    return "\n".join(lines) + "\n"


def _fish_flag(inside: str, flag: Flag) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
    )
    value = f" -x -a {_fish_quote(' '.join(flag.values))}" if flag.values else ""
    value = value or (" -r" if flag.valued else "")
    return f"{inside} {names}{value} -d {_fish_quote(flag.help)}"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_WRITERS: dict[str, Callable[..., str]] = dict(zip(SHELLS, (_bash, _zsh, _fish), strict=True))
