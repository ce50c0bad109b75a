"""The request bodies of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from contract.types import MAX_INT32
from harness.serve.wire import MAX_MESSAGES, Id, Sampling, TopLogprobs
from harness.serve.wire_tools import FunctionName

Predicted = Annotated[int, Meta(ge=-2, le=MAX_INT32, description="-1 and -2 fill the context")]


class SamplingOptions(Sampling, kw_only=True):
    """Sampling options, and ``num_predict``, the most tokens of the answer. Options for loading a
    model are ignored."""

    num_predict: Predicted | None = None


class NamedCall(Struct, forbid_unknown_fields=True):
    """A function and its arguments."""

    name: FunctionName
    arguments: dict[str, Any] | None = None
    index: int | None = None
    description: Any = None


class PastCall(Struct, forbid_unknown_fields=True):
    """A call that the model made."""

    function: NamedCall
    id: str | None = None
    type: Any = None


class OllamaMessage(Struct, forbid_unknown_fields=True):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[Any] | None = None


class _AskedForText(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both requests for generated text. ``keep_alive`` is ignored: a model stays
    loaded while there is room. Answers are streamed unless ``stream`` is false."""

    model: Id
    stream: bool = True
    options: SamplingOptions | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: Any = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0


class OllamaChatRequest(_AskedForText, kw_only=True):
    """``POST /api/chat``. Without messages it only loads the model."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] = []
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(_AskedForText, kw_only=True):
    """``POST /api/generate``: an answer to a prompt, or with ``raw`` its continuation."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class ShowRequest(Struct, forbid_unknown_fields=True):
    """``POST /api/show``."""

    model: Id | None = None
    name: Id | None = None
    verbose: bool | None = None


class EmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /api/embed``. A text that is too long is refused, never truncated."""

    model: Id
    input: str | Annotated[list[str], Meta(min_length=1)]
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate: bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OldEmbedRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /api/embeddings``, for one text."""

    model: Id
    prompt: str
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaPullRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /api/pull``."""

    model: Id | None = None
    name: Id | None = None
    insecure: bool | None = None
    stream: bool = True
