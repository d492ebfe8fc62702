"""Rules for kernel bodies that need no compiler: what Metal or CUDA would refuse or read otherwise.

Knows text. A clean body may still be wrong; see metal_text for the type check.
"""

from __future__ import annotations

import re

from turbospark.kernels.source import Kernel

ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
)
MLX_SUFFIXES = ("_shape", "_strides", "_ndim")
METAL_WORDS = (
    "kernel|vertex|fragment|mesh|object|sampler|patch|visible|stitchable|half|bfloat|thread|"
    "device|constant|threadgroup|ray_data"
)
TEXT_RULES = [
    (r"\b(device|constant|threadgroup)\s+\w+\s*[*&]", "address space spelled out: use auto"),
    (r"\bthreadgroup\s+\w+\s+\w+\s*\[", "threadgroup array spelled out: use TS_SHARED"),
    (
        r"\b(__shared__|__syncthreads|__syncwarp|__shfl\w*|threadIdx|blockIdx|blockDim|gridDim|"
        r"__ldg|cg::|cooperative_groups)",
        "CUDA only",
    ),
    (
        r"\b(threadgroup_barrier|simdgroup_barrier|mem_flags|metal::|as_type|"
        r"simd_(sum|max|min|shuffle\w*|broadcast\w*|any|all|ballot))\b",
        "Metal only",
    ),
    (r"\bdouble\b", "no double in Metal"),
    (r"\blong\b", "long differs in size: use int64_t"),
    (r"\bstd::", "no std:: in Metal"),
    (r"\[[&=]?\]\s*\(", "no lambda before Metal 4"),
    (
        r"(?<![\w.])(\d+\.\d*|\.\d+)([eE][-+]?\d+)?(?![fFhH\w.])",
        "floating literal without f: double in CUDA and C++",
    ),
    (r"\b(float|half|int|uint)[234]\s*\(", "vector constructors are Metal only"),
    (r"\bstatic\b", "no static locals in Metal"),
    (
        rf"\b(?:int|uint|float|bool|auto|int64_t|uint64_t|T)\s+({METAL_WORDS})\b",
        "a keyword or type name in Metal",
    ),
    (r"\bgoto\b|\bnew\b|\bdelete\b|\bthrow\b|\bvirtual\b", "not in Metal"),
    (r"\bINFINITY\b|\bNAN\b", "infinities depend on the math mode: use a finite sentinel"),
    (r"\bassert\s*\(", "no assert in Metal"),
]


def lint(kernel: Kernel) -> list[str]:
    """Every broken rule as "kernel part:line: text: why"; empty for a clean kernel."""
    found = []
    for part, text in (("body", kernel.body), ("header", kernel.header)):
        clean = strip_comments(text)
        for pattern, why in TEXT_RULES:
            for match in re.finditer(pattern, clean):
                found.append(_at(kernel, part, clean, match.start(), match.group(), why))
        found += _structure(kernel, part, clean)
    return found + _names(kernel)


def strip_comments(text: str) -> str:
    """Comments blanked out, offsets and line numbers kept."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)


def _at(kernel: Kernel, part: str, text: str, offset: int, what: str, why: str) -> str:
    line = text.count("\n", 0, offset) + 1
    return f"{kernel.name} {part}:{line}: {what.strip()!r}: {why}"


def _structure(kernel: Kernel, part: str, clean: str) -> list[str]:
    found, depth = [], 0
    for match in re.finditer(r"[{}]|TS_SHARED|\breturn\b", clean):
        token = match.group()
        depth += (token == "{") - (token == "}")
        why = None
        if token == "TS_SHARED" and part == "header":
            why = "shared memory cannot stand in a helper"
        elif token == "TS_SHARED" and depth:
            why = "shared memory must stand at the outermost level"
        elif token == "return" and part == "body":
            after = clean[match.start() :]
            if re.search(r"ts_(barrier|simd|shuffle|mma)", after):
                why = "return before a barrier or simd operation"
        if why:
            found.append(_at(kernel, part, clean, match.start(), token, why))
    return found


def _names(kernel: Kernel) -> list[str]:
    found = []
    header, body = strip_comments(kernel.header), strip_comments(kernel.body)
    for attribute in ATTRIBUTES:
        if attribute in header:
            found.append(f"{kernel.name} header: {attribute}: a helper cannot see it in Metal")
    for name in kernel.inputs:
        for suffix in MLX_SUFFIXES:
            if name + suffix in kernel.body:
                found.append(f"{kernel.name}: the text {name}{suffix} makes MLX add an argument")
    for word in ("grid_size", "grid_origin", "thread_execution_width"):
        if re.search(rf"\b{word}\b", body):
            found.append(f"{kernel.name}: {word} is a Metal attribute, not a variable")
    names = (*kernel.inputs, *kernel.outputs)
    if len(set(names)) != len(names):
        found.append(f"{kernel.name}: two arguments of one name")
    for helper in re.findall(r"TS_FN\s+\w+\s+(\w+)\s*\(", header):
        if not helper.startswith("ts_"):
            found.append(f"{kernel.name}: helper {helper} may clash with MLX: start it with ts_")
    for name in kernel.updates:
        if f"ts_writable({name})" not in body:
            found.append(f"{kernel.name}: {name} is declared updated and never made writable")
    return found
