"""When the drafts of a next round are submitted before the tokens in front of them are taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reference.engine.draft_block import DraftRequest
from reference.engine.next_round import NextRound

END = 7
INFO: Any = SimpleNamespace(asynchronous=True, host_unified=True)


class Submitted:
    """A draft block that notes what it is asked for."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], int]] = []

    def begin_ahead(self, sequences: list[DraftRequest], steps: int) -> None:
        self.drafts += [(one.tokens.tolist(), min(one.limit, steps)) for one in sequences]


class ReadSequence(SimpleNamespace):
    """What a round reads of a sequence, each equal to itself only."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def sequence(**changed: object) -> Any:
    request = SimpleNamespace(
        ignore_end=changed.pop("ignore_end", False), sampling=SimpleNamespace(penalizes=False)
    )
    state = {"order": 1, "slot": 0, "admission": 3, "running": True, "known": 2, "last_position": 9}
    tokens = np.array([5, 6, *[0] * 8], np.int32)
    return ReadSequence(request=request, tokens=tokens, **(state | changed))


def after(
    verified: Any, read: Any, tokens: list[int], accepted: int = 1, admission: int = 3
) -> tuple[int, list[tuple[list[int], int]]]:
    """What is submitted behind a step of ``read``, where one of ``verified`` was expected."""
    block = Submitted()
    rounds = NextRound(block, INFO, [END])  # type: ignore[arg-type]
    rounds.after_step([verified], [2], [2])
    output: Any = SimpleNamespace(accepted=np.array([accepted]), token=np.array(tokens, np.int32))
    return sum(rounds.after_result([read], [admission], output)), block.drafts


def test_drafts_follow_the_accepted_tokens() -> None:
    one = sequence()
    assert after(one, one, [8, 9, END]) == (4, [([5, 6, 8, 9], 2)])
    late = sequence(last_position=5)
    assert after(late, late, [8, 9, 1]) == (4, [([5, 6, 8, 9], 1)])
    ignoring = sequence(ignore_end=True)
    assert after(ignoring, ignoring, [END, 9, 1]) == (4, [([5, 6, END, 9], 2)])


@pytest.mark.parametrize(
    ("changed", "tokens", "admission"),
    [
        ({}, [END, 9, 1], 3),
        ({}, [8, END, 1], 3),
        ({}, [8, -1, 1], 3),
        ({"running": False}, [8, 9, 1], 3),
        ({"last_position": 4}, [8, 9, 1], 3),
        ({}, [8, 9, 1], 2),
    ],
    ids=["end", "accepted end", "not finite", "lost its slot", "full", "older admission"],
)
def test_nothing_follows_a_sequence_that_does_not_go_on(
    changed: dict[str, object], tokens: list[int], admission: int
) -> None:
    one = sequence(**changed)
    assert after(one, one, tokens, admission=admission) == (0, [])


def test_nothing_follows_the_step_of_another_sequence() -> None:
    assert after(sequence(), sequence(), [8, 9, 1]) == (0, [])


def test_nothing_follows_a_sequence_that_was_admitted_again() -> None:
    one = sequence()
    block = Submitted()
    rounds = NextRound(block, INFO, [END])  # type: ignore[arg-type]
    rounds.after_step([one], [2], [2])
    one.admission = 4
    output: Any = SimpleNamespace(accepted=np.array([0]), token=np.array([8], np.int32))
    assert rounds.after_result([one], [3], output) == []
    assert block.drafts == []


def of_two(
    second: Any, tokens: list[int], expected: int = 2
) -> tuple[list[int], list[tuple[list[int], int]]]:
    """What follows a step that verifies two drafts of a sequence and one of ``second``: none and
    one are right. Then ``expected`` drafts of the second are to follow."""
    first, block = sequence(), Submitted()
    rounds = NextRound(block, INFO, [END])  # type: ignore[arg-type]
    rounds.after_step([first, second], [2, 1], [2, 2])
    rounds.expect(second, expected)
    output: Any = SimpleNamespace(
        accepted=np.array([0, 9, 9, 1, 9]), token=np.array(tokens, np.int32)
    )
    return rounds.after_result([first, second], [3, 3], output), block.drafts


def test_drafts_of_several_sequences_follow_the_accepted_tokens_of_each() -> None:
    expected = [([5, 6, 8], 2), ([5, 6, 3, 4], 2)]
    assert of_two(sequence(order=2, slot=1), [8, END, END, 3, 4]) == ([3, 4], expected)
    expected[1] = [5, 6, 3, 4], 1
    assert of_two(sequence(order=2, slot=1), [8, 0, 0, 3, 4], 1) == ([3, 4], expected)
    late = sequence(order=2, slot=1, last_position=5)
    assert of_two(late, [8, 0, 0, 3, 4]) == ([3, 4], expected)


@pytest.mark.parametrize(
    ("changed", "tokens", "expected"),
    [
        ({}, [END, 0, 0, 3, 4], 2),
        ({}, [8, 0, 0, 3, END], 2),
        ({}, [8, 0, 0, 3, -1], 2),
        ({"running": False}, [8, 0, 0, 3, 4], 2),
        ({"last_position": 4}, [8, 0, 0, 3, 4], 2),
        ({}, [8, 0, 0, 3, 4], 0),
        ({"admission": 2}, [8, 0, 0, 3, 4], 2),
    ],
    ids=["end", "accepted end", "not finite", "lost its slot", "full", "paused", "older admission"],
)
def test_nothing_follows_several_sequences_of_which_one_does_not_go_on(
    changed: dict[str, object], tokens: list[int], expected: int
) -> None:
    second = sequence(order=2, slot=1, **changed)
    assert of_two(second, tokens, expected) == ([], [])
