"""``POST /v1/score``: log-probabilities of texts. As many texts run at once as there are slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from contract.errors import RequestError
from contract.types import MAX_INT32, Request, SamplingParams, Tenant, TokenEvent
from harness.host.collectors import PromptScores
from harness.host.submissions import Submission
from harness.serve.answers import Json
from harness.serve.caller import Caller
from harness.serve.errors import ApiError
from harness.serve.readings import Inputs, Reading, checked_inputs, input_ids, read_texts
from harness.serve.receipts.canonical import canonical
from harness.serve.route import Route
from harness.serve.service import Service
from harness.serve.wire import Id, TopLogprobs

Start = Annotated[int, Meta(ge=1, le=MAX_INT32)]


class ScoreRequest(Struct, forbid_unknown_fields=True):
    """``POST /v1/score``. ``input`` is a text, a list of texts, the ids of one text, or a list of
    lists of ids. Tokens from position ``start`` on are scored; ``start`` may be a list, one for
    each text. The first token has no score, since nothing comes before it. ``top`` of the likeliest
    tokens are listed at every position. The text of a control token becomes that token, unless
    ``parse_special`` is false. With ``add_special_tokens`` false no BOS is put in front."""

    input: str | Inputs
    start: Start | list[Start] = 1
    top: TopLogprobs = 0
    model: Id | None = None
    parse_special: bool = True
    add_special_tokens: bool = True
    user: Id | None = None


def score(service: Service, body: ScoreRequest, tenant: Tenant, caller: Caller) -> Json:
    """Answer a request for scores. Raises ApiError, RequestError, QueueFull and EngineStopped
    before anything was computed, and FailedWhileRunning after that."""
    service.check_accepting()
    model = service.model.for_request(body.model)
    prompts = texts_to_score(service, body, tenant)
    starts = _starts(body, prompts)

    def begin(index: int) -> tuple[Submission, Callable[[], Json]]:
        prompt = tuple(prompts[index])
        request = Request(
            model.driver.new_id(),
            prompt,
            max_tokens=0,
            sampling=SamplingParams(repeat_last_n=0),
            tenant=tenant.id,
            adapters=model.scales or (),
            score_from=starts[index] if len(prompt) > 1 else None,
            score_top=max(1, body.top),
        )
        scores = PromptScores(request)
        receivers = {request.id: scores} if request.score_from else {}
        return (
            Submission([request], scores=receivers),
            lambda: _entry(index, scores.tokens, starts[index], body.top),
        )

    reading = Reading(service, model, "score", body, prompts, tenant, caller)
    data, common = read_texts(reading, begin, canonical)
    return {"object": "list", "data": data, **common}


def texts_to_score(service: Service, body: ScoreRequest, tenant: Tenant) -> Sequence[Sequence[int]]:
    """The token ids of every text of a request. Raises RequestError and ApiError."""
    encode = partial(
        service.model.encode,
        parse_special=body.parse_special,
        add_special_tokens=body.add_special_tokens,
    )
    return checked_inputs(service.model, input_ids(service, body.input, encode), tenant)


def _starts(body: ScoreRequest, prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """The first scored position of every text."""
    starts = [body.start] * len(prompts) if isinstance(body.start, int) else body.start
    if len(starts) != len(prompts):
        raise RequestError("start", f"has {len(starts)} numbers for {len(prompts)} texts")
    for index, (start, prompt) in enumerate(zip(starts, prompts, strict=True)):
        if start > max(1, len(prompt) - 1):
            problem = f"{start} is behind the last of the {len(prompt)} tokens of input[{index}]"
            raise ApiError(400, f"start: {problem}", param="start")
    return starts


def _entry(index: int, events: Sequence[TokenEvent], start: int, top: int) -> Json:
    return {
        "object": "score",
        "index": index,
        "tokens": [event.token for event in events],
        "logprobs": [event.log_probability for event in events],
        "ranks": [_rank(event) for event in events],
        "top_logprobs": [
            None
            if event.log_probability is None
            else [{"id": token, "logprob": log} for token, log in event.top[:top]]
            for event in events
        ],
        "sum": math.fsum(event.log_probability or 0.0 for event in events[start:]),
    }


def _rank(event: TokenEvent) -> int | None:
    """The rank of a token among the listed ones, 1 for the likeliest; None if it is not listed."""
    ids = [token for token, _ in event.top]
    return ids.index(event.token) + 1 if event.token in ids else None


SCORE_ROUTES = (
    Route("POST", "/v1/score", score, "Log-probabilities of texts.", ScoreRequest, generates=True),
)
