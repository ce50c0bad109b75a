"""The engine's calls that end requests nobody waits for any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from contract.errors import StepAbandoned
from contract.types import FinishReason
from reference.engine.output_processor import OutputProcessor
from reference.engine.pipeline import Pipeline
from reference.engine.scheduler import Scheduler
from reference.engine.sequence import Sequence
from reference.engine.slot_manager import SlotManager
from reference.engine.tenant_changes import TenantChanges


class CancelCalls:
    """A base class of ``Engine`` for cancelled requests. ``_change`` is a context whose change is
    made completely or undone."""

    _live: dict[int, Sequence]
    _pipeline: Pipeline
    _scheduler: Scheduler
    _slot_manager: SlotManager
    _output_processor: OutputProcessor
    _changes: TenantChanges
    _change: Callable[[], AbstractContextManager[None]]
    _end: Callable[[Sequence, FinishReason], None]

    def will_cancel(self, request_ids: Iterable[int]) -> bool:
        """Say that requests are cancelled before the next step, so that steps which only compute
        for such requests are abandoned. Returns whether the tier can do that; then these requests
        may end at once, without an event. Any thread may call this, and signal handlers."""
        return self._pipeline.leave(request_ids)

    def cancel(self, request_id: int) -> None:
        """End a request and free its slot and pages; no further event of it comes. An id of an
        ended request is ignored."""
        with self._change():
            if request_id in self._pipeline.cancels:
                try:
                    self._pipeline.abandon_unneeded()
                except StepAbandoned:
                    self._end_abandoned()
                self._pipeline.cancels.discard(request_id)
            self._cancel(request_id)
            self._changes.apply()

    def _cancel(self, request_id: int) -> None:
        sequence = self._live.get(request_id)
        self._output_processor.cancel(request_id, sequence)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)

    def _end_abandoned(self) -> None:
        """Cancel the requests of the steps in flight, which were abandoned. Any part of what these
        steps were to write may be there, so nobody may find it; a sequence that may have found it
        already waits again."""
        lost = self._pipeline.drop_abandoned()
        manager, orders = self._slot_manager, {sequence.order for sequence, _ in lost.sequences}
        for sequence in list(manager.running.values()):
            if sequence.admitted > lost.admitted and sequence.order not in orders:
                self._scheduler.preempt(sequence, published=False)
        for sequence, start in lost.sequences:
            # What it found in the cache may be of these steps, too.
            manager.cut_back(sequence, 0 if sequence.admitted > lost.admitted else start)
        for sequence, _ in lost.sequences:
            self._cancel(sequence.request.id)
