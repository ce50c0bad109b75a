"""The JSON objects of answers: OpenAI's fields, and ``x_zinc`` for this server's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

from contract.types import FinishReason, Tenant, TokenEvent
from harness.host.answer_text import Piece
from harness.host.reply_parts import CallArguments, CallBegin, Content, Part, ReasoningText, joined
from harness.serve.caller import Caller
from harness.serve.data_lines import DONE, PING, LineTemplates, data_line, encode
from harness.serve.engine_requests import TIER_OF_CLASS
from harness.serve.errors import ApiError
from harness.serve.generation import Generation
from harness.serve.random_pool import random_bytes
from reference.model.tokenizer import Tokenizer

Json = dict[str, Any]
CHAT_CHUNK = "chat.completion.chunk"
TEXTS = {Content: "content", ReasoningText: "reasoning_content"}
"""The field of a delta for each kind of text."""


class AnswerShape(Protocol):
    """How one route writes an answer, for example ``ChatShape`` and ``MessageShape``."""

    @property
    def ping(self) -> bytes:
        """The bytes that keep the connection of a silent stream open."""

    def lines(self, piece: Piece) -> Iterable[bytes]:
        """The lines of a stream for a new piece."""

    def end(self, usage: bool) -> bytes:
        """The last bytes of a stream, with the ``usage`` if the request asked for it."""

    def failed(self, error: ApiError) -> bytes:
        """The last bytes of a stream that failed."""

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The answer of a request that is not streamed, from every choice's pieces."""


ShapeOf = Callable[["Answer", bool], AnswerShape]
"""Constructs the shape of an answer. The flag: whether its tokens have log-probabilities."""


@dataclass(frozen=True)
class Answer:
    """The fields that all objects of one answer share. With ``usage_in_chunks`` every chunk has a
    ``usage``: the tokens so far if ``counted``, else null."""

    generation: Generation
    tenant: Tenant
    id: str
    created: int
    usage_in_chunks: bool
    ignored: tuple[str, ...] = ()
    token_ids: bool = False
    prompt_logprobs: bool = False
    counted: bool = False
    _sent_tokens: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def of(
        cls,
        generation: Generation,
        tenant: Tenant,
        prefix: str,
        caller: Caller,
        *,
        usage: bool,
        token_ids: bool = False,
        prompt_logprobs: bool = False,
        counted: bool = False,
    ) -> Answer:
        """A new answer for ``caller``. ``usage``: the stream ends with a usage chunk. ``token_ids``
        and ``prompt_logprobs``: these fields were requested. ``counted``: every chunk has the usage
        so far."""
        name, now = prefix + random_bytes(12).hex(), int(time.time())
        ignored = tuple(caller.ignored)
        listed = token_ids, prompt_logprobs, counted
        return cls(generation, tenant, name, now, usage, ignored, *listed)

    def count(self, piece: Piece) -> None:
        """Count the tokens of a piece that is sent."""
        self._sent_tokens[0] += len(piece.events)

    def prompt_ids(self, choice: int) -> list[int]:
        """The ids of the prompt of a choice."""
        return list(self.generation.choices[choice].request.prompt)

    def prompt_part(self, choice: int) -> Json:
        """The field ``prompt_logprobs`` of a choice in vLLM's form, if requested: for each prompt
        token null, or an object of the likeliest tokens and the token itself, by id."""
        if not self.prompt_logprobs:
            return {}
        tokenizer = self.generation.model.tokenizer
        listed: list[Json | None] = []
        for event in self.generation.prompt_events(choice):
            if event.log_probability is None:
                listed.append(None)
                continue
            ranked = [(token, log, n) for n, (token, log) in enumerate(event.top, 1)]
            own = (event.token, event.log_probability, None)
            named = {token: (log, rank) for token, log, rank in (own, *ranked)}
            listed.append(
                {
                    str(token): {
                        "logprob": log,
                        "rank": rank,
                        "decoded_token": tokenizer.token_text(token),
                    }
                    for token, (log, rank) in named.items()
                }
            )
        return {"prompt_logprobs": listed}

    def ids_of(self, pieces: Iterable[Piece]) -> list[int]:
        """The token ids of pieces, including tokens that end a text."""
        return [event.token for piece in pieces for event in piece.events]

    def head(self, kind: str, choices: Sequence[Json]) -> Json:
        """An OpenAI object of type ``kind`` with these choices."""
        model = self.generation.model
        requested = self.generation.choices[0].request.qos
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": model.name,
            "system_fingerprint": model.fingerprint,
            "service_tier": TIER_OF_CLASS[self.tenant.qos.lowered_to(requested)],
            "choices": choices,
        }

    @property
    def origin(self) -> Json:
        """The fields of ``x_zinc`` that are known before the answer: what reproduces it, and which
        tier computes it for which tenant."""
        model = self.generation.model
        seed = self.generation.choices[0].request.sampling.seed
        origin: Json = {"seed": seed, "tenant": self.tenant.name, "tier": model.tier}
        origin["sampling_defaults"] = model.left_out(self.tenant)
        if model.scales:
            origin["lora"] = model.adapters.facts(model.scales)
        if model.trace is not None:
            origin["trace"] = model.trace
        if self.generation.tools_described:
            origin["tools"] = "described"
        if self.ignored:
            origin["ignored"] = self.ignored
        return origin

    @property
    def extra(self) -> Json:
        """``x_zinc`` of a finished answer: its origin, and how it was computed."""
        generation = self.generation
        counts = {"cached": generation.cached, "preemptions": generation.preemptions}
        return {**self.origin, **counts}

    def chunk(self, kind: str, choice: Json, first: bool) -> Json:
        """An object of a stream; the first one names the seed."""
        chunk = self.head(kind, [choice])
        if self.usage_in_chunks:
            prompt, sent = self.generation.prompt_tokens, self._sent_tokens[0]
            counts = {"prompt_tokens": prompt, "completion_tokens": sent}
            chunk["usage"] = counts | {"total_tokens": prompt + sent} if self.counted else None
        if first:
            chunk["x_zinc"] = self.origin
        return chunk

    def with_usage(self, body: Json) -> Json:
        """``body`` with the usage and ``x_zinc``."""
        generation = self.generation
        prompt, completion = generation.prompt_tokens, generation.completion_tokens
        body["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": generation.cached_tokens,
                "cache_write_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": generation.reasoning_tokens,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }
        body["x_zinc"] = self.extra
        if generation.logits_digests is not None:
            body["x_zinc"]["logits_sha256"] = generation.logits_digests
        if generation.experts is not None:
            body["x_zinc"]["experts"] = generation.experts
        if generation.receipt is not None:
            body["x_zinc"]["receipt"] = generation.receipt
        return body


@dataclass(frozen=True)
class OpenAiStream:
    """The parts that OpenAI's streams share. With ``listed`` tokens have log-probabilities. Events
    have no names: OpenAI's client would read a named event as a chunk, and take a stream that was
    cut off for a complete one."""

    answer: Answer
    listed: bool

    ping = PING
    kind: ClassVar[str]
    """The ``object`` of a chunk."""

    @cached_property
    def _tokenwise(self) -> bool:
        """Whether every token has a chunk, also one without text."""
        return self.listed or self.answer.token_ids or self.answer.counted

    def end(self, usage: bool) -> bytes:
        if not usage:
            return DONE
        last = self.answer.with_usage(self.answer.head(self.kind, []))
        return data_line(encode(last)) + DONE

    def failed(self, error: ApiError) -> bytes:
        return data_line(error.encoded())


@dataclass(frozen=True)
class ChatShape(OpenAiStream):
    """``chat.completion`` and its chunks. The first chunk of a choice has the role."""

    kind = CHAT_CHUNK
    _opened: set[int] = field(default_factory=set)
    _templates: LineTemplates = field(default_factory=LineTemplates)

    def lines(self, piece: Piece) -> Iterable[bytes]:
        if piece.finish is None and not self._tokenwise and piece.choice in self._opened:
            parts = piece.parts if len(piece.parts) < 2 else joined(piece.parts)
            return [self._more(piece.choice, part) for part in parts]
        return list(map(data_line, map(encode, self.chunks(piece))))

    def _more(self, index: int, part: Part) -> bytes:
        """The line of a chunk that carries one part alone."""
        name = TEXTS.get(type(part))
        if name is None:
            return data_line(encode(self._chunk(index, _delta_of(part))))
        assert isinstance(part, Content | ReasoningText)
        return self._templates.line(
            (index, name), lambda text: self._chunk(index, {name: text}), part.text
        )

    def chunks(self, piece: Piece) -> Iterable[Json]:
        """The objects of a stream for a new piece."""
        self.answer.count(piece)
        events = text_events(piece.events)
        if not piece.parts and piece.finish is None and not (self._tokenwise and events):
            return
        deltas = [_delta_of(part) for part in joined(piece.parts)] or [{}]
        first = not self._opened
        if piece.choice not in self._opened:
            self._opened.add(piece.choice)
            empty = None if "tool_calls" in deltas[0] else ""
            deltas[0] = {"role": "assistant", "content": empty, **deltas[0]}
        logprobs = self._logprobs(events) if events else None
        for number, delta in enumerate(deltas, 1):
            finish = piece.finish if number == len(deltas) else None
            chunk = self._chunk(piece.choice, delta, logprobs, finish, first)
            if self.answer.token_ids:
                chunk["choices"][0]["token_ids"] = self.answer.ids_of([piece] * (number == 1))
                if first:
                    chunk["prompt_token_ids"] = self.answer.prompt_ids(0)
            yield chunk
            logprobs, first = None, False

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        choices = []
        for index, parts in enumerate(pieces):
            events = text_events([event for part in parts for event in part.events])
            message = message_of([part for piece in parts for part in piece.parts])
            choice: Json = {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(events),
                "finish_reason": parts[-1].finish,
            }
            if self.answer.token_ids:
                choice["token_ids"] = message["token_ids"] = self.answer.ids_of(parts)
            choices.append(choice)
        whole = self.answer.head("chat.completion", choices)
        if self.answer.token_ids:
            whole["prompt_token_ids"] = self.answer.prompt_ids(0)
        whole |= self.answer.prompt_part(0)
        return self.answer.with_usage(whole)

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        finish: str | None = None,
        first: bool = False,
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.answer.chunk(CHAT_CHUNK, choice, first)

    def _logprobs(self, events: Sequence[TokenEvent]) -> Json | None:
        if not self.listed:
            return None
        content = listed_tokens(self.answer.generation.model.tokenizer, events)
        return {"content": content, "refusal": None}


def _delta_of(part: Part) -> Json:
    """The delta of a chunk for a part of an answer."""
    match part:
        case Content(text):
            return {"content": text}
        case ReasoningText(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function"}
            return {"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message_of(parts: Sequence[Part]) -> Json:
    """The message that the parts of an answer make."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    calls = []
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text  # type: ignore[index]
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = calls
    return message


def text_events(events: Sequence[TokenEvent]) -> list[TokenEvent]:
    """The events of a message's tokens, without the token that only ends it."""
    return [event for event in events if event.finish_reason is not FinishReason.STOP]


def listed_tokens(tokenizer: Tokenizer, events: Iterable[TokenEvent]) -> list[Json]:
    """Tokens with their log-probabilities, each with the likeliest tokens at its position."""
    return [
        {
            **token_facts(tokenizer, event.token, event.log_probability),
            "top_logprobs": [token_facts(tokenizer, *one) for one in event.top],
        }
        for event in events
    ]


def token_facts(tokenizer: Tokenizer, token: int, log_probability: float | None) -> Json:
    """A token with its log-probability, as OpenAI and llama.cpp list it."""
    raw = tokenizer.token_bytes(token, special=True)
    return {"token": raw.decode(errors="replace"), "logprob": log_probability, "bytes": list(raw)}
