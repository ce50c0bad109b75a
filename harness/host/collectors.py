"""Results of a request besides its tokens, collected while the engine computes them."""

from __future__ import annotations

import numpy as np

from contract.arrays import Ints
from contract.types import Request, TokenEvent
from reference.sched.scores import TokenScores


class PromptScores:
    """The tokens of a request's prompt, from ``score_from`` on with log-probabilities (rule R10).
    Call it with the engine's scores."""

    def __init__(self, request: Request) -> None:
        start = len(request.prompt) if request.score_from is None else request.score_from
        self._request = request
        self.tokens = [
            TokenEvent(request.id, token, position)
            for position, token in enumerate(request.prompt[:start])
        ]
        """One for each token of the prompt. The first one has no log-probability."""

    @property
    def complete(self) -> bool:
        """Whether all tokens are scored."""
        return len(self.tokens) == len(self._request.prompt)

    def __call__(self, scores: TokenScores) -> None:
        """Add scores. Those of known positions and of the answer are ignored: a request that moved
        to another replica repeats them."""
        prompt = self._request.prompt
        logs = scores.log_probability.tolist()
        likeliest = zip(scores.top_ids.tolist(), scores.top_log_probabilities.tolist(), strict=True)
        for position, (log, top) in enumerate(zip(logs, likeliest, strict=True), scores.first):
            if position == len(self.tokens) and not self.complete:
                listed = tuple(zip(*top, strict=True))
                self.tokens.append(
                    TokenEvent(self._request.id, prompt[position], position, None, log, listed)
                )


class ExpertChoices:
    """The experts of a mixture that the tokens of one request use. Call it with those of each
    position once, in order."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []

    def __call__(self, first: int, ids: Ints) -> None:
        """Take the ids of the positions from ``first`` on."""
        self._parts.append(ids)

    def of(self, tokens: int) -> Ints:
        """The expert ids of the first ``tokens`` positions, int32[positions, layers, used]. There
        are fewer if fewer were computed: the last token of an answer is not."""
        if not self._parts:
            return np.zeros((0, 0, 0), np.int32)
        return np.concatenate(self._parts)[:tokens]
