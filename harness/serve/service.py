"""Starts, answers and counts requests for text, independent of HTTP."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from contract.errors import RequestError
from contract.types import Request, Tenant
from harness.host.submissions import EngineStopped
from harness.serve.accounts import Accounts, usage_in
from harness.serve.answer_grammar import TextPlan
from harness.serve.answers import Answer, AnswerShape, ChatShape, Json, ShapeOf
from harness.serve.caller import Caller
from harness.serve.chat import ChatPlan
from harness.serve.completion_answers import CompletionShape
from harness.serve.engine_requests import COMPLETION_TOKENS, requests_of
from harness.serve.errors import (
    RESTART_SECONDS,
    ApiError,
    as_api_error,
    internal_error,
    invalid_value,
    naming_fields,
    renamed,
    renaming,
    try_again,
)
from harness.serve.generation import Generation
from harness.serve.infill_prompt import infill_prompt
from harness.serve.ledger_store import Counts, LedgerStore
from harness.serve.llama_cpp.slots import SlotTable
from harness.serve.metrics import Metrics
from harness.serve.model import ServedModel
from harness.serve.receipts.document import VERSION
from harness.serve.receipts.make import store_answer
from harness.serve.receipts.store import ReceiptStore
from harness.serve.responses.store import ResponseStore
from harness.serve.streams import CLIENT_LEFT, event_stream, whole_answer
from harness.serve.wire import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationRequest
from harness.tenants import Account

log = logging.getLogger("zinc_rt.serve")
IN_CONVERSATION = renaming({"prompt": "messages"})
"""Names the engine's field ``prompt`` as chat requests do."""
Answered = Json | Iterator[bytes]
"""A whole answer, or the body of a stream."""


class FailedWhileRunning(Exception):
    """Wraps the ``error`` of a request that failed after it was submitted. It is already
    counted."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__()


@dataclass
class Service:
    """A model, the accounts that may use it, and the records of their requests."""

    model: ServedModel
    accounts: Accounts
    ledger: LedgerStore
    metrics: Metrics
    draining: threading.Event = field(default_factory=threading.Event)
    receipts: ReceiptStore | None = None
    slots: SlotTable = field(default_factory=SlotTable)
    responses: ResponseStore = field(default_factory=ResponseStore)

    def chat(
        self,
        body: ChatRequest,
        tenant: Tenant,
        caller: Caller,
        shape_of: ShapeOf = ChatShape,
        prefix: str = "chatcmpl-",
    ) -> Answered:
        """Answer ``POST /v1/chat/completions``. Other APIs translate their requests to it, and pass
        the shape of their answer and the ``prefix`` of its id."""
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs true", param="top_logprobs")

        def begin() -> tuple[Generation, AnswerShape]:
            service = self.for_request(body)
            with naming_fields(IN_CONVERSATION):
                plan, requests = service.chat_requests(body, tenant)
                caller.ignore(plan.ignored)
                generation = service._generation(requests, body, plan=plan)
            answer = self._answer_to(generation, "chat", prefix, body, tenant, caller)
            return generation, shape_of(answer, bool(body.logprobs))

        return self._answer(body, tenant, begin, caller)

    def complete(
        self,
        body: CompletionRequest,
        tenant: Tenant,
        caller: Caller,
        shape_of: ShapeOf | None = None,
        prefix: str = "cmpl-",
    ) -> Answered:
        """Answer ``POST /v1/completions``; ``shape_of`` and ``prefix`` as in ``chat``."""
        listed = body.logprobs is not None

        def begin() -> tuple[Generation, AnswerShape]:
            service = self.for_request(body)
            prompts, requests = service.completion_requests(body, tenant)
            generation = service._generation(requests, body, constrained=TextPlan.of(body))
            answer = self._answer_to(generation, "completion", prefix, body, tenant, caller)
            echoed = self._texts(body.prompt, prompts, body.n or 1) if body.echo else ()
            if shape_of is not None:
                return generation, shape_of(answer, listed)
            return generation, CompletionShape(answer, listed, echoed)

        return self._answer(body, tenant, begin, caller)

    def for_request(self, body: GenerationRequest) -> Service:
        """The service with the model of one request. Raises ApiError and RequestError."""
        model = self.model.for_request(body.model, body.lora)
        return self if model is self.model else replace(self, model=model)

    def chat_requests(self, body: ChatRequest, tenant: Tenant) -> tuple[ChatPlan, list[Request]]:
        """The plan and the engine requests of a conversation. Raises ApiError, RequestError and
        TemplateError."""
        plan = self.model.chat_plan(body)
        prompt = self.model.encode_chat(plan.prompt, plan.spoken)
        return plan, requests_of(
            body,
            [prompt],
            self.model,
            tenant,
            max_tokens=max_chat_tokens(body),
            fallback=None if body.n_predict == -1 else self.model.sampling.max_tokens,
            log_probabilities=(body.top_logprobs or 0) if body.logprobs else None,
            scored=body.prompt_logprobs,
            turns=self.model.turns(plan.prompt, prompt),
        )

    def completion_requests(
        self, body: CompletionRequest, tenant: Tenant
    ) -> tuple[list[Sequence[int]], list[Request]]:
        """The prompts of a completion as token ids, and the engine requests. Raises ApiError and
        RequestError."""
        encode: Callable[[str], list[int]] = partial(
            self.model.encode,
            parse_special=body.parse_special,
            add_special_tokens=body.add_special_tokens,
        )
        if body.suffix:
            encode = _between(self.model, body, body.suffix)
        prompts = self.prompts_of(body.prompt, encode=encode)
        return prompts, requests_of(
            body,
            prompts,
            self.model,
            tenant,
            max_tokens=max_completion_tokens(body),
            log_probabilities=body.logprobs,
            scored=_max_scored(body),
        )

    def _makes_receipt(self, body: GenerationRequest) -> bool:
        """Whether the answer gets a receipt. Raises ApiError if one is requested from a server
        without receipts."""
        if self.receipts is None and body.receipt:
            raise ApiError(
                400, "this server makes no receipts; start it with --receipts", param="receipt"
            )
        return self.receipts is not None and body.receipt is not False

    def _generation(
        self,
        requests: Sequence[Request],
        body: GenerationRequest,
        plan: ChatPlan | None = None,
        constrained: TextPlan | None = None,
    ) -> Generation:
        """Submit the engine requests of a body."""
        return Generation(
            self.model,
            requests,
            body.logits_digest,
            plan,
            constrained,
            body.stop_token_ids or (),
            leaves=VERSION if self._makes_receipt(body) else 0,
            experts=bool(body.experts),
        )

    def _answer_to(
        self,
        generation: Generation,
        kind: str,
        prefix: str,
        body: GenerationRequest,
        tenant: Tenant,
        caller: Caller,
    ) -> Answer:
        """The answer for a generation, with a receipt of this ``kind`` if requested."""
        options = body.stream_options
        answer = Answer.of(
            generation,
            tenant,
            prefix,
            caller,
            usage=_wants_usage(body),
            token_ids=bool(body.return_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
            counted=options is not None and options.continuous_usage_stats,
        )
        if self.receipts is not None and self._makes_receipt(body):
            generation.make_receipt = partial(
                store_answer, self.receipts, generation, kind, body, tenant, answer.id
            )
        return answer

    def usage(self, account: Account) -> Json:
        """Answer ``GET /v1/tenants/{id}/usage``: stored counts, counts since the start, and current
        use."""
        tenant = account.tenant.id
        since, now = self.model.driver.call(usage_in, tenant)
        running = asdict(since) | {
            "requests_finished": {
                reason.value: count for reason, count in since.requests_finished.items()
            }
        }
        days = self.ledger.days(account.tenant)
        return {
            "tenant": {"id": tenant, "name": account.tenant.name, "qos": account.tenant.qos.value},
            "total": self.ledger.total(account.tenant)._asdict(),
            "days": {day: counts._asdict() for day, counts in days.items()},
            "since_start": running,
            "now": now._asdict(),
        }

    def check_accepting(self, receipt: bool = True, engine: bool = True) -> None:
        """Raises ApiError 503, EngineStopped and StorageProblem if the server accepts no new work.
        ``receipt``: the work needs a receipt to be stored. ``engine``: the work needs the
        engine."""
        if self.draining.is_set():
            raise try_again("the server is shutting down", "draining", RESTART_SECONDS)
        problem = self.model.driver.failure or self.model.driver.silence
        if engine and problem is not None:
            raise EngineStopped(problem)
        self.ledger.check()
        if receipt and self.receipts is not None:
            self.receipts.check()
        self.model.check_trace()

    def _answer(
        self,
        body: GenerationRequest,
        tenant: Tenant,
        begin: Callable[[], tuple[Generation, AnswerShape]],
        caller: Caller,
    ) -> Answered:
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError(400, "prompt_logprobs needs stream false", param="prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream true", param="stream_options")
        self.check_accepting(body.receipt is not False)
        generation, shape = begin()
        generation.on_tokens = self.metrics.count_generated(tenant)
        requested = -1 if body.id_slot is None else body.id_slot
        try:
            generation.slot = self.slots.begin(self.model, tenant, generation, requested)
        except ApiError:
            generation.cancel()
            raise
        finish = partial(self._count, generation, tenant)
        if body.stream:
            return event_stream(generation, shape, _wants_usage(body), finish, caller)
        try:
            whole = whole_answer(generation, shape, caller.gone)
        except Exception as error:
            refusal = as_api_error(error)
            finish(refusal or internal_error())
            named = error if refusal is None else renamed(refusal, caller.client_name)
            raise FailedWhileRunning(named) from error
        finish(None)
        return whole

    def reject(self, tenant: Tenant, error: ApiError) -> None:
        """Count a request that was refused before it was submitted."""
        self.metrics.rejected(error.code or "error")
        self.ledger.add(tenant, Counts(requests=1, rejected=1))

    def _count(self, generation: Generation, tenant: Tenant, error: ApiError | None) -> None:
        left = error is CLIENT_LEFT
        prompt, generated = generation.prompt_tokens, generation.completion_tokens
        code = "done" if error is None else error.code
        log.info("%s: %d prompt tokens, %d generated, %s", tenant.name, prompt, generated, code)
        self.slots.end(self.model, tenant, generation, generation.slot)
        self.metrics.ended(generation, tenant)
        self.ledger.add(
            tenant,
            Counts(
                requests=1,
                completed=int(error is None),
                failed=int(error is not None and not left),
                abandoned=int(left),
                prompt_tokens=prompt,
                cached_tokens=generation.cached_tokens,
                completion_tokens=generated,
                preemptions=generation.preemptions,
            ),
        )

    def _texts(
        self, given: str | Sequence[str | int | list[int]], prompts: Sequence[Sequence[int]], n: int
    ) -> list[str]:
        """The prompt's text for every choice, as given or decoded from its tokens."""
        named = [given] if isinstance(given, str) else [g for g in given if isinstance(g, str)]
        decode = self.model.tokenizer.decode_bytes
        texts = named or [decode(ids, special=True).decode(errors="replace") for ids in prompts]
        return [text for text in texts for _ in range(n)]

    def prompts_of(
        self,
        prompt: str | Sequence[str | int | list[int]],
        field: str = "prompt",
        max_texts: int = MAX_CHOICES,
        encode: Callable[[str], list[int]] | None = None,
    ) -> list[Sequence[int]]:
        """The token ids of every text in the request's ``field``; ``encode`` tokenizes a text.
        Raises RequestError for more than ``max_texts`` texts, before tokenizing, and ApiError."""
        encode = encode or self.model.encode
        if isinstance(prompt, str):
            return [encode(prompt)]
        parts: list[Any] = list(prompt)
        kinds = set(map(type, parts))
        if kinds == {int}:
            return [parts]
        if len(parts) > max_texts:
            raise RequestError(field, f"has more than {max_texts} texts")
        if kinds == {str}:
            for text in parts:
                self.model.check_length(text)
            return [encode(text) for text in parts]
        if kinds == {list}:
            return parts
        raise RequestError(field, "mixes texts, token ids and lists of ids; use one kind")


def _between(
    model: ServedModel, body: CompletionRequest, suffix: str
) -> Callable[[str], list[int]]:
    """A function from a prompt's text to an infill prompt with ``suffix``. Raises ApiError."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if body.echo or not all(isinstance(text, str) for text in texts):
        raise invalid_value("suffix", "suffix needs prompts that are texts, and no echo")
    return lambda text: infill_prompt(model, text, suffix)


def _max_tokens(body: GenerationRequest) -> int | None:
    """The token limit of a body, by either of its names."""
    if body.max_tokens is None and body.n_predict is not None and body.n_predict > 0:
        return body.n_predict
    return body.max_tokens


def max_chat_tokens(body: ChatRequest) -> int | None:
    """The token limit of a chat request; None for no limit."""
    return body.max_completion_tokens or _max_tokens(body)


def max_completion_tokens(body: CompletionRequest) -> int | None:
    """The token limit of a completion; None for the whole context."""
    if body.max_tokens is None and body.n_predict is not None:
        return None if body.n_predict < 0 else body.n_predict
    return COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def _max_scored(body: CompletionRequest) -> int | None:
    """How many likely tokens to list with each prompt token; None if prompts are not scored."""
    echoed = body.logprobs if body.echo else None
    if None not in (echoed, body.prompt_logprobs) and echoed != body.prompt_logprobs:
        problem = f"is {body.prompt_logprobs}, and logprobs of the echo {echoed}; give one number"
        raise RequestError("prompt_logprobs", problem)
    return body.prompt_logprobs if echoed is None else echoed


def _wants_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage
