"""A model on a tier for one user: opened, asked, closed.

A ``Session`` owns everything a single user needs; sharing an engine between users is the
scheduler's business."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from contract.context_manager import ContextManager
from contract.tier import Tier
from contract.types import Request, SamplingParams
from harness.host.driver import EngineDriver
from harness.host.generation import TextGeneration
from harness.host.open import chat_template_of, load_model
from harness.host.options import Recording, SessionOptions
from harness.host.submissions import Submission
from harness.named_adapters import Scales, default_scales
from harness.progress import SILENT, Progress
from reference.engine import Engine
from reference.engine.sequence import LogitsSink
from reference.model.open import Model
from reference.observer import NO_OBSERVER, Observer
from reference.runner import LOGITS, ModelRunner

if TYPE_CHECKING:
    from harness.host.harmony_reply import FramedAnswer
    from reference.model.chat_template import ChatTemplate


class Session(ContextManager):
    """A model on a tier, ready to generate for one user, whose requests use all ``adapters``. A
    context manager."""

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
        """Load the model file at ``path``. Raises ModelFileError, UnsupportedModel, TierError,
        RequestError for a context the model does not have, DoesNotFit and, for files that cannot be
        recorded to, ConfigError before anything is uploaded."""
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
        """The longest prompt plus answer, in tokens."""
        return self.runner.limits.context

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The file's chat template, None when it has none. Raises TemplateError."""
        return chat_template_of(self.model, self._owned)

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
    ) -> TextGeneration:
        """The continuation of ``prompt``, at most ``max_tokens`` long, cut at a ``stop`` string.

        One generation at a time: an earlier one that is not finished is cancelled. ``progress``
        shows a prompt that takes several steps, ``on_logits`` receives the logits that tokens are
        sampled from, or ``output`` of them. In a ``chat``, what frames an answer is left out of its
        text. Raises RequestError."""
        request = Request(
            self.next_id(), tuple(prompt), max_tokens, sampling, tuple(stop), adapters=self.adapters
        )
        tokenizer = self.model.tokenizer
        framed = self._framed_answer() if chat else None
        self._latest = TextGeneration(
            self.driver, tokenizer, request, progress, on_logits, output, framed
        )
        return self._latest

    def _framed_answer(self) -> FramedAnswer | None:
        """The parser of answers that consist of messages with headers; None for other models."""
        template = self.template
        if template is None or not template.frames_messages:
            return None
        from harness.host.dialect import dialect_of
        from harness.host.harmony_reply import FramedAnswer

        return FramedAnswer.of(dialect_of(template.text, self.model.tokenizer, template.tool_text))

    def logits(self, tokens: Sequence[int], out: NDArray[np.float32]) -> None:
        """Write the logits of every position to ``out``, f32[len(tokens), vocab]; the session needs
        ``all_logits``. A generation that is not finished is cancelled. Raises RequestError."""
        if self.runner.limits.step_rows < self.engine.chunk_tokens:
            raise AssertionError("the session was opened without all_logits")

        def store(first: int, rows: NDArray[np.float32]) -> None:
            out[first : first + len(rows)] = rows

        unpenalized = SamplingParams(repeat_last_n=0)
        request = Request(self.next_id(), tuple(tokens), 0, unpenalized, adapters=self.adapters)
        self.driver.read(Submission([request], {request.id: store}, 0))

    def next_id(self) -> int:
        """The id of a new request, for which whatever still runs makes room."""
        if self._latest is not None:
            self._latest.cancel()
        return self.driver.new_id()

    def close(self) -> None:
        """Free everything."""
        self._owned.close()


def _timeline_of(recording: Recording, owned: ExitStack) -> Observer:
    """The observer that writes the timeline, one that does nothing where none is asked for."""
    if recording.timeline is None:
        return NO_OBSERVER
    from harness.trace.timeline import Timeline

    return owned.enter_context(Timeline(recording.timeline))
