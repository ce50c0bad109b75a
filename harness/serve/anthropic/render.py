"""Writes answers as messages of Anthropic's API: whole, as events of a stream, and errors."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from contract.arithmetic import PAGE_TOKENS
from contract.types import FinishReason
from harness.host.answer_text import TOOL_CALLS, Piece
from harness.host.reply_parts import CallArguments, CallBegin, Content, Part, ReasoningText, joined
from harness.serve.answers import Answer, Json
from harness.serve.errors import ApiError
from harness.serve.strict_json import object_or_empty

REASONS = {
    FinishReason.STOP.value: "end_turn",
    FinishReason.LENGTH.value: "max_tokens",
    TOOL_CALLS: "tool_use",
}

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def error_body(error: ApiError) -> bytes:
    """The body of an error response. Anthropic's clients read the code of one that has a code from
    ``details``; ``param`` and ``code`` are extensions."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERROR_TYPES.get(error.status, default)
    fields: Json = {"type": kind, "message": error.message}
    fields |= {"param": error.param, "code": error.code}
    if error.code is not None:
        fields["details"] = {"error_code": error.code}
    return msgspec.json.encode({"type": "error", "error": fields})


def event(kind: str, /, **fields: object) -> bytes:
    """A named event."""
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        msgspec.json.encode({"type": kind, **fields}),
    )


PING_EVENT = event("ping")


@dataclass
class MessageShape:
    """A message of one choice, and its events. Events within a content block are deltas."""

    answer: Answer
    listed: bool = False
    ping: bytes = PING_EVENT
    _begun: bool = False
    _open: Part | None = None
    _blocks: int = 0
    _reasoning_parts: list[str] = field(default_factory=list)
    _finish: str | None = None

    def lines(self, piece: Piece) -> Iterable[bytes]:
        """The events for a new piece."""
        yield from self._start()
        for part in joined(piece.parts):
            yield from self._part_events(part)
        self._finish = piece.finish or self._finish

    def end(self, usage: bool) -> bytes:
        """The last events of a message: why it ended, and its token counts."""
        stop = _stop(self.answer, self._finish)
        last = event("message_delta", delta=stop, usage=usage_of(self.answer), **self._ours())
        return b"".join([*self._start(), *self._closed(), last, event("message_stop")])

    def failed(self, error: ApiError) -> bytes:
        """The last event of an answer that failed."""
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The message."""
        (choice,) = pieces
        parts = joined([part for piece in choice for part in piece.parts])
        content: list[Json] = []
        for part in parts:
            if isinstance(part, CallArguments):
                content[-1]["input"] = object_or_empty(part.text)
            else:
                content.append(_block(part) | _text_of(part, self.answer))
        message = self._head() | {"content": content} | _stop(self.answer, choice[-1].finish)
        return message | {"usage": usage_of(self.answer), **self._ours()}

    def _head(self) -> Json:
        """The message before its content."""
        return {
            "id": self.answer.id,
            "type": "message",
            "role": "assistant",
            "model": self.answer.generation.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self.answer),
        }

    def _ours(self) -> Json:
        model = self.answer.generation.model
        return {"system_fingerprint": model.fingerprint, "x_zinc": self.answer.extra}

    def _start(self) -> Iterator[bytes]:
        """The events that begin the message, once."""
        if not self._begun:
            self._begun = True
            yield event("message_start", message=self._head())
            yield PING_EVENT

    def _part_events(self, part: Part) -> Iterator[bytes]:
        if (
            not isinstance(part, CallArguments) and type(part) is not type(self._open)
        ) or isinstance(part, CallBegin):
            yield from self._closed()
        if self._open is None:
            self._open = part
            yield event("content_block_start", index=self._blocks, content_block=_block(part))
        match part:
            case Content(text):
                delta: Json = {"type": "text_delta", "text": text}
            case ReasoningText(text):
                self._reasoning_parts.append(text)
                delta = {"type": "thinking_delta", "thinking": text}
            case CallArguments(_, text):
                delta = {"type": "input_json_delta", "partial_json": text}
            case CallBegin():
                delta = {"type": "input_json_delta", "partial_json": ""}
        yield event("content_block_delta", index=self._blocks, delta=delta)

    def _closed(self) -> Iterator[bytes]:
        """The event that ends the open block, if there is one."""
        if self._open is None:
            return
        if isinstance(self._open, ReasoningText):
            signed = signature("".join(self._reasoning_parts), self.answer)
            delta = {"type": "signature_delta", "signature": signed}
            yield event("content_block_delta", index=self._blocks, delta=delta)
            self._reasoning_parts = []
        yield event("content_block_stop", index=self._blocks)
        self._open = None
        self._blocks += 1


def usage_of(answer: Answer) -> Json:
    """The token counts so far. Cached prompt tokens are ``cache_read_input_tokens``. Tokens of
    pages that this prompt filled are ``cache_creation_input_tokens``: the same prompt would find
    them, except its last token, which is always computed. The rest is ``input_tokens``."""
    generation = answer.generation
    prompt, read = generation.prompt_tokens, generation.cached_tokens
    filled = prompt // PAGE_TOKENS * PAGE_TOKENS if generation.model.keeps_prompts else 0
    created = max(0, min(prompt - 1, filled) - read)
    return {
        "input_tokens": prompt - read - created,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "output_tokens": generation.completion_tokens,
    }


def signature(reasoning: str, answer: Answer) -> str:
    """A digest of the reasoning and the model, for clients that send it back. It is not checked."""
    model = answer.generation.model.fingerprint
    return base64.b64encode(hashlib.sha256(f"{model} {reasoning}".encode()).digest()).decode()


def _block(part: Part) -> Json:
    """The block of a part when it begins."""
    match part:
        case Content():
            return {"type": "text", "text": ""}
        case ReasoningText():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallBegin(_, call_id, name):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        case CallArguments():
            raise AssertionError("arguments come behind the name of their call")


def _text_of(part: Part, answer: Answer) -> Json:
    match part:
        case Content(text):
            return {"text": text}
        case ReasoningText(text):
            return {"thinking": text, "signature": signature(text, answer)}
    return {}


def _stop(answer: Answer, finish: str | None) -> Json:
    """The stop reason of a message."""
    stop_string = answer.generation.choices[0].stop_string
    if stop_string is not None and finish == FinishReason.STOP.value:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": REASONS.get(finish or "", "end_turn"), "stop_sequence": None}
