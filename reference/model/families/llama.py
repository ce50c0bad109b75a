"""``llama``: Llama 2 and 3, SmolLM, Mistral. Rotary pairs are interleaved."""

from __future__ import annotations

from contract.ir.graph import Graph
from reference.model.config import ModelConfig
from reference.model.families.decoder import Variant, build_decoder
from reference.model.families.tensors import Limits, ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Llama model."""
    return build_decoder(config, tensors, limits, Variant(neox=False))
