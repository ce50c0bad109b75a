"""LOAD_REQUEST_STATE: every query token gets its id, and is noted where the penalties look."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contract.records import LAST_TOKEN, QUERY_TOKEN, RECENT_TOKEN, SLOT
from reference.ops.load_request_state import load_request_state

SLOTS, RECENT = 3, 5


def loaded(
    query: list[tuple[int, int, int, int]], last: list[int], recent: np.ndarray
) -> list[tuple[int, int, int, int]]:
    table = np.zeros(SLOTS, SLOT)
    table["last_token"] = last
    words = np.array(query, QUERY_TOKEN).view(np.int32).reshape(-1, 4)
    before = words.copy()
    resolved = load_request_state(
        query=words, slot_table=table.view(np.int32).reshape(SLOTS, -1), recent=recent
    )
    assert (words == before).all(), "the inputs of a step are not the op's to change"
    return [tuple(row) for row in resolved.tolist()]


def test_the_last_token_stands_in_where_the_host_gives_none():
    """Everything else of a query passes through; no last token becomes token 0."""
    recent = np.full((SLOTS, RECENT), -7, np.int32)
    query = [(LAST_TOKEN, 1, 8, 3), (40, 0, 2, 0), (LAST_TOKEN, 2, 0, 0)]
    assert loaded(query, [30, 31, -1], recent) == [(31, 1, 8, 3), (40, 0, 2, 0), (0, 2, 0, 0)]
    assert recent.tolist() == [[-7, -7, 40, -7, -7], [-7, -7, -7, 31, -7], [0, -7, -7, -7, -7]]


def test_a_drafted_token_stands_in_at_its_position():
    """Several positions of a slot, behind a token that the host gives, before the last one."""
    recent = np.array([[-7, 51, 52, -7, 0], [-7] * 5, [60, -7, -7, -7, 64]], np.int32)
    at = RECENT_TOKEN
    query = [(9, 0, 5, 0), (at, 0, 6, 0), (at, 0, 7, 2), (LAST_TOKEN, 0, 8, 0), (at, 2, 10, 0)]
    resolved = [(9, 0, 5, 0), (51, 0, 6, 0), (52, 0, 7, 2), (53, 0, 8, 0), (60, 2, 10, 0)]
    assert loaded(query, [53, 0, 0], recent) == resolved
    assert recent[0].tolist() == [9, 51, 52, 53, 0]
    assert recent[2].tolist() == [60, -7, -7, -7, 64]


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 12)), max_size=6))
def test_the_latest_tokens_are_kept_by_position(runs):
    """Chunks of any length, in any order of slots: entry p mod n is the token of the latest p."""
    recent = np.full((SLOTS, RECENT), -7, np.int32)
    sequences: list[list[int]] = [[] for _ in range(SLOTS)]
    token = 0
    for slot, count in runs:
        query = []
        for _ in range(count):
            query.append((token, slot, len(sequences[slot]), 0))
            sequences[slot].append(token)
            token += 1
        loaded(query, [0] * SLOTS, recent)
    for slot, tokens in enumerate(sequences):
        expected = [-7] * RECENT
        for position, value in enumerate(tokens):
            expected[position % RECENT] = value
        assert recent[slot].tolist() == expected
