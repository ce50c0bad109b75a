"""Texts whose tokens the model reads and does not continue, as many at a time as there are
slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from contract.errors import QueueFull, RequestError
from contract.types import Request, SamplingParams, Tenant
from harness.host.answer_text import failure_of
from harness.host.submissions import EngineStopped, Submission
from harness.serve.caller import Caller, Gone
from harness.serve.errors import ApiError, as_api_error, internal_error
from harness.serve.ledger_store import Counts
from harness.serve.model import ServedModel
from harness.serve.service import Began, Service
from harness.serve.streams import CLIENT_LEFT, LOOK_SECONDS

Result = TypeVar("Result")


class RowSink(Protocol):
    """Receives rows of a prompt, from position ``rows_from`` on."""

    @property
    def rows_from(self) -> int:
        """The first position whose row is needed."""

    def __call__(self, first: int, rows: NDArray[np.float32]) -> None:
        """Take the rows of the positions from ``first`` on."""


Begin = Callable[[int], tuple[Submission, Callable[[], Result]]]
"""What the engine is given for a text by its index, and what gives its result afterwards."""


def read_texts(
    service: Service,
    lengths: Sequence[int],
    begin: Begin[Result],
    tenant: Tenant,
    caller: Caller,
    store: Callable[[Sequence[Result]], None] = lambda results: None,
) -> list[Result]:
    """The results of texts of ``lengths`` tokens, counted for the tenant once ``store`` has
    stored them. Raises the refusal of the first text before anything was computed, and Began
    after that."""
    model, results, tokens = service.model, list[Result](), sum(lengths)
    try:
        while len(results) < len(lengths):
            last = min(len(lengths), len(results) + model.limits.slots)
            wave = [begin(index) for index in range(len(results), last)]
            taken = _compute(model, [submission for submission, _ in wave], caller.gone)
            results += [result() for _, result in wave[:taken]]
        store(results)
    except Exception as error:
        refusal = input_refusal(error)
        if not results and isinstance(error, QueueFull | RequestError | EngineStopped):
            raise refusal from error
        left = refusal is CLIENT_LEFT
        service.metrics.embedded(tenant, 0, "cancelled" if left else "error")
        counts = Counts(requests=1, failed=int(not left), abandoned=int(left))
        service.ledger.add(tenant.id, counts)
        raise Began(refusal) from error
    service.metrics.embedded(tenant, tokens, "stop")
    service.ledger.add(tenant.id, Counts(requests=1, completed=1, prompt_tokens=tokens))
    return results


def rows_of(
    model: ServedModel, prompt: Sequence[int], sink: RowSink, output: str, tenant: Tenant
) -> Submission:
    """A submission that gives ``sink`` the rows of ``output`` at the positions of a prompt."""
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


def checked_inputs(
    model: ServedModel, prompts: Sequence[Sequence[int]], tenant: Tenant
) -> Sequence[Sequence[int]]:
    """``prompts``, each of which fits the context. Raises RequestError and ApiError."""
    most = min(model.context, tenant.max_context)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError("input", f"[{index}] is empty; give at least one token")
        if len(prompt) > most:
            raise ApiError(
                400,
                f"input[{index}] is {len(prompt)} tokens, the context is {most}",
                param="input",
                code="context_length_exceeded",
            )
    return prompts


def input_refusal(error: Exception) -> ApiError:
    """The refusal of a text; clients call the engine's field ``prompt`` their ``input``."""
    if isinstance(error, ValueError):
        return ApiError(500, "the model failed on this text", code="model_failed", retry=False)
    refusal = as_api_error(error) or internal_error()
    return replace(refusal, param="input") if refusal.param == "prompt" else refusal


def _compute(model: ServedModel, submissions: Sequence[Submission], gone: Gone) -> int:
    """Compute submissions of one request each; returns how many of them, the first ones, found room
    in the queue. Raises QueueFull when none did."""
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
            for delivered in stream.take(LOOK_SECONDS):
                failure = failure_of(delivered.event)
                if failure is not None:
                    raise failure
                left.discard(delivered.event.request_id)
            if left and gone():
                raise CLIENT_LEFT
        return taken
    finally:
        stream.cancel()
