"""Helpers for schemas of parameters, for syntaxes whose values are not JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from harness.host.structured.json_schema import ENFORCED
from harness.host.structured.schema_tree import LONGEST_CHAIN, SchemaRefused, referenced

ROOT_KEYWORDS = frozenset(("$schema", "$id", "$defs", "definitions"))
OBJECT_KEYWORDS = frozenset(("type", "properties", "required", "additionalProperties"))


def keywords_of(schema: Mapping[str, Any]) -> set[str]:
    """The keywords that constrain a value."""
    return (set(schema) & ENFORCED) - ROOT_KEYWORDS


def only(keywords: Collection[str], allowed: Collection[str], path: str) -> None:
    """Raises SchemaRefused for a keyword at ``path`` that is not ``allowed``."""
    if more := set(keywords) - set(allowed):
        raise SchemaRefused(path, min(more), "cannot be enforced in this model's calls")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """``schema``, or the schema in ``root`` that it refers to if it is only a reference; True,
    which allows anything, if that does not exist."""
    for _ in range(LONGEST_CHAIN):
        if not isinstance(schema, Mapping) or keywords_of(schema) != {"$ref"}:
            return schema
        schema = referenced(schema["$ref"], root)
    return True


def members_of(schema: Mapping[str, Any], path: str) -> list[tuple[str, Any, bool]]:
    """Name and schema of each property of an object, and whether it is required. Raises
    SchemaRefused if a required one has no schema."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = set(schema.get("required", ()))
    if unknown := required - properties.keys():
        raise SchemaRefused(path, "required", f"names {min(unknown)!r}, which has no schema")
    return [(name, one, name in required) for name, one in properties.items()]
