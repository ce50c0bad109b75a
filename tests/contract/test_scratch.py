"""The scratch plan: buffers alive at the same time never share bytes, dead ones do."""

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.dtypes import F32
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.scratch import ALIGNMENT, buffer_bytes, plan_scratch
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.contract.graphs import decoder


def lifetimes(graph: Graph) -> dict[str, set[int]]:
    """The nodes during which each scratch buffer must keep its bytes."""
    touched: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        for view in node.operands.values():
            if graph.buffers[view.buffer].kind is BufferKind.SCRATCH:
                touched.setdefault(view.buffer, []).append(index)
    return {name: set(range(min(at), max(at) + 1)) for name, at in touched.items()}


def chain(data: st.DataObject) -> Graph:
    """Random sums of earlier values: lifetimes of every length."""
    b = GraphBuilder("chain")
    values = [b.buffer("in", BufferKind.REQUEST, F32, ("tokens", 24))]
    for _ in range(data.draw(st.integers(1, 12))):
        pick = st.sampled_from(values)
        values.append(b.emit(Opcode.ADD, a=data.draw(pick), b=data.draw(pick)))
    b.emit(Opcode.SCALE, x=values[-1], factor=1.0, y=b.output("out", "tokens", 24))
    return b.build()


@settings(max_examples=60)
@given(data=st.data(), tokens=st.integers(1, 40))
def test_live_buffers_do_not_overlap(data, tokens):
    graph, key = chain(data), ShapeKey(tokens, 1)
    plan = plan_scratch(graph, key)
    alive = lifetimes(graph)
    ranges = {
        name: (offset, offset + buffer_bytes(graph.buffers[name], key))
        for name, offset in plan.offsets.items()
    }
    assert set(ranges) == set(alive)
    for name, (start, stop) in ranges.items():
        assert start % ALIGNMENT == 0
        assert stop <= plan.nbytes
        for other, (other_start, other_stop) in ranges.items():
            if other != name and alive[name] & alive[other]:
                assert stop <= other_start or other_stop <= start


def test_memory_does_not_grow_with_the_layers():
    key = ShapeKey(8, 8)
    assert plan_scratch(decoder(8), key).nbytes == plan_scratch(decoder(2), key).nbytes
