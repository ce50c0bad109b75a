"""Log-probabilities of a prompt's own tokens (rule R10), collected as the engine computes them."""

from __future__ import annotations

from collections.abc import Sequence

from contract.types import Request, TokenEvent
from reference.sched.scores import TokenScores


class PromptScores:
    """The tokens of the prompt of ``request``, those from its ``score_from`` on with their
    log-probabilities. Call it with what the engine hands over; ``complete`` after the last."""

    def __init__(self, request: Request) -> None:
        start = len(request.prompt) if request.score_from is None else request.score_from
        self._request = request
        self.tokens = [
            TokenEvent(request.id, token, position)
            for position, token in enumerate(request.prompt[:start])
        ]
        """A token of the prompt each. The first one has no log-probability."""

    @property
    def complete(self) -> bool:
        """Whether the scores of all tokens have come."""
        return len(self.tokens) == len(self._request.prompt)

    def __call__(self, scores: TokenScores) -> None:
        """Take the next scores. Those of a request that goes on elsewhere may come again, and those
        of its answer, too."""
        prompt = self._request.prompt
        logs = scores.log_probability.tolist()
        likeliest = zip(scores.top_ids.tolist(), scores.top_log_probabilities.tolist(), strict=True)
        for position, (log, top) in enumerate(zip(logs, likeliest, strict=True), scores.first):
            if position == len(self.tokens) and not self.complete:
                listed = tuple(zip(*top, strict=True))
                self.tokens.append(
                    TokenEvent(self._request.id, prompt[position], position, None, log, listed)
                )

    def note(self, tokens: Sequence[TokenEvent]) -> None:
        """All tokens, as a replica found them."""
        self.tokens = list(tokens)
