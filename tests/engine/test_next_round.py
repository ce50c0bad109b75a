"""When the drafts of a next round are submitted before the tokens in front of them are taken."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference.draft_shifts import Verification
from reference.engine.draft_block import DraftRequest
from reference.engine.next_round import NextRound
from reference.runner import Submission

END = 7
TIER: Any = SimpleNamespace(info=SimpleNamespace(asynchronous=True, host_unified=True))
STEP = Submission(SimpleNamespace(), 9, 0, SimpleNamespace())  # type: ignore[arg-type]
Drafts = list[tuple[list[int], int]]


class ReadSequence(SimpleNamespace):
    """What a round reads of a sequence, each equal to itself only."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def sequence(order: int, ignore_end: bool = False) -> Any:
    sampling = SimpleNamespace(penalizes=False)
    state = {"admission": 3, "running": True, "known": 2, "last_position": 9}
    return ReadSequence(
        request=SimpleNamespace(ignore_end=ignore_end, sampling=sampling), order=order, slot=order,
        tokens=np.array([5, 6, *[0] * 8], np.int32), **state,
    )  # fmt: skip


class Shifts(NamedTuple):
    """A tier that changes inputs behind the step in front."""

    info: Any = TIER.info

    def prepare_shifts(self) -> None:
        pass

    def submit_shifted(self, *_: object) -> None:
        raise AssertionError("the block is a double")


def of_two(
    tokens: list[int],
    drafts: int = 2,
    ignore_end: bool = False,
    follows: bool = False,
    **changed: Any,
) -> tuple[list[int], Drafts]:
    """What follows a step that verifies two drafts of a sequence, of which none is right, and one
    of a second, which is right. Then ``drafts`` of the second are to follow, which is ``changed``
    meanwhile. If the next verification ``follows``, on a tier that changes inputs."""
    found: Drafts = []

    def begin_ahead(sequences: list[DraftRequest], steps: int, behind: object) -> None:
        assert (behind is not None) == follows
        found.extend((one.tokens.tolist(), min(one.limit, steps)) for one in sequences)

    first, second = sequence(0), sequence(1, ignore_end)
    block: Any = SimpleNamespace(begin_ahead=begin_ahead)
    rounds = NextRound(block, Shifts() if follows else TIER, [END])
    rounds.after_step(STEP, [first, second], [2, 1], [2, 2])
    assert bool(found) == follows
    found.clear()
    rounds.expect(second, drafts)
    read = [first, changed.pop("read", second)]
    second.__dict__.update(changed)
    output: Any = SimpleNamespace(
        accepted=np.array([0, 9, 9, 1, 9]), token=np.array(tokens, np.int32)
    )
    return rounds.after_result(read, [3, 3], output, follows), found


@pytest.mark.parametrize(
    ("tokens", "how", "last"),
    [
        ([8, END, END, 3, 4], {}, 2),
        ([8, 0, 0, 3, 4], {"drafts": 1}, 1),
        ([8, 0, 0, 3, 4], {"last_position": 5}, 1),
        ([8, 0, 0, 3, END], {"ignore_end": True}, 2),
    ],
)
def test_drafts_follow_the_accepted_tokens_of_each(tokens, how, last):
    assert of_two(tokens, **how) == ([3, 4], [([5, 6, 8], 2), ([5, 6, *tokens[3:]], last)])
    assert of_two(tokens, follows=True, **how) == ([3, 4], [])


GO_ON = [8, 0, 0, 3, 4]


@pytest.mark.parametrize(
    ("tokens", "how"),
    [
        *(([END, 0, 0, 3, 4], {}), ([8, 0, 0, 3, END], {}), ([8, 0, 0, 3, -1], {})),
        *((GO_ON, {"running": False}), (GO_ON, {"last_position": 4}), (GO_ON, {"drafts": 0})),
        *((GO_ON, {"admission": 4}), (GO_ON, {"read": sequence(1)})),
    ],
)
def test_nothing_follows_sequences_of_which_one_does_not_go_on(tokens, how):
    """It ended, lost its slot or its pause, is full, or another one was read."""
    for follows in (False, True):
        assert of_two(tokens, follows=follows, **how) == ([], [])


@pytest.mark.parametrize("first", [0, (1 << 32) - 6, (1 << 32) - 1])
def test_events_are_numbered_anew_behind_the_last_number(first):
    """As those of a server that has run for days."""
    found: list[Verification] = []

    def begin_ahead(sequences: list[DraftRequest], steps: int, behind: Verification) -> None:
        found.append(behind)

    tier: Any = Shifts()
    rounds = NextRound(SimpleNamespace(begin_ahead=begin_ahead), tier, [END])  # type: ignore[arg-type]
    step = Submission(SimpleNamespace(), 9, first, SimpleNamespace())  # type: ignore[arg-type]
    rounds.after_step(step, [sequence(n) for n in range(3)], [3, 1, 2], [2, 2, 2])
    begins = [first, first + 4, first + 6]
    assert [one.drafts for one in found] == [
        [(begin % (1 << 32), drafts) for begin, drafts in zip(begins, [3, 1, 2], strict=True)]
    ]
