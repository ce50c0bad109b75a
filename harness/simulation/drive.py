"""Plays one schedule on a real engine, and checks the invariants after every step."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from contract.errors import DeviceLost, DoesNotFit, QueueFull, RequestError
from contract.types import FinishReason, Request, Tenant, TokenEvent
from harness.simulation.acceptance import acceptable, has_room
from harness.simulation.clients import Client, Clients
from harness.simulation.constraint import Constraint
from harness.simulation.interrupt import interrupted_at
from harness.simulation.invariants import Invariant, Violation, require
from harness.simulation.machine import Machine
from harness.simulation.prefixes import Prefixes
from harness.simulation.schedule import (
    Action,
    Arrive,
    Cancel,
    FailCopy,
    Fault,
    Interrupt,
    Pause,
    Prefix,
    Quota,
    Remove,
    Restart,
    Schedule,
    Stall,
)
from harness.simulation.scopes import Scopes
from harness.simulation.world import World, checking_sink, simulated_worlds
from reference.engine import LogitsSink, MaskProvider
from reference.engine.engine import FAULTS

T = TypeVar("T")
IDLE_SECONDS = 0.5
"""Seconds that a server with nothing to compute waits before it looks again."""
PATIENCE_STEPS = 40
"""Steps a request may take in addition to its tokens: steps in flight when it is preempted, and
steps in which it waits until its rates have fallen."""
RECOMPUTATIONS = 4
"""Most times, on average, that the tokens of a request are computed because of preemptions."""


@dataclass(slots=True)
class Outcome:
    """The result of a schedule. ``counts`` has how often each kind of thing happened."""

    violation: Violation | None
    log_hash: str
    counts: Counter[str]


def play(schedule: Schedule, worlds: list[World] | None = None) -> Outcome:
    """Play ``schedule``, by default on simulated models."""
    return Simulation(schedule, worlds or simulated_worlds(schedule)).play()


class Simulation:
    """A schedule, its models on ``worlds``, and their clients."""

    def __init__(self, schedule: Schedule, worlds: list[World]) -> None:
        self.schedule = schedule
        self.worlds = worlds
        self.clock = worlds[0].clock
        self.log: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.clients = Clients(
            lambda model, request, rule: worlds[model].solo(request, rule),
            schedule.shape.stall_steps,
            FAULTS,
        )
        self._vocab: int = worlds[0].runner.model.config.vocab
        self._step = 0
        self._leaving: list[int] = []
        self._interrupts: dict[bool, int] = {}
        self._prefixes = Prefixes(self.counts)
        self._machine = self._start(schedule.tenants)

    def play(self) -> Outcome:
        """Play it once."""
        violation = None
        try:
            self._play()
        except Violation as found:
            violation = found
        except Exception as error:
            violation = self._machine.violation or Violation(
                Invariant.ONLY_DOCUMENTED_ERRORS, f"{type(error).__name__}: {error}"
            )
            violation.__cause__ = error
        self._machine.close()
        digest = hashlib.blake2b(repr(self.log).encode(), digest_size=16).hexdigest()
        return Outcome(violation, digest, self.counts)

    def _start(self, tenants: Iterable[Tenant], before: Scopes | None = None) -> Machine:
        log, counts, call = self.log, self.counts, self._called
        return Machine(self.schedule, self.worlds, tenants, self.clients, log, counts, call, before)

    def _play(self) -> None:
        actions = list(reversed(self.schedule.actions))
        while actions:
            if not self.clients.live:
                self._step = max(self._step, actions[-1].step)
            while actions and actions[-1].step <= self._step:
                self._act(actions.pop())
            self._step_engine()
        self._change(lambda: self._machine.replace_tenants(self.schedule.tenants))
        deadline = self._step + self._bound()
        while self.clients.live:
            require(
                self._step <= deadline,
                Invariant.LIVENESS,
                lambda: (
                    f"requests {[c.request.id for c in self.clients.live]} still live after "
                    f"{deadline} steps"
                ),
            )
            self._step_engine()
        self.counts["abandoned"] = sum([world.runner.abandoned for world in self.worlds])
        self._machine.empty()
        self._machine.leave()

    def _bound(self) -> int:
        """Steps after which all requests have ended, if every step computes a token of one."""
        limits, shape = self.schedule.shape.limits, self.schedule.shape
        steps = shape.stall_steps + PATIENCE_STEPS
        for client in self.clients.live:
            request = client.request
            reach = min(len(request.prompt) + request.max_tokens, limits.context)
            steps += RECOMPUTATIONS * (reach + shape.steps_ahead) + PATIENCE_STEPS
        return steps

    def _step_engine(self) -> None:
        machine, before = self._machine, self._machine.steps
        self._step += 1
        events: list[TokenEvent] = []
        line = self._interrupts.pop(False, 0)
        failures = self._machine.failures
        try:
            events = interrupted_at(line, machine.step) if line else machine.step()
        except DeviceLost:
            self._note_fault(failures)
        except KeyboardInterrupt:
            self._note_interrupt(failures)
        machine.hold()
        found = machine.violation
        if found is not None:
            raise found
        taken = machine.steps - before
        if not taken and not events:
            self.clock.advance(IDLE_SECONDS)
            self.counts["idle steps"] += 1
        self.counts["steps"] += taken
        now = self.clock()
        for event in events:
            self._deliver(event, now)
        if machine.latest is not None:
            machine.latest.watch.between_steps(self._step)
        while self._leaving:
            self._cancel(self._leaving.pop())

    def _note_fault(self, before: list[int]) -> None:
        """Note the faults of engines. ``before``: the failures of each runner before."""
        self.counts["faults"] += 1
        self.log.append(("fault", self.clock()))
        for served in self._machine.served.values():
            if self._machine.failures[served.number] > before[served.number]:
                for request_id in served.watch.running:
                    self.clients.by_id[request_id].faults += 1
                served.watch.running.clear()

    def _note_interrupt(self, failures: list[int], *, call: bool = False) -> None:
        """Note an interrupted step or ``call``. ``failures``: those of each runner before."""
        self.counts["interrupted calls" if call else "interrupts"] += 1
        self.log.append(("interrupt", self.clock()))
        for served in self._machine.served.values():
            served.watch.interrupted = True
            served.watch.call_interrupted |= call
        if failures != self._machine.failures:
            self._note_fault(failures)
        for served in self._machine.without_requests():
            served.watch.running.clear()

    def _deliver(self, event: TokenEvent, now: float) -> None:
        """Give an event to its client."""
        reason = event.finish_reason
        logs = (event.log_probability, event.top) if event.top else ()
        self.log.append((now, event.request_id, event.token, event.position, reason, *logs))
        self.clients.take(event, self._step)
        client = self.clients.by_id[event.request_id]
        watch = self._machine.served[client.model].watch
        if event.token >= 0:
            self.counts["tokens"] += 1
            self.counts["logs"] += event.log_probability is not None
            if not client.tenant_replaced:
                watch.delivered(client.request.tenant)
        if reason is not None:
            if not client.tenant_replaced:
                watch.accounts.add(client.request.tenant, reason.value)
            self.counts[f"ended {reason.value}"] += 1

    def _act(self, action: Action) -> None:
        match action:
            case Arrive():
                self._arrive(action)
            case Cancel():
                self._leave(action)
            case Stall():
                self._stall(action)
            case Quota():
                self._change(lambda: self._machine.put_tenant(action.tenant))
            case Fault():
                self.worlds[action.model].runner.fail_next(action.where)
            case Restart():
                self._restart()
            case Pause():
                self.clock.advance(action.seconds)
            case Remove():
                self._change(lambda: self._machine.remove_tenant(action.tenant_id))
            case FailCopy():
                self.worlds[action.model].runner.fail_next_copy()
            case Interrupt():
                self._interrupts[action.call] = action.line
            case Prefix():
                self._noting_loss(lambda: self._prefixes.act(action, self.clients, self._machine))

    def _arrive(self, arrival: Arrive) -> None:
        request, constraint, machine = arrival.request, arrival.constraint, self._machine
        may_wait = self._may_wait(arrival)
        sink = self._sink(request, arrival.model) if arrival.logits else None
        try:
            machine.submit(arrival.model, request, sink, self._masks(constraint))
        except DoesNotFit:
            self.counts["no room"] += 1
        except QueueFull:
            self._rejected(arrival)
            self.counts["queue full"] += 1
            # An interrupted submission may have made running requests wait.
            require(not self._may_wait(arrival), Invariant.LIVENESS, lambda: "the queue had room")
        except RequestError as error:
            self.counts["refused"] += 1
            if self._acceptable(request):
                raise Violation(
                    Invariant.ONLY_DOCUMENTED_ERRORS, f"request {request.id} was refused: {error}"
                ) from error
            self._rejected(arrival)
        else:
            require(
                self._acceptable(request),
                Invariant.ONLY_DOCUMENTED_ERRORS,
                lambda: f"request {request.id} was accepted",
            )
            require(may_wait, Invariant.LIVENESS, lambda: "the queue had no room for it")
            self._account(arrival.model, request.tenant, "tokens_prompted", len(request.prompt))
            self.clients.accepted(request, arrival.logits, constraint, arrival.model)

    def _may_wait(self, arrival: Arrive) -> bool:
        """Whether the queue of the model has room for a request: with several tenants, none may
        have more waiting requests than the queue has free entries."""
        waiting = self._machine.waiting(arrival.model)
        free = self.schedule.shape.queue_depth - len(waiting)
        tenant = arrival.request.tenant
        own = sum(self.clients.by_id[id].request.tenant == tenant for id in waiting)
        return free > 0 and (own < free or len(self._machine.tenants) == 1)

    def _rejected(self, arrival: Arrive) -> None:
        """Count a refused request, which the engine's usage must count too."""
        tenant, tenants = arrival.request.tenant, self._machine.tenants
        known = tenant in tenants and not tenants.is_removed(tenant)
        if not self._is_live(arrival.request.id) and known:
            self._account(arrival.model, tenant, "requests_rejected")

    def _account(self, model: int, tenant: int, what: str, count: int = 1) -> None:
        """Add to the counts that the usage of a model's engine should have."""
        self._machine.served[model].watch.accounts.add(tenant, what, count)

    def _is_live(self, request_id: int) -> bool:
        client = self.clients.by_id.get(request_id)
        return client is not None and client.ended is None

    def _leave(self, action: Cancel) -> None:
        if self.schedule.shape.abandons and self._is_live(action.request_id):
            self._machine.will_cancel(action.request_id, action.meanwhile)
        (self._leaving.append if action.meanwhile else self._cancel)(action.request_id)

    def _cancel(self, request_id: int) -> None:
        if self._is_live(request_id):
            client = self.clients.by_id[request_id]
            self.counts["cancels"] += 1
            if not client.tenant_replaced:
                self._account(client.model, client.request.tenant, FinishReason.CANCELLED.value)
        self.clients.cancelled(request_id)
        self._noting_loss(lambda: self._machine.cancel(request_id))

    def _change(self, change: Callable[[], None]) -> None:
        """Change the tenants. One with too many reserved pages must be refused whole."""
        before = tuple(self._machine.tenants), self._machine.tenants.reservations
        try:
            change()
        except ValueError:
            self.counts["reservations refused"] += 1
            require(
                before == (tuple(self._machine.tenants), self._machine.tenants.reservations),
                Invariant.ONLY_DOCUMENTED_ERRORS,
                lambda: "a change of tenants that was refused took effect in part",
            )
        except DeviceLost:
            self._note_failures()
        self._machine.scopes.refresh()
        limits, tenants = self.schedule.shape.limits, self._machine.tenants
        for client in self.clients.live:
            client.may_fail |= not has_room(client.request, limits, tenants)

    def _noting_loss(self, call: Callable[[], None]) -> None:
        """Do a call other than a step, and note the faults of engines that fail."""
        try:
            call()
        except DeviceLost:
            self._note_failures()

    def _note_failures(self) -> None:
        self.counts["faults"] += 1
        for served in self._machine.without_requests():
            for request_id in served.watch.running:
                self.clients.by_id[request_id].faults += 1
            served.watch.running.clear()

    def _acceptable(self, request: Request) -> bool:
        """Whether an engine may accept the request, if its queue has room."""
        return not self._is_live(request.id) and acceptable(
            request, self.schedule.shape.limits, self._machine.tenants, self._vocab
        )

    def _masks(self, constraint: Constraint | None) -> MaskProvider | None:
        return None if constraint is None else constraint.counted(self.counts, self._vocab)

    def _sink(self, request: Request, model: int) -> LogitsSink:
        return checking_sink(self.worlds[model], request, self.counts)

    def _called(self, call: Callable[[], T]) -> T:
        """Do a call of an engine that is no step. After an interrupt its caller repeats it."""
        line = self._interrupts.pop(True, 0)
        if line:
            before = self._machine.failures
            try:
                return interrupted_at(line, call)
            except KeyboardInterrupt:
                self._note_interrupt(before, call=True)
        return call()

    def _stall(self, action: Stall) -> None:
        if not self._is_live(action.request_id):
            return
        client = self.clients.by_id[action.request_id]
        served = self._machine.served[client.model]
        self._machine.stall(action.request_id, over=action.over)
        if action.over:
            # An end that was counted is certain, also where an interrupt came before it was taken.
            if action.request_id in served.watch.live():
                client.stalled_since = None
        else:
            self.counts["stalls"] += 1
            if client.stalled_since is None:
                client.stalled_since = self._step

    def _restart(self) -> None:
        self.counts["restarts"] += 1
        self._machine.leave()
        for world in self.worlds:
            world.runner.restart()
        tenants, scopes = self._machine.tenants, self._machine.scopes
        left = [tenant for tenant in tenants if not tenants.is_removed(tenant.id)]
        self._machine.close()
        self._machine = self._start(left, scopes)
        for client in self.clients.live:
            self._resubmit(client)

    def _resubmit(self, client: Client) -> None:
        client.stalled_since = None
        client.faults, client.tenant_replaced = 0, False
        rest = client.rest
        sink = self._sink(client.request, client.model) if client.logits else None
        try:
            constraint = client.constraint and client.constraint.after(client.tokens)
            self._machine.submit(client.model, rest, sink, self._masks(constraint))
        except (QueueFull, RequestError):
            client.ended = FinishReason.CANCELLED
            if rest.tenant in self._machine.tenants:
                self._account(client.model, rest.tenant, "requests_rejected")
        else:
            self._account(client.model, rest.tenant, "tokens_prompted", len(rest.prompt))
