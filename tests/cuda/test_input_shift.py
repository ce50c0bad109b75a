"""Inputs of steps that change by the drafts that a step in front accepted."""

from pathlib import Path

import numpy as np
import pytest

from accel.cuda import launcher
from accel.cuda.input_shift import THREADS, packed
from accel.cuda.program import tuned_source
from contract.draft_shift import DraftShift, SequenceShift, shift_inputs
from contract.dtypes import I32
from contract.ir.graph import BufferDecl, BufferKind
from contract.records import OUTPUT_EVENT
from tests.cuda.conftest import OpenTier
from tests.cuda.emulator import emulate
from tests.cuda.fake_context import floats
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.test_tier import LARGEST, Lowered, block_of, values_of
from tests.doubling import WIDTH, doubled

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


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("max_brief", [0, 16])
@pytest.mark.parametrize("changed", [1, 2, 3, 4, 5])
def test_steps_with_changed_inputs_keep_their_inputs(
    driver: FakeDriver,
    open_cuda: OpenTier,
    late: bool,
    max_brief: int,
    changed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many follow each other, behind and in front of others. Each step has fewer tokens
    than the one in front, whose results stay behind its own."""
    monkeypatch.setattr(launcher, "MAX_BRIEF_LAUNCHES", max_brief)
    lowered = Lowered(open_cuda())
    tier, y = lowered.tier, lowered.y.allocations[0].address
    ring = tier.alloc(BufferDecl("ring", BufferKind.OUTPUT, I32, (4, 8)), 4 * OUTPUT_EVENT.itemsize)
    tier.prepare_shifts()
    lowered.run()
    driver.current.late = late
    shift = DraftShift(ring, (SequenceShift(0, 0, 0, 0, None),))
    for first in range(0, 60, 20):
        expected = np.zeros((LARGEST.tokens, WIDTH), np.float32)
        for number in range(changed + 3):
            values = values_of(LARGEST.tokens - 5 * number, first + number)
            block = block_of(values)
            if number == 0 or number == changed + 2:
                fence = lowered.submit(block)
            elif number == changed + 1:
                fence = tier.submit_unread(lowered.batch, block)
            else:
                fence = tier.submit_shifted(lowered.batch, block, None, shift)
            block[:] = 0xFF
            expected[: len(values)] = doubled(values)
        tier.wait(fence)
        found = floats(y, expected.size).reshape(expected.shape)
        assert np.array_equal(found, expected)
