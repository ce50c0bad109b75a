"""Walks the parts of a JSON schema: JSON pointers, and targets of references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

SCHEMA = frozenset(("items", "additionalProperties"))
LIST_OF_SCHEMAS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
SCHEMA_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
LONGEST_CHAIN = 32
"""Most references in a chain that is followed."""


@dataclass(eq=False)
class SchemaRefused(Exception):
    """A schema that cannot be enforced, because of ``keyword`` at the JSON pointer ``pointer``."""

    pointer: str
    keyword: str
    problem: str

    def __str__(self) -> str:
        where = self.pointer or "its root"
        return f"{self.keyword} at {where} {self.problem}"


def subschemas(schema: object) -> Iterator[tuple[str, Any]]:
    """``schema`` and every schema in it, with its JSON pointer. Malformed parts are returned as
    they are."""
    open_parts: list[tuple[str, Any]] = [("", schema)]
    while open_parts:
        at, part = open_parts.pop()
        yield at, part
        if not isinstance(part, Mapping):
            continue
        for keyword, value in part.items():
            open_parts.extend(
                (pointer_of(at, keyword, *names), one) for names, one in children(keyword, value)
            )


def children(keyword: str, value: object) -> list[tuple[tuple[str, ...], Any]]:
    """The schemas in the value of a keyword, each with the path to it."""
    if keyword in SCHEMA:
        return [((), value)]
    if keyword in LIST_OF_SCHEMAS and isinstance(value, list):
        return [((str(index),), one) for index, one in enumerate(value)]
    if keyword in SCHEMA_BY_NAME and isinstance(value, Mapping):
        return [((name,), one) for name, one in value.items()]
    return []


def with_children(
    pointer: str, keyword: str, value: Any, changed: Callable[[str, Any], Any]
) -> Any:
    """The value of a keyword of the schema at ``pointer``, in which ``changed`` takes the place of
    each schema; it is called with the schema's own pointer and the schema."""
    copies = [
        (names, changed(pointer_of(pointer, keyword, *names), one))
        for names, one in children(keyword, value)
    ]
    if keyword in SCHEMA:
        return copies[0][1]
    if keyword in LIST_OF_SCHEMAS:
        return [one for _, one in copies]
    if keyword in SCHEMA_BY_NAME:
        return {names[0]: one for names, one in copies}
    return value


def pointer_of(pointer: str, *names: str) -> str:
    """``pointer`` extended by names."""
    return pointer + "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)


def names_of_reference(reference: object) -> list[str] | None:
    """The names in the path of a reference into its own schema; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return None
    return [name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]


def _is_index(name: str, part: list[Any]) -> bool:
    """Whether a name is the index of an item. Python cannot convert numbers of thousands of
    digits."""
    return name.isdecimal() and len(name) <= len(str(len(part))) and int(name) < len(part)


def referenced(reference: object, root: object) -> Any:
    """The schema in ``root`` that a reference means; True, which allows anything, if there is
    none."""
    part: Any = root
    for name in names_of_reference(reference) or []:
        if isinstance(part, Mapping):
            part = part.get(name, True)
        elif isinstance(part, list) and _is_index(name, part):
            part = part[int(name)]
        else:
            return True
    return part
