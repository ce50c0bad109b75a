"""Model families by ``general.architecture``: each module turns a file into an IR graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from contract.errors import UnsupportedModel
from contract.ir.graph import Graph
from reference.model.config import ModelConfig
from reference.model.families import llama, qwen2, qwen3
from reference.model.families.tensors import Limits, ModelTensors

Family = Callable[[ModelConfig, ModelTensors, Limits], Graph]

FAMILIES: Mapping[str, Family] = {
    "llama": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def build_graph(config: ModelConfig, tensors: ModelTensors, limits: Limits) -> Graph:
    """The forward pass of the model. Raises UnsupportedModel for an unknown architecture."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise UnsupportedModel(
            tensors.path,
            "key general.architecture",
            f"is {config.architecture!r}",
            f"supported are {', '.join(FAMILIES)}",
        )
    graph = family(config, tensors, limits)
    tensors.reject_unused(config.architecture)
    return graph
