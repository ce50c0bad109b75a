"""How much prefill goes with decoding sequences: as much as the most urgent of their classes
bears."""

import pytest

from contract.types import QosClass, Request, Tenant
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner, StepSeconds
from reference.engine import Engine, EngineOptions
from reference.engine.scheduler import INTERVAL_RATIO
from reference.limits import Limits
from reference.observer import Observer, StepObservation
from reference.sched.tenants import Tenants

pytestmark = pytest.mark.usefixtures("finite_logits")

SECONDS = StepSeconds(fixed=10e-3, token=1e-4, attended=0.0, host=0.0)
CHUNK = 400
ALONE = SECONDS.fixed + 2 * SECONDS.token
"""A step in which two sequences decode."""


class Steps(Observer):
    """The prefill tokens of steps in which two sequences decode, and of those of one sequence."""

    def __init__(self) -> None:
        self.prefill: list[int] = []
        self.alone: list[int] = []

    def step(self, step: StepObservation) -> None:
        tokens = sorted(count for _, _, count in step.chunks)
        if len(tokens) == 1 and tokens[0] > 1:
            self.alone.append(tokens[0])
        if tokens[:2] == [1, 1]:
            self.prefill.append(sum(tokens[2:]))


def max_prefill(
    *classes: QosClass,
    beside: int | None = None,
    reads: QosClass = QosClass.BATCH,
    prompt: int = 900,
) -> int:
    """The largest prefill beside a decoding sequence of each of two ``classes``, once the engine
    knows what steps cost; ``beside`` is its ``chunk_while_decoding``, ``reads`` the class of the
    prompts of so many tokens."""
    clock, steps = VirtualClock(), Steps()
    tenants = [Tenant(n, f"t{n}", qos=qos) for n, qos in enumerate(classes)]
    reader = Tenant(len(tenants), "reader", qos=reads)
    limits = Limits(3, 1024, 3 * 64, step_tokens=CHUNK + 3, step_rows=3)
    engine = Engine(
        SimulatedRunner(limits, clock, seconds=SECONDS),
        EngineOptions(prefix_cache=False, chunk_while_decoding=beside),
        tenants=Tenants([*tenants, reader], clock=clock), clock=clock, observer=steps,
    )  # fmt: skip
    for tenant in tenants:
        engine.submit(Request(tenant.id, (tenant.id + 1,), 400, tenant=tenant.id, ignore_end=True))
    for number in range(10, 14 if prompt > 200 else 30):
        engine.submit(Request(number, (7,) * prompt, 1, tenant=reader.id, ignore_end=True))
    while engine.statistics.waiting or engine.statistics.running > 2:
        engine.step()
    return max(steps.prefill[len(steps.prefill) // 2 :])


@pytest.mark.parametrize(
    ("classes", "max_urgent"),
    [
        ((QosClass.INTERACTIVE, QosClass.STANDARD), QosClass.INTERACTIVE),
        ((QosClass.STANDARD, QosClass.BATCH), QosClass.STANDARD),
    ],
)
def test_the_most_urgent_class_decides(classes, max_urgent):
    spare = (INTERVAL_RATIO[max_urgent] - 1) * ALONE / SECONDS.token
    assert 0.8 * spare <= max_prefill(*classes) <= 1.05 * spare


@pytest.mark.parametrize(("reads", "most"), [(QosClass.BATCH, 70), (QosClass.STANDARD, 120)])
def test_only_prompts_of_lower_classes_are_spread(reads, most):
    """Three times what decoding takes leaves room for 204 tokens, a third of that for 68."""
    decode = QosClass.STANDARD, QosClass.STANDARD
    assert 0.9 * most <= max_prefill(*decode, reads=reads, prompt=120) <= most


def test_batch_work_waits_for_nobody():
    assert max_prefill(QosClass.BATCH, QosClass.BATCH) == CHUNK


def test_a_chunk_of_its_own_beside_decoding_sequences():
    """A prompt that nobody decodes beside is read by whole chunks all the same."""
    assert max_prefill(QosClass.BATCH, QosClass.BATCH, beside=100) == 100
    limits = Limits(1, 1024, 64, step_tokens=CHUNK + 1, step_rows=1)
    steps = Steps()
    engine = Engine(
        SimulatedRunner(limits, VirtualClock(), seconds=SECONDS),
        EngineOptions(chunk_while_decoding=100),
        observer=steps,
    )
    assert (engine.chunk_tokens, engine.chunk_while_decoding) == (CHUNK, 100)
    engine.submit(Request(1, (7,) * 900, 2, ignore_end=True))
    while not engine.idle:
        engine.step()
    assert steps.alone == [CHUNK, CHUNK, 900 - 2 * CHUNK]
