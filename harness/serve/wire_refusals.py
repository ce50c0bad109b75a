"""What a client is told about a body of the wrong type."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from harness.serve.allowed_values import allowed_values
from harness.serve.errors import ApiError, unsupported

MEDIA = {
    "image": "images",
    "audio": "sounds",
    "video": "videos",
    "file": "files",
    "document": "documents",
}
"""Names of the media that are not served, by a word in the type of a message part."""
INVALID = ("Invalid value", "Invalid enum value")
"""How msgspec's errors about a value that a type does not list begin."""


def refusal(problem: str, value: Any, whole: type[Struct]) -> ApiError:
    """msgspec's error about ``value``, with the field named as OpenAI does:
    ``messages[0].role``."""
    text, _, path = problem.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    kind = _found_at(value, path) if path.endswith(".type") else None
    medium = next((name for name in MEDIA if isinstance(kind, str) and name in kind), None)
    if medium is not None:
        return unsupported(path, f"{path}: this server takes text; {MEDIA[medium]} are not served")
    allowed = allowed_values(whole, path) if text.startswith(INVALID) and path else None
    if allowed is not None:
        text += f"; expected {allowed}"
    unknown = re.search(r"unknown field `(.*)`|missing required field `(.*)`", text)
    if unknown:
        name = unknown[1] or unknown[2]
        path = f"{path}.{name}" if path else name
    return ApiError(
        400,
        f"{path} is missing" if unknown and unknown[2] else f"{path}: {text}" if path else text,
        param=path or None,
        code="unknown_parameter" if unknown and unknown[1] else "invalid_value",
    )


def _found_at(value: Any, path: str) -> Any:
    """The part of ``value`` at a path such as ``messages[0].role``; None if there is none."""
    try:
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[name] if name else value[int(index)]
    except (KeyError, IndexError, TypeError):
        return None
    return value
