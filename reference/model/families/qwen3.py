"""``qwen3``: dense Qwen 3. Rotary pairs are halves; queries and keys are normed per head."""

from __future__ import annotations

from contract.ir.graph import Graph
from reference.model.config import ModelConfig
from reference.model.families.decoder import Variant, build_decoder
from reference.model.families.tensors import Limits, ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Qwen 3 model."""
    return build_decoder(config, tensors, limits, Variant(neox=True, query_key_norm=True))
