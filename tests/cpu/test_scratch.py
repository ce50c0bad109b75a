"""The scratch plan: nothing that lives at the same time shares a byte, everything is aligned."""

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.dtypes import F32
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.ir.scratch import ALIGNMENT, ScratchPlan, buffer_bytes, plan_scratch
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey

KEYS = st.builds(ShapeKey, st.integers(0, 70), st.integers(0, 5))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random chains and diamonds of additions and scalings over several widths."""
    builder = GraphBuilder("random")
    widths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3, unique=True))
    query = builder.request("query", "tokens", 4)
    made: dict[int, list[View]] = {}
    for width in widths:
        table = builder.buffer(f"w{width}", BufferKind.WEIGHT, F32, (9, width), "w")
        made[width] = [builder.emit(Opcode.EMBED, query=query, table=table)]
    for _ in range(draw(st.integers(0, 12))):
        pool = made[draw(st.sampled_from(widths))]
        a, b = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        pool.append(builder.emit(Opcode.ADD, a=a, b=b))
    return builder.build()


def lifetimes(graph: Graph) -> dict[str, range]:
    """First to last node that touches each scratch buffer, by looking at every node."""
    spans: dict[str, range] = {}
    for decl in graph.of_kind(BufferKind.SCRATCH):
        touching = [
            index
            for index, node in enumerate(graph.nodes)
            if any(view.buffer == decl.name for view in node.operands.values())
        ]
        spans[decl.name] = range(min(touching), max(touching) + 1)
    return spans


def conflicts(graph: Graph, plan: ScratchPlan, key: ShapeKey) -> list[tuple[str, str]]:
    """Pairs that are alive together and share bytes."""
    spans = lifetimes(graph)
    found = []
    for a in spans:
        for b in spans:
            if a >= b or not set(spans[a]) & set(spans[b]):
                continue
            first, second = sorted((plan.offsets[name], name) for name in (a, b))
            if first[0] + buffer_bytes(graph.buffers[first[1]], key) > second[0]:
                found.append((a, b))
    return found


@given(graph=graphs(), key=KEYS)
@settings(deadline=None)
def test_no_two_living_buffers_overlap(graph, key):
    """Whatever the graph and the sizes."""
    plan = plan_scratch(graph, key)
    assert set(plan.offsets) == set(lifetimes(graph))
    assert conflicts(graph, plan, key) == []


@given(graph=graphs(), key=KEYS)
@settings(deadline=None)
def test_offsets_are_aligned_and_inside_the_arena(graph, key):
    """Every buffer starts at a multiple of the alignment and ends before the arena does."""
    plan = plan_scratch(graph, key)
    for name, offset in plan.offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset + buffer_bytes(graph.buffers[name], key) <= plan.nbytes


@given(graph=graphs(), key=KEYS)
@settings(deadline=None, max_examples=30)
def test_plan_is_deterministic(graph, key):
    """The same graph and key give the same plan."""
    assert plan_scratch(graph, key) == plan_scratch(graph, key)


def chain(length: int) -> Graph:
    """A long chain of scalings."""
    builder = GraphBuilder("chain")
    table = builder.buffer("w", BufferKind.WEIGHT, F32, (9, 64), "w")
    x = builder.emit(Opcode.EMBED, query=builder.request("query", "tokens", 4), table=table)
    for _ in range(length):
        x = builder.emit(Opcode.SCALE, x=x, factor=2.0)
    return builder.build()


def test_chain_reuses_two_buffers():
    """Memory does not grow with depth."""
    key = ShapeKey(16, 1)
    assert plan_scratch(chain(40), key).nbytes == plan_scratch(chain(1), key).nbytes


def test_shared_bytes_are_found():
    """Negative control: a plan that puts everything at offset 0 is caught."""
    graph, key = chain(3), ShapeKey(16, 1)
    broken = ScratchPlan(dict.fromkeys(lifetimes(graph), 0), 4096)
    assert conflicts(graph, broken, key)
