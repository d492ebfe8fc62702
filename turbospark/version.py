"""The version of the package, for pyproject.toml, installs and receipts alike."""

__version__ = "0.1.0"
