"""Changes a step's inputs on the device by the drafts that a step in front accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accel.cuda.launcher import Arguments, LaunchShape, start_kernel
from accel.cuda.memory import Memory
from accel.cuda.program import Modules, tuned_source
from contract.draft_shift import DraftShift, SequenceShift
from contract.records import OUTPUT_EVENT

THREADS = 32
"""Threads of the launch: each changes what belongs to one sequence."""
NO_QUERY = (1 << 32) - 1
"""The kernel's ``query`` for a step that has no token behind all drafts."""


@dataclass(slots=True)
class InputShift:
    """The kernel that changes inputs, on one device."""

    memory: Memory
    modules: Modules
    _shape: LaunchShape | None = None

    def prepare(self) -> None:
        """Build the kernel. Raises CudaError."""
        if self._shape is None:
            function = self.modules.function(tuned_source("shift_inputs.cu", {}), "shift_inputs")
            self._shape = LaunchShape(function, (1, 1, 1), THREADS)

    def enqueue(self, inputs: int, ring: int, shift: DraftShift) -> None:
        """Enqueue the change of the inputs at address ``inputs``, with the events at address
        ``ring``. Raises CudaError."""
        assert self._shape is not None
        addresses = [np.uint64(address) for address in (inputs, ring)]
        events = np.uint32(shift.ring.nbytes // OUTPUT_EVENT.itemsize)
        for first in range(0, len(shift.sequences), THREADS):
            some = shift.sequences[first : first + THREADS]
            arguments = Arguments(*addresses, events, np.uint32(len(some)), packed(some))
            start_kernel(self.memory.context, self.memory.stream, self._shape, arguments)


def packed(sequences: Sequence[SequenceShift]) -> np.void:
    """The kernel's argument: THREADS records of five words, those behind ``sequences`` 0."""
    words = np.zeros((THREADS, len(SequenceShift._fields)), np.uint32)
    for row, one in zip(words, sequences, strict=False):
        row[:] = *one[:-1], NO_QUERY if one.query is None else one.query
    return np.void(words.tobytes())
