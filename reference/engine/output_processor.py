"""Turns the tokens of a step into events, and ends the sequences that are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import field
from types import SimpleNamespace
from typing import Any

import numpy as np

from contract.arrays import Floats
from contract.lazy_dataclass import dataclass
from contract.types import FinishReason, TokenEvent
from reference.engine.constraining import (
    NO_LOG_PROBABILITIES,
    drop_min_tokens,
    log_probabilities_of,
)
from reference.engine.pipeline import Pipeline
from reference.engine.sequence import Sequence
from reference.engine.slot_manager import SlotManager
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.engine.steps import Computed
from reference.expert_outputs import expert_ids
from reference.runner import ROW_DIGEST, StepOutput
from reference.sched.scores import scores_in
from reference.sched.tenants import Tenants
from reference.usage import UsageCounters

COUNTED_ENDS = tuple(reason for reason in FinishReason if reason is not FinishReason.CANCELLED)
"""The reasons that a client receives as an event."""


@dataclass(slots=True)
class _Batch:
    """Events that were not taken yet. ``entries`` are (event, tenant) pairs; the event counts for
    this tenant, or for none. ``events`` are the events already counted, and ``before`` is each
    tenant's usage without them."""

    entries: list[tuple[TokenEvent, int | None]] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    before: dict[int, tuple[int, Counter[FinishReason]]] = field(default_factory=dict)


class OutputProcessor:
    """Turns the results of steps into events. ``finish`` is called with every sequence that ends.

    An event is final once it is in the batch: what an interrupt prevents after that can be repeated
    from the batch. A batch is returned as a whole, in one instruction."""

    def __init__(
        self,
        slot_manager: SlotManager,
        pipeline: Pipeline,
        speculative: SpeculativeDecoder | None,
        tenants: Tenants,
        usage: UsageCounters,
        end_of_generation: frozenset[int],
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._slot_manager = slot_manager
        self._pipeline = pipeline
        self._speculative = speculative
        self._tenants = tenants
        self._usage = usage
        self._end_of_generation = end_of_generation
        self._finish = finish
        self._batches: list[_Batch] = [_Batch()]
        self._intervals: Counter[tuple[int, float]] = Counter()

    @property
    def pending(self) -> bool:
        """Whether there are events that were not taken."""
        return bool(self._batches and self._batches[-1].entries)

    def count(self) -> None:
        """Count the batch in the usage. Another call corrects the usage by the events added or
        dropped since."""
        if not self._batches:
            return
        batch = self._batches[-1]
        tokens, ends = dict[int, int](), Counter[tuple[int, FinishReason]]()
        for event, tenant in batch.entries:
            if tenant is not None:
                tokens[tenant] = tokens.get(tenant, 0) + (event.token >= 0)
                if event.finish_reason is not None:
                    ends[tenant, event.finish_reason] += 1
        gone = [tenant for tenant in tokens if tenant not in self._tenants]
        if gone:
            tokens = {tenant: count for tenant, count in tokens.items() if tenant not in gone}
            ends = Counter({key: count for key, count in ends.items() if key[0] not in gone})
        usage, again = self._usage, bool(batch.before)
        for tenant in tokens.keys() - batch.before.keys():
            batch.before[tenant] = usage.handed_out(tenant)
        for tenant, (before, ended) in batch.before.items():
            counted, counted_ends = usage.handed_out(tenant)
            usage.generated(tenant, before + tokens.get(tenant, 0) - counted)
            for reason in COUNTED_ENDS if ends or again else ():
                more = ended[reason] + ends[tenant, reason] - counted_ends[reason]
                if more:
                    usage.finished(tenant, reason, more)
        batch.events = [event for event, _ in batch.entries]

    def events(self) -> list[TokenEvent]:
        """Return and remove the batch that was counted."""
        return self._batches.pop().events if self._batches else []

    def drop(self) -> None:
        """Drop the events that were not taken, from the usage too."""
        if self.pending:
            self._batches[-1].entries = []
            self.count()

    def apply_batch(self, live: dict[int, Sequence]) -> list[tuple[Sequence, FinishReason]]:
        """Write the tokens of the batch into their sequences, in case an interrupt prevented it.
        Returns the sequences that an event of the batch ends."""
        ends = []
        for event, _ in self._batches[-1].entries if self._batches else ():
            sequence = live.get(event.request_id)
            if sequence is None:
                continue
            if event.finish_reason is not None:
                ends.append((sequence, event.finish_reason))
            elif event.token >= 0:
                sequence.tokens[event.position] = event.token
                sequence.known = max(sequence.known, event.position + 1)
                if sequence.request.force_tokens:
                    sequence.next_score = max(sequence.next_score, event.position + 1)
        self._intervals.clear()
        return ends

    def detach_tenants(self, tenants: Collection[int]) -> None:
        """Stop counting the events of the batch for removed tenants."""
        if self._batches and tenants:
            batch = self._batches[-1]
            batch.entries = [(e, None if id in tenants else id) for e, id in batch.entries]
            for tenant in tenants:
                batch.before.pop(tenant, None)

    def cancel(self, request_id: int, sequence: Sequence | None) -> None:
        """Drop the events of a request from the batch and the usage, and count the cancellation
        once, even if an interrupted call is repeated. ``sequence`` is None if one of these events
        ends it, or it ended before."""
        batch = self._batches[-1] if self.pending else _Batch()
        own = [entry for entry in batch.entries if entry[0].request_id == request_id]
        left = [entry for entry in batch.entries if entry[0].request_id != request_id]
        tenant = None
        if sequence is not None:
            tenant = None if sequence.cancelled else sequence.tenant
        elif own and own[-1][0].finish_reason is not None:
            tenant = own[-1][1]
        if tenant is None:
            batch.entries = left
        else:
            marked: Any = SimpleNamespace() if sequence is None else sequence
            finished, reason = self._usage.entry(tenant).finished, FinishReason.CANCELLED
            count = finished[reason] + 1
            # One line, so that an interrupt comes before or after all assignments.
            batch.entries, marked.cancelled, finished[reason] = left, True, count
        self.count()

    def take(self, output: StepOutput, computed: Iterable[Computed], now: float) -> bool:
        """Process a step that was read at ``now`` seconds. Returns whether it ended no sequence."""
        tokens, live = output.token.tolist(), True
        try:
            for part in computed:
                self._take(part, tokens, output, now)
                live &= part.sequence.slot >= 0
        finally:
            for (tenant, seconds), count in self._intervals.items():
                self._usage.interval(tenant, seconds, count)
            self._intervals.clear()
        return live

    def end_early(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request without a token."""
        event = TokenEvent(sequence.request.id, -1, sequence.known, reason)
        self._append(event, sequence.tenant)
        self._finish(sequence, reason)

    def _append(self, event: TokenEvent, tenant: int) -> None:
        if not self._batches:
            self._batches.append(_Batch())
        self._batches[-1].entries.append((event, tenant))

    def _take(self, part: Computed, tokens: list[int], output: StepOutput, now: float) -> None:
        """Process the part of a step that belongs to one sequence."""
        sequence, stop, first_row, end_row = part.sequence, part.stop, part.first_row, part.end_row
        if sequence.on_logits is not None:
            _hand_over(sequence, part, output)
            if not sequence.running:
                # The sink has cancelled the request.
                return
        if sequence.on_experts is not None:
            _hand_over_experts(sequence, part, output)
            if not sequence.running:
                return
        if sequence.scored_to and not self._score(part, output, now):
            return
        if stop < sequence.known:
            return
        if end_row - first_row > 1 and part.drafted:
            taken = self._take_drafted(part, tokens, output)
            if self._speculative is not None and not sequence.running:
                # Drafts after the end were not compared.
                compared = part.stop - part.start if taken > output.accepted[first_row] else taken
                self._speculative.ended(sequence, taken, compared - 1)
        else:
            token = tokens[end_row - 1] if end_row > first_row else -1
            taken = int(token >= 0 and sequence.samples)
            self._receive(sequence, stop, token, output, end_row - 1)
        if taken:
            self._note_tokens(sequence, now)
        if self._speculative is not None or sequence.allowed is not None:
            self._after_tokens(part)

    def _score(self, part: Computed, output: StepOutput, now: float) -> bool:
        """Pass on the log-probabilities that a step computed for given tokens, each token's once.
        False if a row was not finite, or the sequence ended or lost its slot."""
        sequence = part.sequence
        first, stop = sequence.next_score, min(part.stop + 1, sequence.scored_to)
        if first >= stop:
            return True
        row = part.end_row - (part.stop + 1 - first)
        behind = min(stop, max(first, len(sequence.request.prompt)))
        if first < behind and sequence.on_scores is not None:
            tokens, rows = sequence.tokens[first:behind], slice(row, row + behind - first)
            scores = scores_in(output, rows, first, tokens, sequence.request.score_top)
            # One line, so that an interrupt comes before or after both assignments.
            sequence.next_score, _ = behind, sequence.on_scores(scores)
            if sequence.running and np.isnan(scores.log_probability).any():
                self.end_early(sequence, FinishReason.ERROR)
        for position in range(behind, stop):
            if sequence.running:
                self._emit_forced(sequence, position, output, row + position - first)
        if behind < stop:
            self._note_tokens(sequence, now)
        if sequence.running:
            # Tokens computed again after wrong drafts need no row each.
            self._slot_manager.table.rows_from[sequence.slot] = sequence.rows_from
        return sequence.running

    def _emit_forced(self, sequence: Sequence, position: int, output: StepOutput, row: int) -> None:
        """Append an event of the forced token at ``position``, whose log-probability is in ``row``.
        The last token ends the sequence, and so does a row that is not finite."""
        request, token = sequence.request, int(sequence.tokens[position])
        if output.token[row] != token:
            self.end_early(sequence, FinishReason.ERROR)
            return
        reason = None
        if position == sequence.scored_to - 1:
            ends = token in self._end_of_generation and not request.ignore_end
            reason = FinishReason.STOP if ends else FinishReason.LENGTH
        scores = log_probabilities_of(request, output, row)
        event = TokenEvent(request.id, token, position, reason, *scores)
        self._append(event, request.tenant)
        sequence.next_score = position + 1
        if reason is not None:
            self._finish(sequence, reason)

    def _take_drafted(self, part: Computed, tokens: list[int], output: StepOutput) -> int:
        """Take the tokens of the accepted drafts and the one after them; returns their number."""
        sequence, first = part.sequence, part.first_row
        taken = 0
        for row in range(first, first + 1 + int(output.accepted[first])):
            token = tokens[row]
            if token >= 0 and sequence.samples:
                taken += 1
                if taken > 1:
                    # The step counted its first token. Others count before a sink gets them, since
                    # its copy may fail.
                    self._tenants.count(sequence.tenant, 0, 1)
            self._receive(sequence, part.start + 1 + row - first, token, output, row)
            if not sequence.running:
                break
        return taken

    def _note_tokens(self, sequence: Sequence, now: float) -> None:
        tenant = sequence.request.tenant
        if sequence.read_at is None:
            self._usage.first_token(tenant, now - sequence.arrived)
        else:
            # Most sequences of a step have the same interval: equal ones are counted together.
            self._intervals[tenant, now - sequence.read_at] += 1
        sequence.read_at = now

    def _receive(
        self, sequence: Sequence, position: int, token: int, output: StepOutput, row: int
    ) -> None:
        """Take ``token``, sampled for ``position`` in ``row``; it continues or ends the
        sequence."""
        request = sequence.request
        reason = None
        scores = NO_LOG_PROBABILITIES
        if request.log_probabilities is not None and token >= 0:
            scores = log_probabilities_of(request, output, row)
        if not sequence.samples:
            token, reason, scores = -1, FinishReason.LENGTH, NO_LOG_PROBABILITIES
        elif token < 0:
            reason = FinishReason.ERROR
        elif token in self._end_of_generation and not request.ignore_end:
            reason = FinishReason.STOP
        elif position >= sequence.last_position:
            reason = FinishReason.LENGTH
        event = TokenEvent(request.id, token, position, reason, *scores)
        self._append(event, request.tenant)
        if reason is None:
            sequence.tokens[position] = token
            sequence.known = position + 1
        else:
            self._finish(sequence, reason)

    def _after_tokens(self, part: Computed) -> None:
        """Update the slot table for a sequence that continues and runs in lockstep."""
        sequence, table = part.sequence, self._slot_manager.table
        if not sequence.running:
            return
        if part.drafted:
            assert self._speculative is not None
            self._speculative.settle(sequence, part.start, part.stop)
            self._pipeline.replan()
        elif table.lockstep[sequence.slot]:
            if sequence.masked:
                drop_min_tokens(sequence)
                table.lockstep[sequence.slot] = sequence.masked
            table.known[sequence.slot] = sequence.known
            self._pipeline.replan()
        if self._speculative is not None and self._speculative.consider(sequence):
            self._pipeline.replan()


def _hand_over_experts(sequence: Sequence, part: Computed, output: StepOutput) -> None:
    """Pass the experts of a step to the sequence's sink, those of each position once."""
    assert sequence.on_experts is not None
    first = max(sequence.routed, part.start)
    if first < part.stop:
        shift = part.first_token - part.start
        ids = expert_ids(output.outputs, part.tokens, first + shift, part.stop + shift)
        # One line, so that an interrupt comes before or after both assignments.
        sequence.routed, _ = part.stop, sequence.on_experts(first, ids)


def _hand_over(sequence: Sequence, part: Computed, output: StepOutput) -> None:
    """Pass the logits of a step to the sequence's sink, those of each position once."""
    assert sequence.on_logits is not None
    first = max(sequence.scored, part.stop - (part.end_row - part.first_row))
    if first < part.stop:
        row = part.end_row - (part.stop - first)
        rows = _copied(output.rows(sequence.output)[row : part.end_row], sequence.output)
        # One line, so that an interrupt comes before or after both assignments.
        sequence.scored, _ = part.stop, sequence.on_logits(first, rows)


@np.errstate(invalid="ignore")
def _copied(rows: Floats, output: str) -> Floats:
    """A copy of rows, with +0 for -0, a sign that tiers are free to choose (rule R0).

    Digests are words of any bits; so are numbers of a broken model, also a signalling NaN's."""
    return rows.copy() if output == ROW_DIGEST else rows + np.float32(0.0)
