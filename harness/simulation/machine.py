"""The models of a schedule: memory has room for some of them, and they take turns."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from contract.errors import DoesNotFit, RequestError
from contract.types import Request, Tenant, TokenEvent
from harness.simulation.checks import State
from harness.simulation.clients import Clients
from harness.simulation.invariants import Invariant, Violation, require
from harness.simulation.schedule import Schedule
from harness.simulation.scopes import Scopes
from harness.simulation.served import Served
from harness.simulation.watch import EngineWatch
from harness.simulation.world import World
from reference.engine import LogitsSink, MaskProvider
from reference.engine.models import Loaded, Models
from reference.runner import StepInput
from reference.sched.tenants import Tenants

TURNS_SPREAD = 3.0
"""The most that the weighted times of busy models may differ, in units of the longest weighted
step: two models may each have been a step ahead when the comparison began, and one of them may have
waited for a step that no_watch needed, while the other had nothing to compute."""


def no_watch(step: StepInput) -> None:
    """The ``watch`` of a runner that has no engine any more."""


class Machine:
    """``Models`` of ``schedule``, each with a world of ``worlds``, for ``tenants``.

    ``served`` are the models in memory, ``latest`` is the one that was stepped last. ``call`` does
    each call of an engine but steps. ``before`` are the scopes before a restart."""

    def __init__(
        self,
        schedule: Schedule,
        worlds: list[World],
        tenants: Iterable[Tenant],
        clients: Clients,
        log: list[tuple[Any, ...]],
        counts: Counter[str],
        call: Callable[[Callable[[], Any]], Any],
        before: Scopes | None,
    ) -> None:
        disk = worlds[0].disk
        forget = (lambda scope: None) if disk is None else disk.forget
        self.tenants = Tenants(tenants, clock=worlds[0].clock, forget=forget)
        self.scopes = Scopes(self.tenants, before)
        self.served: dict[int, Served] = {}
        self.latest: Served | None = None
        self._schedule = schedule
        self._worlds = worlds
        self._clients = clients
        self._log = log
        self._counts = counts
        self.call = call
        self._clock = worlds[0].clock
        self._models = Models(self._load, self._clock)
        self._model_of: dict[int, int] = {}
        self._uses = 0
        self._used: dict[int, int] = {}
        self._given: dict[int, float] = {}
        self._largest = 0.0

    @property
    def steps(self) -> int:
        """Steps of all models so far."""
        return sum([world.runner.steps for world in self._worlds])

    @property
    def failures(self) -> list[int]:
        """Number of planned failures of each model's runner."""
        return [world.runner.failures for world in self._worlds]

    @property
    def violation(self) -> Violation | None:
        """The first violation that a watch found while an engine worked."""
        for served in self.served.values():
            if (found := served.violation) is not None:
                return found
        return None

    def waiting(self, model: int) -> list[int]:
        """Ids of the requests that wait for a model."""
        served = self.served.get(model)
        return [] if served is None else list(served.watch.state().waiting)

    def submit(
        self, model: int, request: Request, sink: LogitsSink | None, allowed: MaskProvider | None
    ) -> None:
        """Submit to the engine of a model, which is loaded if it is not. Raises RequestError for an
        id in use, and Violation where a model finds no room though another is idle."""
        if request.id in self._model_of:
            raise RequestError("id", f"is {request.id}, that of a request still under way")
        idle = [number for number, served in self.served.items() if served.engine.idle]
        try:
            engine = self._models.engine(str(model))
            live = self.served[model].watch.live

            def submit() -> None:
                if request.id not in live():
                    engine.submit(request, sink, allowed=allowed)

            self.call(submit)
            self._model_of[request.id] = model
        except DoesNotFit as error:
            if idle:
                raise Violation(Invariant.MODEL_ROOM, f"{idle} are idle: {error}") from error
            raise
        finally:
            if model in self.served:
                self._use(model)

    def cancel(self, request_id: int) -> None:
        """Cancel a request, if it has not ended."""
        served = self._served(request_id)
        if served is not None:
            del self._model_of[request_id]
            self.call(lambda: served.engine.cancel(request_id))

    def will_cancel(self, request_id: int, meanwhile: str) -> None:
        """Say that a request will be cancelled, in the next "submit" or "collect" of its engine, or
        now."""
        served = self._served(request_id)
        if served is not None:
            engine, runner = served.engine, served.world.runner
            if meanwhile:
                runner.meanwhile[meanwhile].append(lambda: engine.will_cancel([request_id]))
            else:
                engine.will_cancel([request_id])

    def stall(self, request_id: int, *, over: bool) -> None:
        """Stall a request, or end its stall if it is ``over``."""
        served = self._served(request_id)
        if served is not None:
            change = served.engine.unstall if over else served.engine.stall
            self.call(lambda: change(request_id))

    def put_tenant(self, tenant: Tenant) -> None:
        """Add or change a tenant."""
        self._check_reserved(self.tenants.reservations | {tenant.id: tenant.reserved_pages})
        self._renew([tenant.id])
        if self.served:
            self.call(lambda: self._models.put_tenant(tenant))
        else:
            self.tenants.put(tenant)

    def replace_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Make these the only tenants."""
        tenants = tuple(tenants)
        self._renew([tenant.id for tenant in tenants])
        if self.served:
            self.call(lambda: self._models.replace_tenants(tenants))
        else:
            self.tenants.put(*tenants)

    def remove_tenant(self, id: int) -> None:
        """Remove a tenant; one that was removed is ignored."""
        if id not in self.tenants or self.tenants.is_removed(id):
            return
        if self.served:
            self.call(lambda: self._remove(id))
        else:
            self.tenants.begin_removal(id)
            self.tenants.finish_removals()

    def _remove(self, id: int) -> None:
        if id in self.tenants:
            self._models.remove_tenant(id)

    def _check_reserved(self, reserved: dict[int, int]) -> None:
        """Raise ValueError for more pages than an engine has, also where no engine is loaded."""
        if sum(reserved.values()) > self._schedule.shape.limits.pages:
            raise ValueError("more pages would be reserved than there are")

    def without_requests(self) -> list[Served]:
        """The engines in which requests ran by their watches, and none runs now: they failed in
        between."""
        served = self.served.values()
        return [s for s in served if s.watch.running and not s.engine.statistics.running]

    def _renew(self, ids: Iterable[int]) -> None:
        """Note that tenants with these ids are put. Where a tenant with the id was removed, its
        counts are forgotten, and its requests may end with an error."""
        there = {tenant.id for tenant in self.tenants}
        for served in self.served.values():
            served.watch.accounts.keep_only(there)
        ended = [id for id in ids if id not in self.tenants or self.tenants.is_removed(id)]
        self.scopes.refresh()
        self.scopes.refresh(ended)
        for client in self._clients.by_id.values():
            client.tenant_replaced |= client.request.tenant in ended
        remaining = there - set(ended)
        for served in self.served.values():
            served.watch.keep_only(remaining)

    def step(self) -> list[TokenEvent]:
        """One step of the model whose turn it is. Raises Violation when it was another's."""
        busy = {number for number, served in self.served.items() if not served.engine.idle}
        if busy != self._given.keys():
            self._given = dict.fromkeys(busy, 0.0)
        try:
            events = self._models.step()
            for event in events:
                if event.finish_reason is not None:
                    self._model_of.pop(event.request_id, None)
            return events
        except KeyboardInterrupt:
            # The last lines of a turn note that its model was used: noted or not, both are right.
            for name in self._models.loaded:
                self._use(int(name))
            raise
        finally:
            if len(self._given) > 1:
                self._check_turns()

    def hold(self) -> None:
        """Note for each engine since when counted events wait to be taken, if any do."""
        for served in self.served.values():
            served.watch.hold()

    def leave(self) -> None:
        """Check what engines must have right when they are left."""
        for served in self.served.values():
            served.leave(self._counts)

    def empty(self) -> None:
        """Check that the engines have no requests and no pages in use."""
        for served in self.served.values():
            served.empty()

    def close(self) -> None:
        """Clear all engines and their watches: they refer to each other, and collecting such cycles
        takes a twentieth of a schedule's time."""
        for served in self.served.values():
            served.world.runner.watch = no_watch
            for one in (served.engine, served.watch):
                vars(one).clear()
        vars(self).clear()

    def _served(self, request_id: int) -> Served | None:
        """The model that has a request in flight."""
        model = self._model_of.get(request_id)
        return None if model is None else self.served.get(model)

    def _load(self, name: str) -> Loaded:
        number, room = int(name), self._schedule.shape.room
        if len(self.served) == room:
            raise DoesNotFit(f"model {name}", room + 1, room, "unload one")
        world = self._worlds[number]
        watch = EngineWatch(self._clock, self._log, self._states, self.scopes)
        served = Served(number, self._schedule, world, self.tenants, self._clients, watch)
        self.served[number] = served
        self._counts["models loaded"] += 1
        advance = served.engine.advance
        served.engine.advance = partial(  # type: ignore[method-assign]
            self._watched_advance, served, advance
        )
        return Loaded(served.engine, 1, partial(self._unload, served))

    def _unload(self, served: Served) -> None:
        """Unload a model. Raises Violation unless it is the idle model that was unused for
        longest."""
        idle = {number for number, other in self.served.items() if other.engine.idle}
        oldest = min(idle, key=lambda number: self._used[number], default=None)
        require(
            served.number == oldest,
            Invariant.MODEL_ROOM,
            lambda: f"model {served.number} made room; idle for longest is {oldest}",
        )
        served.leave(self._counts)
        served.world.unload()
        del self.served[served.number], self._used[served.number]
        if self.latest is served:
            self.latest = None
        self._counts["models unloaded"] += 1

    def _watched_advance(self, served: Served, advance: Callable[[], None]) -> None:
        self.latest = served
        self._use(served.number)
        if len(self._worlds) == 1:
            advance()
            served.watch.check_rest()
            return
        began = self._clock()
        clients = (self._clients.by_id[id] for id in served.watch.live())
        tenants = {one.request.tenant for one in clients}
        # An engine that has only events to hand out has no active tenant.
        weight = sum(self.tenants[id].weight for id in tenants) or 1.0
        try:
            advance()
            served.watch.check_rest()
        finally:
            share = (self._clock() - began) / weight
            self._largest = max(self._largest, share)
            if served.engine.blocked:
                # A blocked model used no turn, so the comparison begins again.
                self._given = {}
            elif served.number in self._given:
                self._given[served.number] += share

    def _check_turns(self) -> None:
        shares = self._given.values()
        require(
            max(shares) - min(shares) <= TURNS_SPREAD * self._largest + 1e-9,
            Invariant.MODEL_TURNS,
            lambda: f"weighted seconds of the models at work: {self._given}",
        )

    def _use(self, number: int) -> None:
        self._uses += 1
        self._used[number] = self._uses

    def _states(self) -> list[State]:
        """All engines as they are now."""
        return [served.watch.state() for served in self.served.values()]
