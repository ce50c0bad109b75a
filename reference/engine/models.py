"""Several models on one machine: each has an engine, and the engines take turns on the device.

A step belongs to one model: two sets of weights cannot share a product. The next turn goes to the
model with the least step time divided by the weight of the tenants that use it. So a model gets
device time in proportion to the tenants that wait for it. A model is loaded on request; if it does
not fit, the idle model that was unused for longest is unloaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from contract.errors import DoesNotFit, OutOfMemory, RequestError
from contract.types import Clock, Tenant, TokenEvent
from reference.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory: its engine, its size in bytes, and the function that frees it."""

    engine: Engine
    nbytes: int
    close: Callable[[], None]


Result = TypeVar("Result")
Loader = Callable[[str], Loaded]
"""Loads a model by its name. Raises DoesNotFit or OutOfMemory if there is no room, and the errors
of a model that cannot be loaded."""


@dataclass(slots=True)
class _LoadedModel:
    """A loaded model. ``turn`` is the weighted seconds of its steps. ``used`` and ``latest`` are
    sequence numbers over all models: of its latest use, and of its latest step or its loading."""

    loaded: Loaded
    turn: float
    used: int
    latest: int = 0


def load_with_room(load: Callable[[], Result], make_room: Callable[[], bool]) -> Result:
    """Call ``load`` and return its result. If it finds no room, ``make_room`` unloads an idle model
    and ``load`` is called again; once ``make_room`` returns False the error is raised."""
    while True:
        try:
            return load()
        except (DoesNotFit, OutOfMemory):
            if not make_room():
                raise


def no_loader(name: str) -> Loaded:
    """The loader for ``Models`` to which models are only added with ``add``."""
    raise RequestError("model", f"{name!r} is not known here")


class Models:
    """The engines of models by name, loaded on demand or added. ``step`` steps one of them.

    Requests are submitted to and cancelled in an engine itself. ``clock`` measures the time of
    steps. If engines share their tenants, quotas of slots, pages and rates hold for all models
    together."""

    def __init__(self, load: Loader, clock: Clock) -> None:
        self._load = load
        self._clock = clock
        self._models: dict[str, _LoadedModel] = {}
        self.stepped = ""
        """The name of the model whose step was the last one."""
        self._at_work: set[str] = set()
        self._turns = 0

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the loaded models, the most recently used last."""
        return tuple(sorted(self._models, key=lambda name: self._models[name].used))

    def engine(self, name: str) -> Engine:
        """The engine of a model, which is loaded first if necessary. Raises DoesNotFit or
        OutOfMemory if there is no room beside the models in use, and what the loader raises."""
        if name not in self._models:
            self.add(name, load_with_room(partial(self._load, name), self._unload_longest_idle))
        model = self._models[name]
        self._touch(model)
        return model.loaded.engine

    def add(self, name: str, loaded: Loaded) -> None:
        """Add a model that the caller loaded."""
        assert name not in self._models, f"model {name!r} is loaded twice"
        self._models[name] = _LoadedModel(loaded, 0.0, 0)
        self._touch(self._models[name])
        self._models[name].latest = self._turns

    def put_tenant(self, tenant: Tenant) -> None:
        """``Engine.put_tenant`` in all loaded engines, or in none."""
        for engine in self._engines:
            engine.check_tenants([tenant])
        self._in_all(
            lambda engine: engine.end_removed(tenant.id),
            Engine.finish_removals,
            lambda engine: engine.put_tenant(tenant),
        )

    def replace_tenants(self, tenants: Iterable[Tenant]) -> None:
        """``Engine.replace_tenants`` in all loaded engines, or in none."""
        tenants = tuple(tenants)
        for engine in self._engines:
            engine.check_tenants(tenants, whole=True)
        ends = [partial(Engine.end_removed, id=tenant.id) for tenant in tenants]
        # An engine forgets a tenant only when no engine has requests of it.
        self._in_all(*ends, Engine.finish_removals, lambda engine: engine.replace_tenants(tenants))

    def remove_tenant(self, id: int) -> None:
        """``Engine.remove_tenant`` in all loaded engines."""
        for engine in self._engines:
            engine.begin_removal(id)
        self._in_all(Engine.finish_removals)

    def _in_all(self, *changes: Callable[[Engine], None]) -> None:
        """Make each change in all engines, one change after the other. If an engine raises, the
        others are changed before the error is raised."""
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
        """One step of the model whose turn it is, or of the next model if all its requests wait for
        a quota or a consumer. Events stay with their engine until the last line, so an interrupt
        loses none."""
        if len(self._models) == 1:
            ((name, model),) = self._models.items()
            self.stepped = name
            self._catch_up_idle({} if model.loaded.engine.idle else {name: model})
            return model.loaded.engine.step()
        engine = self._advance()
        return [] if engine is None else engine.take_events()

    def _advance(self) -> Engine | None:
        """Advance the model whose turn it is, and return the engine that has events or computed
        something."""
        # The last request of a removed tenant may have ended in another engine.
        self._in_all(Engine.finish_removals)
        busy = {name: p for name, p in self._models.items() if not p.loaded.engine.idle}
        self._catch_up_idle(busy)
        passed: list[_LoadedModel] = []
        in_turn = sorted(busy.items(), key=lambda named: (named[1].turn, named[1].latest))
        for self.stepped, model in in_turn:
            engine, used = model.loaded.engine, True
            try:
                self._step(model)
                used = engine.has_events or not engine.blocked
            finally:
                # A model that could not use its turn gets no turns later to make up for it.
                for other in passed if used else ():
                    other.turn = max(other.turn, model.turn)
            if used:
                return engine
            passed.append(model)
        return None

    def unload(self, name: str) -> bool:
        """Free an idle model; False if it is in use or not loaded."""
        model = self._models.get(name)
        if model is None or not model.loaded.engine.idle:
            return False
        self.take_out(name)
        return True

    def take_out(self, name: str) -> None:
        """Free a model even if it has requests."""
        self._at_work.discard(name)
        model = self._models.pop(name)
        model.loaded.engine.abandon()
        model.loaded.close()

    def longest_idle(self, names: Collection[str]) -> str | None:
        """The idle model among ``names`` that was unused for longest; None if all are in use."""
        idle = [name for name in self.loaded if self._models[name].loaded.engine.idle]
        return next((name for name in idle if name in names), None)

    def close(self) -> None:
        """Free all models, even those that have requests."""
        for name in tuple(self._models):
            self.take_out(name)

    @property
    def _engines(self) -> list[Engine]:
        return [model.loaded.engine for model in self._models.values()]

    def _step(self, model: _LoadedModel) -> None:
        engine = model.loaded.engine
        # An engine that has only events to hand out has no active tenant.
        began, weight = self._clock(), engine.active_weight or 1.0
        try:
            engine.advance()
        finally:
            model.turn += (self._clock() - began) / weight
            self._touch(model)
            model.latest = model.used

    def _unload_longest_idle(self) -> bool:
        """Free the idle model that was unused for longest; False if none is idle."""
        oldest = self.longest_idle(self._models)
        return oldest is not None and self.unload(oldest)

    def _catch_up_idle(self, busy: dict[str, _LoadedModel]) -> None:
        """Start models that were idle with the least time of the busy models, so that they get no
        extra turns for their idle time. The time of a model while it was the only busy one does not
        count."""
        if busy.keys() == self._at_work:
            return
        turns = [model.turn for name, model in busy.items() if name in self._at_work]
        if not turns:
            for model in self._models.values():
                model.turn = 0.0
        for name in busy.keys() - self._at_work if turns else ():
            busy[name].turn = max(busy[name].turn, min(turns))
        self._at_work = set(busy)

    def _touch(self, model: _LoadedModel) -> None:
        self._turns += 1
        model.used = self._turns
