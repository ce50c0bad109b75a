"""Errors of the Responses API: its names of fields, and answers that are not stored."""

from __future__ import annotations

from harness.serve.errors import ApiError, renaming

response_name = renaming(
    {
        "messages": "input",
        "continue_final_message": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_tokens": "max_output_tokens",
    }
)
"""This API's names of fields of chat completions."""


def item_not_found(id: str, param: str) -> ApiError:
    """404 for an item that is not stored for this tenant."""
    problem = f"{param}: no item {id[:64]!r} is stored here"
    return ApiError(404, problem, param=param, code="item_not_found", retry=False)


def not_found(id: str, param: str | None = None) -> ApiError:
    """404 for an answer that is not stored for this tenant."""
    shown = id[:64]
    problem = f"no response {shown!r} is stored here"
    code = "response_not_found" if param is None else "previous_response_not_found"
    return ApiError(404, problem, param=param, code=code, retry=False)
