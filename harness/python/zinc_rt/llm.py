"""A model in this process, for offline batches, conversations and streams."""

from __future__ import annotations

import atexit
import itertools
import operator
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from contract.context_manager import ContextManager
from contract.errors import NonFiniteLogits, RequestError, ZincError
from contract.types import MAX_INT32, Request
from harness.generate import load_drafter, load_runner, make_engine, prepare_session
from harness.progress import NullProgress, Progress, progress_on
from harness.serve.driver import EngineDriver
from harness.serve.structured.grammars import Grammars
from harness.serve.submissions import Submission
from reference.model.chat_template import ChatTemplate, encode_chat, encode_rendered
from zinc_rt.arguments import opening
from zinc_rt.batches import WAIT_SECONDS, Job, Refused, run_batch
from zinc_rt.conversations import Conversations, fields_of
from zinc_rt.outputs import Output
from zinc_rt.parameters import SamplingParams
from zinc_rt.pending import Pending
from zinc_rt.streams import Stream

Prompt = str | Sequence[int]
"""A text, in which what looks like a control token is just text, or token ids."""
Message = Mapping[str, object]
WAITING = 16
"""Requests of a batch that wait beside those that run, so that a slot is never empty."""


OPEN: weakref.WeakSet[LLM] = weakref.WeakSet()
"""What nobody has closed yet."""


def _close_all() -> None:
    for llm in list(OPEN):
        llm.close()


# Before thread pools end, in which a step may still compute: what ``atexit`` calls comes too late.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


class LLM(ContextManager):
    """A model that is loaded, and an engine for any number of threads. A context manager.

    ``model`` is a file or a name as on the command line. The other arguments are the settings of
    the same names (``zinc-rt run --help``); those left out come from the environment, the
    configuration file or their defaults, as for ``zinc-rt run``. ``slots`` sequences run at once.
    ``log_probabilities`` and ``logit_biases`` are the most that a request may ask for, which take
    room in every step. ``progress`` shows bars on standard error. Raises ConfigError, CatalogError,
    ModelFileError, TierError and DoesNotFit.

    >>> llm = LLM("model.gguf", tier="cpu", slots=2, progress=False)
    >>> llm.tier, llm.slots
    ('cpu', 2)
    >>> [len(output.tokens) for output in llm.generate(["a", "b"], SamplingParams(max_tokens=3))]
    [3, 3]
    >>> llm.close()
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        log_probabilities: int = 20,
        logit_biases: int = 1024,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        path, options = opening(model, settings)
        options = replace(options, top_log_probabilities=log_probabilities, biases=logit_biases)
        self._shows = progress
        with ExitStack() as owned:
            prepared = prepare_session(path, replace(options, masks=True), owned)
            runner = owned.enter_context(
                load_runner(prepared.model, prepared.tier, prepared.limits, self._progress(True))
            )
            engine = partial(
                make_engine,
                runner,
                prepared.model,
                options,
                drafter=load_drafter(
                    prepared, prepared.tier, options.draft, owned, self._progress(True)
                ),
                queue_depth=MAX_INT32,
                stall_steps=MAX_INT32,
                clock=time.monotonic,
            )
            self._driver = EngineDriver(lambda observer: engine(observer=observer))
            self._driver.start()
            owned.callback(self._driver.close)
            self._grammars = Grammars(prepared.model.tokenizer, prepared.model.config.vocab)
            owned.callback(self._grammars.close)
            self._close = weakref.finalize(self, owned.pop_all().close)
            OPEN.add(self)
        self._prepared = prepared
        self._ids = iter(self._driver.new_id, None)
        self.model = prepared.model
        """The open model: its configuration, file and tokenizer."""
        self.tokenizer = prepared.model.tokenizer

    @property
    def tier(self) -> str:
        """The tier that computes."""
        return self._prepared.tier.info.name

    @property
    def slots(self) -> int:
        """Sequences that run at once."""
        return self._prepared.limits.slots

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self._prepared.limits.context

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        parameters: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Continue every prompt; the results are in the order of the prompts.

        ``parameters`` are for all of them, or one for each. A prompt that cannot be served has an
        ``error`` in its output and takes nothing from the others. Ctrl-C cancels what runs and
        raises KeyboardInterrupt: use ``completed`` to keep what was finished.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     good, bad = llm.generate(["one", "two " * 9999], SamplingParams(max_tokens=2))
        >>> good.error is None, type(bad.error).__name__
        (True, 'RequestError')
        """
        return sorted(self.completed(prompts, parameters), key=lambda output: output.index)

    def completed(
        self,
        prompts: Prompt | Iterable[Prompt],
        parameters: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Output]:
        """As ``generate``, each output as soon as it is there; ``prompts`` are read as there is
        room for them, so that they may be without end."""
        return self._run(_listed(prompts), parameters, self._plain)

    def chat(
        self,
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        parameters: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Answer a conversation, or many of them: lists of ``{"role": ..., "content": ...}``.

        ``thinking`` None leaves it to the model's template. ``tools`` and ``response_format`` are
        what they are for the server, as are the fields beside them, and need its extra: then
        messages may have calls and their answers, and a completion has a ``message``.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     asked = [{"role": "user", "content": "Hello"}]
        ...     (answer,) = llm.chat(asked, SamplingParams(max_tokens=4))
        >>> answer.completion.finish_reason
        'length'
        """
        fields = fields_of(thinking, tools, tool_choice, parallel_tool_calls, response_format)
        conversations = _conversations(messages)
        outputs = self._run(conversations, parameters, partial(self._answer, fields=fields))
        return sorted(outputs, key=lambda output: output.index)

    def stream(self, prompt: Prompt, parameters: SamplingParams | None = None) -> Stream:
        """The continuation of a prompt as it comes, with ``for`` or ``async for``.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     stream = llm.stream("one", SamplingParams(max_tokens=4))
        ...     text = "".join(piece.text for piece in stream)
        >>> text == stream.output.text
        True
        """
        return self._stream(partial(self._plain, 0, prompt), parameters)

    def stream_chat(
        self,
        messages: Sequence[Message],
        parameters: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> Stream:
        """The answer to a conversation as it comes, calls of tools as the model writes them; its
        ``output`` has the message that they make."""
        fields = fields_of(thinking, tools, tool_choice, parallel_tool_calls, response_format)
        return self._stream(partial(self._answer, 0, messages, fields=fields), parameters)

    def encode_chat(
        self, messages: Sequence[Message], *, thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation and the start of its answer. Raises RequestError and
        TemplateError."""
        template = self._template
        if thinking and not template.has_thinking_toggle:
            raise RequestError("thinking", f"{self.model.config.name} has no switch for it")
        return encode_chat(self.tokenizer, template, messages, enable_thinking=thinking)

    def logits(self, prompt: Prompt) -> NDArray[np.float32]:
        """What the model says after every token of a text: float32[tokens, vocab].

        Raises RequestError, and NonFiniteLogits for a model that fails.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     llm.logits([1, 2, 3]).shape
        (3, 320)
        """
        rows: list[NDArray[np.float32]] = []
        tokens = tuple(self._encode(prompt))
        request = Request(next(self._ids), tokens, max_tokens=0)
        sinks = {request.id: lambda first, values: rows.extend(values.copy())}
        stream = self._driver.open_stream()
        (error,) = self._driver.submit_to(stream, [Submission([request], sinks, 0)])
        if error is not None:
            raise error
        try:
            while not any(one.event.finish_reason for one in stream.take(WAIT_SECONDS)):
                pass
        finally:
            stream.cancel()
        values = np.array(rows)
        if not np.isfinite(values).all():
            raise NonFiniteLogits("the logits hold NaN or infinity; the model file is damaged")
        return values

    def close(self) -> None:
        """End what runs and free everything. A second time does nothing."""
        OPEN.discard(self)
        self._close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError("prompt", "is neither a text nor token ids") from None

    @property
    def _template(self) -> ChatTemplate:
        if self._prepared.template is None:
            raise RequestError("messages", f"{self.model.config.name} has no chat template")
        return self._prepared.template

    @cached_property
    def _planner(self) -> Conversations:
        name = self.model.config.name
        return Conversations(self._template, self.tokenizer, self._grammars, name)

    def _requests(self, tokens: Sequence[int], parameters: SamplingParams) -> list[Request]:
        return parameters.requests(tokens, self._ids, self._prepared.limits.recent_tokens)

    def _plain(self, index: int, prompt: Prompt, parameters: SamplingParams) -> Pending:
        """A text to be continued."""
        requests = self._requests(self._encode(prompt), parameters)
        return Pending(index, requests, parameters, self.tokenizer)

    def _answer(
        self,
        index: int,
        messages: Sequence[Message],
        parameters: SamplingParams,
        fields: Mapping[str, Any],
    ) -> Pending:
        """A conversation to be answered."""
        if fields.keys() <= {"enable_thinking"}:
            tokens = self.encode_chat(messages, thinking=fields.get("enable_thinking"))
            return self._plain(index, tokens, parameters)
        plan = self._planner.plan(messages, fields)
        requests = self._requests(encode_rendered(self.tokenizer, plan.prompt), parameters)
        masks = self._planner.masks(plan, requests)
        return Pending(index, requests, parameters, self.tokenizer, plan, masks)

    def _run(
        self,
        prompts: Iterable[Any],
        parameters: SamplingParams | Sequence[SamplingParams] | None,
        prepare: Callable[[int, Any, SamplingParams], Pending],
    ) -> Iterator[Output]:
        """The outputs of all prompts as they end, with a bar."""
        each = _parameters_of(parameters, prompts)

        def job(index: int, prompt: Any, said: SamplingParams) -> Pending | Refused:
            try:
                return prepare(index, prompt, said)
            except ZincError as error:
                return Refused(index, error)

        jobs: Iterator[Job] = (
            partial(job, index, prompt, said)
            for index, (prompt, said) in enumerate(zip(prompts, each, strict=False))
        )
        total = len(prompts) if isinstance(prompts, Sequence) else None
        progress = self._progress(False)
        progress.start("generating", total, "prompt")
        try:
            for output in run_batch(self._driver, jobs, self.slots + WAITING):
                progress.advance(1)
                yield output
        finally:
            progress.close()

    def _stream(
        self, prepare: Callable[[SamplingParams], Pending], parameters: SamplingParams | None
    ) -> Stream:
        said = parameters or SamplingParams()
        if said.n != 1:
            raise RequestError("n", "is 1 for a stream; use generate for more")
        return Stream(self._driver, lambda: prepare(said))

    def _progress(self, transient: bool) -> Progress:
        return progress_on(sys.stderr, transient=transient) if self._shows else NullProgress()


def _listed(prompts: Prompt | Iterable[Prompt]) -> Iterable[Prompt]:
    """Many prompts, of which one may be given as it is."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    return cast(Iterable[Prompt], prompts)


def _conversations(
    messages: Sequence[Message] | Iterable[Sequence[Message]],
) -> Iterable[Sequence[Message]]:
    """Many conversations, of which one may be given as it is."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
        return [cast(Sequence[Message], messages)]
    return cast(Iterable[Sequence[Message]], messages)


def _parameters_of(
    parameters: SamplingParams | Sequence[SamplingParams] | None, prompts: Iterable[Any]
) -> Iterable[SamplingParams]:
    """Parameters for each of the prompts."""
    if parameters is None or isinstance(parameters, SamplingParams):
        return itertools.repeat(parameters or SamplingParams())
    if not isinstance(prompts, Sequence) or len(parameters) != len(prompts):
        raise RequestError("parameters", "are for all prompts, or one for each of a list of them")
    return parameters
