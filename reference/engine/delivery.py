"""What the tokens of a step mean to the requests they were sampled for: events, and ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from contract.types import FinishReason, TokenEvent
from reference.engine.constraining import NOT_LISTED, Listed, listed_of
from reference.engine.pipeline import Computed, Pipeline
from reference.engine.residents import Residents
from reference.engine.sequence import Placement, Sequence
from reference.engine.speculating import Speculating
from reference.ledger import Ledger
from reference.runner import StepOutput
from reference.sched.tenants import Tenants


class Delivery:
    """Turns what steps computed into events. ``finish`` is called with every sequence that ends."""

    def __init__(
        self,
        residents: Residents,
        pipeline: Pipeline,
        speculating: Speculating | None,
        tenants: Tenants,
        ledger: Ledger,
        end_of_generation: frozenset[int],
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._residents = residents
        self._pipeline = pipeline
        self._speculating = speculating
        self._tenants = tenants
        self._ledger = ledger
        self._end_of_generation = end_of_generation
        self._finish = finish
        self._events: list[TokenEvent] = []
        self._computed: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def events(self) -> list[TokenEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def forget(self, request_id: int) -> None:
        """Drop the events of a request that were not given away: a sink raised before they were."""
        self._events = [event for event in self._events if event.request_id != request_id]

    def take(self, output: StepOutput, computed: Iterable[Computed], now: float) -> None:
        """A step was read at ``now``."""
        tokens = output.token.tolist()
        for part in computed:
            self._take(part, tokens, output, now)
        for tenant, (prefilled, decoded) in self._computed.items():
            self._tenants.count(tenant, prefilled, decoded)
        self._computed.clear()

    def end_early(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request that no token ends."""
        self._events.append(TokenEvent(sequence.request.id, -1, sequence.known, reason))
        self._finish(sequence, reason)

    def _take(self, part: Computed, tokens: list[int], output: StepOutput, now: float) -> None:
        """What one sequence got out of a step."""
        sequence, stop = part.placement.sequence, part.stop
        request = sequence.request
        if sequence.on_logits is not None:
            skipped = max(0, sequence.scored - part.start)
            if skipped < stop - part.start:
                rows = output.logits[part.first_row + skipped : part.end_row].copy()
                sequence.on_logits(part.start + skipped, rows)
                sequence.scored = stop
        if stop < sequence.known:
            self._computed[request.tenant][0] += stop - part.start
            return
        first = part.start + 1 if part.drafted else stop
        given = 0
        for position in range(first, stop + 1):
            row = part.end_row - 1 - (stop - position)
            token = tokens[row] if row >= part.first_row else -1
            guess = int(sequence.tokens[position]) if position < stop else token
            given += token >= 0 and sequence.samples
            listed = listed_of(request, output, row) if token >= 0 else NOT_LISTED
            self._receive(part.placement, position, token, listed)
            if token != guess or sequence.placement is None:
                break
        counts = self._computed[request.tenant]
        counts[0] += stop - part.start - 1 if first == stop else 0
        counts[1] += given
        if given:
            self._note_tokens(sequence, given, now)
        if self._speculating is not None or part.placement.masked:
            self._after_tokens(part)

    def _note_tokens(self, sequence: Sequence, given: int, now: float) -> None:
        tenant = sequence.request.tenant
        self._ledger.generated(tenant, given)
        if sequence.given is None:
            self._ledger.first_token(tenant, now - sequence.arrived)
        else:
            self._ledger.interval(tenant, now - sequence.given)
        sequence.given = now

    def _receive(self, placement: Placement, position: int, token: int, listed: Listed) -> None:
        """What ``token``, sampled for ``position``, means: the next one, or the end."""
        sequence = placement.sequence
        request = sequence.request
        reason = None
        if not sequence.samples:
            token, reason, listed = -1, FinishReason.LENGTH, NOT_LISTED
        elif token < 0:
            reason = FinishReason.ERROR
        elif token in self._end_of_generation and not request.ignore_end:
            reason = FinishReason.STOP
        elif position >= sequence.last:
            reason = FinishReason.LENGTH
        self._events.append(TokenEvent(request.id, token, position, reason, *listed))
        if reason is None:
            sequence.tokens[position] = token
            sequence.known = position + 1
        else:
            self._finish(sequence, reason)

    def _after_tokens(self, part: Computed) -> None:
        """Let a sequence that goes on be planned from the tokens it has."""
        placement, table = part.placement, self._residents.table
        if placement.sequence.placement is not placement:
            return
        if part.drafted:
            assert self._speculating is not None
            self._speculating.settle(placement, part.start, part.stop)
            self._pipeline.changed()
        elif table.lockstep[placement.slot]:
            table.known[placement.slot] = placement.sequence.known
            self._pipeline.changed()
        if self._speculating is not None and self._speculating.consider(placement):
            self._pipeline.changed()
