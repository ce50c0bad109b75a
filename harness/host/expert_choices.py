"""The experts of a mixture that the tokens of one request use, collected as they are computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class ExpertChoices:
    """Receives the experts of the positions of a request, each once and in order."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []

    def __call__(self, first: int, ids: NDArray[np.int32]) -> None:
        """Take the ids of the positions from ``first`` on."""
        self._parts.append(ids)

    def of(self, tokens: int) -> NDArray[np.int32]:
        """int32[positions, layers, used] of the first ``tokens`` positions, or of as many as were
        computed: of the last token of an answer nothing is."""
        if not self._parts:
            return np.zeros((0, 0, 0), np.int32)
        return np.concatenate(self._parts)[:tokens]
