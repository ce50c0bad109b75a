"""Refusals in the shape that Anthropic's clients read."""

from __future__ import annotations

import msgspec

from harness.serve.errors import ApiError

TYPES = {
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
    """The JSON object that says why a request is not answered; ``code`` is this server's own."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = TYPES.get(error.status, default)
    fields = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return msgspec.json.encode({"type": "error", "error": fields})
