"""The engine: runs many requests on one ``ModelRunner``. Each module has one subject."""

from reference.engine.engine import Engine
from reference.engine.options import EngineOptions
from reference.engine.sequence import LogitsSink, MaskProvider
from reference.engine.statistics import EngineStatistics

__all__ = ["Engine", "EngineOptions", "EngineStatistics", "LogitsSink", "MaskProvider"]
