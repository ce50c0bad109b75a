"""A model's hyperparameters, read from GGUF metadata and checked before the graph is built."""

from reference.model.config.read import read_config
from reference.model.config.records import DeltaNet, Experts, ModelConfig, Rope

__all__ = ["DeltaNet", "Experts", "ModelConfig", "Rope", "read_config"]
