"""``qwen3`` and ``qwen3moe``: Qwen 3, dense or with experts. Queries and keys are normed per
head."""

from __future__ import annotations

from contract.ir.graph import Graph
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.decoder import build_decoder
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Qwen 3 model."""
    return build_decoder(config, tensors, limits, query_key_norm=True)
