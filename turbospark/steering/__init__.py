"""Directional steering: edits of the residual stream along directions from control-vector files."""

from turbospark.policies import SteeringMode
from turbospark.steering.edit import Steering
from turbospark.steering.extract import extract
from turbospark.steering.files import ControlVectorInfo
from turbospark.steering.support import unsupported_reason
from turbospark.steering.vectors import SteeringPolicy, SteeringSet, SteeringVector

__all__ = [
    "ControlVectorInfo",
    "Steering",
    "SteeringMode",
    "SteeringPolicy",
    "SteeringSet",
    "SteeringVector",
    "extract",
    "unsupported_reason",
]
