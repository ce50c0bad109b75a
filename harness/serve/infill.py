"""llama.cpp's ``POST /infill``: the text between two others, as a completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from flask import g
from msgspec import Meta

from contract.types import FinishReason
from harness.host.answer_text import Piece
from harness.serve.answers import Answer, Json
from harness.serve.data_lines import PING, data_line, encode
from harness.serve.errors import ApiError
from harness.serve.gate import caller_of_request, decoded
from harness.serve.infill_prompt import ExtraFile, infill_prompt
from harness.serve.openapi import Route
from harness.serve.service import Answered, Service
from harness.serve.wire import CompletionRequest, Sampled, converted

MOST_EXTRA = 64


class InfillRequest(Sampled, kw_only=True):
    """``POST /infill``: the text between ``input_prefix`` followed by ``prompt``, and
    ``input_suffix``. The texts hold no control tokens. ``input_extra`` are other files, for models
    with tokens for them."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MOST_EXTRA)] | None = None
    grammar: str | None = None


INFILL_ROUTES = (Route("POST", "/infill", "infill", "The text between two others.", InfillRequest),)


class InfillHandlers:
    """One method for each of INFILL_ROUTES, named by it."""

    def infill(self, raw: bytes) -> Answered:
        g.generates = True
        body = decoded(raw, InfillRequest)
        service: Service = g.service
        own = ("input_prefix", "input_suffix", "input_extra", "prompt")
        asked: Json = {
            name: given
            for name in InfillRequest.__struct_fields__
            if name not in own and (given := getattr(body, name)) is not None
        }
        if body.stream:
            asked["stream_options"] = {"include_usage": True}
        service.model.check_name(body.model)
        prefix, extra = body.input_prefix + body.prompt, body.input_extra or ()
        prompt = infill_prompt(service.model, prefix, body.input_suffix, extra)
        if asked.get("n", 1) != 1:
            raise ApiError(400, "n is 1 here", param="n", code="unsupported")
        complete = converted(asked | {"prompt": prompt}, CompletionRequest)
        tenant, caller = g.account.tenant, caller_of_request()
        return service.complete(complete, tenant, caller, lambda answer, _: InfillShape(answer))


@dataclass(frozen=True)
class InfillShape:
    """An answer in the format of llama.cpp."""

    answer: Answer

    ping = PING

    def lines(self, piece: Piece) -> Iterable[bytes]:
        """The line with the text that became certain."""
        if piece.text:
            yield data_line(encode({"content": piece.text, "stop": False}))

    def end(self, usage: bool) -> bytes:
        """The last line, with the counts."""
        return data_line(encode(self._body("")))

    def failed(self, error: ApiError) -> bytes:
        """The last line of an answer that failed."""
        return data_line(error.encoded())

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The answer of a request that is not streamed."""
        (choice,) = pieces
        return self._body("".join(piece.text for piece in choice))

    def _body(self, text: str) -> Json:
        generation = self.answer.generation
        cut = generation.choices[0].finish == FinishReason.LENGTH.value
        return {
            "content": text,
            "stop": True,
            "stop_type": "limit" if cut else "eos",
            "tokens_predicted": generation.completion_tokens,
            "tokens_evaluated": generation.prompt_tokens,
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
            "x_zinc": self.answer.extra,
        }
