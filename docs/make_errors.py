"""The texts of docs/errors.md, from the code that raises them.

`python docs/make_errors.py > docs/errors.md` writes it; a test compares the two.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from turbospark import errors

PACKAGE = Path(errors.__file__).parent
HEAD = """\
# Errors

Made by `python docs/make_errors.py > docs/errors.md`; do not edit by hand.

Everything that turbospark refuses is one of these classes, all in `turbospark.errors`. Each is a
`TurbosparkError`, and that is a `ValueError`, so that one `except` takes them all. Texts are one
line: what was asked, what was found, where, and what would work; "…" stands for what varies. What
to do about the frequent ones is in [troubleshooting](troubleshooting.md). On the command line an
`OptionError` is exit code 2, every other one exit code 1.
"""
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.TurbosparkError)
}


def markdown() -> str:
    """The whole document."""
    texts = collected()
    parts = [HEAD.strip()]
    for name, kind in CLASSES.items():
        parent = kind.__mro__[1].__name__
        above = f" A subclass of `{parent}`." if parent in list(CLASSES)[1:] else ""
        parts.append(f"## {name}\n\n{(kind.__doc__ or '').strip()}{above}")
        lines = sorted(texts[name])
        if lines:
            parts.append("```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts) + "\n"


def collected() -> dict[str, set[str]]:
    """Class name -> its texts, over the whole package."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        # What a validator of options raises arrives as an OptionError.
        validating = path.name in ("options.py", "policies.py")
        for name, message in _raised(tree, validating):
            text = _text(message)
            if len(text.replace("…", "").strip(" :;,.")) > 3:
                found[name].add(text)
    return found


def _raised(tree: ast.Module, validating: bool) -> Iterator[tuple[str, ast.expr]]:
    """(class, message) of every error that a module makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if validating and name == "ValueError":
                name = "OptionError"
            if name in CLASSES:
                yield name, node.args[0]
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for call in ast.walk(node):
                is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
                if is_call and call.func.attr == "__init__" and call.args:
                    yield node.name, call.args[0]


def _text(message: ast.expr) -> str:
    """A message with "…" in place of what is filled in."""
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        return message.value
    if isinstance(message, ast.JoinedStr):
        return "".join(_text(part) for part in message.values)
    if isinstance(message, ast.BinOp) and isinstance(message.op, ast.Add):
        return _text(message.left) + _text(message.right)
    return "…"


if __name__ == "__main__":
    sys.stdout.write(markdown())
