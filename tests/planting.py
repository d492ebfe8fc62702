"""Mistakes planted one at a time, so that a test can show that it would notice them."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Replace a function by its own source with `new` for `old`."""
    function = vars(owner)[name]
    inner = function.fget if isinstance(function, property) else function
    text = textwrap.dedent(inspect.getsource(inner))
    assert text.count(old) == 1, f"the mistake cannot be planted: {old!r}"
    scope: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + text.replace(old, new)
    exec(code, inner.__globals__, scope)
    patch.setattr(owner, name, scope[name])
