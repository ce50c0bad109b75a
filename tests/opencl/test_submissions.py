"""Steps under way together: each has its own inputs and outputs, and any number of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from accel.opencl.launcher import Mode
from accel.packets.footprint import MAPPED_OUTPUT_BYTES
from accel.packets.submissions import HostSlot
from contract.dtypes import F32
from contract.ir.graph import BufferKind, Graph, GraphBuilder
from contract.ir.inputs import InputCopy, input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Fence, Tier
from reference.cpu.tier import CpuTier
from tests.opencl.conftest import OpenTier

LARGEST = ShapeKey(64, 64)
WIDTH = 1200
"""Floats of a row: outputs of the largest step are above what is always brought to the host."""
WAYS = [
    *((mode, True) for mode in (Mode.PERSISTENT, Mode.LAUNCH)),
    (Mode.PERSISTENT, False),
    pytest.param(Mode.LAUNCH, False, marks=pytest.mark.soak),
]


def chained() -> Graph:
    """A convolution that goes on where the step before ended, and rows kept for later."""
    b = GraphBuilder("chained")
    x = b.buffer("x", BufferKind.REQUEST, F32, ("tokens", WIDTH))
    query, pairs = b.request("query", "tokens", 4), b.request("pairs", "rows", 2)
    weight = b.buffer("weight", BufferKind.WEIGHT, F32, (WIDTH, 3), source="weight")
    state = b.buffer("state", BufferKind.STATE, F32, (1, 2, WIDTH))
    memory = b.buffer("memory", BufferKind.STATE, F32, (LARGEST.tokens, WIDTH))
    product, folded = b.output("product", "tokens", WIDTH), b.output("folded", "tokens", WIDTH)
    b.emit(Opcode.SCALE, x=x, factor=3.0, y=product)
    conv = {"weight": weight, "query": query, "state": state, "history": 2}
    b.emit(Opcode.SSM_CONV1D, x=x, y=folded, **conv)
    b.emit(Opcode.COPY_ROWS, source=product, pairs=pairs, target=memory)
    return b.build()


GRAPH = chained()
LAYOUT = input_layout(GRAPH, LARGEST)
WEIGHT = np.random.default_rng(0).standard_normal((WIDTH, 3), np.float32).view(np.uint8)


def step_block(tokens: int, seed: int) -> np.ndarray:
    """Random values of tokens that go on with one sequence; one row of memory is moved."""
    rng = np.random.default_rng(seed)
    query = np.zeros((tokens, 4), np.int32)
    query[:, 2] = 100 + np.arange(tokens)
    arrays = {
        "x": rng.standard_normal((tokens, WIDTH), np.float32),
        "query": query,
        "pairs": np.array([[tokens - 1, 8 + seed % 3]], np.int32),
    }
    return pack_inputs(LAYOUT, ShapeKey(tokens, 1), arrays)


class Lowered:
    """The graph on one tier, its memory holding known values."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.buffers = {"weight": tier.upload(GRAPH.buffers["weight"], WEIGHT)}
        for name in ("state", "memory", "product", "folded"):
            nbytes = buffer_bytes(GRAPH.buffers[name], LARGEST)
            self.buffers[name] = tier.alloc(GRAPH.buffers[name], nbytes)
        values = np.random.default_rng(1).standard_normal((LARGEST.tokens, WIDTH), np.float32)
        tier.write(self.buffers["memory"], 0, values.reshape(-1).view(np.uint8))
        self.batch = tier.lower(GRAPH, self.buffers, LARGEST, LAYOUT)

    def submit(self, block: np.ndarray, *requested: str) -> Fence:
        return self.tier.submit(self.batch, block, requested)

    def outputs(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Both outputs of a step that is waited for."""
        fence = self.submit(block, "product", "folded")
        self.tier.wait(fence)
        return dict(fence.outputs)

    def states(self) -> list[np.ndarray]:
        buffers = [self.buffers[name] for name in ("state", "memory")]
        return [self.tier.read(buffer, 0, buffer.nbytes) for buffer in buffers]


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(("mode", "shared"), WAYS, ids=str)
def test_queued_steps_keep_their_inputs_and_outputs(
    open_opencl: OpenTier, mode: Mode, shared: bool
) -> None:
    """Inputs are overwritten as soon as they were submitted, and nothing is waited for in between.

    Outputs and states are those of the CPU tier, which runs one step after the other."""
    tier = open_opencl(mode=mode, shared_addresses=shared)
    assert GRAPH.buffers["product"].kind is BufferKind.OUTPUT
    assert buffer_bytes(GRAPH.buffers["product"], LARGEST) > MAPPED_OUTPUT_BYTES
    late, exact = Lowered(tier), Lowered(CpuTier())
    for first in range(3):
        in_flight, expected = [], []
        for number, tokens in enumerate((LARGEST.tokens, 5, 1, 17)):
            block = step_block(tokens, seed=4 * first + number)
            in_flight.append(late.submit(block, "product", "folded"))
            expected.append(exact.outputs(block))
            block[:] = 0xFF
        for fence, outputs in zip(reversed(in_flight), reversed(expected), strict=True):
            tier.wait(fence)
            assert same(fence.outputs, outputs)
    for got, requested in zip(late.states(), exact.states(), strict=True):
        assert np.array_equal(got, requested)


def test_inputs_that_are_read_late_are_noticed(
    open_opencl: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without a snapshot the steps meet what the host wrote since."""
    lowered = Lowered(open_opencl())
    block = step_block(LARGEST.tokens, seed=2)
    expected = Lowered(CpuTier()).outputs(block)
    held = HostSlot(InputCopy(step_block(LARGEST.tokens, seed=1)))
    monkeypatch.setattr(lowered.tier._submissions, "_free_slots", lambda batch: [held])
    monkeypatch.setattr(InputCopy, "update", lambda self, inputs, rows=None: None)
    assert not same(lowered.outputs(block), expected)


@pytest.mark.parametrize("shared", [True, False])
def test_outputs_outlive_later_steps(open_opencl: OpenTier, shared: bool) -> None:
    """What a fence holds is its own; the buffer itself shows the last step when it is mapped."""
    lowered, exact = Lowered(open_opencl(shared_addresses=shared)), Lowered(CpuTier())
    block = step_block(3, seed=1)
    fence = lowered.submit(block, "product")
    lowered.tier.wait(fence)
    first = exact.outputs(block)["product"]
    for seed in (2, 3):
        block = step_block(4, seed)
        lowered.tier.wait(lowered.submit(block))
        expected = exact.outputs(block)["product"]
        mapped = lowered.tier.map(lowered.buffers["product"])
        assert np.array_equal(mapped[: expected.size], expected)
    assert np.array_equal(fence.outputs["product"], first)


def test_a_step_of_nothing_wants_nothing(open_opencl: OpenTier) -> None:
    """Without a token no op has anything to do, and wanted outputs are empty."""
    lowered = Lowered(open_opencl())
    outputs = lowered.outputs(pack_inputs(LAYOUT, ShapeKey(0, 0), {}))
    assert [array.size for array in outputs.values()] == [0, 0]


def test_a_step_beyond_the_form_is_refused(open_opencl: OpenTier) -> None:
    """Its scratch memory would be overrun."""
    lowered = Lowered(open_opencl())
    block = step_block(2, seed=1)
    block[:4].view(np.int32)[0] = LARGEST.tokens + 1
    with pytest.raises(ValueError, match="at most"):
        lowered.submit(block)


def test_snapshots_are_used_again(open_opencl: OpenTier) -> None:
    """Memory for inputs is as much as steps were under way at once, however many follow."""
    lowered = Lowered(open_opencl())
    tier = lowered.tier
    before = tier.allocated_bytes
    for _ in range(5):
        tier.wait(lowered.submit(step_block(2, seed=1)))
    assert tier.allocated_bytes == before + LAYOUT.nbytes * tier.shares_memory


def test_waiting_again_teaches_nothing_of_a_steps_time(open_opencl: OpenTier) -> None:
    """Else the host would think steps take no time, and ask all the while whether one is done."""
    lowered = Lowered(open_opencl())
    fence = lowered.submit(step_block(LARGEST.tokens, seed=1))
    lowered.tier.wait(fence)
    fence.batch.pace.seconds = 1.0
    lowered.tier.wait(fence)
    assert fence.batch.pace.seconds == 1.0
