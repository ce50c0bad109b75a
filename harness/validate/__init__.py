"""Every op of a model, on every tier, against the numpy definitions."""

from harness.validate.compare import Divergence
from harness.validate.histogram import ValueHistogram
from harness.validate.run import ValidationReport, Workload, validate

__all__ = ["Divergence", "Histogram", "Report", "Workload", "validate"]
