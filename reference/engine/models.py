"""Several models on one machine: each an engine of its own, one step at a time, memory shared.

A step is one model's: two sets of weights cannot share a product. Which model's turn it is goes by
the time its steps took, divided by the weight of the tenants that use it, so that a model that many
wait for gets as many times the device as tenants wait. What does not fit is loaded when somebody
asks for it, in place of what nobody has used for longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from contract.errors import DoesNotFit, OutOfMemory
from contract.types import Clock, Request, TokenEvent
from reference.engine.engine import Engine
from reference.engine.sequence import LogitsSink, MaskProvider


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory: its engine, what it takes, and how to let go of it."""

    engine: Engine
    nbytes: int
    close: Callable[[], None]


Loader = Callable[[str], Loaded]
"""Makes the engine of a model by its name. Raises DoesNotFit or OutOfMemory when there is no room,
and whatever is wrong with the model."""


@dataclass(slots=True)
class _Place:
    """A loaded model. ``turn`` is the weighted seconds its steps took, ``used`` when one ended."""

    loaded: Loaded
    turn: float
    used: int


class Models:
    """Engines by model name, loaded on demand. Request ids are one space for all of them.

    ``clock`` measures what a step takes; where it stands still every step counts the same.
    """

    def __init__(self, load: Loader, clock: Clock) -> None:
        self._load = load
        self._clock = clock
        self._places: dict[str, _Place] = {}
        self._model_of: dict[int, str] = {}
        self._turns = 0

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the models in memory, the one used last at the end."""
        return tuple(sorted(self._places, key=lambda name: self._places[name].used))

    def engine(self, name: str) -> Engine:
        """The engine of a model, which is loaded if it is not.

        Raises DoesNotFit or OutOfMemory when there is no room beside the models in use, and what
        the loader raises.
        """
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = _Place(self._load_beside(name), 0.0, 0)
        self._touch(place)
        return place.loaded.engine

    def submit(
        self,
        name: str,
        request: Request,
        on_logits: LogitsSink | None = None,
        allowed: MaskProvider | None = None,
    ) -> None:
        """Queue a request for a model; see ``Engine.submit`` and ``engine``."""
        engine = self.engine(name)
        was_idle, earliest = engine.idle, self._earliest_turn()
        engine.submit(request, on_logits, allowed=allowed)
        self._model_of[request.id] = name
        if was_idle:
            place = self._places[name]
            place.turn = max(place.turn, earliest)

    def cancel(self, request_id: int) -> None:
        """See ``Engine.cancel``."""
        place = self._places.get(self._model_of.pop(request_id, ""))
        if place is not None:
            place.loaded.engine.cancel(request_id)

    @property
    def idle(self) -> bool:
        """True when no model has a request."""
        return all(place.loaded.engine.idle for place in self._places.values())

    def step(self) -> list[TokenEvent]:
        """One step of the model whose turn it is."""
        busy = [place for place in self._places.values() if not place.loaded.engine.idle]
        if not busy:
            return []
        place = min(busy, key=lambda place: place.turn)
        engine = place.loaded.engine
        began = self._clock()
        weight = engine.active_weight
        try:
            events = engine.step()
        finally:
            place.turn += ((self._clock() - began) or 1.0) / weight
            self._touch(place)
        for event in events:
            if event.finish_reason is not None:
                self._model_of.pop(event.request_id, None)
        return events

    def run(self) -> Iterator[TokenEvent]:
        """Step until idle."""
        while not self.idle:
            yield from self.step()

    def unload(self, name: str) -> bool:
        """Let go of a model nobody uses; False when it is in use or not loaded."""
        place = self._places.get(name)
        if place is None or not place.loaded.engine.idle:
            return False
        del self._places[name]
        place.loaded.close()
        return True

    def close(self) -> None:
        """Let go of all models, in use or not."""
        while self._places:
            self._places.popitem()[1].loaded.close()

    def _load_beside(self, name: str) -> Loaded:
        """Load a model, unloading idle ones from the one unused for longest until it fits."""
        while True:
            try:
                return self._load(name)
            except (DoesNotFit, OutOfMemory):
                if not any(self.unload(other) for other in self.loaded):
                    raise

    def _earliest_turn(self) -> float:
        """Where one that had nothing to do begins: no earlier than those at work, so that nobody
        waits for it to catch up."""
        busy = (place for place in self._places.values() if not place.loaded.engine.idle)
        return min((place.turn for place in busy), default=0.0)

    def _touch(self, place: _Place) -> None:
        self._turns += 1
        place.used = self._turns
