"""Figures derived from a graph: bytes and FLOPs by opcode, kinds of layers, critical path.

They follow from ``contract.ir.cost`` and the data flow; nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from contract.ir.cost import Cost, cost, traffic
from contract.ir.flow import data_flow
from contract.ir.nodes import LAYER, BufferKind, Graph, Node, layer_of
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey

ANY_LAYER = "[*]"
"""Replaces the layer number in a name that several layers share."""


@dataclass(frozen=True, slots=True)
class Share:
    """A group of nodes and the sum of their costs. ``opcode`` is the name of their opcode."""

    name: str
    opcode: str
    nodes: int
    cost: Cost


def op_mix(graph: Graph, costs: Sequence[Cost]) -> tuple[Share, ...]:
    """Group the nodes by opcode, most bytes first. ``costs`` has one entry per node."""
    return _shares(graph, costs, [node.opcode.name for node in graph.nodes])


def role_mix(graph: Graph, costs: Sequence[Cost]) -> tuple[Share, ...]:
    """Group the nodes by their role in a layer, over all layers, most bytes first."""
    return _shares(graph, costs, [LAYER.sub(ANY_LAYER, node.name, 1) for node in graph.nodes])


def _shares(graph: Graph, costs: Sequence[Cost], names: Sequence[str]) -> tuple[Share, ...]:
    found: dict[tuple[str, str], Share] = {}
    for node, node_cost, name in zip(graph.nodes, costs, names, strict=True):
        key = (name, node.opcode.name)
        known = found.get(key, Share(*key, 0, Cost()))
        found[key] = Share(*key, known.nodes + 1, known.cost + node_cost)
    return tuple(sorted(found.values(), key=lambda s: (-s.cost.bytes_moved, s.name, s.opcode)))


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes a step moves, by the kind of buffer that holds them.

    ``weights`` counts tensors of the file, ``kv`` the pages of keys and values, ``state`` every
    other state that outlives the step, ``activations`` the rest: scratch, step inputs, tables,
    outputs."""

    weights: int = 0
    kv: int = 0
    state: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Bytes read and written by the step."""
        return self.weights + self.kv + self.state + self.activations


def step_bytes(graph: Graph, key: ShapeKey, context: int) -> StepBytes:
    """The bytes of ``graph_cost`` by the kind of buffer that holds them."""
    sums = {"weights": 0, "kv": 0, "state": 0, "activations": 0}
    for node in graph.nodes:
        for operand, moved in traffic(node, graph, key, context).items():
            sums[_holder(graph, node, operand)] += moved.bytes_read + moved.bytes_written
    return StepBytes(**sums)


def _holder(graph: Graph, node: Node, operand: str) -> str:
    kind = graph.buffers[node.operands[operand].buffer].kind
    if kind is BufferKind.WEIGHT:
        return "weights"
    if kind is BufferKind.STATE:
        return "kv" if operand == "kv" else "state"
    return "activations"


@dataclass(frozen=True, slots=True)
class Storage:
    """The weights of one storage type: the number of tensors, their elements and their bytes."""

    dtype: str
    tensors: int
    elements: int
    nbytes: int


def weight_storage(graph: Graph) -> tuple[Storage, ...]:
    """Group the weights by storage type, most bytes first; a tensor that two buffers share counts
    once."""
    found: dict[str, Storage] = {}
    weights = {decl.source or decl.name: decl for decl in graph.of_kind(BufferKind.WEIGHT)}
    for decl in weights.values():
        elements = 1
        for dim in decl.shape:
            assert isinstance(dim, int), f"{decl.name}: the shape of a weight has no symbols"
            elements *= dim
        known = found.get(decl.dtype.name, Storage(decl.dtype.name, 0, 0, 0))
        found[decl.dtype.name] = Storage(
            known.dtype,
            known.tensors + 1,
            known.elements + elements,
            known.nbytes + buffer_bytes(decl, ShapeKey(1, 1)),
        )
    return tuple(sorted(found.values(), key=lambda row: (-row.nbytes, row.dtype)))


class Mixer(StrEnum):
    """The way a layer combines information of different tokens."""

    FULL = "full attention"
    SLIDING = "sliding attention"
    DELTA_NET = "delta net"
    NONE = "no mixer"


class FeedForward(StrEnum):
    """The way a layer transforms each token by itself."""

    DENSE = "dense"
    MOE = "MoE"
    MOE_AND_DENSE = "MoE and dense"
    NONE = "no feed-forward"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The kind of one layer. ``window`` is in positions, those of a chunk if below 0; 0 is all."""

    layer: int
    mixer: Mixer
    feed_forward: FeedForward
    window: int


ATTENTION = (Opcode.FLASH_ATTN, Opcode.FLASH_ATTN_BATCHED)
EXPERTS = (Opcode.MOE_GATE_UP, Opcode.MOE_DOWN_ACC)
SIGMOID = 2
"""SWIGLU's ``activation`` when it gates attention's output, which is not a feed-forward."""


def layer_kinds(graph: Graph) -> tuple[LayerKind, ...]:
    """The kind of each layer, derived from the opcodes of its nodes, in order of layers."""
    layers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        layer = layer_of(node.name)
        if layer is not None:
            layers.setdefault(layer, []).append(node)
    return tuple(_layer_kind(layer, nodes) for layer, nodes in sorted(layers.items()))


def _layer_kind(layer: int, nodes: Sequence[Node]) -> LayerKind:
    windows = [int(node.params["window"]) for node in nodes if node.opcode in ATTENTION]
    if windows:
        mixer = Mixer.SLIDING if windows[0] else Mixer.FULL
    elif any(node.opcode is Opcode.SSM_DELTA_NET for node in nodes):
        mixer = Mixer.DELTA_NET
    else:
        mixer = Mixer.NONE
    experts = any(node.opcode in EXPERTS for node in nodes)
    dense = any(
        node.opcode is Opcode.XIELU
        or (node.opcode is Opcode.SWIGLU and node.params["activation"] != SIGMOID)
        for node in nodes
    )
    feed_forward = {
        (False, False): FeedForward.NONE,
        (False, True): FeedForward.DENSE,
        (True, False): FeedForward.MOE,
        (True, True): FeedForward.MOE_AND_DENSE,
    }[experts, dense]
    return LayerKind(layer, mixer, feed_forward, windows[0] if windows else 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine an estimate assumes: bytes and FLOPs per second, both above 0."""

    bytes_per_second: float
    flops_per_second: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic, not memory, limits a node's speed."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, work: Cost) -> float:
        """Roofline estimate: the longer of the time to move the bytes and the time to compute the
        FLOPs."""
        return max(work.bytes_moved / self.bytes_per_second, work.flops / self.flops_per_second)


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The longest chain of nodes in which each reads what the one before it wrote.

    ``nodes`` are indices in execution order. ``serial_seconds`` is the time of all nodes one by
    one."""

    nodes: tuple[int, ...]
    seconds: float
    serial_seconds: float


def critical_path(graph: Graph, costs: Sequence[Cost], machine: Machine) -> CriticalPath:
    """The longest path of the data flow by estimated seconds; of equal paths the earliest
    node's."""
    times = [machine.seconds(node_cost) for node_cost in costs]
    finish: list[float] = []
    before: list[int | None] = []
    for time, flows in zip(times, data_flow(graph).reads, strict=True):
        sources = sorted(flow.source for flow in flows if flow.source is not None)
        latest = max(sources, key=lambda source: finish[source], default=None)
        before.append(latest)
        finish.append(time + (0.0 if latest is None else finish[latest]))
    if not finish:
        return CriticalPath((), 0.0, 0.0)
    path = [max(range(len(finish)), key=lambda index: finish[index])]
    while (previous := before[path[-1]]) is not None:
        path.append(previous)
    return CriticalPath(tuple(reversed(path)), finish[path[0]], sum(times))


@dataclass(frozen=True, slots=True)
class PathPart:
    """Part of a path: nodes of the same opcodes in each layer of ``layers``; () means outside all
    layers."""

    layers: tuple[int, ...]
    opcodes: tuple[str, ...]
    seconds: float


def fold_path(
    graph: Graph, path: CriticalPath, costs: Sequence[Cost], machine: Machine
) -> tuple[PathPart, ...]:
    """The path by layers, in path order; layers with the same opcodes on the path are one part."""
    folded: dict[tuple[object, tuple[str, ...]], PathPart] = {}
    stretches = groupby(path.nodes, key=lambda index: layer_of(graph.nodes[index].name))
    for position, (layer, members) in enumerate(stretches):
        nodes = list(members)
        opcodes = tuple(graph.nodes[index].opcode.name for index in nodes)
        # Nodes outside the layers stay in order: before, between or after them.
        key = (f"outside {position}" if layer is None else "layer", opcodes)
        known = folded.get(key, PathPart((), opcodes, 0.0))
        seconds = sum(machine.seconds(costs[index]) for index in nodes)
        layers = known.layers if layer is None else (*known.layers, layer)
        folded[key] = PathPart(layers, opcodes, known.seconds + seconds)
    return tuple(folded.values())


def node_costs(graph: Graph, key: ShapeKey, context: int) -> tuple[Cost, ...]:
    """The cost of every node, in order. ``context`` is that of ``contract.ir.cost.cost``."""
    return tuple(cost(node, graph, key, context) for node in graph.nodes)
