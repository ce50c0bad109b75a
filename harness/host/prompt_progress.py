"""Shows how much of a long prompt is computed."""

from __future__ import annotations

from contract.types import Request
from harness.progress import Progress
from reference.engine import Engine


class PromptProgress:
    """The progress of the prompt of ``request``, if it takes several steps of ``engine``."""

    def __init__(self, engine: Engine, request: Request, progress: Progress) -> None:
        self._engine = engine
        self._request = request
        self._progress = progress
        self._read = 0
        self._shown = len(request.prompt) > engine.chunk_tokens
        if self._shown:
            progress.start("reading the prompt", len(request.prompt), "token")

    def look(self) -> None:
        """Show what is computed by now."""
        if self._shown:
            # With the first token the prompt is complete.
            read = min(self._engine.progress(self._request.id), len(self._request.prompt))
            # After a preemption the engine begins again.
            self._progress.advance(max(0, read - self._read))
            self._read = max(read, self._read)

    def close(self) -> None:
        """The prompt is complete, or no longer needed."""
        if self._shown:
            self._progress.close()
            self._shown = False
