"""The tables of docs/options.md, from the option models and the command line themselves.

`python docs/make_options.py > docs/options.md` writes it; a test compares the two.
"""

from __future__ import annotations

import sys
from typing import Any

from turbospark import GenerationOptions, OpenOptions, RuntimeToggles
from turbospark.cli.parser import COMMANDS
from turbospark.policies import ENV_PREFIX, FrozenOptions

HEAD = """\
# Options

Made by `python docs/make_options.py > docs/options.md`; do not edit by hand.

Options are frozen: `options.replace(max_context=8192)` gives a changed copy, checked as a whole.
A value that cannot be is an `OptionError` of one line, and what was finally chosen (the answer to
every `"auto"`) is `runner.resolved`. A feature that this build or the model's family does not have
is refused by name when the model is opened, never ignored.
"""
OPENING = """\
`OpenOptions()` pins everything. `OpenOptions.interactive()` is for a person at a terminal: context,
experts and slots are `"auto"`, and the environment is read. The command line uses it for `run` and
`chat`; there `max_context` is `--max-context`, and so on.
"""
GENERATION = """\
For `runner.generate` and `runner.stream`: `runner.generate(prompt, temperature=0)` or a
`GenerationOptions`. On the command line `--max-new` is short for `max_new_tokens`.
"""
TOGGLES = """\
Switches between two ways of computing the same tokens, for measuring and for hunting mistakes:
`OpenOptions(toggles=RuntimeToggles(...))`, later `runner.toggles.prefill_steel = False`.
`runner.toggles.has_effect(name)` tells whether the open model reads one at all.
"""
ENVIRONMENT = f"""\
Read by `OpenOptions.from_env()`, `OpenOptions.interactive()` and the commands for people; flags and
arguments win. Nothing else in the library reads the environment, except `{ENV_PREFIX}HOME`.

| variable | effect |
| --- | --- |
| `{ENV_PREFIX}HOME` | where installed models are (default `~/.turbospark`) |
| `{ENV_PREFIX}PREFILL_CHUNK` | `prefill_chunk` |
| `{ENV_PREFIX}EXPERT_RESIDENCY` | `expert_residency` |
| `{ENV_PREFIX}EXPERT_DISK_IO` | `expert_disk_io`: 0 or 1 |
| `{ENV_PREFIX}CHAT_DATE` | `chat_date`, such as 2026-01-31 |
| `{ENV_PREFIX}MTP_DRAFT` | the MTP drafter: 0 is off, a number its width |
| `{ENV_PREFIX}DFLASH_DRAFT` | the block drafter: 0 is off, a number its width |
"""


def markdown() -> str:
    """The whole document."""
    parts = [HEAD, "## Opening a model", OPENING, table(OpenOptions)]
    parts += ["## Generating", GENERATION, table(GenerationOptions)]
    parts += ["## Toggles", TOGGLES, table(RuntimeToggles)]
    rows = [
        f"| `{ENV_PREFIX}{suffix}` | toggle `{name}`: 0 or 1 |"
        for name, suffix in RuntimeToggles.ENVIRONMENT.items()
    ]
    parts += ["## Environment", ENVIRONMENT + "\n".join(rows)]
    commands = [f"| `turbospark {name}` | {c.help} |" for name, c in COMMANDS.items()]
    parts += ["## Commands", "\n".join(["| command | |", "| --- | --- |", *commands])]
    parts += ["`turbospark COMMAND --help` lists the arguments; every command takes `--json`."]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def table(model: Any) -> str:
    """A row per field: name, default, what works, what it does."""
    rows = ["| option | default | works | |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        works = field.json_schema_extra["works"].replace("|", "\\|")
        default = field.default
        shown = default if isinstance(default, (bool, int, float, type(None))) else str(default)
        if isinstance(default, FrozenOptions):
            shown = f"{type(default).__name__}()"
        rows.append(f"| `{name}` | `{shown}` | {works} | {field.description} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(markdown())
