"""Validation: every op of a model, on every tier, compared with the numpy definitions."""

from harness.validate.compare import Divergence
from harness.validate.histogram import Histogram
from harness.validate.run import Report, Workload, validate

__all__ = ["Divergence", "Histogram", "Report", "Workload", "validate"]
