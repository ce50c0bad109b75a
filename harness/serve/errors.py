"""The error responses of the server, as OpenAI's client reads them: ``{"error": {"message", "type",
"param", "code"}}``.

The client repeats 408, 409, 429 and 5xx by itself, unless ``x-should-retry`` says false. It waits
``Retry-After`` seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from contract.errors import (
    DoesNotFit,
    NonFiniteLogits,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
    RequestError,
    TemplateError,
    TemplateRefused,
    TemplateUnavailable,
    TenantQueueFull,
    ZincError,
)
from harness.host.answer_text import ClientTooSlow
from harness.host.structured.grammars import GrammarsBusy, GrammarsUnavailable
from harness.host.submissions import EngineStopped
from harness.serve.storage import StorageProblem

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}
IN_FORMAT = ".json_schema.schema"
"""Where chat completions have the schema of a response_format."""
WIRE_NAMES = {"repeat_penalty": "repetition_penalty", "log_probabilities": "top_logprobs"}
"""The name in the API of a field of the engine's requests."""
TOO_LARGE = "model_does_not_fit"
RESTART_SECONDS = 5
"""Seconds after which a client should try again when the server is about to stop."""
STORAGE_SECONDS = 30
"""Seconds after which a client should try again when the server's disk is full."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error response. ``retry_after`` is in seconds. ``retry`` None leaves the decision to the
    client. ``allow`` lists the methods of the path."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    retry: bool | None = None
    allow: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's JSON object."""
        kind = TYPES.get(self.status, "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code or kind,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """The headers that tell a client whether to try again."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.allow:
            headers["Allow"] = ", ".join(self.allow)
        if self.status == 401:
            # With Basic a browser would show its own dialog before the page can ask.
            headers["WWW-Authenticate"] = 'Bearer realm="zinc-rt"'
        return headers

    def encoded(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.body)


def invalid_value(param: str | None, message: str) -> ApiError:
    """The refusal of a field whose value cannot be used."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """The refusal of a field that asks for what this server does not do."""
    return ApiError(400, message, param=param, code="unsupported")


def too_long(error: PromptTooLong, name: str) -> ApiError:
    """The refusal of a prompt that a field, or the part ``name`` of it, holds. Agents search the
    message for "prompt is too long" and then shorten the conversation."""
    message = f"{name}: prompt {error.problem}"
    return ApiError(400, message, param=error.field, code="context_length_exceeded")


def model_refused(status: int, message: str, code: str) -> ApiError:
    """The refusal of a request because of the model that it names."""
    return ApiError(status, message, param="model", code=code)


def try_again(message: str, code: str, seconds: float, param: str | None = None) -> ApiError:
    """The refusal of a request that may be answered ``seconds`` later."""
    return ApiError(503, message, param, code, retry_after=seconds, retry=True)


def as_api_error(error: Exception) -> ApiError | None:
    """The error response for an error of the engine; None for a fault of the server."""
    match error:
        case ApiError():
            return error
        case PromptTooLong(field=name):
            return too_long(error, name)
        case RequestError(field=name, problem=problem):
            name = WIRE_NAMES.get(name, name)
            return ApiError(400, f"{name} {problem}", param=name, code="invalid_value")
        case TemplateRefused(words=words):
            message = f"the model's chat template refuses these messages: {words}"
            return ApiError(400, message, param="messages", code="template_refused")
        case TemplateUnavailable() | GrammarsUnavailable():
            message = "the system starts no process for this request; the server's log says why"
            return try_again(message, "overloaded", 1)
        case GrammarsBusy():
            return try_again(str(error), "overloaded", 1)
        case TemplateError():
            message = "the model's chat template fails on these messages; the server's log says why"
            return ApiError(400, message, param="messages", code="template_broken")
        case TenantQueueFull(retry_after=seconds, rate=rate):
            code = "rate_limit_exceeded" if rate else "tenant_queue_full"
            return ApiError(429, str(error), code=code, retry_after=seconds, retry=True)
        case QueueFull(retry_after=seconds):
            return try_again(str(error), "queue_full", seconds or 1.0)
        case NonFiniteLogits():
            message = "the model failed on this request"
            return ApiError(500, message, code="model_failed", retry=False)
        case ClientTooSlow():
            return ApiError(408, str(error), code="client_too_slow", retry=False)
        case StorageProblem(full=full):
            code = "disk_full" if full else "storage_unwritable"
            return try_again(str(error), code, STORAGE_SECONDS)
        case EngineStopped():
            return try_again(str(error), "engine_stopped", RESTART_SECONDS)
    return None


def renaming(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that maps a field of chat completions to its name in a client's API. ``names`` has
    the names that differ."""

    def client_name(param: str) -> str:
        name = re.split(r"[.\[]", param, maxsplit=1)[0]
        return names.get(name, name) + param[len(name) :]

    return client_name


@contextmanager
def naming_fields(client_name: Callable[[str], str]) -> Iterator[None]:
    """Rename the field of errors raised in the block as ``with_client_name`` does."""
    try:
        yield
    except (ApiError, RequestError) as error:
        raise with_client_name(error, client_name) from None


def with_client_name(
    error: ApiError | RequestError, client_name: Callable[[str], str]
) -> ApiError | RequestError:
    """``error`` with its field, if any, renamed, also at the start of the message. ``client_name``
    maps a field of chat completions to its name in the client's API."""
    refusal = as_api_error(error)
    return error if refusal is None or refusal.param is None else renamed(refusal, client_name)


def renamed(refusal: ApiError, client_name: Callable[[str], str]) -> ApiError:
    """``refusal`` with its field, if any, renamed as ``with_client_name`` does."""
    if refusal.param is None:
        return refusal
    own, message = client_name(refusal.param), refusal.message
    if message.startswith(refusal.param):
        message = own + message.removeprefix(refusal.param).removeprefix(IN_FORMAT)
    return replace(refusal, param=own, message=message)


def internal_error() -> ApiError:
    """The error response after a fault of the server; it does not reveal the cause."""
    return ApiError(500, "the server failed; its log says where", code="internal_error")


def no_room(name: str, error: BaseException) -> ApiError:
    """The error for a request whose model does not fit beside models that are in use."""
    problem = f"{name} does not fit into memory beside the models in use: {error}"
    return try_again(problem, TOO_LARGE, RESTART_SECONDS, "model")


def load_refusal(name: str, error: BaseException) -> BaseException:
    """The error for a request whose model cannot be loaded."""
    if isinstance(error, DoesNotFit | OutOfMemory):
        problem = f"{name} does not fit into memory beside the model that answers now: {error}"
        return model_refused(422, problem, TOO_LARGE)
    if isinstance(error, ZincError) and not isinstance(error, EngineStopped | TemplateUnavailable):
        problem = error.problem if isinstance(error, RequestError) else str(error)
        return model_refused(422, f"{name} cannot be loaded: {problem}", "model_unusable")
    return error
