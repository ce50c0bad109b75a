"""Conversations in files: JSON with the ``messages`` of a request for chat completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from contract.cached_files import replacing
from contract.errors import ConfigError, system_errors_as
from harness.cli.outputs import check_writable
from harness.cli.prompt import MAX_PROMPT_BYTES, Messages
from harness.setting_kinds import path_of

ROLES = ("system", "user", "assistant")


def save_conversation(named: str, messages: Messages) -> Path:
    """Write a conversation to the file that a user named, and return its path.

    Raises ConfigError where it cannot be written, or another file would be lost."""
    path = _path(named)
    check_writable("/save", path)
    if path.exists() and not _may_be_replaced(path):
        raise ConfigError(f"/save: {path} is there and no conversation; name another file")
    text = json.dumps({"messages": list(messages)}, ensure_ascii=False, indent=1)
    with system_errors_as(f"/save: {path} cannot be written"):
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666
        with replacing(path, mode) as file:
            file.write(f"{text}\n".encode())
    return path


def read_conversation(named: str) -> list[dict[str, object]]:
    """The messages of a saved conversation. Raises ConfigError for any other file."""
    path = _path(named)
    found = _json_of(path)
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not _is_conversation(messages):
        raise ConfigError(f"/load: {path} is no conversation as /save writes it")
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def _json_of(path: Path) -> object:
    """The value in a file, None if it has none. Raises ConfigError."""
    with system_errors_as(f"/load: {path} cannot be read"), path.open("rb") as file:
        raw = file.read(MAX_PROMPT_BYTES + 1)
    try:
        value: object = json.loads(raw) if len(raw) <= MAX_PROMPT_BYTES else None
    except (ValueError, RecursionError):
        value = None
    return value


def _may_be_replaced(path: Path) -> bool:
    """Whether a file is empty or a conversation with nothing else in it; a device or a pipe never
    is."""
    try:
        if not path.is_file():
            return False
        empty = not path.stat().st_size
        return empty or _json_of(path) == {"messages": read_conversation(str(path))}
    except ConfigError:
        return False


def _path(named: str) -> Path:
    try:
        return path_of(named)
    except (ValueError, RuntimeError):
        raise ConfigError(f"{named!r} is not a path; name a file, such as talk.json") from None


def _is_conversation(messages: Sequence[object]) -> bool:
    return all(
        isinstance(one, dict) and one.get("role") in ROLES and _is_text(one.get("content"))
        for one in messages
    )


def _is_text(content: object) -> bool:
    """Whether it is a text of whole characters."""
    return isinstance(content, str) and not any("\ud800" <= c <= "\udfff" for c in content)
