"""How likely a prompt's own tokens are to the model: rule R10, of the logits before each of them.

They come in chunks, on the engine's thread, which is not kept with them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from contract.types import Request, TokenEvent
from reference.engine.sequence import LogitsSink
from reference.ops.log_probabilities import log_probabilities

ROWS_AT_ONCE = 8
"""Rows that are worked on together: each takes several times its size meanwhile."""


class PromptScores:
    """The tokens of the prompt of ``request``, with as many of the likeliest in the place of each
    as it asks for of generated ones."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._prompt = np.array(request.prompt, np.int32)
        self._found = [TokenEvent(request.id, token, 0) for token in request.prompt[:1]]
        self._chunks: deque[tuple[int, NDArray[np.float32]]] = deque()
        self._lock = threading.Lock()
        self._working = False
        self._ended = threading.Event()
        if len(request.prompt) == 1:
            self._ended.set()

    def sink(self, begin: Callable[[], None], rest: LogitsSink | None, start: int) -> LogitsSink:
        """What takes the logits of every position, those from ``start`` on for ``rest`` too.
        ``begin`` is called when there is work to do."""
        scored = len(self._prompt) - 1

        def divide(first: int, rows: NDArray[np.float32]) -> None:
            if first < scored and self.take(first, rows[: scored - first]):
                begin()
            skipped = max(0, start - first)
            if rest is not None and skipped < len(rows):
                rest(first + skipped, rows[skipped:])

        return divide

    def take(self, first: int, rows: NDArray[np.float32]) -> bool:
        """The logits of the positions from ``first`` on, float32[positions, vocab]: those before
        the last position, each once and in order. Whether ``work`` is to be called, on any thread;
        what comes while it is under way it does too."""
        with self._lock:
            self._chunks.append((first, rows))
            idle, self._working = not self._working, True
            return idle

    def work(self) -> None:
        """Work on what has come."""
        while (chunk := self._next()) is not None:
            first, rows = chunk
            for start in range(0, len(rows), ROWS_AT_ONCE):
                self._score(first + start, rows[start : start + ROWS_AT_ONCE])
        if len(self._found) == len(self._prompt):
            self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait so long for the last token; whether all of them are there."""
        return self._ended.wait(seconds)

    def note(self, tokens: Sequence[TokenEvent]) -> None:
        """All of them, as others found them."""
        self._found = list(tokens)
        self._ended.set()

    @property
    def tokens(self) -> list[TokenEvent]:
        """The tokens of the prompt. The first one has no log-probability, nor has any where a logit
        is not finite."""
        return self._found

    def _next(self) -> tuple[int, NDArray[np.float32]] | None:
        with self._lock:
            self._working = bool(self._chunks)
            return self._chunks.popleft() if self._chunks else None

    def _score(self, first: int, rows: NDArray[np.float32]) -> None:
        listed = self._request.log_probabilities or 0
        tokens = self._prompt[first + 1 : first + 1 + len(rows)]
        # A list of none costs more than one of one.
        logs, ids, tops = log_probabilities(logits=rows, token=tokens, top=max(1, listed))
        for row, position in enumerate(range(first + 1, first + 1 + len(rows))):
            likeliest = zip(ids[row, :listed].tolist(), tops[row, :listed].tolist(), strict=True)
            self._found.append(
                TokenEvent(
                    self._request.id,
                    int(tokens[row]),
                    position,
                    log_probability=None if np.isnan(logs[row]) else float(logs[row]),
                    top=tuple(likeliest),
                )
            )
