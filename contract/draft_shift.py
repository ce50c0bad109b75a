"""Inputs of a step that depend on how many drafts an earlier step accepts.

The host need not know that number when it submits the step: it writes the inputs as if all drafts
were accepted, and who executes the step changes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from contract.arrays import Bytes, Records
from contract.ir.inputs import InputRows
from contract.lazy_dataclass import dataclass
from contract.records import EVENT_NUMBERS, OUTPUT_EVENT, QUERY_TOKEN

WORD_BYTES = 4


class SequenceShift(NamedTuple):
    """What changes in the inputs of a step behind one that verifies ``drafts`` drafts of a
    sequence, whose events begin with number ``event``.

    The number of rejected drafts is subtracted from the int32 words number ``first`` and ``second``
    of the inputs. ``query`` is the number of the first word of the QUERY_TOKEN behind all drafts,
    None if the step has none of them: the token sampled behind the accepted drafts is that of the
    record as many before as were rejected, 0 for one that is not finite."""

    event: int
    drafts: int
    first: int
    second: int
    query: int | None


@dataclass(frozen=True, slots=True)
class DraftShift:
    """What changes in the inputs of a step behind one whose events are in the buffer ``ring`` of
    the tier, for each of the ``sequences``."""

    ring: Any
    sequences: tuple[SequenceShift, ...]


@runtime_checkable
class ShiftsInputs(Protocol):
    """A tier that executes a step whose inputs depend on an earlier one that it has not read."""

    def prepare_shifts(self) -> None:
        """Have ready what ``submit_shifted`` needs."""

    def submit_shifted(
        self, batch: Any, inputs: Bytes, rows: InputRows | None, shift: DraftShift
    ) -> Any:
        """As ``SubmitsUnread.submit_unread``, with the inputs changed behind the steps in front.
        The events of ``shift`` are those of one of them."""


def shift_inputs(inputs: Bytes, ring: Bytes, sequences: Iterable[SequenceShift]) -> None:
    """Change ``inputs``, given the bytes of the ring once the step in front has ended."""
    events, words = ring.reshape(-1).view(OUTPUT_EVENT), inputs.view(np.int32)
    for event, drafts, *positions, query in sequences:
        accepted = int(_event(events, event)["flags"])
        rejected = drafts - accepted
        words[positions] -= rejected
        if query is not None:
            token = int(_event(events, event + accepted)["token"])
            words[query - rejected * (QUERY_TOKEN.itemsize // WORD_BYTES)] = max(token, 0)


def _event(events: Records, number: int) -> np.void:
    found: np.void = events[number % EVENT_NUMBERS % len(events)]
    return found
