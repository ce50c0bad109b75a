"""A model on a tier for one user. ``Session`` owns all that it needs; several users share an engine
by ``harness.host.engine_thread``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from contract.arrays import Floats
from contract.context_manager import ContextManager
from contract.tier import Tier
from contract.types import Request, SamplingParams
from harness.host.driver import EngineDriver
from harness.host.generation import TextGeneration
from harness.host.open import chat_template_of, load_model
from harness.host.options import Recording, SessionOptions
from harness.host.prompt_progress import PromptProgress
from harness.host.submissions import NO_MASKS, Submission
from harness.named_adapters import Scales, default_scales
from harness.progress import SILENT, Progress
from reference.engine import Engine
from reference.engine.sequence import LogitsSink
from reference.model.open import Model
from reference.observer import NO_OBSERVER, Observer
from reference.runner import LOGITS, ModelRunner

if TYPE_CHECKING:
    from harness.host.harmony_reply import FramedAnswer
    from harness.host.structured.grammars import Grammars, TokenMasks
    from reference.model.chat_template import ChatTemplate


class AnswerConstraint(Protocol):
    """What an answer must be like."""

    def masks(self, request: Request) -> Mapping[int, TokenMasks]:
        """The token masks that enforce it, by request. Raises RequestError."""

    def framed(self, request: Request) -> FramedAnswer | None:
        """The parser for the text of the answer; None if all of it is its text."""


class Session(ContextManager):
    """A loaded model for one user, whose requests use all ``adapters``. A context manager."""

    def __init__(
        self,
        model: Model,
        tier: Tier,
        runner: ModelRunner,
        driver: EngineDriver,
        adapters: Scales = (),
    ) -> None:
        self.model = model
        self.tier = tier
        self.runner = runner
        self.driver = driver
        self.adapters = adapters
        self.load_seconds = 0.0
        self._owned = ExitStack()
        self._latest: TextGeneration | None = None

    @property
    def engine(self) -> Engine:
        """The engine of the session."""
        return self.driver.engine

    @classmethod
    def open(cls, path: Path, options: SessionOptions, progress: Progress = SILENT) -> Session:
        """Load the model file ``path``. Raises ModelFileError, UnsupportedModel, TierError,
        DoesNotFit, RequestError for a context the model does not have, and ConfigError, before the
        upload, for files that cannot be recorded to."""
        started = time.perf_counter()
        with ExitStack() as owned:
            loaded = load_model(path, options, owned, progress)
            driver = EngineDriver(
                lambda observer: loaded.engine(observer=observer, clock=time.perf_counter),
                observer=_timeline_of(options.recording, owned),
            )
            prepared = loaded.prepared
            adapters = default_scales(options.lora)
            session = cls(prepared.model, prepared.tier, loaded.runner, driver, adapters)
            session.load_seconds = time.perf_counter() - started
            session._owned = owned.pop_all()
            if prepared.template is not None:
                session.template = prepared.template
        return session

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.runner.limits.context

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The file's chat template; None if it has none. Raises TemplateError."""
        return chat_template_of(self.model, self._owned)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles the grammars of answers."""
        from harness.host.structured.grammars import Grammars

        grammars = Grammars(self.model.tokenizer, self.model.config.vocab)
        self._owned.callback(grammars.close)
        return grammars

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        max_tokens: int,
        stop: Sequence[str] = (),
        progress: Progress = SILENT,
        on_logits: LogitsSink | None = None,
        output: str = LOGITS,
        chat: bool = False,
        constraint: AnswerConstraint | None = None,
    ) -> TextGeneration:
        """The continuation of ``prompt`` by at most ``max_tokens`` tokens, up to a ``stop`` string.

        Only one generation runs at a time: an earlier unfinished one is cancelled. ``progress``
        shows a prompt of several steps. ``on_logits`` receives the logits that tokens are sampled
        from, or the rows of ``output``. In a ``chat`` harmony headers are left out of the text.
        ``constraint`` needs the option ``masks``. Raises RequestError."""
        request = Request(
            self.next_id(), tuple(prompt), max_tokens, sampling, tuple(stop), adapters=self.adapters
        )
        tokenizer = self.model.tokenizer
        framed = self._framed_answer() if chat else None
        masks = NO_MASKS
        if constraint is not None:
            framed, masks = constraint.framed(request), constraint.masks(request)
        self._latest = TextGeneration(
            self.driver, tokenizer, request, progress, on_logits, output, framed, masks
        )
        return self._latest

    def _framed_answer(self) -> FramedAnswer | None:
        """The parser for answers in the harmony format; None for other models."""
        template = self.template
        if template is None or not template.frames_messages:
            return None
        from harness.host.dialect import dialect_of
        from harness.host.harmony_reply import FramedAnswer

        return FramedAnswer.of(dialect_of(template.text, self.model.tokenizer, template.tool_text))

    def logits(self, tokens: Sequence[int], out: Floats, progress: Progress = SILENT) -> None:
        """Write the logits of every position to ``out``, f32[len(tokens), vocab]. Needs the option
        ``all_logits``. Cancels an unfinished generation. Raises RequestError."""
        if self.runner.limits.step_rows < self.engine.chunk_tokens:
            raise AssertionError("the session was opened without all_logits")

        def store(first: int, rows: Floats) -> None:
            out[first : first + len(rows)] = rows

        unpenalized = SamplingParams(repeat_last_n=0)
        request = Request(self.next_id(), tuple(tokens), 0, unpenalized, adapters=self.adapters)
        self.read(Submission([request], {request.id: store}, 0), progress)

    def read(self, submission: Submission, progress: Progress = SILENT) -> None:
        """As ``EngineDriver.read``, for one request; ``progress`` shows its prompt."""
        (request,) = submission.requests
        shown = PromptProgress(self.engine, request, progress)
        try:
            self.driver.read(submission, shown.look)
        finally:
            shown.close()

    def next_id(self) -> int:
        """The id of a new request. Cancels an unfinished generation."""
        if self._latest is not None:
            self._latest.cancel()
        return self.driver.new_id()

    def close(self) -> None:
        """Free everything."""
        self._owned.close()


def _timeline_of(recording: Recording, owned: ExitStack) -> Observer:
    """The observer that writes the timeline; one that does nothing if none is requested."""
    if recording.timeline is None:
        return NO_OBSERVER
    from harness.trace.timeline import Timeline

    return owned.enter_context(Timeline(recording.timeline))
