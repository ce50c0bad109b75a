"""A model in this process, for offline batches, conversations and streams."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from contract.arrays import Floats
from contract.errors import NonFiniteLogits, RequestError, ZincError
from contract.types import Request
from harness.conversations import Conversations, fields_of
from harness.host.pooling import Pool, pooling_of, tokens_to_embed
from harness.host.submissions import NO_MASKS, EngineStopped, Submission
from harness.host.thinking import thinking_arguments
from harness.named_adapters import scales_by_name
from reference.model.chat_template import ChatTemplate, encode_chat, encode_rendered
from zinc_rt.batches import Finished
from zinc_rt.loaded import OpenModel
from zinc_rt.other_names import refuse_unknown_arguments
from zinc_rt.outputs import Output, Score
from zinc_rt.parameters import SamplingParams
from zinc_rt.pending import Pending, text_of_tokens
from zinc_rt.readings import Embedding, HiddenStates, Scoring
from zinc_rt.shapes import (
    OF_MESSAGES,
    OF_PROMPTS,
    OF_SCORES,
    OF_TEXTS,
    Conversation,
    Message,
    Parameters,
    Prompt,
    check_parts,
    conversations_of,
    either,
    messages_of,
    naming,
    parameters_for_one,
    parameters_of,
    prompts_of,
    starts_of,
)
from zinc_rt.streams import Stream


class LLM(OpenModel):
    """A model that is loaded, and an engine for any number of threads. A context manager.

    >>> llm = LLM("model.gguf", tier="cpu", slots=2, context=64, progress=False)
    >>> (answer,) = llm.chat("Why is the sky blue?", SamplingParams(max_tokens=3))
    >>> len(answer.tokens), answer.text == str(answer)
    (3, True)

    ``model`` is a file or a name as on the command line. The other arguments are the settings of
    the same names (``zinc-rt run --help``); those left out come from the environment, the
    configuration file or their defaults, as for ``zinc-rt run``. ``slots`` sequences run at once.
    ``log_probabilities`` and ``logit_biases`` are the most that a request may ask for, which take
    room in every step; without log-probabilities there are no scores. ``experts`` lets requests
    read which experts of a mixture their tokens use. ``lora`` are adapters, as
    ``FILE``, ``FILE:SCALE`` or ``NAME=FILE``: requests use all of them unless their parameters say
    which. ``progress`` shows bars on standard error.
    Threads share one LLM; each process opens its own.
    Raises TypeError, ConfigError, CatalogError, ModelFileError, TierError and DoesNotFit.

    >>> llm.tier, llm.slots, llm.context
    ('cpu', 2, 64)
    >>> [len(output.tokens) for output in llm.generate(["a", "b"], SamplingParams(max_tokens=3))]
    [3, 3]
    >>> llm.close()"""

    @refuse_unknown_arguments
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        parameters: Parameters = None,
        *,
        sampling_params: Parameters = None,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Continue every prompt; the results are in the order of the prompts.

        ``parameters``, or ``sampling_params`` as vLLM has it, are for all prompts, or one for each.
        A prompt that cannot be served has an
        ``error`` in its output and takes nothing from the others. Ctrl-C cancels what runs and
        raises KeyboardInterrupt: use ``completed`` to keep what was finished. There is no bar
        without ``use_tqdm``.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     good, bad = llm.generate(["one", "two " * 9999], SamplingParams(max_tokens=2))
        >>> good.error is None, type(bad.error).__name__
        (True, 'PromptTooLong')"""
        chosen = either(parameters, sampling_params)
        outputs = self._run(prompts_of(prompts), chosen, self._plain, OF_PROMPTS, use_tqdm)
        return sorted(outputs, key=lambda output: output.index)

    @refuse_unknown_arguments
    def completed(
        self,
        prompts: Prompt | Iterable[Prompt],
        parameters: Parameters = None,
        *,
        sampling_params: Parameters = None,
    ) -> Iterator[Output]:
        """As ``generate``, each output as soon as it is there; ``prompts`` are read as there is
        room for them, so that they may be without end."""
        chosen = either(parameters, sampling_params)
        return self._run(prompts_of(prompts), chosen, self._plain, OF_PROMPTS)

    @refuse_unknown_arguments
    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        parameters: Parameters = None,
        *,
        sampling_params: Parameters = None,
        use_tqdm: bool = True,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[Output]:
        """Answer a conversation, or many of them: lists of ``{"role": ..., "content": ...}``, or
        the text of a user's one message.

        ``thinking`` None leaves it to the model's template. ``tools`` and ``response_format`` are
        what they are for the server, as are the fields after them, and need its extra: then
        messages may have calls and their answers, and a completion has a ``message``.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     (answer,) = llm.chat("Hello", SamplingParams(max_tokens=4))
        >>> answer.completion.finish_reason
        'length'"""
        fields = fields_of(thinking, tools, tool_choice, parallel_tool_calls, response_format)
        conversations = conversations_of(messages)
        chosen = either(parameters, sampling_params)
        prepare = partial(self._answer, fields=fields)
        outputs = self._run(conversations, chosen, prepare, OF_MESSAGES, use_tqdm)
        return sorted(outputs, key=lambda output: output.index)

    @refuse_unknown_arguments
    def stream(
        self,
        prompt: Prompt,
        parameters: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> Stream:
        """The continuation of a prompt as it comes, with ``for`` or ``async for``.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     stream = llm.stream("one", SamplingParams(max_tokens=4))
        ...     text = "".join(piece.text for piece in stream)
        >>> text == stream.output.text
        True"""
        chosen = either(parameters, sampling_params)
        return self._stream(partial(self._plain, 0, prompt), chosen, OF_PROMPTS)

    @refuse_unknown_arguments
    def stream_chat(
        self,
        messages: Conversation,
        parameters: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> Stream:
        """The answer to a conversation as it comes, calls of tools as the model writes them; its
        ``output`` has the message that they make."""
        fields = fields_of(thinking, tools, tool_choice, parallel_tool_calls, response_format)
        one = messages_of(messages)
        chosen = either(parameters, sampling_params)
        return self._stream(partial(self._answer, 0, one, fields=fields), chosen, OF_MESSAGES)

    def encode_chat(self, messages: Conversation, *, thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation and the start of its answer. Raises RequestError and
        TemplateError."""
        template = self._template
        turns = messages_of(messages)
        arguments = thinking_arguments(template, self.model.config.name, thinking)
        check_parts(turns)
        with naming(OF_MESSAGES):
            return encode_chat(self.tokenizer, template, turns, **arguments)

    def logits(self, prompt: Prompt) -> Floats:
        """The logits after every token of a text: float32[tokens, vocab].

        Raises RequestError, and NonFiniteLogits for a model that fails.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     llm.logits([1, 2, 3]).shape
        (3, 320)"""
        rows: list[Floats] = []
        with naming(OF_PROMPTS):
            tokens = tuple(self._encode(prompt))
        adapters = self._default_adapters
        request = Request(next(self._ids), tokens, max_tokens=0, adapters=adapters)
        sinks = {request.id: lambda first, values: rows.extend(values.copy())}
        self._driver.read(Submission([request], sinks, 0))
        values = np.array(rows)
        if not np.isfinite(values).all():
            raise NonFiniteLogits("the logits hold NaN or infinity; the model file is damaged")
        return values

    @refuse_unknown_arguments
    def score(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        start: int | Sequence[int] = 1,
        top: int = 0,
        experts: bool = False,
    ) -> list[Score]:
        """How likely the tokens of every text are, each given those before it, at the speed at
        which prompts are read; the results are in the order of the texts.

        Scored are the tokens from position ``start`` on, 1 for all but the first one, which comes
        after nothing; or for each text its own. ``top`` of the likeliest are listed at every
        position. The values are those of rule R10, before any sampling parameter. With ``experts``
        a score has those of a mixture. A text that cannot be served has an ``error`` in its score.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     (score,) = llm.score("one two three", start=4)
        >>> score.total == sum(float(log) for log in score.log_probabilities[4:])
        True"""
        prompts = prompts_of(texts, "texts")
        starts = starts_of(start, prompts)

        def job(index: int, prompt: Prompt, first: int) -> Scoring:
            scoring = Scoring(index, self._encode(prompt), first, top, next(self._ids), experts)
            scoring.use(self._default_adapters)
            return scoring

        jobs = (
            partial(job, index, prompt, first)
            for index, (prompt, first) in enumerate(zip(prompts, starts, strict=False))
        )
        scores = self._results("scoring", jobs, _count_of(prompts), OF_SCORES)
        return sorted(scores, key=lambda score: score.index)

    @refuse_unknown_arguments
    def embed(self, texts: Prompt | Iterable[Prompt], *, dimensions: int | None = None) -> Floats:
        """A normalised vector of every text, float32[texts, n], as the server's embeddings; with
        ``dimensions`` cut to that many numbers. Raises RequestError and UnsupportedModel.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     llm.embed(["one", "two"], dimensions=8).shape
        (2, 8)"""
        self._check_open()
        pooling, width = pooling_of(self.model), self.model.config.hidden
        if dimensions is not None and not 1 <= operator.index(dimensions) <= width:
            raise RequestError("dimensions", f"is {dimensions}, not from 1 to {width}")
        prompts = list(prompts_of(texts, "texts"))
        vectors = np.empty((len(prompts), dimensions or width), np.float32)

        def job(index: int, prompt: Prompt) -> Embedding:
            tokens = tokens_to_embed(self.model, self._encode(prompt), isinstance(prompt, str))
            pool = Pool(pooling, len(tokens))
            embedding = Embedding(tokens, pool, vectors[index], next(self._ids))
            embedding.use(self._default_adapters)
            return embedding

        jobs = (partial(job, index, prompt) for index, prompt in enumerate(prompts))
        for _ in self._results("embedding", jobs, len(prompts), OF_TEXTS):
            pass
        return vectors

    @refuse_unknown_arguments
    def hidden_states(self, texts: Prompt | Iterable[Prompt]) -> list[Floats]:
        """What the output matrix multiplies to give the logits: of every text float32[tokens,
        width], the last layer's rows after the final norm. Raises RequestError.

        >>> with LLM("model.gguf", tier="cpu", progress=False) as llm:
        ...     [rows.shape for rows in llm.hidden_states([[1, 2, 3], [4]])]
        [(3, 256), (1, 256)]"""
        prompts, width = prompts_of(texts, "texts"), self.model.config.hidden

        def job(index: int, prompt: Prompt) -> HiddenStates:
            kept = HiddenStates(index, self._encode(prompt), width, next(self._ids))
            kept.use(self._default_adapters)
            return kept

        jobs = (partial(job, index, prompt) for index, prompt in enumerate(prompts))
        found = self._results("reading", jobs, _count_of(prompts), OF_TEXTS)
        return [rows for _, rows in sorted(found, key=operator.itemgetter(0))]

    @property
    def _template(self) -> ChatTemplate:
        self._check_open()
        if self._hosted.template is None:
            raise RequestError("messages", f"{self.model.config.name} has no chat template")
        return self._hosted.template

    @cached_property
    def _planner(self) -> Conversations:
        name = self.model.config.name
        return Conversations(self._template, self.tokenizer, self._grammars, name)

    def _requests(self, tokens: Sequence[int], parameters: SamplingParams) -> list[Request]:
        adapters = self._default_adapters
        if parameters.lora is not None:
            adapters = scales_by_name(self._adapters, parameters.lora)
        window = self._hosted.penalty_window
        # What lies before the context's begin is no token: such a reach is the context.
        reach = min(parameters.repeat_last_n or 0, self.context)
        if reach > window and parameters.sampling(0, window).penalizes:
            problem = f"is {reach}; penalties look back at most {window} tokens here, and as far "
            raise RequestError("repeat_last_n", problem + f"with LLM(..., repeat_last_n={reach})")
        if parameters.repeat_last_n is not None:
            parameters = replace(parameters, repeat_last_n=min(reach, window))
        return parameters.requests(tokens, self._ids, window, adapters)

    def _plain(self, index: int, prompt: Prompt, parameters: SamplingParams) -> Pending:
        """A text to be continued."""
        requests = self._requests(self._encode(prompt), parameters)
        text = prompt if isinstance(prompt, str) else None
        return Pending(index, requests, parameters, self.tokenizer, prompt=text)

    def _answer(
        self,
        index: int,
        messages: Sequence[Message],
        parameters: SamplingParams,
        fields: Mapping[str, Any],
    ) -> Pending:
        """A conversation to be answered."""
        self._check_open()
        if fields.keys() <= {"enable_thinking"} and not self._planner.dialect.framed:
            tokens = self.encode_chat(messages, thinking=fields.get("enable_thinking"))
            plan, masks = None, NO_MASKS
            requests = self._requests(tokens, parameters)
        else:
            plan = self._planner.plan(messages, fields)
            tokens = encode_rendered(self.tokenizer, plan.prompt)
            requests = self._requests(tokens, parameters)
            masks = self._planner.masks(plan, requests)
        text = text_of_tokens(self.tokenizer, tokens)
        return Pending(index, requests, parameters, self.tokenizer, plan, masks, text)

    def _run(
        self,
        prompts: Iterable[Any],
        parameters: Parameters,
        prepare: Callable[[int, Any, SamplingParams], Pending],
        names: Mapping[str, str],
        shows: bool = True,
    ) -> Iterator[Output]:
        """The outputs of all prompts as they end, with a bar if it ``shows`` one."""
        each = parameters_of(parameters, prompts)

        def job(index: int, prompt: Any, chosen: SamplingParams) -> Pending | Finished[Output]:
            try:
                return prepare(index, prompt, chosen)
            except EngineStopped:
                raise
            except ZincError as error:
                text = prompt if isinstance(prompt, str) else None
                return Finished(Output(index, (), error=error, prompt=text))

        jobs = (
            partial(job, index, prompt, chosen)
            for index, (prompt, chosen) in enumerate(zip(prompts, each, strict=False))
        )
        return self._results("generating", jobs, _count_of(prompts), names, shows)

    def _stream(
        self,
        prepare: Callable[[SamplingParams], Pending],
        parameters: SamplingParams | None,
        names: Mapping[str, str],
    ) -> Stream:
        chosen = parameters_for_one(parameters)
        if chosen.n != 1:
            raise RequestError("n", "is 1 for a stream; use generate for more")
        return Stream(self._driver, lambda: prepare(chosen), names)


def _count_of(prompts: Iterable[Any]) -> int | None:
    return len(prompts) if isinstance(prompts, Sequence) else None
