"""The clients: the events that each request should get, and those it got."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from contract.types import FinishReason, Request, TokenEvent
from harness.simulation.constraint import Constraint
from harness.simulation.invariants import Invariant, Violation, require


@dataclass(slots=True)
class Client:
    """One request as its client sees it.

    ``expected`` are the events of its solo run; ``faults`` counts the faults while it ran;
    ``stalled_since`` is the engine step at which it stopped taking tokens. ``tenant_replaced`` is
    true when another tenant has got the id of its tenant. It ``may_fail`` when other tenants have
    reserved the pages it needs."""

    request: Request
    expected: tuple[TokenEvent, ...]
    logits: bool = False
    constraint: Constraint | None = None
    model: int = 0
    received: int = 0
    ended: FinishReason | None = None
    faults: int = 0
    stalled_since: int | None = None
    tenant_replaced: bool = False
    may_fail: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens it has got so far."""
        return tuple(event.token for event in self.expected[: self.received])

    @property
    def rest(self) -> Request:
        """A request for the rest of its answer, as a client submits it after the server
        restarted."""
        tokens = self.tokens
        return replace(
            self.request,
            prompt=self.request.prompt + tokens,
            max_tokens=self.request.max_tokens - self.received,
        )


@dataclass(slots=True)
class Clients:
    """The clients of all accepted requests. ``solo`` gives the events of a request that runs alone
    on the model of a number. A request may end with an error after ``max_faults`` faults."""

    solo: Callable[[int, Request, Constraint | None], tuple[TokenEvent, ...]]
    stall_steps: int
    max_faults: int
    by_id: dict[int, Client] = field(default_factory=dict)

    @property
    def live(self) -> list[Client]:
        """The clients whose requests have not ended."""
        return [client for client in self.by_id.values() if client.ended is None]

    def accepted(
        self, request: Request, logits: bool, constraint: Constraint | None, model: int
    ) -> None:
        """Note that the engine of a model accepted a request."""
        expected = self.solo(model, request, constraint)
        self.by_id[request.id] = Client(request, expected, logits, constraint, model)

    def cancelled(self, request_id: int) -> None:
        """Note that a client cancelled its request: no event may follow."""
        client = self.by_id.get(request_id)
        if client is not None and client.ended is None:
            client.ended = FinishReason.CANCELLED

    def take(self, event: TokenEvent, step: int) -> None:
        """Check an event that arrived after ``step`` steps of the engine. Raises Violation."""
        client = self.by_id.get(event.request_id)
        if client is None:
            raise Violation(Invariant.TOKENS, f"{event} belongs to no request")
        require(client.ended is None, Invariant.TOKENS, lambda: f"{event} follows {client.ended}")
        expected = client.expected[client.received]
        if event == expected:
            client.received += 1
        elif not self._may_end_early(client, event, step):
            raise Violation(Invariant.TOKENS, f"{event}, expected {expected}")
        client.ended = event.finish_reason

    def _may_end_early(self, client: Client, event: TokenEvent, step: int) -> bool:
        """Whether a request may end with this event, without a token, though its solo run goes
        on."""
        if event.token != -1 or event.position != client.expected[client.received].position:
            return False
        if event.finish_reason is FinishReason.ERROR:
            return client.faults >= self.max_faults or client.tenant_replaced or client.may_fail
        if event.finish_reason is FinishReason.CLIENT_TOO_SLOW:
            stalled = client.stalled_since
            return stalled is not None and step - stalled >= self.stall_steps
        return False
