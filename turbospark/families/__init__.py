"""The one registry of families: a row per family file.

Knows which file answers for which name. Imports a family's file when it is asked for.
"""

from __future__ import annotations

import difflib
from importlib import import_module

from turbospark.errors import UnsupportedArchitectureError
from turbospark.families.base import Family

# (module, config.json model types, manifest wire strings, GGUF architectures)
_ROWS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "llama",
        ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
        ("llama", "qwen2", "qwen3", "qwen3moe"),
        ("llama", "qwen2", "qwen3", "qwen3moe"),
    ),
    ("deepseek2", ("deepseek_v2",), ("deepseek2",), ("deepseek2",)),
    ("gemma3", ("gemma3", "gemma3_text"), ("gemma3",), ("gemma3",)),
    (
        "gemma4",
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        ("gemma4",),
        ("gemma4",),
    ),
    ("gpt_oss", ("gpt_oss",), ("gptOss",), ("gpt-oss",)),
    (
        "muse_glimmer",
        ("muse_glimmer", "muse_glimmer_text"),
        ("museGlimmer",),
        ("muse-glimmer",),
    ),
    (
        "qwen3_5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        ("qwen35", "qwen36"),
        ("qwen35", "qwen35moe"),
    ),
    ("qwen4_exp", ("qwen4_exp", "qwen4_exp_text"), ("qwen4exp",), ()),
    ("spark", ("spark2_5",), ("spark2_5",), ("spark2_5",)),
)


def families() -> list[Family]:
    """Every family, loaded."""
    return [_load(row[0]) for row in _ROWS]


def family_for_model_type(model_type: str) -> Family:
    """The family of config.json's `model_type`."""
    return _find(1, model_type, "model_type")


def family_for_wire(wire: str) -> Family:
    """The family of a manifest's `arch.family`."""
    return _find(2, wire, "manifest.arch.family")


def family_for_gguf(architecture: str) -> Family:
    """The family of GGUF's `general.architecture`."""
    return _find(3, architecture, "general.architecture")


def _load(module: str) -> Family:
    return import_module(f"turbospark.families.{module}").family


def _find(column: int, name: str, what: str) -> Family:
    for row in _ROWS:
        if name in row[column]:
            return _load(row[0])
    known = sorted({n for row in _ROWS for n in row[column]})
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; nearest: {near[0]}" if near else ""
    raise UnsupportedArchitectureError(
        f"{what} {name!r} is not supported{hint}; supported: {', '.join(known)}"
    )
