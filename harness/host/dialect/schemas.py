"""Schemas of parameters, for syntaxes whose values are no JSON: what of them those can hold to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from harness.host.structured.json_schema import ENFORCED
from harness.host.structured.schema_tree import SchemaRefused, referenced

LONGEST_CHAIN = 32
"""References that lead from one to the next."""
ROOT_KEYWORDS = frozenset(("$schema", "$id", "$defs", "definitions"))
OBJECT_KEYWORDS = frozenset(("type", "properties", "required", "additionalProperties"))


def keywords_of(schema: Mapping[str, Any]) -> set[str]:
    """The keywords that ask for something of a value."""
    return (set(schema) & ENFORCED) - ROOT_KEYWORDS


def only(keywords: Collection[str], allowed: Collection[str], path: str) -> None:
    """Raises SchemaRefused for a keyword at ``path`` that is not ``allowed``."""
    if more := set(keywords) - set(allowed):
        raise SchemaRefused(path, min(more), "cannot be enforced in this model's calls")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """``schema``, or what it leads to in ``root`` if it is only a reference; True, which allows
    anything, for one that leads nowhere."""
    for _ in range(LONGEST_CHAIN):
        if not isinstance(schema, Mapping) or keywords_of(schema) != {"$ref"}:
            return schema
        schema = referenced(schema["$ref"], root)
    return True


def members_of(schema: Mapping[str, Any], path: str) -> list[tuple[str, Any, bool]]:
    """Name and schema of every property of an object, and whether it is required. Raises
    SchemaRefused where a required one has no schema."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = set(schema.get("required", ()))
    if unknown := required - properties.keys():
        raise SchemaRefused(path, "required", f"names {min(unknown)!r}, which has no schema")
    return [(name, one, name in required) for name, one in properties.items()]
