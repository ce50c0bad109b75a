"""Requests for the log-probabilities of given tokens, and what the definition gives for them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.types import Request
from reference.engine import Engine
from reference.limits import Limits
from reference.ops.log_probabilities import log_probabilities
from reference.runner import ModelRunner
from reference.sched.scores import TokenScores
from tests.engine.small_engine import events_of as run
from tests.named_tiers import named, quick_tier, runner_on

LIMITS = Limits(
    slots=3, context=96, pages=9, step_tokens=40, step_rows=8, draft_tokens=5, masks=3, biases=4,
    top_log_probabilities=5, scores=True,
)  # fmt: skip
TIERS = named("native", "opencl", "vulkan")
QUICK = [tier for tier in TIERS if tier != "vulkan"]
"""A processor that plays a graphics card takes long for every token."""
PROMPT = tuple((i * 37) % 250 for i in range(50))
LISTED = 3
Scores = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]


class Receiver:
    """Takes the scores of one request, each token once and in order."""

    def __init__(self, first: int) -> None:
        self.parts: list[TokenScores] = []
        self._next = first

    def __call__(self, scores: TokenScores) -> None:
        assert scores.first == self._next
        assert len(scores.log_probability) > 0
        self._next += len(scores.log_probability)
        self.parts.append(scores)

    @property
    def bits(self) -> tuple[bytes, bytes, bytes]:
        """All that was received."""
        return tuple(  # type: ignore[return-value]
            np.concatenate([getattr(part, name) for part in self.parts]).tobytes()
            for name in ("log_probability", "top_ids", "top_log_probabilities")
        )


def score(number: int, prompt: Sequence[int] = PROMPT, start: int = 1, **more: Any) -> Request:
    fields = {"max_tokens": 0, "score_top": LISTED, "score_from": start, **more}
    return Request(number, tuple(prompt), **fields)


def submit(engine: Engine, request: Request, **more: Any) -> Receiver:
    assert request.score_from is not None
    receiver = Receiver(request.score_from)
    engine.submit(request, on_scores=receiver, **more)
    return receiver


def break_tokens(runner: ModelRunner, patch: pytest.MonkeyPatch) -> None:
    """No row has a token, as where a logit is not finite."""
    collected = runner.collect

    def broken(submission: Any) -> Any:
        output = collected(submission)
        return replace(output, token=np.full_like(output.token, -1))

    patch.setattr(runner, "collect", broken)


def runs_of(first: tuple[int, int], *others: tuple[int, int]) -> list[tuple[str, int, int]]:
    """Tokens of a chunk and steps ahead for every tier; ``first`` alone for those not in QUICK."""
    quick = [(tier, *schedule) for tier in QUICK for schedule in (first, *others)]
    return quick + [(tier, *first) for tier in TIERS if tier not in QUICK]


@cache
def by_definition(
    path: Path, prompt: tuple[int, ...] = PROMPT, start: int = 1, listed: int = LISTED
) -> tuple[bytes, bytes, bytes]:
    """Rule R10 of the logits that the CPU tier computes in one step."""
    limits = Limits(1, 96, 6, step_tokens=len(prompt) + 1, step_rows=len(prompt))
    rows: list[NDArray[np.float32]] = []
    with runner_on(path, quick_tier, limits) as runner:
        engine = Engine(runner)
        engine.submit(Request(1, prompt, 0), lambda first, values: rows.append(values))
        run(engine)
    (logits,) = rows
    chosen, ids, logs = log_probabilities(
        logits=logits[start - 1 : -1], token=np.array(prompt[start:], np.int32), top=listed or 1
    )
    return chosen.tobytes(), ids[:, :listed].tobytes(), logs[:, :listed].tobytes()
