"""What a step costs on paper is what the simulated GPU counts."""

import pytest

from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.tools.performance import FAR, Card, PacketCost, Paper
from accel.packets.layouts import planes_bytes
from contract.ir.nodes import BufferKind
from contract.types import Request
from harness.amd_performance import DOCUMENT, MODELS, report
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner

LIMITS = Limits(1, 32, 2, step_tokens=2, step_rows=1)
LENGTH = 4


@pytest.fixture(scope="module")
def paper(tiny_model_path) -> Paper:
    """A step of one token."""
    return Paper(open_model(tiny_model_path).graph(LIMITS), 1, LENGTH)


@pytest.mark.soak
def test_instructions_are_those_a_step_executes(paper, open_amd, tiny_model_path):
    """As many launches, and but for what depends on data as many instructions."""
    kernel = FakeKernel()
    tier = open_amd(kernel, native=True)
    (queue,) = kernel.machine.gpu.queues.values()
    with ModelRunner(open_model(tiny_model_path), tier, LIMITS) as runner:
        engine = Engine(runner, EngineOptions(steps_ahead=1))
        engine.submit(Request(1, (7,), LENGTH, ignore_end=True))
        counts = []
        for _ in engine.run():
            counts.append((queue.processor.launches, queue.processor.instructions))
    (before, some), (after, more) = counts[-2:]
    costs = list(paper.costs())
    steps, rest = divmod(after - before, len(costs))
    assert rest == 0
    counted = steps * sum(cost.instructions for cost in costs)
    assert more - some == pytest.approx(counted, rel=0.1)


def test_bytes_of_products_are_those_of_the_weights(paper):
    """Each weight of a matrix is read once in a step."""
    products = [cost for cost in paper.costs() if cost.kernel.startswith("matmul")]
    matrices = [
        planes_bytes(decl) or decl.nbytes
        for decl in paper.graph.of_kind(BufferKind.WEIGHT)
        if len(decl.shape) == 2 and decl.name != "token_embd.weight"
    ]
    assert sum(cost.far for cost in products) == pytest.approx(sum(matrices), rel=0.05)
    assert {"weights", "state"} == FAR


COST = PacketCost("kernel", 64, 512, 8, 1 << 20, 1 << 24, 0, True)


def test_the_longest_of_three_counts():
    """Bytes, instructions or the instructions of a wave; then launching and waiting."""
    card = Card()
    limits = COST.limits(card)
    assert limits["memory"] == (1 << 24) / (640e9 * 0.8)
    assert limits["issue"] == (1 << 20) / (128 * 2.4e9)
    assert limits["latency"] == (1 << 20) / 512 * 5 / 2.4e9
    assert COST.seconds(card) == limits["memory"] + 2.3e-6
    few = PacketCost("kernel", 1, 4, 16, 4000, 64, 0, False)
    assert few.seconds(card) == 1000 * 5 / 2.4e9 + 0.3e-6


@pytest.mark.soak
def test_the_document_is_what_is_counted():
    """With the kernels of now; python -m harness.amd_performance --write renews it."""
    assert DOCUMENT.read_text() == "\n".join(report(MODELS, Card())) + "\n"
