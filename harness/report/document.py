"""The report on one model, as JSON values."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from contract.ir import analysis
from contract.ir.cost import Cost, graph_cost
from contract.ir.export import cost_fields, to_document
from contract.ir.nodes import Graph
from contract.ir.prune_rows import prune_rows
from contract.ir.scratch import plan_scratch
from contract.shape_key import ShapeKey

DECODE = ShapeKey(1, 1)
PROMPT_TOKENS = 512
"""Prompt tokens of the counted prefill, or fewer for a shorter context."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The counted step, the context its query tokens attend to, and the machine of the estimate."""

    key: ShapeKey
    context: int
    machine: analysis.Machine


def model_document(
    label: str, architecture: str, graph: Graph, assumptions: Assumptions
) -> dict[str, Any]:
    """The document of ``contract.ir.export`` with further keys.

    Added keys: ``model``, ``architecture``, ``layers`` (one object per layer), ``parameters``,
    ``weights`` (by storage type), ``scratch_bytes``, ``decode`` (one token: bytes by kind of
    buffer, and FLOPs), ``prefill`` (a prompt of ``tokens``: FLOPs), ``roles`` (nodes grouped over
    the layers) and ``critical_path`` (seconds estimated for ``machine``)."""
    key, context, machine = assumptions.key, assumptions.context, assumptions.machine
    costs = analysis.node_costs(graph, key, context)
    storage = analysis.weight_storage(graph)
    return {
        "model": label,
        "architecture": architecture,
        "layers": [asdict(kind) for kind in analysis.layer_kinds(graph)],
        "parameters": sum(row.elements for row in storage),
        "weights": [
            {
                "type": row.dtype,
                "tensors": row.tensors,
                "elements": row.elements,
                "bytes": row.nbytes,
            }
            for row in storage
        ],
        "scratch_bytes": plan_scratch(graph, key).nbytes,
        "decode": _decode(graph, context),
        "prefill": _prefill(graph, context),
        "roles": [
            {
                "role": share.name,
                "opcode": share.opcode,
                "nodes": share.nodes,
                **cost_fields(share.cost),
            }
            for share in analysis.role_mix(graph, costs)
        ],
        "critical_path": _critical_path(graph, costs, machine),
        "machine": asdict(machine),
        **to_document(graph, key, context, costs),
    }


def _decode(graph: Graph, context: int) -> dict[str, Any]:
    """Counts of one token at the end of the context."""
    moved = analysis.step_bytes(graph, DECODE, context)
    return {
        "context": context,
        "bytes": asdict(moved),
        "bytes_per_token": moved.total,
        "flops_per_token": graph_cost(graph, DECODE, context).flops,
    }


def _prefill(graph: Graph, context: int) -> dict[str, Any]:
    """Counts of a prompt from position 0: its tokens attend to half of it on average; one row of
    logits."""
    tokens = min(PROMPT_TOKENS, context)
    key = ShapeKey(tokens, 1)
    work = graph_cost(prune_rows(graph, key), key, (tokens + 1) // 2)
    return {"tokens": tokens, "flops": work.flops, "flops_per_token": work.flops // tokens}


def _critical_path(
    graph: Graph, costs: Sequence[Cost], machine: analysis.Machine
) -> dict[str, Any]:
    path = analysis.critical_path(graph, costs, machine)
    return {
        "estimate": "each node takes the longer of bytes / bandwidth and FLOPs / peak",
        "nodes": [graph.nodes[index].name for index in path.nodes],
        "seconds": path.seconds,
        "serial_seconds": path.serial_seconds,
        "memory_bound_seconds": sum(
            machine.seconds(costs[index])
            for index in path.nodes
            if costs[index].intensity <= machine.ridge
        ),
        "parts": [asdict(part) for part in analysis.fold_path(graph, path, costs, machine)],
    }
