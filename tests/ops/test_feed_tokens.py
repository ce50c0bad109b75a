"""FEED_TOKENS: what it leaves is what a host would write for the next step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from contract.records import QUERY_TOKEN, SAMPLING
from reference.ops.feed_tokens import feed_tokens

WIDTH = 6


def recent_of(tokens: list[int], last_n: int) -> list[int]:
    """The row of recent tokens before the token after ``tokens`` is sampled."""
    row = [-1] * WIDTH
    for position in range(max(0, len(tokens) - last_n), len(tokens)):
        row[position % last_n] = tokens[position]
    return row


@given(
    prompts=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=4),
    steps=st.integers(1, 9),
    last_n=st.integers(0, WIDTH),
    data=st.data(),
)
def test_rows_follow_their_sequences(
    prompts: list[list[int]], steps: int, last_n: int, data: st.DataObject
) -> None:
    """After any number of steps: token, position and window of every sequence."""
    rows = len(prompts)
    query_of_row = data.draw(st.permutations(range(rows)))
    query, sampling = np.zeros(rows, QUERY_TOKEN), np.zeros(rows, SAMPLING)
    recent = np.full((rows, WIDTH), -1, np.int32)
    for row, prompt in enumerate(prompts):
        query[query_of_row[row]] = (prompt[-1], 10 + row, len(prompt) - 1, 0)
        sampling[row]["position"], sampling[row]["repeat_last_n"] = len(prompt), last_n
        if last_n:
            recent[row] = recent_of(prompt, last_n)
    for step in range(steps):
        token = np.array([200 + 10 * step + row for row in range(rows)], np.int32)
        feed_tokens(
            token=token,
            output_rows=np.array(query_of_row, np.int32),
            query=query.view(np.int32).reshape(rows, 4),
            sampling=sampling.view(np.int32).reshape(rows, 16),
            recent=recent,
        )
        for row, prompt in enumerate(prompts):
            prompt.append(int(token[row]))
            expected = (prompt[-1], 10 + row, len(prompt) - 1, 0)
            assert query[query_of_row[row]].tolist() == expected
            assert sampling[row]["position"] == len(prompt)
            assert recent[row].tolist() == (recent_of(prompt, last_n) if last_n else [-1] * WIDTH)


def test_a_row_without_a_token_stays_within_the_vocabulary() -> None:
    """-1 is nobody's embedding, and no recent token."""
    query, sampling = np.zeros((1, 4), np.int32), np.zeros(1, SAMPLING)
    sampling["repeat_last_n"] = 2
    recent = np.full((1, 2), -1, np.int32)
    feed_tokens(
        token=np.array([-1], np.int32),
        output_rows=np.zeros(1, np.int32),
        query=query,
        sampling=sampling.view(np.int32).reshape(1, 16),
        recent=recent,
    )
    assert query.tolist() == [[0, 0, 1, 0]]
    assert recent.tolist() == [[-1, -1]]
