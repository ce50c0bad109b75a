"""Plays one schedule on a real engine, and checks it with every step."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import DeviceLost, QueueFull, RequestError
from contract.types import FinishReason, Request, Tenant
from harness.simulation.clients import Client, Clients
from harness.simulation.constraint import Constraint
from harness.simulation.guesses import Guesses
from harness.simulation.invariants import Invariant, Violation, require
from harness.simulation.schedule import (
    Action,
    Arrive,
    Cancel,
    Fault,
    Pause,
    Quota,
    Restart,
    Schedule,
    Stall,
)
from harness.simulation.watch import Watch
from harness.simulation.world import SimulatedWorld, World
from reference.engine import Engine
from reference.engine.engine import FAULTS
from reference.engine.sequence import MaskProvider
from reference.limits import pages_for
from reference.sched.constraints import Mask
from reference.sched.tenants import Tenants

IDLE_SECONDS = 0.5
"""How long a server with nothing to compute waits before it looks again."""
PATIENCE_STEPS = 40
"""Steps a request may take beyond its tokens: those under way when it is preempted, and waiting
until rates over five seconds have fallen."""
RECOMPUTATIONS = 4
"""How often, on average, the tokens of a request may be computed because it was preempted."""


@dataclass(slots=True)
class Outcome:
    """What became of a schedule. ``counts`` says how often something happened, steps among it."""

    violation: Violation | None
    log_hash: str
    counts: Counter[str]


def play(schedule: Schedule, world: World | None = None) -> Outcome:
    """Play ``schedule``, by default without a model."""
    return Simulation(schedule, world or SimulatedWorld(schedule.shape)).play()


class Simulation:
    """A schedule, an engine on ``world``, and its clients."""

    def __init__(self, schedule: Schedule, world: World) -> None:
        self.schedule = schedule
        self.world = world
        self.log: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.clients = Clients(world.solo, schedule.shape.stall_steps, FAULTS)
        self._step = 0
        self._watch = Watch(world.clock, self.log)
        world.runner.watch = self._watch.submitted_step
        self._engine = self._start(schedule.tenants)

    def play(self) -> Outcome:
        """Play it once."""
        violation = None
        try:
            self._play()
        except Violation as found:
            violation = found
        except Exception as error:
            where = self._watch.violation or self.world.runner.violation
            violation = where or Violation(
                Invariant.ONLY_DOCUMENTED_ERRORS, f"{type(error).__name__}: {error}"
            )
            violation.__cause__ = error
        self.counts["admissions"] = self._watch.admissions
        self.counts["preemptions"] = self._watch.preemptions
        digest = hashlib.blake2b(repr(self.log).encode(), digest_size=16).hexdigest()
        return Outcome(violation, digest, self.counts)

    def _start(self, tenants: tuple[Tenant, ...]) -> Engine:
        shape, clock = self.schedule.shape, self.world.clock
        engine = Engine(
            self.world.runner,
            end_of_generation=self.world.end_of_generation,
            chunk_tokens=shape.chunk_tokens,
            page_order=shape.page_order,
            steps_ahead=shape.steps_ahead,
            tenants=Tenants(tenants, clock=clock),
            clock=clock,
            queue_depth=shape.queue_depth,
            prefix_cache=shape.prefix_cache,
            copy_pages=shape.copy_pages,
            host_pages=shape.host_pages,
            stall_steps=shape.stall_steps,
            drafter=self._drafter(),
            observer=self._watch,
        )
        self._watch.attach(engine)
        return engine

    def _drafter(self) -> Guesses | None:
        if not self.schedule.shape.guesses:
            return None
        vocab = self.world.runner.model.config.vocab
        return Guesses(self._answer, vocab, Random(self.schedule.seed))

    def _answer(self, order: int) -> tuple[int, ...] | None:
        request_id = self._watch.request_in_order(order)
        client = None if request_id is None else self.clients.by_id.get(request_id)
        if client is None:
            return None
        return client.request.prompt + tuple(max(0, event.token) for event in client.expected)

    def _play(self) -> None:
        actions = list(reversed(self.schedule.actions))
        while actions:
            if not self.clients.live:
                self._step = max(self._step, actions[-1].step)
            while actions and actions[-1].step <= self._step:
                self._act(actions.pop())
            self._step_engine()
        for tenant in self.schedule.tenants:
            self._engine.put_tenant(tenant)
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
        self._end()

    def _bound(self) -> int:
        """Steps after which everybody is served, if every step computes one token for somebody."""
        limits, shape = self.schedule.shape.limits, self.schedule.shape
        steps = shape.stall_steps + PATIENCE_STEPS
        for client in self.clients.live:
            request = client.request
            reach = min(len(request.prompt) + request.max_tokens, limits.context)
            steps += RECOMPUTATIONS * (reach + shape.steps_ahead) + PATIENCE_STEPS
        return steps

    def _end(self) -> None:
        """Nobody is left, and neither is anything they had."""
        require(
            self._engine.idle, Invariant.LIVENESS, lambda: "the engine has requests without clients"
        )
        self._watch.between_steps(0)
        self._leave()
        state = self._watch.state()
        require(
            not state.residents, Invariant.SLOT_OWNER, lambda: "a slot is taken without requests"
        )

    def _leave(self) -> None:
        """Check what an engine must have right at its end, and note what it did."""
        self._watch.at_end()
        statistics = self._engine.statistics
        for what in ("tokens_hit", "evicted", "spilled", "restored", "copied"):
            self.counts[f"prefix {what}"] += getattr(statistics.prefix, what)
        self.counts["guesses right"] += statistics.speculation.accepted
        drafted = statistics.speculation.drafted
        self.counts["guesses wrong"] += drafted - statistics.speculation.accepted

    def _step_engine(self) -> None:
        runner, engine = self.world.runner, self._engine
        before = runner.steps
        self._step += 1
        events = []
        try:
            events = engine.step()
        except DeviceLost:
            self.counts["faults"] += 1
            self.log.append(("fault", self.world.clock()))
            for request_id in self._watch.running:
                self.clients.by_id[request_id].faults += 1
            self._watch.running.clear()
        found = self._watch.violation or runner.violation
        if found is not None:
            raise found
        if runner.steps == before and not events:
            self.world.clock.advance(IDLE_SECONDS)
            self.counts["idle steps"] += 1
        self.counts["steps"] += runner.steps - before
        now = self.world.clock()
        for event in events:
            reason = event.finish_reason
            self.log.append((now, event.request_id, event.token, event.position, reason))
            self.clients.take(event, self._step)
            if event.token >= 0:
                self.counts["tokens"] += 1
                self._watch.delivered(self.clients.by_id[event.request_id].request.tenant)
            if reason is not None:
                tenant = self.clients.by_id[event.request_id].request.tenant
                self._watch.accounts.add(tenant, reason.value)
                self.counts[f"ended {reason.value}"] += 1
        self._watch.between_steps(self._step)

    def _act(self, action: Action) -> None:
        match action:
            case Arrive():
                self._arrive(action)
            case Cancel():
                self._cancel(action.request_id)
            case Stall():
                self._stall(action)
            case Quota():
                self._engine.put_tenant(action.tenant)
            case Fault():
                self.world.runner.fail_next(action.where)
            case Restart():
                self._restart()
            case Pause():
                self.world.clock.advance(action.seconds)

    def _arrive(self, arrival: Arrive) -> None:
        request, logits, constraint = arrival.request, arrival.logits, arrival.constraint
        waiting = self._watch.state().waiting
        sink = self._sink(request) if logits else None
        try:
            self._engine.submit(request, sink, allowed=self._masks(constraint))
        except QueueFull:
            self._watch.accounts.add(request.tenant, "requests_rejected")
            self.counts["queue full"] += 1
            free = self.schedule.shape.queue_depth - len(waiting)
            own = sum(self.clients.by_id[id].request.tenant == request.tenant for id in waiting)
            require(
                free <= 0 or own >= free,
                Invariant.LIVENESS,
                lambda: f"{own} of tenant {request.tenant} wait, and {free} places are free",
            )
            return
        except RequestError as error:
            self.counts["refused"] += 1
            if request.tenant in self._engine.tenants:
                self._watch.accounts.add(request.tenant, "requests_rejected")
            if self._acceptable(request):
                raise Violation(
                    Invariant.ONLY_DOCUMENTED_ERRORS, f"request {request.id} was refused: {error}"
                ) from error
            return
        require(
            self._acceptable(request),
            Invariant.ONLY_DOCUMENTED_ERRORS,
            lambda: f"request {request.id} was accepted",
        )
        self._watch.accounts.add(request.tenant, "tokens_prompted", len(request.prompt))
        self.clients.accepted(request, logits, constraint)

    def _cancel(self, request_id: int) -> None:
        client = self.clients.by_id.get(request_id)
        if client is not None and client.ended is None:
            self.counts["cancels"] += 1
            self._watch.accounts.add(client.request.tenant, FinishReason.CANCELLED.value)
        self.clients.cancelled(request_id)
        self._engine.cancel(request_id)

    def _acceptable(self, request: Request) -> bool:
        """Whether an engine may accept the request, apart from the depth of its queue."""
        limits, tenants = self.schedule.shape.limits, self._engine.tenants
        client = self.clients.by_id.get(request.id)
        if (client is not None and client.ended is None) or request.tenant not in tenants:
            return False
        tenant = tenants[request.tenant]
        context = min(limits.context, tenant.max_context)
        vocab = self.world.runner.model.config.vocab
        reach = min(len(request.prompt) + request.max_tokens, context)
        reserved = sum(other.reserved_pages for other in tenants if other.id != tenant.id)
        return (
            0 < len(request.prompt) <= context
            and all(0 <= token < vocab for token in request.prompt)
            and pages_for(reach) <= min(tenant.max_kv_pages, limits.pages - reserved)
        )

    def _masks(self, constraint: Constraint | None) -> MaskProvider | None:
        """What an engine asks which tokens may come next."""
        if constraint is None:
            return None
        vocab = self.world.runner.model.config.vocab

        def mask(generated: list[int]) -> Mask | None:
            self.counts["masks"] += 1
            return constraint.mask(generated, vocab)

        return mask

    def _sink(self, request: Request) -> Any:
        """Takes the logits of a request, each position once and in order."""
        position = 0

        def take(start: int, logits: NDArray[np.float32]) -> None:
            nonlocal position
            self.counts["logits"] += len(logits)
            require(
                start == position and self.world.logits_match(request, start, logits),
                Invariant.TOKENS,
                lambda: (
                    f"request {request.id} got other logits from position {start} on, after "
                    f"{position}"
                ),
            )
            position = start + len(logits)

        return take

    def _stall(self, action: Stall) -> None:
        client = self.clients.by_id.get(action.request_id)
        if client is None or client.ended is not None:
            return
        if action.over:
            self._engine.unstall(action.request_id)
            client.stalled_since = None
        else:
            self.counts["stalls"] += 1
            self._engine.stall(action.request_id)
            if client.stalled_since is None:
                client.stalled_since = self._step

    def _restart(self) -> None:
        self.counts["restarts"] += 1
        self._leave()
        self.world.runner.restart()
        self._engine = self._start(tuple(self._engine.tenants))
        for client in self.clients.live:
            self._resubmit(client)

    def _resubmit(self, client: Client) -> None:
        client.stalled_since = None
        client.faults = 0
        rest = client.rest
        sink = self._sink(client.request) if client.logits else None
        try:
            constraint = client.constraint and client.constraint.after(client.tokens)
            self._engine.submit(rest, sink, allowed=self._masks(constraint))
        except (QueueFull, RequestError):
            client.ended = FinishReason.CANCELLED
            self._watch.accounts.add(rest.tenant, "requests_rejected")
        else:
            self._watch.accounts.add(rest.tenant, "tokens_prompted", len(rest.prompt))
