"""Several models on one machine: each an engine of its own, one step at a time, memory shared.

A step is one model's: two sets of weights cannot share a product. Which model's turn it is goes by
the time its steps took, divided by the weight of the tenants that use it, so that a model that many
wait for gets as many times the device as tenants wait. What does not fit is loaded when somebody
asks for it, in place of what nobody has used for longest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from contract.errors import DoesNotFit, OutOfMemory, RequestError
from contract.types import Clock, Tenant, TokenEvent
from reference.engine.engine import Engine


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


def no_loader(name: str) -> Loaded:
    """The loader of ``Models`` that are only ever added to."""
    raise RequestError("model", f"{name!r} is not known here")


class Models:
    """Engines by model name, loaded on demand or added; their steps are taken here.

    Requests are submitted to an engine itself and cancelled there. ``clock`` measures what a step
    takes. Engines may share their tenants: quotas of slots, pages and rates are then those of all
    models together.
    """

    def __init__(self, load: Loader, clock: Clock) -> None:
        self._load = load
        self._clock = clock
        self._places: dict[str, _Place] = {}
        self._at_work: set[str] = set()
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
        if name not in self._places:
            self.add(name, self._load_in_background(name))
        place = self._places[name]
        self._touch(place)
        return place.loaded.engine

    def add(self, name: str, loaded: Loaded) -> None:
        """Take turns with a model that was loaded elsewhere."""
        assert name not in self._places, f"model {name!r} is loaded twice"
        self._places[name] = _Place(loaded, 0.0, 0)
        self._touch(self._places[name])

    def put_tenant(self, tenant: Tenant) -> None:
        """See ``Engine.put_tenant``: in all that are loaded, or in none."""
        for engine in self._engines:
            engine.check_tenants([tenant])
        self._in_all(
            lambda engine: engine.end_removed(tenant.id),
            Engine.forget_left,
            lambda engine: engine.put_tenant(tenant),
        )

    def replace_tenants(self, tenants: Iterable[Tenant]) -> None:
        """See ``Engine.replace_tenants``: in all that are loaded, or in none."""
        tenants = tuple(tenants)
        for engine in self._engines:
            engine.check_tenants(tenants, whole=True)
        ends = [partial(Engine.end_removed, id=tenant.id) for tenant in tenants]
        # Once one is gone from the last of them, all of them forget it.
        self._in_all(*ends, Engine.forget_left, lambda engine: engine.replace_tenants(tenants))

    def remove_tenant(self, id: int) -> None:
        """See ``Engine.remove_tenant``: from all that are loaded."""
        for engine in self._engines:
            engine.let_leave(id)
        self._in_all(Engine.forget_left)

    def _in_all(self, *changes: Callable[[Engine], None]) -> None:
        """Make one change after the other in all engines, though the device of one fails meanwhile:
        its error comes last."""
        failed: Exception | None = None
        for change in changes:
            for engine in self._engines:
                try:
                    change(engine)
                except Exception as error:
                    failed = error
        if failed is not None:
            raise failed

    @property
    def idle(self) -> bool:
        """True when no model has a request."""
        return all(engine.idle for engine in self._engines)

    def step(self) -> list[TokenEvent]:
        """One step of the model whose turn it is; of the next one where all its requests wait for
        a quota or a consumer. An interrupt loses no event: the events stay with their engine until
        the last line here."""
        engine = self._advance()
        return [] if engine is None else engine.take_events()

    def _advance(self) -> Engine | None:
        """Advance the model whose turn it is: the engine that has events, or computed something."""
        if len(self._places) > 1:
            # A tenant that was gone with its last request in one is gone from all.
            self._in_all(Engine.forget_left)
        busy = {name: p for name, p in self._places.items() if not p.loaded.engine.idle}
        self._let_join(busy)
        passed: list[_Place] = []
        for place in sorted(busy.values(), key=lambda place: (place.turn, place.used)):
            engine, used = place.loaded.engine, True
            try:
                self._step(place)
                used = engine.has_events or not engine.blocked
            finally:
                # Who could not use its turn has it no more: nobody waits for it to catch up.
                for other in passed if used else ():
                    other.turn = max(other.turn, place.turn)
            if used:
                return engine
            passed.append(place)
        return None

    def unload(self, name: str) -> bool:
        """Let go of a model nobody uses; False when it is in use or not loaded."""
        place = self._places.get(name)
        if place is None or not place.loaded.engine.idle:
            return False
        self.take_out(name)
        return True

    def take_out(self, name: str) -> None:
        """Let go of a model, in use or not."""
        self._at_work.discard(name)
        place = self._places.pop(name)
        place.loaded.engine.give_back()
        place.loaded.close()

    def longest_idle(self, names: Collection[str]) -> str | None:
        """Of the models called ``names`` the one to unload first: that is idle, and unused for
        longest; None where each is in use."""
        idle = [name for name in self.loaded if self._places[name].loaded.engine.idle]
        return next((name for name in idle if name in names), None)

    def close(self) -> None:
        """Let go of all models, in use or not."""
        for name in tuple(self._places):
            self.take_out(name)

    @property
    def _engines(self) -> list[Engine]:
        return [place.loaded.engine for place in self._places.values()]

    def _step(self, place: _Place) -> None:
        engine = place.loaded.engine
        if len(self._places) == 1:
            engine.advance()
            return
        # Where there are only events to hand out, nobody computes.
        began, weight = self._clock(), engine.active_weight or 1.0
        try:
            engine.advance()
        finally:
            place.turn += (self._clock() - began) / weight
            self._touch(place)

    def _load_in_background(self, name: str) -> Loaded:
        """Load a model, unloading idle ones from the one unused for longest until it fits."""
        while True:
            try:
                return self._load(name)
            except (DoesNotFit, OutOfMemory):
                oldest = self.longest_idle(self._places)
                if oldest is None or not self.unload(oldest):
                    raise

    def _let_join(self, busy: dict[str, _Place]) -> None:
        """Let those that had nothing to do begin no earlier than those at work, so that nobody
        waits for them to catch up. What was done while no other wanted the device counts for
        nothing."""
        if busy.keys() == self._at_work:
            return
        turns = [place.turn for name, place in busy.items() if name in self._at_work]
        if not turns:
            for place in self._places.values():
                place.turn = 0.0
        for name in busy.keys() - self._at_work if turns else ():
            busy[name].turn = max(busy[name].turn, min(turns))
        self._at_work = set(busy)

    def _touch(self, place: _Place) -> None:
        self._turns += 1
        place.used = self._turns
