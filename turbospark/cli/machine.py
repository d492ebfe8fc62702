"""What a figure was measured on: machine, back end, versions.

Knows how to ask the operating system. Does not know models.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from turbospark import __version__
from turbospark.kernels.choices import backend
from turbospark.sizing import physical_memory


def machine(device: str) -> dict[str, Any]:
    """The machine, with the GPU where that is what runs the model."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": physical_memory(),
        "backend": backend(mx.Device(getattr(mx, device))),
        "gpu": gpu_name() if device == "gpu" else None,
    }


def versions() -> dict[str, str]:
    """Versions of everything that moves a figure."""
    found = {"turbospark": __version__, "python": platform.python_version()}
    for name in ("mlx", "numpy", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def processor() -> str:
    """The processor's name as the system tells it."""
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        return found or platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def gpu_name() -> str:
    """The GPU's name as MLX tells it."""
    info = mx.device_info(mx.Device(mx.gpu))
    return str(info.get("device_name", "unknown"))


def peak_resident_bytes() -> int:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
