"""Ollama's format of descriptions of models, and of answers: one JSON object, or a stream of one
object a line."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain

import msgspec

from contract.types import FinishReason
from harness.host.answer_text import Piece
from harness.host.reply_parts import CallArguments, CallBegin, Content, Part, ReasoningText, joined
from harness.serve.answers import Answer, Json, listed_tokens, text_events
from harness.serve.errors import ApiError
from harness.serve.model import ServedModel
from harness.serve.strict_json import object_or_empty

FOREVER = "2318-01-01T00:00:00Z"
"""The reported unload time of a model that stays loaded."""


def details_of(model: ServedModel) -> Json:
    """A model's file format, family, size and quantization."""
    family = str(model.model.file.metadata.get("general.architecture", ""))
    count = sum(math.prod(tensor.shape) for tensor in model.model.file.tensors.values())
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
        "quantization_level": _max_used(model),
    }


def _max_used(model: ServedModel) -> str:
    """The storage type with the most bytes in a file."""
    sizes: dict[str, int] = {}
    for tensor in model.model.file.tensors.values():
        name = tensor.ggml_type.name
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name]).upper()


def listed(model: ServedModel) -> Json:
    """A model in the list of ``/api/tags``."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(model.created),
        "size": model.model.file.size,
        "digest": model.fingerprint,
        "details": details_of(model),
    }


def running(model: ServedModel) -> Json:
    """A model in the list of ``/api/ps``."""
    here = listed(model)
    del here["modified_at"]
    memory = model.plan.total
    on_device = 0 if model.tier == "cpu" else memory
    more = {"size": memory, "size_vram": on_device, "expires_at": FOREVER}
    return here | more | {"context_length": model.context}


def shown(model: ServedModel) -> Json:
    """A model as ``/api/show`` describes it."""
    metadata = model.model.file.metadata
    architecture = str(metadata.get("general.architecture", ""))
    info = {
        name: value
        for name, value in metadata.items()
        if isinstance(value, bool | int | float | str) and len(str(value)) < 1000
    }
    info[f"{architecture}.context_length"] = model.model.config.context
    sampling = model.sampling.values
    return {
        "modelfile": f"FROM {model.name}",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in sampling.items()),
        "template": "" if model.template is None else model.template.text,
        "details": details_of(model),
        "model_info": info,
        "capabilities": capabilities(model),
        "modified_at": _time(model.created),
    }


def capabilities(model: ServedModel) -> list[str]:
    """Ollama's names of a model's capabilities."""
    found = ["completion"]
    if model.dialect.calls is not None:
        found.append("tools")
    if model.dialect.reasoning is not None:
        found.append("thinking")
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


NANOSECONDS = 1e9


def line(value: Json) -> bytes:
    """A line of a stream."""
    return msgspec.json.encode(value) + b"\n"


def error_line(error: ApiError) -> bytes:
    """The body of an error response, as Ollama's clients read it."""
    return msgspec.json.encode({"error": error.message})


def now() -> str:
    """The current time in the format of Ollama's answers."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass
class OllamaShape:
    """The objects of one choice of ``/api/chat``, or with ``text`` of ``/api/generate``. ``plain``:
    reasoning and calls stay in the text. A call is sent once it is complete."""

    answer: Answer
    listed: bool = False
    text: bool = False
    plain: bool = False
    ping: bytes = b""
    _call: CallBegin | None = None
    _arguments: list[str] = field(default_factory=list)
    _finish: str | None = None
    _unlisted: list[Json] = field(default_factory=list)

    def lines(self, piece: Piece) -> Iterable[bytes]:
        """The objects for a new piece."""
        self._list(piece)
        for part in self._parts(piece):
            for fields in self._objects_of(part):
                yield line(self._head() | fields | self._listed() | {"done": False})
        self._finish = piece.finish or self._finish

    def end(self, usage: bool) -> bytes:
        """The last objects: a call that is still open, and the counts."""
        calls = [line(self._head() | fields | {"done": False}) for fields in self._ended_call()]
        body = self._body("", "", []) | self._listed()
        last = line(self._head() | body | self._counts(self._finish))
        return b"".join([*calls, last])

    def failed(self, error: ApiError) -> bytes:
        """The last line of an answer that failed."""
        return error_line(error) + b"\n"

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The answer in one object."""
        (choice,) = pieces
        parts = joined([part for piece in choice for part in self._parts(piece)])
        for piece in choice:
            self._list(piece)
        text = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
        objects = [*chain.from_iterable(map(self._objects_of, parts)), *self._ended_call()]
        calls = [call for one in objects for call in one.get("message", {}).get("tool_calls", ())]
        whole = self._body(text, reasoning, calls) | self._listed()
        return self._head() | whole | self._counts(choice[-1].finish)

    def _list(self, piece: Piece) -> None:
        if self.listed:
            tokenizer = self.answer.generation.model.tokenizer
            self._unlisted += listed_tokens(tokenizer, text_events(piece.events))

    def _listed(self) -> Json:
        """The tokens that no object has listed yet."""
        listed, self._unlisted = self._unlisted, []
        return {"logprobs": listed} if listed else {}

    def _parts(self, piece: Piece) -> Sequence[Part]:
        """The parts of a piece."""
        if not self.plain:
            return joined(piece.parts)
        return [Content(piece.text)] if piece.text else []

    def _objects_of(self, part: Part) -> Iterator[Json]:
        """The objects for a part. A tool call that it ends comes first."""
        if isinstance(part, CallArguments):
            self._arguments.append(part.text)
            return
        yield from self._ended_call()
        match part:
            case Content(text):
                yield self._body(text, "", [])
            case ReasoningText(text):
                yield self._body("", text, [])
            case CallBegin():
                self._call = part

    def _ended_call(self) -> Iterator[Json]:
        call, text = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is not None:
            function = {"index": call.index, "name": call.name, "arguments": object_or_empty(text)}
            yield self._body("", "", [{"id": call.id, "function": function}])

    def _body(self, text: str, reasoning: str, calls: Sequence[Json]) -> Json:
        thinking: Json = {"thinking": reasoning} if reasoning else {}
        if self.text:
            return {"response": text, **thinking}
        called: Json = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}}

    def _head(self) -> Json:
        return {"model": self.answer.generation.model.name, "created_at": now()}

    def _counts(self, finish: str | None) -> Json:
        """The reason of the end, token counts, and durations in nanoseconds."""
        generation = self.answer.generation
        (choice,) = generation.choices
        prompt_seconds, answer_seconds = generation.seconds_of(choice)
        return {
            "done": True,
            "done_reason": "length" if finish == FinishReason.LENGTH.value else "stop",
            "total_duration": int((time.monotonic() - generation.began) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": generation.prompt_tokens,
            "prompt_eval_duration": int(prompt_seconds * NANOSECONDS),
            "eval_count": generation.completion_tokens,
            "eval_duration": int(answer_seconds * NANOSECONDS),
            "system_fingerprint": generation.model.fingerprint,
            "x_zinc": self.answer.extra,
        }
