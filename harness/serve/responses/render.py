"""The objects and events of ``/v1/responses``, made from those of a chat completion. Its events
have names, as its clients expect."""

from __future__ import annotations

import secrets
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from harness.host.answer_text import Piece
from harness.serve.answers import CHAT_CHUNK, Answer, ChatShape, Json
from harness.serve.chat import several_calls
from harness.serve.data_lines import PING
from harness.serve.errors import ApiError
from harness.serve.responses.namespaces import NAMESPACE
from harness.serve.responses.wire import ResponsesRequest
from harness.serve.wire import plain

LENGTH = "length"
Keep = Callable[[Json, Sequence[int]], None]
"""Stores a response that has these tokens."""


class ResponseShape:
    """An answer as a response and its events. ``keep`` stores a complete answer."""

    ping = PING

    def __init__(
        self, body: ResponsesRequest, answer: Answer, listed: bool, keep: Keep | None
    ) -> None:
        self._body = body
        self._answer = answer
        self._chat = ChatShape(answer, listed)
        self._events = ResponseEvents(body)
        self._keep = keep
        self._tokens: list[int] = []

    def lines(self, piece: Piece) -> Iterable[bytes]:
        """The events for a new piece."""
        self._tokens += self._answer.ids_of([piece])
        return [event for chunk in self._chat.chunks(piece) for event in self._events.chunk(chunk)]

    def end(self, usage: bool) -> bytes:
        """The event with the complete response."""
        last = self._answer.with_usage(self._answer.head(CHAT_CHUNK, []))
        events = b"".join(self._events.chunk(last))
        self._stored(self._events.response)
        return events

    def failed(self, error: ApiError) -> bytes:
        """The event of an answer that failed."""
        body: Json = msgspec.json.decode(error.encoded())
        return self._events.failed(body["error"])

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The response."""
        (choice,) = pieces
        self._tokens = self._answer.ids_of(choice)
        response = response_of(self._body, self._chat.whole(pieces))
        self._stored(response)
        return response

    def _stored(self, response: Json) -> None:
        if self._keep is not None:
            self._keep(response, self._tokens)


def response_of(body: ResponsesRequest, chat: Json) -> Json:
    """The response for a complete chat completion."""
    (choice,) = chat["choices"]
    events = ResponseEvents(body)
    for _ in events.chunk(chat | {"choices": [choice | {"delta": choice["message"]}]}):
        pass
    return events.response


class ResponseEvents:
    """The events of a streamed answer, made from the chunks of the chat completion in order."""

    def __init__(self, body: ResponsesRequest) -> None:
        self._body = body
        self.response: Json = {}
        self._head: Json = {}
        self._items: list[_Item] = []
        self._open = False
        self._finish: str | None = None
        self._number = 0
        self._listed: list[Json] = []

    def chunk(self, chunk: Json) -> Iterator[bytes]:
        """The events for one chunk."""
        if not self._head:
            self._head = _head(self._body, chunk)
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._head | {"output": []})
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if choice.get("logprobs") is not None:
                self._listed += choice["logprobs"]["content"]
            if delta.get("reasoning_content"):
                self._pass_thoughts(delta["reasoning_content"])
                yield from self._more("reasoning", delta["reasoning_content"])
            if delta.get("content"):
                yield from self._more("message", delta["content"])
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)
            self._finish = choice["finish_reason"] or self._finish
        if chunk.get("usage") is not None:
            yield from self._close()
            yield from self._completed(chunk)

    def failed(self, error: Json) -> bytes:
        """The last event of a failed answer."""
        fields = {name: error.get(name) for name in ("code", "message", "param")}
        return self._event("error", **fields, error=error)

    def _completed(self, chunk: Json) -> Iterator[bytes]:
        if not self._items:
            yield from self._begin(_Item("message"))
            yield from self._close()
        last = self._items[-1]
        cut = self._finish == LENGTH and last.kind == "message"
        output = [item.json("completed") for item in self._items[:-1]]
        output.append(last.json("incomplete" if cut else "completed"))
        response = self._head | _end(self._finish, chunk["usage"]) | _ours(chunk)
        name = "incomplete" if self._finish == LENGTH else "completed"
        self.response = response | {"output": output}
        yield self._event(f"response.{name}", response=self.response)

    def _more(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._open or self._items[-1].kind != kind:
            yield from self._close()
            yield from self._begin(_Item(kind))
        item = self._items[-1]
        item.text += text
        more: Json = {}
        if kind == "message":
            new = self._tokens_of(text)
            item.tokens += new
            more = {"logprobs": response_logprobs(new)}
        yield self._event(f"response.{item.part}.delta", **self._address(), delta=text, **more)

    def _pass_thoughts(self, text: str) -> None:
        """Remove the listed tokens of thoughts. Between several there are marks in the list, and in
        the text line breaks instead."""
        whole = text_of(self._listed)
        parts = [text] if text in whole else text.split("\n")
        for part in [one for one in parts if one and one in whole] or [text]:
            self._tokens_of(part)

    def _tokens_of(self, text: str) -> list[Json]:
        """The listed tokens of ``text``. They are removed from the list, with those before them."""
        tokens = tokens_of_text(text, self._listed)
        if tokens:
            last = next(n for n, one in enumerate(self._listed) if one is tokens[-1])
            del self._listed[: last + 1]
        return tokens

    def _call(self, call: Json) -> Iterator[bytes]:
        function = call["function"]
        if "id" in call:
            yield from self._close()
            yield from self._begin(_call_item(self._body, call))
        text = function.get("arguments")
        if text:
            self._items[-1].text += text
            name = "response.function_call_arguments.delta"
            yield self._event(name, **self._address(), delta=text)

    def _begin(self, item: _Item) -> Iterator[bytes]:
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        begun = item.json("in_progress")
        yield self._event("response.output_item.added", output_index=index, item=begun)
        if item.kind != "function_call":
            part = {**item.content, "text": ""}
            yield self._event("response.content_part.added", **self._address(), part=part)

    def _close(self) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        if item.kind == "function_call":
            name = "response.function_call_arguments.done"
            yield self._event(name, **self._address(), name=item.name, arguments=item.text)
        else:
            listed = response_logprobs(item.tokens)
            more: Json = {"logprobs": listed} if item.kind == "message" else {}
            address = self._address()
            yield self._event(f"response.{item.part}.done", **address, text=item.text, **more)
            yield self._event("response.content_part.done", **address, part=item.content)
        index = len(self._items) - 1
        done = item.json("completed")
        yield self._event("response.output_item.done", output_index=index, item=done)

    def _address(self) -> Json:
        item = self._items[-1]
        address = {"item_id": item.id, "output_index": len(self._items) - 1}
        return address if item.kind == "function_call" else address | {"content_index": 0}

    def _event(self, kind: str, /, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(slots=True)
class _Item:
    """An item of a response: a message, reasoning, or a call. ``text`` is its text or its
    arguments; ``tokens`` are listed tokens of a message."""

    kind: str
    text: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    id: str = field(default="")
    tokens: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = PREFIXES[self.kind] + secrets.token_hex(12)

    @property
    def part(self) -> str:
        """The type of its content part."""
        return PARTS[self.kind]

    @property
    def content(self) -> Json:
        """Its text as a content part."""
        piece: Json = {"type": self.part, "text": self.text}
        if self.kind != "message":
            return piece
        return piece | {"annotations": [], "logprobs": response_logprobs(self.tokens)}

    def json(self, status: str) -> Json:
        """The item as JSON."""
        item: Json = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            space = {} if self.namespace is None else {NAMESPACE: self.namespace}
            return item | call | space
        item["content"] = [] if status == "in_progress" else [self.content]
        more: Json = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return item | more


def _call_item(body: ResponsesRequest, call: Json) -> _Item:
    """A call without its arguments, with the function's name as in the request."""
    name = call["function"]["name"]
    tool = next((one for one in body.tools or () if one.called == name), None)
    named = (name, None) if tool is None else (tool.name, tool.namespace)
    return _Item("function_call", "", call["id"], *named)


def _head(body: ResponsesRequest, chat: Json) -> Json:
    """The fields of a response that are known at its beginning."""
    text = body.text.format if body.text is not None else None
    origin = chat.get("x_zinc", {})
    defaults = origin.get("sampling_defaults", {})
    several = several_calls(
        body.parallel_tool_calls,
        required=body.tool_choice == "required",
        described=origin.get("tools") == "described",
    )
    return {
        "id": chat["id"],
        "object": "response",
        "created_at": chat["created"],
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": chat["model"],
        "parallel_tool_calls": several,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        "service_tier": chat["service_tier"],
        "store": body.store is not False,
        "temperature": _or_default(body.temperature, defaults.get("temperature")),
        "text": {"format": {"type": "text"} if text is None else plain(text)},
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "tools": plain(body.tools or []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _or_default(body.top_p, defaults.get("top_p")),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _or_default(value: float | None, default: float | None) -> float | None:
    return default if value is None else value


def _end(finish: str | None, usage: Json) -> Json:
    """The fields of a response that are known at its end."""
    cut = finish == LENGTH
    return {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
        },
    }


def _ours(chat: Json) -> Json:
    return {"system_fingerprint": chat["system_fingerprint"], "x_zinc": chat["x_zinc"]}


UTF8 = getincrementaldecoder("utf-8")
Listed = dict[str, Any]


def text_of(listed: Sequence[Listed]) -> str:
    """The text of the listed tokens."""
    return b"".join(bytes(one["bytes"] or ()) for one in listed).decode(errors="replace")


def tokens_of_text(text: str, listed: Sequence[Listed]) -> list[Listed]:
    """The ``listed`` tokens with at least one byte of ``text``.

    If the tokens' bytes do not contain ``text``, all tokens that have bytes."""
    visible = [token for token in listed if token["bytes"]]
    decoder = UTF8(errors="replace")
    whole, spans = "", []
    for number, token in enumerate(visible, 1):
        begin = len(whole)
        whole += decoder.decode(bytes(token["bytes"]), final=number == len(visible))
        # Bytes that wait for the rest of a character are part of the next character.
        spans.append((begin, len(whole) + bool(decoder.getstate()[0])))
    start = whole.find(text)
    if start < 0:
        return visible
    end = start + len(text)
    return [
        token
        for token, (first, last) in zip(visible, spans, strict=True)
        if first < end and last > start
    ]


def response_logprobs(listed: Sequence[Listed]) -> list[Listed]:
    """Tokens as ``/v1/responses`` lists them."""
    return [
        {
            **{name: one[name] for name in ("token", "bytes", "logprob")},
            "top_logprobs": [
                {name: other[name] for name in ("token", "bytes", "logprob")}
                for other in one["top_logprobs"]
            ],
        }
        for one in listed
    ]
