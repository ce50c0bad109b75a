"""The world of a simulated engine: a runner that can be watched and made to fail, and the right
answers."""

from collections import Counter
from typing import Any, Protocol

from contract.arrays import Floats
from contract.types import Request, TokenEvent
from harness.simulation.clock import VirtualClock
from harness.simulation.constraint import Constraint
from harness.simulation.disk import SimulatedDisk
from harness.simulation.history import END_OF_GENERATION, Solo, solo_run
from harness.simulation.invariants import Invariant, require
from harness.simulation.runner import SimulatedRunner, StepSeconds, history_of_logits
from harness.simulation.schedule import EngineShape, Schedule
from reference.engine import LogitsSink


class World(Protocol):
    """A model's runner, the clock of the whole simulation, and the solo run of any request.

    ``runner`` has what ``SimulatedRunner`` has beyond ``ModelRunner``: ``slot_scopes``, ``watch``,
    ``violation``, ``steps``, ``fail_next``, ``restart`` and ``unload``."""

    clock: VirtualClock
    runner: Any
    disk: Any
    end_of_generation: frozenset[int]

    def solo(
        self, request: Request, constraint: Constraint | None = None
    ) -> tuple[TokenEvent, ...]:
        """All events of ``request`` when it runs alone."""

    def unload(self) -> None:
        """Lose the contents of the model's memory."""

    def logits_match(self, request: Request, start: int, logits: Floats) -> bool:
        """Whether these are the logits of the solo run from position ``start`` on."""

    def close(self) -> None:
        """Free what the world has allocated."""


def checking_sink(world: World, request: Request, counts: Counter[str]) -> LogitsSink:
    """A sink that checks and counts the logits of a request: each position once and in order."""
    position = 0

    def take(start: int, logits: Floats) -> None:
        nonlocal position
        counts["logits"] += len(logits)
        require(
            start == position and world.logits_match(request, start, logits),
            Invariant.TOKENS,
            lambda: (
                f"request {request.id} got other logits from position {start} on, after {position}"
            ),
        )
        position = start + len(logits)

    return take


class SimulatedWorld:
    """A world without a model: tokens are hashes of the tokens before them and of the number of the
    model. ``files`` are on a disk that all models share."""

    end_of_generation = END_OF_GENERATION

    def __init__(
        self, shape: EngineShape, clock: VirtualClock, model: int, files: dict[str, Any]
    ) -> None:
        self.clock = clock
        self.model = model
        self.runner = SimulatedRunner(
            shape.limits,
            self.clock,
            recurrent=shape.recurrent,
            model=model,
            seconds=StepSeconds(fixed=shape.step_seconds),
            abandons=shape.abandons,
        )
        self.disk = SimulatedDisk(clock, model, files) if shape.disk else None
        self._context = shape.limits.context
        self._solos: dict[int, Solo] = {}

    def solo(
        self, request: Request, constraint: Constraint | None = None
    ) -> tuple[TokenEvent, ...]:
        """Computed in closed form."""
        self._solos[request.id] = solo_run(request, self._context, constraint, self.model)
        return self._solos[request.id].events

    def unload(self) -> None:
        """Lose all contents of the device's memory."""
        self.runner.unload()

    def logits_match(self, request: Request, start: int, logits: Floats) -> bool:
        """The logits of a position name the history up to it."""
        expected = self._solos[request.id].histories[start + 1 : start + 1 + len(logits)]
        return history_of_logits(logits) == list(expected)

    def close(self) -> None:
        """Nothing to free."""


def simulated_worlds(schedule: Schedule) -> list[World]:
    """A world for each model of a schedule, with one clock and one disk."""
    clock, files = VirtualClock(), dict[str, Any]()
    return [SimulatedWorld(schedule.shape, clock, n, files) for n in range(schedule.shape.models)]
