"""What a client is told about a body of the wrong type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec.inspect as types
from msgspec import Struct

from harness.serve.errors import ApiError, unsupported
from harness.serve.strict_json import known_type

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
MOST_NAMED = 16
"""Longer lists of values are not printed."""


def refusal(problem: str, value: Any, whole: type[Struct]) -> ApiError:
    """msgspec's error about ``value``, with the field named as OpenAI does:
    ``messages[0].role``."""
    text, _, path = problem.partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    kind = _found_at(value, path) if path.endswith(".type") else None
    medium = next((name for name in MEDIA if isinstance(kind, str) and name in kind), None)
    if medium is not None:
        return unsupported(path, f"{path}: this server takes text; {MEDIA[medium]} are not served")
    allowed = _allowed_values(whole, path) if text.startswith(INVALID) and path else None
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


def _allowed_values(kind: type[Struct], path: str) -> str | None:
    """The values that the type of ``path`` lists in a body of type ``kind``: "a, b or c". None
    where it lists none, or more than ``MOST_NAMED``."""
    nodes = [types.type_info(known_type(kind))]
    *parents, last = re.findall(r"[^.\[\]]+|\[\d+\]", path)
    for name in parents:
        nodes = [found for node in nodes for found in _below(node, name)]
    values = dict.fromkeys(one for node in nodes for one in _listed(node, last))
    if not 0 < len(values) <= MOST_NAMED:
        return None
    *most, final = (str(one).lower() if isinstance(one, bool) else str(one) for one in values)
    return f"{', '.join(most)} or {final}" if most else final


def _below(node: types.Type, name: str) -> Iterator[types.Type]:
    """The types of the field or item ``name`` of a value of type ``node``."""
    for plain in _members(node):
        if name.startswith("["):
            if isinstance(plain, types.ListType):
                yield plain.item_type
        elif isinstance(plain, types.StructType):
            yield from (field.type for field in plain.fields if field.encode_name == name)


def _listed(node: types.Type, name: str) -> Iterator[object]:
    """The values of the field ``name`` that the type ``node`` lists: of literals, or the tags that
    tell objects apart."""
    for plain in _members(node):
        if isinstance(plain, types.StructType) and plain.tag_field == name:
            yield plain.tag
    for below in _below(node, name):
        for plain in _members(below):
            if isinstance(plain, types.LiteralType):
                yield from plain.values


def _members(node: types.Type) -> Iterator[types.Type]:
    """The alternatives of a type, without the constraints around them."""
    if isinstance(node, types.Metadata):
        yield from _members(node.type)
    elif isinstance(node, types.UnionType):
        for one in node.types:
            yield from _members(one)
    else:
        yield node
