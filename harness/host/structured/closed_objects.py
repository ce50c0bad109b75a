"""Closes the objects of a JSON schema that does not say whether other keys are allowed.

JSON Schema allows them then. A model writes keys that nobody asked for where it may, until its
tokens run out, so llama.cpp and most grammar engines allow declared keys only. What a closed schema
allows, the schema allows, too: where closing could change that, the objects stay open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from harness.host.structured.schema_tree import (
    LONGEST_CHAIN,
    children,
    names_of_reference,
    pointer_of,
    subschemas,
    with_children,
)

KEYS = ("properties", "required", "patternProperties", "additionalProperties")
"""Keywords about the keys of an object."""


def with_closed_objects(schema: Any) -> Any:
    """A copy of a schema that ``enforceable`` returned, in which an object with ``properties`` and
    without ``additionalProperties`` has no other keys.

    Schemas that have to match together stay open, with all that is in them: one alone does not know
    the keys of the others. So do the alternatives of a ``oneOf`` unless a type or a constant tells
    them apart, because closing one would hide that a value matches two."""
    parts = dict(subschemas(schema))
    left = _left_open(parts)
    return _closed(schema, "", left) if isinstance(schema, Mapping) else schema


def _closed(part: Any, pointer: str, left: set[str]) -> Any:
    if not isinstance(part, Mapping):
        return part
    copy = dict(part)
    for keyword, value in part.items():
        copy[keyword] = with_children(
            pointer, keyword, value, lambda at, one: _closed(one, at, left)
        )
    if pointer not in left and _is_silent(part):
        copy["additionalProperties"] = False
    return copy


def _is_silent(part: Mapping[str, Any]) -> bool:
    """Whether a schema declares keys and says nothing of others, nor needs one."""
    if "properties" not in part or {"patternProperties", "additionalProperties"} & part.keys():
        return False
    declared: Mapping[str, Any] = part["properties"]
    return declared.keys() >= set(part.get("required", ()))


def _left_open(parts: Mapping[str, Any]) -> set[str]:
    """The JSON pointers of the schemas whose objects stay open."""
    begun = []
    for pointer, part in parts.items():
        if not isinstance(part, Mapping):
            continue
        if _joins(part):
            begun.append(pointer)
        alternatives = part.get("oneOf", [])
        if not _apart([_followed(one, parts) for one in alternatives]):
            begun += [pointer_of(pointer, "oneOf", str(n)) for n in range(len(alternatives))]
    found: set[str] = set()
    while begun:
        pointer = begun.pop()
        if pointer not in found:
            found.add(pointer)
            begun += _below(pointer, parts.get(pointer))
    return found


def _below(pointer: str, part: Any) -> Iterator[str]:
    """The JSON pointers of the schemas in a schema, and of what it refers to."""
    for keyword, value in part.items() if isinstance(part, Mapping) else ():
        if keyword in ("$defs", "definitions"):
            continue
        for names, _ in children(keyword, value):
            yield pointer_of(pointer, keyword, *names)
        if keyword == "$ref":
            yield pointer_of("", *(names_of_reference(value) or []))


def _joins(part: Mapping[str, Any]) -> bool:
    """Whether a value has to match two schemas at once."""
    own = [any(key in part for key in KEYS), "const" in part or "enum" in part]
    others = [keyword in part for keyword in ("anyOf", "oneOf", "$ref")]
    return sum(own) + sum(others) + len(part.get("allOf", ())) > 1


def _followed(part: Any, parts: Mapping[str, Any]) -> Any:
    """The schema that a schema refers to, if it does nothing else."""
    for _ in range(LONGEST_CHAIN):
        if not isinstance(part, Mapping) or "$ref" not in part:
            break
        part = parts.get(pointer_of("", *(names_of_reference(part["$ref"]) or [])))
    return part


def _apart(alternatives: list[Any]) -> bool:
    """Whether no value matches two alternatives, whatever keys their objects may have: they have
    other types, or all objects require a key with other constants."""
    types: list[str] = []
    objects = []
    for one in alternatives:
        if not isinstance(one, Mapping) or "type" not in one:
            return len(alternatives) == 1
        asked = [one["type"]] if isinstance(one["type"], str) else one["type"]
        if asked == ["object"]:
            objects.append(one)
        else:
            types += {"number" if each == "integer" else each for each in asked}
    if len(set(types)) < len(types) or (objects and "object" in types):
        return False
    if len(objects) < 2:
        return True
    return any(_differ(key, objects) for key in objects[0].get("required", ()))


def _differ(key: str, objects: list[Mapping[str, Any]]) -> bool:
    """Whether each object requires ``key`` with constants that no other has there."""
    seen: set[str] = set()
    for one in objects:
        value = one.get("properties", {}).get(key)
        if key not in one.get("required", ()) or not isinstance(value, Mapping):
            return False
        constants = [value["const"]] if "const" in value else value.get("enum", [])
        texts = {json.dumps(constant, sort_keys=True) for constant in constants}
        if not texts or texts & seen:
            return False
        seen |= texts
    return True
