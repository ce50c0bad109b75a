"""Memory of the device is given back and taken again at any moment of any schedule."""

from dataclasses import replace
from random import Random

from harness.simulation.device import DeviceMemory
from harness.simulation.drive import Simulation
from harness.simulation.generate import generate
from harness.simulation.runner import SimulatedRunner
from harness.simulation.served import Served
from harness.simulation.world import simulated_worlds
from reference.engine.memory_calls import MemoryCalls

MOST = 6
"""Most changes of a schedule: each has everything that runs computed again."""


def reopened(runner: SimulatedRunner, pages: int, model: int) -> None:
    """Close a runner, whose memory is lost, and open it with so many pages."""
    runner.restart()
    recurrent = runner.memory.recurrent
    runner.limits = replace(runner.limits, pages=pages)
    runner.memory = DeviceMemory(runner.limits, recurrent=recurrent, model=model)


class Changing(Simulation):
    """A schedule during which the memory of a model changes before some steps."""

    changes = 0
    fewer = 0

    def _step_engine(self) -> None:
        random = Random(f"{self.schedule.seed} {self._step}")
        for served in self._machine.served.values():
            if random.random() < 0.04 and self.changes < MOST:
                self._change_memory(served, random)
        super()._step_engine()

    def _change_memory(self, served: Served, random: Random) -> None:
        engine, full = served.engine, self.schedule.shape.limits.pages
        fewest = min(full, engine.min_pages)
        pages = random.choice([fewest, full, random.randint(fewest, full)])
        engine.reopen(lambda: reopened(served.world.runner, pages, served.number))
        served.watch.running.clear()
        self.changes += 1
        self.fewer += pages < full


def play(seeds: range) -> tuple[list[str], int, int]:
    """What was broken in the schedules of ``seeds``, and how often memory changed, and shrank."""
    broken, changes, fewer = [], 0, 0
    for seed in seeds:
        schedule = generate(seed)
        simulation = Changing(schedule, simulated_worlds(schedule))
        outcome = simulation.play()
        if outcome.violation is not None:
            broken.append(f"{seed}: {outcome.violation}")
        changes, fewer = changes + simulation.changes, fewer + simulation.fewer
    return broken, changes, fewer


def test_no_answer_changes():
    """Requests of all kinds, tenants, faults, interrupts and restarts beside it."""
    broken, changes, fewer = play(range(12))
    assert not broken
    assert changes > 20
    assert fewer > 10


def test_an_engine_that_goes_on_with_lost_memory_is_caught(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(MemoryCalls, "reopen", lambda engine, reopen_runner: reopen_runner())
    broken, _, _ = play(range(4))
    assert broken
