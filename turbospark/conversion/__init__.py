"""From a checkpoint to an install."""

from turbospark.conversion.run import Origin, convert

__all__ = ["Origin", "convert"]
