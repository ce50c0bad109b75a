"""Runs prompts without generation: for embeddings, reranking and scores. As many run at once as
there are slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from contract.errors import PromptTooLong, QueueFull, RequestError
from contract.types import Request, SamplingParams, Tenant
from harness.host.answer_text import failure_of
from harness.host.submissions import EngineStopped, Submission
from harness.serve.answers import Json
from harness.serve.caller import Caller, Gone
from harness.serve.errors import ApiError, as_api_error, internal_error, renamed, renaming, too_long
from harness.serve.ledger_store import Counts
from harness.serve.model import ServedModel
from harness.serve.receipts.make import keep_results
from harness.serve.service import FailedWhileRunning, Service
from harness.serve.streams import CLIENT_LEFT, POLL_SECONDS

Result = TypeVar("Result")
MAX_INPUTS = 2048
"""OpenAI's limit."""
Inputs = Annotated[list[str | int | list[int]], Meta(min_length=1)]
"""Texts, the ids of one text, or a list of ids for each text."""


class RowSink(Protocol):
    """Receives the rows of a prompt from position ``rows_from`` on."""

    @property
    def rows_from(self) -> int:
        """The first position whose row is needed."""

    def __call__(self, first: int, rows: NDArray[np.float32]) -> None:
        """Take the rows of the positions from ``first`` on."""


Begin = Callable[[int], tuple[Submission, Callable[[], Result]]]
"""For the index of a text: its submission to the engine, and the function that returns its result
once the engine has finished."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A request to read ``prompts``. ``kind`` is the kind of its receipt."""

    service: Service
    model: ServedModel
    kind: str
    body: msgspec.Struct
    prompts: Sequence[Sequence[int]]
    tenant: Tenant
    caller: Caller


def read_texts(
    reading: Reading,
    begin: Begin[Result],
    octets: Callable[[Result], bytes],
    facts: Json | None = None,
) -> tuple[list[Result], Json]:
    """The results of the texts, and the fields that all such answers share. ``facts`` are added to
    ``x_zinc``; ``octets`` gives the bytes of a result for the receipt.

    The tenant is charged after the receipt is stored. If the first text is refused before anything
    was computed, raises that error; later failures raise FailedWhileRunning."""
    service, tenant, model = reading.service, reading.tenant, reading.model
    results, prompts = list[Result](), reading.prompts
    try:
        while len(results) < len(prompts):
            last = min(len(prompts), len(results) + model.limits.slots)
            wave = [begin(index) for index in range(len(results), last)]
            taken = _compute(model, [submission for submission, _ in wave], reading.caller.gone)
            results += [result() for _, result in wave[:taken]]
        receipt = keep_results(
            service.receipts,
            model,
            reading.kind,
            reading.body,
            tenant,
            prompts,
            list(map(octets, results)),
        )
    except Exception as error:
        refusal = input_refusal(error)
        if not results and isinstance(error, QueueFull | RequestError | EngineStopped):
            raise refusal from error
        left = refusal is CLIENT_LEFT
        service.metrics.embedded(tenant, 0, "cancelled" if left else "error")
        counts = Counts(requests=1, failed=int(not left), abandoned=int(left))
        service.ledger.add(tenant, counts)
        raise FailedWhileRunning(refusal) from error
    tokens = sum(map(len, prompts))
    service.metrics.embedded(tenant, tokens, "stop")
    service.ledger.add(tenant, Counts(requests=1, completed=1, prompt_tokens=tokens))
    ignored: Json = {"ignored": reading.caller.ignored} if reading.caller.ignored else {}
    lora: Json = {"lora": model.adapters.facts(model.scales)} if model.scales else {}
    extra = {**(facts or {}), "tenant": tenant.name, "tier": model.tier, **lora}
    return results, {
        "model": model.name,
        "system_fingerprint": model.fingerprint,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "x_zinc": {**extra, **receipt, **ignored},
    }


def rows_of(
    model: ServedModel, prompt: Sequence[int], sink: RowSink, output: str, tenant: Tenant
) -> Submission:
    """A submission that passes the rows of ``output`` at a prompt's positions to ``sink``."""
    unpenalized = SamplingParams(repeat_last_n=0)
    request = Request(
        model.driver.new_id(),
        tuple(prompt),
        0,
        unpenalized,
        tenant=tenant.id,
        adapters=model.scales or (),
    )
    return Submission([request], {request.id: sink}, sink.rows_from, output)


def input_ids(
    service: Service, given: str | Inputs, encode: Callable[[str], list[int]] | None = None
) -> list[Sequence[int]]:
    """The token ids of every text of the field ``input``; ``encode`` tokenizes a text. Raises
    ApiError."""
    try:
        return service.prompts_of(given, "input", MAX_INPUTS, encode)
    except RequestError as error:
        raise input_refusal(error) from None


def checked_inputs(
    model: ServedModel, prompts: Sequence[Sequence[int]], tenant: Tenant
) -> Sequence[Sequence[int]]:
    """``prompts``, after checking that none is empty or longer than the context. Raises
    RequestError and ApiError."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError("input", f"[{index}] is empty; give at least one token")
        check_context(model, prompt, tenant, "input", f"input[{index}]")
    return prompts


def check_context(
    model: ServedModel, prompt: Sequence[int], tenant: Tenant, field: str, name: str
) -> None:
    """Raises ApiError if the prompt is longer than the context. ``name`` names it in the
    message."""
    limit = min(model.context, tenant.max_context)
    if len(prompt) > limit:
        raise too_long(PromptTooLong(field, f"{len(prompt)} tokens", limit), name)


INPUT = renaming({"prompt": "input"})


def input_refusal(error: Exception) -> ApiError:
    """The error response for a text; clients call the engine's field ``prompt`` ``input``."""
    if isinstance(error, ValueError):
        return ApiError(500, "the model failed on this text", code="model_failed", retry=False)
    refusal = as_api_error(error) or internal_error()
    return renamed(refusal, INPUT)


def _compute(model: ServedModel, submissions: Sequence[Submission], gone: Gone) -> int:
    """Compute submissions of one request each. Returns how many of the first ones were accepted by
    the queue. Raises QueueFull if none was."""
    stream = model.driver.open_stream()
    try:
        refused = model.driver.submit_to(stream, submissions)
        for number, error in enumerate(refused):
            if error is not None and (number == 0 or not isinstance(error, QueueFull)):
                raise error
        taken = next((n for n, error in enumerate(refused) if error is not None), len(refused))
        requests: list[Request] = [one.requests[0] for one in submissions[:taken]]
        left = {request.id for request in requests}
        while left:
            for delivered in stream.take(POLL_SECONDS):
                failure = failure_of(delivered.event)
                if failure is not None:
                    raise failure
                left.discard(delivered.event.request_id)
            if left and gone():
                raise CLIENT_LEFT
        return taken
    finally:
        stream.cancel()
