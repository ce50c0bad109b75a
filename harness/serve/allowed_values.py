"""What a field of a body may be, where its type lists the values: for errors that say so."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec.inspect as types
from msgspec import Struct

from harness.serve.strict_json import known_type

MOST_NAMED = 16
"""Longer lists of values are not printed."""


def allowed_values(kind: type[Struct], path: str) -> str | None:
    """The values that the type of ``path``, such as ``messages[0].role``, lists in a body of type
    ``kind``: "a, b or c". None where it lists none, or more than ``MOST_NAMED``."""
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
