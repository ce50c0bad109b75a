"""``llama``: Llama 1 to 3, Mistral, Mixtral and relatives. Rotary pairs are adjacent channels."""

from __future__ import annotations

from contract.ir.graph import Graph
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.decoder import build_decoder
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Llama model."""
    return build_decoder(config, tensors, limits, query_key_norm=False)
