"""Runs kernel launches on the CPU, checks their rules and their Metal text. Test tooling."""

from emulator.emulate import Emulated, EmulationError, emulate, float64, sparse
from emulator.lint import lint

__all__ = ["Emulated", "EmulationError", "emulate", "float64", "lint", "sparse"]
