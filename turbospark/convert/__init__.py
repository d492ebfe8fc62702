"""From a checkpoint to an install."""

from turbospark.convert.run import Origin, convert

__all__ = ["Origin", "convert"]
