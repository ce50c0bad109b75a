"""What an engine is simulated on: a runner that can be watched and broken, and what is right."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from contract.types import Request, TokenEvent
from harness.simulation.clock import VirtualClock
from harness.simulation.constraint import Constraint
from harness.simulation.history import END_OF_GENERATION, Solo, solo_run
from harness.simulation.runner import SimulatedRunner, StepSeconds, history_of_logits
from harness.simulation.schedule import Shape


class World(Protocol):
    """A runner, its clock, and the solo run of any request.

    ``runner`` has what ``SimulatedRunner`` has beyond ``ModelRunner``: ``slot_scopes``, ``watch``,
    ``violation``, ``steps``, ``fail_next`` and ``restart``.
    """

    clock: VirtualClock
    runner: Any
    end_of_generation: frozenset[int]

    def solo(
        self, request: Request, constraint: Constraint | None = None
    ) -> tuple[TokenEvent, ...]:
        """All events of ``request`` when it is alone."""

    def logits_match(self, request: Request, start: int, logits: NDArray[np.float32]) -> bool:
        """Whether these are the logits of its solo run from position ``start`` on."""

    def close(self) -> None:
        """Free what it holds."""


class SimulatedWorld:
    """No model: tokens are hashes of what came before them."""

    end_of_generation = END_OF_GENERATION

    def __init__(self, shape: Shape) -> None:
        self.clock = VirtualClock()
        self.runner = SimulatedRunner(
            shape.limits,
            self.clock,
            recurrent=shape.recurrent,
            seconds=StepSeconds(fixed=shape.step_seconds),
        )
        self._context = shape.limits.context
        self._solos: dict[int, Solo] = {}

    def solo(
        self, request: Request, constraint: Constraint | None = None
    ) -> tuple[TokenEvent, ...]:
        """In closed form."""
        self._solos[request.id] = solo_run(request, self._context, constraint)
        return self._solos[request.id].events

    def logits_match(self, request: Request, start: int, logits: NDArray[np.float32]) -> bool:
        """The logits of a position name the history up to it."""
        expected = self._solos[request.id].histories[start + 1 : start + 1 + len(logits)]
        return history_of_logits(logits) == list(expected)

    def close(self) -> None:
        """Nothing to free."""
