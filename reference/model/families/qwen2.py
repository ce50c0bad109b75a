"""``qwen2``: Qwen 2 and 2.5. Rotary pairs are (m, m + n/2); queries, keys and values have a
bias."""

from __future__ import annotations

from contract.ir.graph import Graph
from reference.limits import Limits
from reference.model.config import ModelConfig
from reference.model.families.decoder import build_decoder
from reference.model.families.tensors import ModelTensors


def build(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The graph of a Qwen 2 model."""
    return build_decoder(config, tensors, limits, query_key_norm=False)
