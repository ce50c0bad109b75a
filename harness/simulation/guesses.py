"""A drafter that knows the next tokens and is sometimes wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from reference.engine.drafter import DraftRequest

WRONG_ONE_IN = 4
"""One drafted token in so many is wrong."""
READY_PARTS = 0.7
"""The fraction of cases in which there is a draft."""


class Guesses:
    """``answer`` gives all tokens of the sequence with a key, None for one it does not know."""

    def __init__(
        self, answer: Callable[[int], Sequence[int] | None], vocab: int, random: Random
    ) -> None:
        self._answer = answer
        self._vocab = vocab
        self._random = random

    def draft(self, sequences: Sequence[DraftRequest]) -> list[NDArray[np.int32]]:
        """See ``Drafter``."""
        return [self._guess(open) for open in sequences]

    def ready(self, key: int, tokens: NDArray[np.int32]) -> bool:
        """See ``Drafter``."""
        return self._random.random() < READY_PARTS

    def forget(self, key: int) -> None:
        """See ``Drafter``."""

    def _guess(self, open: DraftRequest) -> NDArray[np.int32]:
        answer = self._answer(open.key) or ()
        known = len(open.tokens)
        guess = np.array(answer[known : known + open.most], np.int32)
        for index in range(len(guess)):
            if self._random.randrange(WRONG_ONE_IN) == 0:
                guess[index] = (guess[index] + 1) % self._vocab
        return guess
