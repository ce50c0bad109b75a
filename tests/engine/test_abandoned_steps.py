"""Steps that are abandoned because all their requests leave: others go on with every bit, and
nobody finds what was not computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.types import FinishReason, Request
from harness.simulation import disk
from harness.simulation.clock import VirtualClock
from harness.simulation.disk import SimulatedDisk
from harness.simulation.history import solo_run
from harness.simulation.invariants import Violation
from harness.simulation.runner import SimulatedRunner
from harness.synth.sizes import sized_spec
from harness.synth.write import write_synthetic
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.engine.drafter import Drafter
from reference.engine.scheduler import Scheduler
from reference.limits import Limits
from reference.runner import ModelRunner
from reference.sched.drafts import DraftPolicy
from tests.named_tiers import quick_tier, runner_on

TIERS = {"cpu": CpuTier, "native": quick_tier}
LIMITS = Limits(2, 96, 16, step_tokens=26, step_rows=8, saved_states=4, state_interval=16)
PROMPT = tuple((7 * n) % 251 for n in range(85))
LEAVES = Request(1, PROMPT, 9, ignore_end=True)
STAYS = Request(2, PROMPT[:50], 7, ignore_end=True)


@pytest.fixture(scope="module", params=["qwen3", "qwen35"])
def model_path(request, tmp_path_factory) -> Path:
    """A model with attention alone, and a hybrid."""
    path = tmp_path_factory.mktemp("abandoned") / "model.gguf"
    write_synthetic(path, sized_spec("tiny", architecture=request.param))
    return path


@pytest.fixture(scope="module", params=TIERS)
def any_runner(request, model_path) -> Iterator[ModelRunner]:
    with runner_on(model_path, TIERS[request.param], LIMITS) as runner:
        yield runner


def engine_on(runner: Any, steps_ahead: int | None = None, **more: Any) -> Engine:
    return Engine(runner, EngineOptions(chunk_tokens=16, steps_ahead=steps_ahead), **more)


def tokens_of(engine: Engine, request: Request) -> list[int]:
    engine.submit(request)
    return [event.token for event in engine.run()]


@contextmanager
def said_within(runner: ModelRunner, number: int, say: Callable[[], Any]) -> Iterator[None]:
    """``say`` is called when the tier begins the call of this number, of those in which it computes
    or waits."""
    tier, left = runner.tier, number
    owner, name = (CpuTier, "call_of") if isinstance(tier, CpuTier) else (type(tier), "wait")
    inner = getattr(owner, name)

    def noted() -> None:
        nonlocal left
        left -= 1
        if not left:
            say()

    def call_of(self: Any, *arguments: Any) -> Any:
        call = inner(self, *arguments)
        return lambda: (noted(), call())

    def wait(self: Any, *arguments: Any) -> None:
        noted()
        inner(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call_of if name == "call_of" else wait)
        yield


@pytest.mark.parametrize("number", [1, 3, 61])
def test_another_request_is_computed_as_if_alone(any_runner, number):
    """Its prompt begins like the one that was being read, and it finds all that was computed."""
    leaves, stays = (replace(one, prompt=one.prompt[:40]) for one in (LEAVES, STAYS))
    expected = [tokens_of(engine_on(any_runner), request) for request in (stays, leaves)]
    engine = engine_on(any_runner)
    for lowered in any_runner._lowerings:
        lowered._forget()
    engine.submit(leaves)
    with said_within(any_runner, number, lambda: engine.will_cancel([leaves.id])):
        events = [event for _ in range(5) for event in engine.step()]
    engine.cancel(leaves.id)
    assert engine.idle
    assert not any(event.finish_reason for event in events)
    engine.memory.check([])
    assert [tokens_of(engine, request) for request in (stays, leaves)] == expected
    engine.memory.check([])


def simulated(
    steps_ahead: int, *, recurrent: bool = False, clock: VirtualClock | None = None, **more: Any
) -> tuple[Engine, SimulatedRunner]:
    clock = clock or VirtualClock()
    states = 4 * recurrent
    limits = Limits(
        2, 96, 16, step_tokens=26, saved_states=states, state_interval=16, draft_tokens=4
    )
    runner = SimulatedRunner(limits, clock, recurrent=recurrent, abandons=True)
    return engine_on(runner, steps_ahead, clock=clock, **more), runner


@pytest.mark.parametrize("steps_ahead", [1, 2, 3])
@pytest.mark.parametrize("recurrent", [False, True])
def test_who_found_lost_pages_waits_again(finite_logits, steps_ahead, recurrent, monkeypatch):
    """It was admitted behind the steps in flight and is in none of them. Were it to go on, it would
    read what was never written."""
    engine, runner = simulated(steps_ahead, recurrent=recurrent)

    def leave_behind_another() -> list[int]:
        engine.submit(LEAVES)
        engine.step()
        engine.submit(STAYS)
        runner.meanwhile["collect"].append(lambda: engine.will_cancel([LEAVES.id]))
        engine.step()
        engine.cancel(LEAVES.id)
        return [event.token for event in engine.run()]

    assert leave_behind_another() == [event.token for event in solo_run(STAYS, 96).events]
    assert runner.abandoned
    assert engine.statistics.preempted == 1
    engine.memory.check([])
    engine, runner = simulated(steps_ahead, recurrent=recurrent)
    monkeypatch.setattr(Scheduler, "preempt", lambda self, sequence, *, published=True: None)
    with pytest.raises(Violation):
        leave_behind_another()


def test_steps_with_others_are_finished(finite_logits):
    """A request that leaves ends between two steps as long as someone else needs them."""
    engine, runner = simulated(1)
    engine.submit(STAYS)
    tokens = [event for _ in range(4) for event in engine.step()]
    engine.submit(LEAVES)
    tokens += engine.step()
    runner.meanwhile["collect"].append(lambda: engine.will_cancel([LEAVES.id]))
    tokens += engine.step()
    assert (runner.abandoned, engine.progress(LEAVES.id) > 0) == (0, True)
    engine.cancel(LEAVES.id)
    tokens += engine.run()
    expected = [event.token for event in solo_run(STAYS, 96).events]
    assert [event.token for event in tokens if event.request_id == STAYS.id] == expected


def test_what_was_computed_counts(finite_logits):
    """Who leaves and asks again is not ahead of who waits: an abandoned step counts whole."""
    engine, runner = simulated(1)
    engine.submit(LEAVES)
    engine.step()
    counted: list[tuple[int, int]] = []
    engine.tenants.counter = lambda tenant: lambda *n: counted.append(n)  # type: ignore[assignment,method-assign]
    runner.meanwhile["collect"].append(lambda: engine.will_cancel([LEAVES.id]))
    engine.step()
    assert runner.abandoned == 1
    assert engine.usage.of(0).requests_finished[FinishReason.CANCELLED] == 1
    assert counted


@pytest.mark.parametrize("recurrent", [False, True])
def test_no_copy_of_an_abandoned_page_is_written(finite_logits, recurrent, monkeypatch):
    """Pages that wait for room in the queue to the disk are replaced by those of a request that
    computes all its logits. They are copied before its steps are abandoned."""
    monkeypatch.setattr(disk, "LOST_ONE_IN", 1 << 62)
    files: dict[str, Any] = {}
    room = False
    reserve = SimulatedDisk.reserve
    monkeypatch.setattr(SimulatedDisk, "reserve", lambda *given: room and reserve(*given))

    def opened() -> tuple[Engine, SimulatedRunner]:
        cache = SimulatedDisk(VirtualClock(), 1, files)
        return simulated(2, recurrent=recurrent, disk=cache)

    engine, runner = opened()
    expected = tokens_of(engine, replace(STAYS, prompt=PROMPT))
    engine.submit(LEAVES, on_logits=lambda first, logits: None)
    engine.step()
    room = True
    engine.step()
    assert engine._disk is not None
    assert engine._disk._copying
    runner.meanwhile["collect"].append(lambda: engine.will_cancel([LEAVES.id]))
    engine.step()
    engine.cancel(LEAVES.id)
    assert runner.abandoned
    tokens_of(engine, replace(STAYS, prompt=PROMPT[::-1]))
    engine.advance()
    assert files
    engine, _ = opened()
    assert tokens_of(engine, replace(STAYS, prompt=PROMPT)) == expected


class FindsNothing(Drafter):
    """Seems to have a draft, and has none."""

    def draft(self, sequences: Any) -> list[Any]:
        return [np.zeros(0, np.int32) for _ in sequences]

    def ready(self, key: int, tokens: Any) -> bool:
        return True

    def forget(self, key: int) -> None:
        pass


def test_the_time_behind_an_abandoned_step_is_not_that_of_a_draft(finite_logits, monkeypatch):
    """A step that waited for drafts of which there were none is abandoned while it is submitted."""
    noted: list[float] = []
    monkeypatch.setattr(
        DraftPolicy, "note_no_drafts", lambda self, running, seconds: noted.append(seconds)
    )
    clock = VirtualClock()
    engine, runner = simulated(1, clock=clock, drafter=FindsNothing())
    speculative = engine._speculative
    assert speculative is not None
    engine.submit(LEAVES)
    while not engine.idle:
        runner.meanwhile["submit"] = [
            lambda: speculative._waited and engine.will_cancel([LEAVES.id])
        ]
        engine.step()
    assert engine.usage.of(0).requests_finished[FinishReason.CANCELLED] == 1
    clock.advance(1000.0)
    tokens_of(engine, STAYS)
    assert noted
    assert max(noted) < 1.0
