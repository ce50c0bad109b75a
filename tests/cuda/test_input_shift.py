"""The kernel that changes a step's inputs by the drafts that a step in front accepted."""

from pathlib import Path

import numpy as np
import pytest

from accel.cuda.input_shift import THREADS, packed
from accel.cuda.program import tuned_source
from contract.draft_shift import SequenceShift, shift_inputs
from contract.records import OUTPUT_EVENT
from tests.cuda.emulator import emulate

EVENTS, DRAFTS, SEQUENCES = 96, 5, 11
QUERY_WORDS, OTHER_WORDS = 4 * (DRAFTS + 1), 2
"""Words of a sequence: the records of its tokens, and two others that change."""


@pytest.mark.parametrize("first", [0, 90, (1 << 32) - 3])
@pytest.mark.parametrize("queries", [False, True])
def test_the_kernel_does_what_is_defined(first: int, queries: bool, folder: Path) -> None:
    """Of several sequences with each number of accepted drafts, also at the end of the ring and of
    the numbers of events."""
    kernel = emulate(tuned_source("shift_inputs.cu", {}), folder)
    rng = np.random.default_rng(first)
    events = np.zeros(EVENTS, OUTPUT_EVENT)
    events["token"] = rng.integers(-1, 1000, EVENTS)
    begins = [(first + number * (DRAFTS + 1)) % (1 << 32) for number in range(SEQUENCES)]
    for number, event in enumerate(begins):
        events[event % EVENTS]["flags"] = number % (DRAFTS + 1)
    each = QUERY_WORDS + OTHER_WORDS
    sequences = [
        SequenceShift(event, DRAFTS, end - 2, end - 1, end - OTHER_WORDS - 4 if queries else None)
        for event, end in zip(begins, range(each, each * SEQUENCES + 1, each), strict=True)
    ]
    inputs = rng.integers(-99, 99, each * SEQUENCES, np.int32)
    expected = inputs.copy()
    shift_inputs(expected.view(np.uint8), events.view(np.uint8), sequences)
    argument = np.array(packed(sequences))
    addresses = inputs.ctypes.data, events.ctypes.data
    numbers = EVENTS, SEQUENCES, argument.ctypes.data
    kernel.run("shift_inputs", (1, 1, 1), THREADS, *addresses, *numbers)
    assert inputs.tolist() == expected.tolist()
