"""What changes in a step's inputs if drafts in front of it are rejected."""

import numpy as np
import pytest

from contract.draft_shift import SequenceShift, shift_inputs
from contract.records import OUTPUT_EVENT, QUERY_TOKEN

DRAFTS = 3
BEHIND_ALL = 4 * DRAFTS
"""The first word of the record behind the tokens of all drafts, of those that begin the inputs."""
EVENTS = 6


def ring(first: int, accepted: int, tokens: list[int]) -> np.ndarray:
    """The bytes of the events of a step whose first one is number ``first``."""
    events = np.zeros(EVENTS, OUTPUT_EVENT)
    for row, token in enumerate(tokens):
        events[(first + row) % (1 << 32) % EVENTS]["token"] = token
    events[first % EVENTS]["flags"] = accepted
    return events.view(np.uint8)


@pytest.mark.parametrize("first", [0, 4, (1 << 32) - 2])
@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
@pytest.mark.parametrize("broken", [False, True])
def test_inputs_follow_the_accepted_drafts(first, accepted, broken):
    query = np.zeros(DRAFTS + 1, QUERY_TOKEN)
    query["token"], query["position"] = (-2, -2, -2, -1), range(20, 24)
    words = np.concatenate([query.view(np.int32), np.array([DRAFTS, 24, 99], np.int32)])
    tokens = [50, 51, 52, 53]
    if broken:
        tokens[accepted] = -1
    shift = SequenceShift(first, DRAFTS, 16, 17, BEHIND_ALL)
    shift_inputs(words.view(np.uint8), ring(first, accepted, tokens), [shift])
    expected = query.copy()
    expected["token"][accepted] = 0 if broken else 50 + accepted
    assert words[:16].tolist() == expected.view(np.int32).tolist()
    assert words[16:].tolist() == [accepted, 21 + accepted, 99]


def test_a_step_behind_drafts_moves_alone():
    """A step of one token, which no draft in front of it has."""
    words = np.arange(30, 40, dtype=np.int32)
    shift = SequenceShift(1, DRAFTS, 2, 7, None)
    shift_inputs(words.view(np.uint8), ring(1, 1, [5, 6, 7, 8]), [shift])
    assert words.tolist() == [30, 31, 30, 33, 34, 35, 36, 35, 38, 39]
