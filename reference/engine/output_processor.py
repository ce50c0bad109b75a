"""What the tokens of a step mean to the requests they were sampled for: events, and ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from contract.types import FinishReason, TokenEvent
from reference.engine.constraining import NOT_LISTED, listed_of
from reference.engine.pipeline import Computed, Pipeline
from reference.engine.sequence import RunningSequence, Sequence
from reference.engine.slot_manager import SlotManager
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.ledger import Ledger
from reference.runner import StepOutput
from reference.sched.tenants import Tenants


class OutputProcessor:
    """Turns what steps computed into events. ``finish`` is called with every sequence that ends."""

    def __init__(
        self,
        slot_manager: SlotManager,
        pipeline: Pipeline,
        speculative: SpeculativeDecoder | None,
        tenants: Tenants,
        ledger: Ledger,
        end_of_generation: frozenset[int],
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._slot_manager = slot_manager
        self._pipeline = pipeline
        self._speculative = speculative
        self._tenants = tenants
        self._ledger = ledger
        self._end_of_generation = end_of_generation
        self._finish = finish
        self._events: list[TokenEvent] = []
        self._computed: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._intervals: Counter[tuple[int, float]] = Counter()

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
        try:
            for part in computed:
                self._take(part, tokens, output, now)
        finally:
            self._settle_accounts()

    def end_early(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request that no token ends."""
        self._events.append(TokenEvent(sequence.request.id, -1, sequence.known, reason))
        self._finish(sequence, reason)

    def _take(self, part: Computed, tokens: list[int], output: StepOutput, now: float) -> None:
        """What one sequence got out of a step."""
        active, start, stop, first_row, end_row = part
        sequence = active.sequence
        if sequence.on_logits is not None:
            _hand_over(sequence, part, output)
        counts = self._computed[sequence.request.tenant]
        if stop < sequence.known:
            counts[0] += stop - start
            return
        if part.drafted:
            given = self._take_guessed(part, tokens, output)
        else:
            counts[0] += stop - start - 1
            token = tokens[end_row - 1] if end_row > first_row else -1
            given = int(token >= 0 and sequence.samples)
            self._receive(active, stop, token, output, end_row - 1)
        counts[1] += given
        if given:
            self._note_tokens(sequence, now)
        if self._speculative is not None or active.masked:
            self._after_tokens(part)

    def _take_guessed(self, part: Computed, tokens: list[int], output: StepOutput) -> int:
        """The tokens up to the first one that was guessed wrongly: how many they are."""
        sequence = part.active.sequence
        given = 0
        for row in range(part.first_row, part.end_row):
            position = part.start + 1 + row - part.first_row
            token = tokens[row]
            guess = int(sequence.tokens[position]) if position < part.stop else token
            given += token >= 0 and sequence.samples
            self._receive(part.active, position, token, output, row)
            if token != guess or sequence.active is None:
                break
        return given

    def _note_tokens(self, sequence: Sequence, now: float) -> None:
        tenant = sequence.request.tenant
        if sequence.given is None:
            self._ledger.first_token(tenant, now - sequence.arrived)
        else:
            # The sequences of a step mostly had their last tokens at the same time, too.
            self._intervals[tenant, now - sequence.given] += 1
        sequence.given = now

    def _settle_accounts(self) -> None:
        """Tell the tenants' rates and the ledger what a step did for each."""
        for tenant, (prefilled, decoded) in self._computed.items():
            self._tenants.count(tenant, prefilled, decoded)
            self._ledger.generated(tenant, decoded)
        for (tenant, seconds), count in self._intervals.items():
            self._ledger.interval(tenant, seconds, count)
        self._computed.clear()
        self._intervals.clear()

    def _receive(
        self, active: RunningSequence, position: int, token: int, output: StepOutput, row: int
    ) -> None:
        """What ``token``, sampled for ``position`` in ``row``, means: the next one, or the end."""
        sequence = active.sequence
        request = sequence.request
        reason = None
        listed = NOT_LISTED
        if request.log_probabilities is not None and token >= 0:
            listed = listed_of(request, output, row)
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
        active, table = part.active, self._slot_manager.table
        if active.sequence.active is not active:
            return
        if part.drafted:
            assert self._speculative is not None
            self._speculative.settle(active, part.start, part.stop)
            self._pipeline.changed()
        elif table.lockstep[active.slot]:
            table.known[active.slot] = active.sequence.known
            self._pipeline.changed()
        if self._speculative is not None and self._speculative.consider(active):
            self._pipeline.changed()


def _hand_over(sequence: Sequence, part: Computed, output: StepOutput) -> None:
    """Give the logits of a step to whoever asked, those of a position once."""
    assert sequence.on_logits is not None
    skipped = max(0, sequence.scored - part.start)
    if skipped < part.stop - part.start:
        rows = output.rows(sequence.output)[part.first_row + skipped : part.end_row].copy()
        sequence.on_logits(part.start + skipped, rows)
        sequence.scored = part.stop
