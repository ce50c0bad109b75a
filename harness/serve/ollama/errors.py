"""Refusals in the shape that Ollama's clients read."""

from __future__ import annotations

import msgspec

from harness.serve.errors import ApiError


def error_line(error: ApiError) -> bytes:
    """The JSON object that says why a request is not answered."""
    return msgspec.json.encode({"error": error.message})
