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

    def begin_ahead(self, one: DraftRequest, steps: int) -> None:
        self.drafts.append((one.tokens.tolist(), min(one.limit, steps)))


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
    rounds.after_step(verified, 2, 2)
    output: Any = SimpleNamespace(accepted=np.array([accepted]), token=np.array(tokens, np.int32))
    return rounds.after_result(read, admission, output), block.drafts


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
    rounds.after_step(one, 2, 2)
    one.admission = 4
    output: Any = SimpleNamespace(accepted=np.array([0]), token=np.array([8], np.int32))
    assert rounds.after_result(one, 3, output) == 0
    assert block.drafts == []
