"""Several models on one machine: each an engine of its own, one step at a time, memory shared.

A step is one model's: two sets of weights cannot share a product. Which model's turn it is goes by
the time its steps took, divided by the weight of the tenants that use it, so that a model that many
wait for gets as many times the device as tenants wait. What does not fit is loaded when somebody
asks for it, in place of what nobody has used for longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from contract.errors import DoesNotFit, OutOfMemory, RequestError
from contract.types import Clock, Request, Tenant, TokenEvent
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

    ``clock`` measures what a step takes. Engines may share their tenants: quotas of slots, pages
    and rates are then those of all models together.
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
        if request.id in self._model_of:
            raise RequestError("id", f"is {request.id}, that of a request still under way")
        engine = self.engine(name)
        if engine.idle:
            self._join(self._places[name])
        engine.submit(request, on_logits, allowed=allowed)
        self._model_of[request.id] = name

    def cancel(self, request_id: int) -> None:
        """See ``Engine.cancel``."""
        engine = self._engine_of(request_id)
        if engine is not None:
            del self._model_of[request_id]
            engine.cancel(request_id)

    def stall(self, request_id: int) -> None:
        """See ``Engine.stall``."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.stall(request_id)

    def unstall(self, request_id: int) -> None:
        """See ``Engine.unstall``."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.unstall(request_id)

    def put_tenant(self, tenant: Tenant) -> None:
        """See ``Engine.put_tenant``: in all that are loaded."""
        for place in self._places.values():
            place.loaded.engine.put_tenant(tenant)

    @property
    def idle(self) -> bool:
        """True when no model has a request."""
        return all(place.loaded.engine.idle for place in self._places.values())

    def step(self) -> list[TokenEvent]:
        """One step of the model whose turn it is; of the next one where all its requests wait for
        a quota or a consumer."""
        busy = [place for place in self._places.values() if not place.loaded.engine.idle]
        events: list[TokenEvent] = []
        passed: list[_Place] = []
        for place in sorted(busy, key=lambda place: (place.turn, place.used)):
            events = self._step(place)
            if events or not place.loaded.engine.blocked:
                # Who could not use its turn has it no more: nobody waits for it to catch up.
                for other in passed:
                    other.turn = max(other.turn, place.turn)
                break
            passed.append(place)
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
        self._model_of.clear()
        while self._places:
            self._places.popitem()[1].loaded.close()

    def _step(self, place: _Place) -> list[TokenEvent]:
        engine = place.loaded.engine
        if len(self._places) == 1:
            return engine.step()
        began, weight = self._clock(), engine.active_weight
        try:
            return engine.step()
        finally:
            place.turn += (self._clock() - began) / weight
            self._touch(place)

    def _engine_of(self, request_id: int) -> Engine | None:
        """Who has a request that has not ended."""
        place = self._places.get(self._model_of.get(request_id, ""))
        return None if place is None else place.loaded.engine

    def _load_beside(self, name: str) -> Loaded:
        """Load a model, unloading idle ones from the one unused for longest until it fits."""
        while True:
            try:
                return self._load(name)
            except (DoesNotFit, OutOfMemory):
                if not any(self.unload(other) for other in self.loaded):
                    raise

    def _join(self, place: _Place) -> None:
        """Let one that had nothing to do begin no earlier than those at work, so that nobody waits
        for it to catch up. What was done while no other wanted the device counts for nothing."""
        turns = [other.turn for other in self._places.values() if not other.loaded.engine.idle]
        if turns:
            place.turn = max(place.turn, min(turns))
        else:
            for other in self._places.values():
                other.turn = 0.0

    def _touch(self, place: _Place) -> None:
        self._turns += 1
        place.used = self._turns
