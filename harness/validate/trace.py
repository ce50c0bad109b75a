"""Makes the intermediate values of a graph readable on any tier.

Scratch buffers share memory, so most are overwritten within the step. A graph that declares them
OUTPUT computes the same bits, and every tier can return them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from contract.arrays import Array
from contract.ir.graph import BufferKind, Graph, View
from contract.ir.nodes import layer_of
from contract.ir.scratch import buffer_bytes, concrete_shape
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import Access
from reference.cpu.tier import NUMPY_DTYPES
from reference.limits import Limits
from reference.model.open import Model
from reference.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Site:
    """A result that can be read after a step: operand ``operand`` of node number ``node``.

    A buffer updated in place is read after its last update and belongs to that node."""

    node: int
    operand: str
    view: View


@dataclass(frozen=True)
class TracedModel(Model):
    """A model whose graphs keep the named scratch buffers as outputs."""

    traced: frozenset[str]

    def graph(self, limits: Limits) -> Graph:
        """The graph with ``traced`` scratch buffers declared OUTPUT."""
        return with_outputs(super().graph(limits), self.traced)


def with_outputs(graph: Graph, names: frozenset[str]) -> Graph:
    """``graph`` with the scratch buffers ``names`` declared OUTPUT and nothing else changed."""
    buffers = {
        name: replace(decl, kind=BufferKind.OUTPUT) if name in names else decl
        for name, decl in graph.buffers.items()
    }
    return replace(graph, buffers=MappingProxyType(buffers))


def result_sites(graph: Graph) -> tuple[Site, ...]:
    """Every readable result, in execution order."""
    sites: list[Site] = []
    for number, node in enumerate(graph.nodes):
        for operand in TABLE[node.opcode].outputs:
            view = node.operands.get(operand.name)
            if view is None:
                continue
            if operand.access is Access.UPDATE:
                sites = [site for site in sites if not _overlap(site.view, view)]
            sites.append(Site(number, operand.name, view))
    return tuple(sites)


def residual_sites(graph: Graph) -> Mapping[int, Site]:
    """The hidden state after each layer: the last scratch result of the layer's nodes."""
    found: dict[int, Site] = {}
    for site in result_sites(graph):
        layer = layer_of(graph.nodes[site.node].name)
        if layer is not None and graph.buffers[site.view.buffer].kind is not BufferKind.STATE:
            found[layer] = site
    return found


def scratch_of(graph: Graph, layers: frozenset[int | None]) -> frozenset[str]:
    """The scratch buffers that nodes of ``layers`` write; None means the nodes outside layers."""
    return frozenset(
        site.view.buffer
        for site in result_sites(graph)
        if graph.buffers[site.view.buffer].kind is BufferKind.SCRATCH
        and layer_of(graph.nodes[site.node].name) in layers
    )


def layer_groups(
    graph: Graph, layers: Sequence[int], key: ShapeKey, budget_bytes: int
) -> list[frozenset[int | None]]:
    """Split ``layers`` into groups that can be traced in one step each: the scratch buffers of a
    group need at most ``budget_bytes``, or it is a single layer.

    The nodes outside the layers, None, belong to the first group."""
    groups: list[set[int | None]] = [{None}]
    used = _traced_bytes(graph, frozenset({None}), key)
    for layer in layers:
        nbytes = _traced_bytes(graph, frozenset({layer}), key)
        if used + nbytes > budget_bytes and groups[-1] != {None}:
            groups.append(set())
            used = 0
        groups[-1].add(layer)
        used += nbytes
    return [frozenset(group) for group in groups]


def observe(runner: ModelRunner, view: View, key: ShapeKey) -> Array:
    """The contents of ``view`` after a step in the shape bucket ``key``: an array that the next
    step overwrites. Of types that numpy does not have it holds the bytes of each row."""
    decl = runner.graph.buffers[view.buffer]
    data = runner.buffer(view.buffer).reshape(-1)[: buffer_bytes(decl, key)]
    shape = concrete_shape(decl, key)
    if decl.dtype not in NUMPY_DTYPES:
        return data.reshape(-1, decl.dtype.row_bytes(shape[-1]))
    array = data.view(NUMPY_DTYPES[decl.dtype]).reshape(shape)
    return array if view.columns is None else array[..., slice(*view.columns)]


def _traced_bytes(graph: Graph, layers: frozenset[int | None], key: ShapeKey) -> int:
    return sum(buffer_bytes(graph.buffers[name], key) for name in scratch_of(graph, layers))


def _overlap(a: View, b: View) -> bool:
    if a.buffer != b.buffer:
        return False
    if a.columns is None or b.columns is None:
        return True
    return a.columns[0] < b.columns[1] and b.columns[0] < a.columns[1]
