"""The `turbospark` command: which command runs, and what a person sees when it refuses.

Knows argument vectors, exit codes and standard error. Does not know what the commands do; their
modules are imported when they run, so that `turbospark --help` loads neither MLX nor pydantic.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from turbospark.cli.console import flags, note
from turbospark.cli.parser import option_flags, parse
from turbospark.errors import ModelFormatError, OptionError, TurbosparkError
from turbospark.loading import load

REFUSED = 1
USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    0 done, 1 refused or failed, 2 a wrong option, 130 interrupted, 141 nobody reads the output.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    _open_closed_streams()
    as_json = "--json" in argv
    try:
        args = parse(argv)
        as_json = args.json
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: note(
                f"turbospark: warning: {flags(str(message), args.typed)}"
            )
            code = _command(args.run)(args)
        sys.stdout.flush()
        return code
    except OptionError as error:
        return _refuse(error, as_json, USAGE, option_flags(argv))
    except (TurbosparkError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _stop_writing()
        # What a file says of itself is no flag, even where it has the name of one.
        typed = {} if isinstance(error, (ModelFormatError, OSError)) else option_flags(argv)
        return _refuse(error, as_json, REFUSED, typed)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _command(where: str) -> Callable[[Any], int]:
    module, _, name = where.partition(":")
    return getattr(load(f"turbospark.cli.{module}"), name)


def _refuse(error: Exception, as_json: bool, code: int, typed: Mapping[str, str]) -> int:
    """One line on standard error; with --json the same as an object on standard output."""
    message = flags(" ".join(str(error).split()), typed) or type(error).__name__
    print(f"turbospark: {message}", file=sys.stderr)
    if as_json:
        with suppress(OSError):  # a full disk may be what is told
            print(json.dumps({"error": {"type": type(error).__name__, "message": message}}))
    return code


def _open_closed_streams() -> None:
    """Python has None for a standard stream that was closed before it started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (for the whole run)


def _stop_writing() -> int:
    """The reader of a pipe has gone; keep Python from complaining when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return BROKEN_PIPE
